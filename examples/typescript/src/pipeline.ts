// npm run pipeline        then `atoll approval list`, `atoll approval grant apr_…`, `atoll artifact get change-ts -`
// Kill this program or the server wherever you like and start it again: it goes on where it was.
import { play } from './play.ts';

const repository = process.env.REPOSITORY ?? 'origin';
const name = process.env.PIPELINE ?? 'change-ts';
console.log(await play('pipeline', [repository, name], name));
process.exit(0);
