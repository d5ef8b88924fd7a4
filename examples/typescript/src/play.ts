// Connects to Atoll, plays the workflows of ./workflows.ts, and waits for one of them.
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { Client, Connection, type WorkflowStartOptions } from '@temporalio/client';
import { DefaultLogger, NativeConnection, Runtime, Worker } from '@temporalio/worker';

Runtime.install({ logger: new DefaultLogger('ERROR') });

export async function play(
  workflow: string,
  args: unknown[],
  workflowId: string,
  activities: Record<string, (...args: any[]) => Promise<unknown>> = {},
): Promise<unknown> {
  const address = process.env.TEMPORAL_ADDRESS ?? '127.0.0.1:7233';
  const apiKey = readFileSync(process.env.ATOLL_KEY_FILE ?? '/var/lib/atoll/admin.key', 'utf8').trim();
  const options = { address, apiKey, tls: false as const };
  const taskQueue = `typescript-${workflow}`;
  const worker = await Worker.create({
    connection: await NativeConnection.connect(options),
    taskQueue,
    workflowsPath: fileURLToPath(new URL('./workflows.ts', import.meta.url)),
    activities,
  });
  const client = new Client({ connection: await Connection.connect(options) });
  return worker.runUntil(async () => {
    // Started again, it is the same workflow.
    const start: WorkflowStartOptions = { taskQueue, workflowId, args, workflowIdConflictPolicy: 'USE_EXISTING' };
    const handle = await client.workflow.start(workflow, start);
    console.log(`${workflowId} runs`);
    return handle.result();
  });
}
