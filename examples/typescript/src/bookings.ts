// The activities of the saga, carried out by this program's own worker.
import { ApplicationFailure } from '@temporalio/activity';

export async function book(what: string): Promise<string> {
  console.log(`  booked   ${what}`);
  return `${what}-${Math.random().toString(36).slice(2, 8)}`;
}

export async function takeBack(booking: string): Promise<void> {
  console.log(`  undone   ${booking}`);
}

export async function pay(declined: boolean): Promise<string> {
  if (declined) throw ApplicationFailure.nonRetryable('the card was declined', 'Declined');
  console.log('  paid');
  return 'receipt-1';
}
