// The workflows of the examples. They decide and wait; what they do is done by activities.
import { ActivityFailure, ApplicationFailure, proxyActivities } from '@temporalio/workflow';
import type * as bookings from './bookings.ts';
import { run, steps } from './steps.ts';

const { book, takeBack, pay } = proxyActivities<typeof bookings>({ startToCloseTimeout: '10 seconds' });

/** Three bookings, and when the payment fails, they are taken back, the latest first. */
export async function trip(declined: boolean): Promise<string> {
  const undo: string[] = [];
  try {
    for (const what of ['flight', 'hotel', 'car']) {
      undo.push(await book(what));
    }
    return await pay(declined);
  } catch (error) {
    if (!(error instanceof ActivityFailure)) throw error;
    for (const booking of undo.reverse()) {
      await takeBack(booking);
    }
    return `nothing is booked: ${error.cause?.message}`;
  }
}

const TOOLS = [
  {
    type: 'function',
    function: {
      name: 'weather',
      description: 'The weather of a city',
      parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
    },
  },
];
const WEATHER = `const city = process.argv[1]; console.log(['sun', 'rain', 'snow'][city.length % 3], 'in', city)`;

const quoted = (text: string) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A model decides, its tools run in a sandbox, each call is paid from the workflow's budget. */
export async function agent(model: string, question: string): Promise<string> {
  const { id: sandbox } = await steps['sandbox.create']({ template: 'base' });
  const messages: any[] = [{ role: 'user', content: question }];
  for (let round = 0; round < 10; round++) {
    const call = await steps['model.call']({ model, messages, tools: TOOLS, max_tokens: 500 });
    const message = call.answer.choices[0].message;
    if (!message.tool_calls?.length) return message.content;
    messages.push(message);
    for (const asked of message.tool_calls) {
      const { city } = JSON.parse(asked.function.arguments);
      const found = await run(sandbox, `node -e ${quoted(WEATHER)} ${quoted(city)}`);
      messages.push({ role: 'tool', tool_call_id: asked.id, content: found.trim() });
    }
  }
  throw ApplicationFailure.nonRetryable('ten rounds and no answer');
}

// A repository to work on, made in the sandbox, so that the example needs no network.
const EXAMPLE = `
git config --global user.name example; git config --global user.email example@example.org
git config --global init.defaultBranch main
mkdir -p origin && cd origin && git init -q
printf 'exports.greet = (name) => "Helo " + name;\\n' > greet.js
printf 'const {greet} = require("./greet"); require("assert").equal(greet("Ada"), "Hello Ada");\\n' > test.js
git add . && git commit -qm 'Greet people'
`;

/** Clone, edit, test, wait for a person, deliver a diff. */
export async function pipeline(repository: string, name: string): Promise<string> {
  const { id: sandbox } = await steps['sandbox.create']({ template: 'base' });
  if (repository === 'origin') await run(sandbox, EXAMPLE);
  await run(sandbox, `git clone -q ${quoted(repository)} work`);
  await run(sandbox, `sed -i s/Helo/Hello/ work/greet.js`);
  await run(sandbox, `cd work && node test.js`);
  const diff = await run(sandbox, `cd work && git diff | tee ../change.diff`);
  // Exactly this and nothing else is what the person says yes to.
  const delivery = { sandbox, path: 'change.diff', name };
  const yes = await steps['approval.request']({
    action: { step: 'artifact.save', input: delivery },
    reason: `deliver this?\n${diff}`,
  });
  await steps['artifact.save']({ ...delivery, approval: yes.approval });
  return `delivered, as ${yes.by || 'somebody'} said:\n${diff}`;
}
