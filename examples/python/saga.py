"""A saga: three bookings, and when the last one fails, those before are taken back, the latest first.

    python3 saga.py            # the card is declined: everything is undone
    python3 saga.py --paid     # it is not
"""

import asyncio
import sys
import uuid
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from steps import connect

LIMIT = timedelta(seconds=10)


@activity.defn
async def book(what: str) -> str:
    print(f"  booked   {what}")
    return f"{what}-{uuid.uuid4().hex[:6]}"


@activity.defn
async def take_back(booking: str) -> None:
    print(f"  undone   {booking}")


@activity.defn
async def pay(declined: bool) -> str:
    if declined:
        raise ApplicationError("the card was declined", type="Declined", non_retryable=True)
    print("  paid")
    return "receipt-1"


@workflow.defn
class Trip:
    @workflow.run
    async def run(self, declined: bool) -> str:
        undo: list[str] = []
        try:
            for what in ["flight", "hotel", "car"]:
                undo.append(await workflow.execute_activity(book, what, start_to_close_timeout=LIMIT))
            return await workflow.execute_activity(pay, declined, start_to_close_timeout=LIMIT)
        except ActivityError as error:
            # A compensation must not fail for good: it is tried until it works.
            for booking in reversed(undo):
                await workflow.execute_activity(
                    take_back, booking, start_to_close_timeout=LIMIT, retry_policy=RetryPolicy(maximum_attempts=0)
                )
            return f"nothing is booked: {error.cause.message}"


async def main() -> None:
    client = await connect()
    async with Worker(
        client,
        task_queue="saga",
        workflows=[Trip],
        activities=[book, take_back, pay],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        declined = "--paid" not in sys.argv
        print(await client.execute_workflow(Trip.run, declined, id=f"trip-{uuid.uuid4()}", task_queue="saga"))


asyncio.run(main())
