// Steps that Atoll carries out, for workflows: activities on the task queue `atoll`, for which no worker of yours is needed.
import { ApplicationFailure, proxyActivities } from '@temporalio/workflow';

type Step = (input: Record<string, unknown>) => Promise<any>;

export const steps = proxyActivities<Record<string, Step>>({
  taskQueue: 'atoll',
  startToCloseTimeout: '24 hours',
  // A step that died with the server is tried again this soon, and finds what it did before.
  heartbeatTimeout: '5 seconds',
});

/** A command in a sandbox that must succeed. */
export async function run(sandbox: string, cmd: string): Promise<string> {
  const done = await steps['sandbox.exec']({ sandbox, cmd });
  if (done.exit_code !== 0) {
    throw ApplicationFailure.nonRetryable(`\`${cmd}\` failed: ${done.stderr || done.stdout}`);
  }
  return done.stdout;
}
