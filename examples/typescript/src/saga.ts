// npm run saga            the card is declined: everything is undone
// npm run saga -- --paid  it is not
import { randomUUID } from 'node:crypto';
import * as bookings from './bookings.ts';
import { play } from './play.ts';

const declined = !process.argv.includes('--paid');
console.log(await play('trip', [declined], `trip-${randomUUID()}`, { ...bookings }));
process.exit(0);
