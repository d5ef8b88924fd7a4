// npm run agent -- What is the weather in Bern?     (which model answers: see ../README.md)
import { randomUUID } from 'node:crypto';
import { play } from './play.ts';

const question = process.argv.slice(2).join(' ') || 'What is the weather in Bern?';
console.log(await play('agent', [process.env.MODEL ?? 'helper', question], `agent-${randomUUID()}`));
process.exit(0);
