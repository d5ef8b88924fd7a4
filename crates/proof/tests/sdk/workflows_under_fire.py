"""Keeps workflows of every kind going while somebody kills the server, and then checks that nothing was lost.

What was acknowledged (a start, a signal, an update) must be in the workflow's result. What was seen of a history must be
how that history begins at the end. Every workflow must end, and every history must replay. Prints "burning" when it has
begun, and reads a line when it has been enough. Prints "all ok" at the end, or fails.
"""

import asyncio
import os
import random
import sys
import uuid
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHistory
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

LANES = 8
QUICK = RetryPolicy(initial_interval=timedelta(milliseconds=20), maximum_interval=timedelta(milliseconds=200))


@activity.defn
async def step(number: int) -> int:
    # Some attempts fail, and some are cut off by the fire.
    if random.random() < 0.2:
        raise ApplicationError("try again")
    await asyncio.sleep(random.random() * 0.05)
    return number + 1


@workflow.defn
class Part:
    @workflow.run
    async def run(self, number: int) -> int:
        await asyncio.sleep(0.02)
        return await workflow.execute_activity(step, number, start_to_close_timeout=timedelta(seconds=5), retry_policy=QUICK)


@workflow.defn
class Order:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.closed = False

    @workflow.run
    async def run(self, steps: int, heard: list[str] | None = None) -> list[str]:
        if heard is not None:
            return heard + self.heard
        number = 0
        for _ in range(steps):
            number = await workflow.execute_activity(
                step, number, start_to_close_timeout=timedelta(seconds=5), retry_policy=QUICK
            )
        await workflow.execute_local_activity(step, number, start_to_close_timeout=timedelta(seconds=5), retry_policy=QUICK)
        assert await workflow.execute_child_workflow(Part.run, number) == steps + 1
        await workflow.wait_condition(lambda: self.closed)
        await workflow.wait_condition(workflow.all_handlers_finished)
        if steps == 3:
            workflow.continue_as_new(args=[steps, self.heard])
        return self.heard

    @workflow.signal
    def hear(self, word: str) -> None:
        self.heard.append(word)

    @workflow.signal
    def close(self) -> None:
        self.closed = True

    @workflow.update
    async def add(self, word: str) -> str:
        await asyncio.sleep(0.01)
        self.heard.append(word)
        return word


LOST = {RPCStatusCode.UNAVAILABLE, RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.UNKNOWN}


async def persist(call):
    """Until the server answers. What it refuses is an error of the test."""
    while True:
        try:
            return await asyncio.wait_for(call(), 20)
        except (asyncio.TimeoutError, ConnectionError):
            pass
        except RPCError as error:
            if error.status not in LOST:
                raise
        await asyncio.sleep(0.05)


class Fire:
    def __init__(self, client: Client, queue: str) -> None:
        self.client, self.queue, self.enough = client, queue, asyncio.Event()
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self.acknowledged = 0
        self.lost_answers = 0
        self.ended: list[str] = []
        self.first: dict[str, str] = {}

    async def attempt(self, call) -> bool:
        """Whether it was acknowledged."""
        try:
            await asyncio.wait_for(call, 20)
            self.acknowledged += 1
            return True
        except (asyncio.TimeoutError, ConnectionError):
            pass
        except RPCError as error:
            if error.status not in LOST:
                raise
        self.lost_answers += 1
        return False

    async def one(self) -> None:
        name = uuid.uuid4().hex

        async def start():
            try:
                return await self.client.start_workflow(Order.run, random.choice([1, 3]), id=name, task_queue=self.queue)
            except WorkflowAlreadyStartedError:
                return self.client.get_workflow_handle(name)

        handle = await persist(start)
        self.acknowledged += 1
        handle = self.client.get_workflow_handle(name)
        sure, tried = set(), set()
        for number in range(6):
            word = f"{name[:6]}-{number}"
            tried.add(word)
            if number % 3 == 2:
                call = handle.execute_update(Order.add, word, id=word)
            else:
                call = handle.signal(Order.hear, word)
            if await self.attempt(call):
                sure.add(word)
            if number == 3:
                events = (await persist(handle.fetch_history)).events
                self.first[name] = events[0].workflow_execution_started_event_attributes.original_execution_run_id
                self.seen[name] = [(event.event_id, event.event_type) for event in events]
            await asyncio.sleep(random.random() * 0.05)
        await persist(lambda: handle.signal(Order.close))
        heard = await self.result(handle)
        assert sure <= set(heard), f"{name}: acknowledged and lost: {sure - set(heard)}"
        assert set(heard) <= tried and len(heard) == len(set(heard)), f"{name}: {heard} of {tried}"
        self.ended.append(name)

    async def result(self, handle) -> list[str]:
        while True:
            try:
                return await handle.result()
            except RPCError as error:
                if error.status not in LOST:
                    raise
                await asyncio.sleep(0.05)
            except WorkflowFailureError as error:
                raise AssertionError(f"{handle.id} failed: {error.cause!r}") from error

    async def lane(self) -> None:
        while not self.enough.is_set():
            await self.one()

    async def check_histories(self) -> int:
        replayer = Replayer(workflows=[Order, Part], workflow_runner=UnsandboxedWorkflowRunner())
        count = 0
        for name in self.ended:
            # The first run, which is what was looked at.
            handle = self.client.get_workflow_handle(name, run_id=self.first[name])
            history = await handle.fetch_history()
            events = [(event.event_id, event.event_type) for event in history.events]
            assert [event[0] for event in events] == list(range(1, len(events) + 1)), name
            seen = self.seen[name]
            assert events[: len(seen)] == seen, f"{name}: the history was {seen} and is {events}"
            await replayer.replay_workflow(WorkflowHistory(name, history.events))
            count += 1
        return count


async def main() -> None:
    address, key = os.environ["TEMPORAL_ADDRESS"], os.environ["TEMPORAL_API_KEY"]
    client = await Client.connect(address, api_key=key, tls=False)
    queue = f"fire-{uuid.uuid4()}"
    fire = Fire(client, queue)
    worker = Worker(
        client,
        task_queue=queue,
        workflows=[Order, Part],
        activities=[step],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_cached_workflows=20,
    )
    async with worker:
        print("burning", flush=True)
        lanes = [asyncio.create_task(fire.lane()) for _ in range(LANES)]
        told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await asyncio.wait([told, *lanes], return_when=asyncio.FIRST_COMPLETED)
        fire.enough.set()
        await asyncio.gather(*lanes)
    replayed = await fire.check_histories()
    open_ones = [one.id async for one in client.list_workflows(f"TaskQueue = '{queue}' AND ExecutionStatus = 'Running'")]
    assert not open_ones, f"still open: {open_ones}"
    print(f"{len(fire.ended)} workflows ended, {fire.acknowledged} acknowledged calls, {fire.lost_answers} answers lost,")
    print(f"{replayed} histories replayed")
    print("all ok")


asyncio.run(main())
