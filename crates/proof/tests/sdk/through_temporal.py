"""Takes Temporal's SDK through every kind of call that a workflow, a worker and a client make, and replays what is left.

Address and key come from TEMPORAL_ADDRESS and TEMPORAL_API_KEY. Prints "all ok" at the end, or fails.
"""

import asyncio
import os
import sys
import uuid
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, RegisterNamespaceRequest
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleIntervalSpec,
    ScheduleSpec,
    ScheduleState,
    WithStartWorkflowOperation,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHistory,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import RetryPolicy, SearchAttributeKey, SearchAttributePair, TypedSearchAttributes, WorkflowIDConflictPolicy
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, ChildWorkflowError, TerminatedError, TimeoutError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner, Worker

ADDRESS = os.environ["TEMPORAL_ADDRESS"]
KEY = os.environ["TEMPORAL_API_KEY"]
SHORT = timedelta(seconds=60)
ORDER = SearchAttributeKey.for_keyword("AtollOrder")

attempts: dict[str, int] = {}


@activity.defn
async def greet(name: str) -> str:
    return f"hello {name}"


@activity.defn
async def third_time(key: str) -> int:
    attempts[key] = attempts.get(key, 0) + 1
    if attempts[key] < 3:
        raise ApplicationError("not yet")
    return attempts[key]


@activity.defn
async def refuses() -> None:
    raise ApplicationError("never", type="Never", non_retryable=True)


@activity.defn
async def never_ends() -> None:
    while True:
        activity.heartbeat("still here")
        await asyncio.sleep(0.05)


@activity.defn
async def says_nothing() -> None:
    await asyncio.sleep(600)


@workflow.defn
class Doubles:
    @workflow.run
    async def run(self, number: int) -> int:
        if number < 0:
            raise ApplicationError("negative")
        await asyncio.sleep(0.05)
        return number * 2


@workflow.defn
class Listens:
    def __init__(self) -> None:
        self.heard: list[str] = []

    @workflow.run
    async def run(self, enough: int) -> list[str]:
        await workflow.wait_condition(lambda: len(self.heard) >= enough)
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self.heard

    @workflow.signal
    def hear(self, word: str) -> None:
        self.heard.append(word)

    @workflow.query
    def count(self) -> int:
        return len(self.heard)

    @workflow.query
    def fails(self) -> int:
        raise ApplicationError("no answer")

    @workflow.update
    async def add(self, word: str) -> str:
        answer = await workflow.execute_activity(greet, word, start_to_close_timeout=SHORT)
        self.heard.append(word)
        return answer

    @add.validator
    def check(self, word: str) -> None:
        if word == "bad":
            raise ApplicationError("not this word")


@workflow.defn
class Does:
    @workflow.run
    async def run(self, what: str) -> str:
        return await getattr(self, what)()

    async def activity(self) -> str:
        return await workflow.execute_activity(greet, "you", start_to_close_timeout=SHORT)

    async def many(self) -> str:
        calls = [workflow.execute_activity(greet, str(n), start_to_close_timeout=SHORT) for n in range(10)]
        return ",".join(await asyncio.gather(*calls))

    async def retry(self) -> str:
        policy = RetryPolicy(initial_interval=timedelta(milliseconds=20))
        key = workflow.info().workflow_id
        return str(await workflow.execute_activity(third_time, key, start_to_close_timeout=SHORT, retry_policy=policy))

    async def refused(self) -> str:
        await workflow.execute_activity(refuses, start_to_close_timeout=SHORT)
        return "not reached"

    async def silence(self) -> str:
        once = RetryPolicy(maximum_attempts=1)
        await workflow.execute_activity(
            says_nothing, start_to_close_timeout=SHORT, heartbeat_timeout=timedelta(seconds=1), retry_policy=once
        )
        return "not reached"

    async def cancel_activity(self) -> str:
        handle = workflow.start_activity(
            never_ends,
            start_to_close_timeout=SHORT,
            heartbeat_timeout=timedelta(seconds=30),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        await asyncio.sleep(0.2)
        handle.cancel()
        try:
            await handle
        except ActivityError as error:
            return type(error.cause).__name__
        return "not cancelled"

    async def local(self) -> str:
        return await workflow.execute_local_activity(greet, "near", start_to_close_timeout=SHORT)

    async def timer(self) -> str:
        first = asyncio.create_task(asyncio.sleep(1000))
        await asyncio.sleep(0.1)
        first.cancel()
        return "woke"

    async def child(self) -> str:
        return str(await workflow.execute_child_workflow(Doubles.run, 21))

    async def bad_child(self) -> str:
        await workflow.execute_child_workflow(Doubles.run, -1)
        return "not reached"

    async def again(self) -> str:
        if workflow.info().continued_run_id is None:
            workflow.continue_as_new("again")
        return "second run"

    async def tells_nobody(self) -> str:
        try:
            await workflow.get_external_workflow_handle("nobody-has-this-id").signal("hear", "x")
        except ApplicationError as error:
            return error.message
        return "somebody"

    async def patch(self) -> str:
        return str(workflow.patched("a-change"))

    async def fails(self) -> str:
        raise ApplicationError("on purpose", type="Purpose")

    async def waits(self) -> str:
        await asyncio.sleep(1000)
        return "not reached"


async def failure(handle, kind) -> BaseException:
    try:
        await handle.result()
    except WorkflowFailureError as error:
        assert isinstance(error.cause, kind), repr(error.cause)
        return error.cause
    raise AssertionError(f"{handle.id} did not fail")


async def refused_with(code: RPCStatusCode, call) -> None:
    try:
        await call
    except RPCError as error:
        assert error.status == code, error
        return
    except RuntimeError as error:
        # A client that may not even connect.
        assert code == RPCStatusCode.UNAUTHENTICATED and "API key" in str(error), error
        return
    raise AssertionError(f"not refused with {code}")


async def strangers() -> None:
    await refused_with(RPCStatusCode.UNAUTHENTICATED, Client.connect(ADDRESS))
    await refused_with(RPCStatusCode.UNAUTHENTICATED, Client.connect(ADDRESS, api_key="atl_wrong", tls=False))
    unknown = await Client.connect(ADDRESS, api_key=KEY, tls=False, namespace="nobody-made-this")
    start = unknown.start_workflow(Does.run, "timer", id="x", task_queue="x")
    await refused_with(RPCStatusCode.NOT_FOUND, start)


async def main() -> None:
    await strangers()
    client = await Client.connect(ADDRESS, api_key=KEY, tls=False)
    queue, run = f"queue-{uuid.uuid4()}", uuid.uuid4().hex[:8]
    attributes = {"AtollOrder": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD}
    await client.operator_service.add_search_attributes(
        AddSearchAttributesRequest(namespace="default", search_attributes=attributes)
    )
    workflows = [Does, Doubles, Listens]
    worker = Worker(
        client,
        task_queue=queue,
        workflows=workflows,
        activities=[greet, third_time, refuses, never_ends, says_nothing],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )

    async def does(what: str, **options):
        return await client.start_workflow(Does.run, what, id=f"{run}-{what}", task_queue=queue, **options)

    async def listens(name: str, enough: int, **options):
        return await client.start_workflow(Listens.run, enough, id=f"{run}-{name}", task_queue=queue, **options)

    async with worker:
        expected = {
            "activity": "hello you",
            "many": ",".join(f"hello {n}" for n in range(10)),
            "retry": "3",
            "cancel_activity": "CancelledError",
            "local": "hello near",
            "timer": "woke",
            "child": "42",
            "again": "second run",
            "patch": "True",
        }
        handles = {what: await does(what) for what in expected}
        for what, result in expected.items():
            assert await handles[what].result() == result, what
        assert "not found" in await (await does("tells_nobody")).result()

        assert isinstance((await failure(await does("refused"), ActivityError)).cause, ApplicationError)
        assert isinstance((await failure(await does("silence"), ActivityError)).cause, TimeoutError)
        await failure(await does("bad_child"), ChildWorkflowError)
        await failure(await does("waits", run_timeout=timedelta(seconds=1)), TimeoutError)
        twice = RetryPolicy(maximum_attempts=2, initial_interval=timedelta(milliseconds=50))
        cause = await failure(await does("fails", retry_policy=twice), ApplicationError)
        assert cause.type == "Purpose"

        cancelled = await client.start_workflow(Does.run, "waits", id=f"{run}-cancelled", task_queue=queue)
        await cancelled.cancel()
        await failure(cancelled, CancelledError)
        terminated = await client.start_workflow(Does.run, "waits", id=f"{run}-terminated", task_queue=queue)
        await terminated.terminate("enough")
        await failure(terminated, TerminatedError)

        heard = await listens("heard", 2)
        await heard.signal(Listens.hear, "one")
        assert await heard.query(Listens.count) == 1
        try:
            await heard.query(Listens.fails)
            raise AssertionError("the query did not fail")
        except WorkflowQueryFailedError:
            pass
        try:
            await listens("heard", 2)
            raise AssertionError("started twice")
        except WorkflowAlreadyStartedError:
            pass
        await heard.signal(Listens.hear, "two")
        assert await heard.result() == ["one", "two"]
        assert await heard.query(Listens.count) == 2, "a closed workflow answers too"

        updated = await listens("updated", 2)
        before = len((await updated.fetch_history()).events)
        assert await updated.execute_update(Listens.add, "a") == "hello a"
        try:
            await updated.execute_update(Listens.add, "bad")
            raise AssertionError("the update was not rejected")
        except WorkflowUpdateFailedError as error:
            assert "not this word" in str(error.cause)
        assert len((await updated.fetch_history()).events) > before
        assert await updated.execute_update(Listens.add, "b", id="once") == "hello b"
        assert await updated.result() == ["a", "b"]

        def with_start() -> WithStartWorkflowOperation:
            return WithStartWorkflowOperation(
                Listens.run, 2, id=f"{run}-both", task_queue=queue, id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING
            )

        for word in ["c", "d"]:
            operation = with_start()
            answer = await client.execute_update_with_start_workflow(Listens.add, word, start_workflow_operation=operation)
            assert answer == f"hello {word}"
        assert await (await operation.workflow_handle()).result() == ["c", "d"]

        found = TypedSearchAttributes([SearchAttributePair(ORDER, run)])
        both = await listens("begun", 1, start_signal="hear", start_signal_args=["first"], search_attributes=found, memo={"why": 1})
        assert await both.result() == ["first"]
        described = await both.describe()
        assert described.status == WorkflowExecutionStatus.COMPLETED and await described.memo() == {"why": 1}
        listed = [one.id async for one in client.list_workflows(f"AtollOrder = '{run}'")]
        assert listed == [both.id], listed
        mine = f"WorkflowId STARTS_WITH '{run}-' AND ExecutionStatus = 'Terminated'"
        assert (await client.count_workflows(mine)).count == 1

        action = ScheduleActionStartWorkflow(Does.run, "timer", id=f"{run}-scheduled", task_queue=queue)
        spec = ScheduleSpec(intervals=[ScheduleIntervalSpec(every=timedelta(hours=1))])
        state = ScheduleState(paused=True)
        schedule = await client.create_schedule(f"{run}-schedule", Schedule(action=action, spec=spec, state=state))
        await schedule.trigger()
        for _ in range(600):
            done = (await schedule.describe()).info.recent_actions
            if done:
                break
            await asyncio.sleep(0.1)
        started = done[0].action
        assert await client.get_workflow_handle(started.workflow_id).result() == "woke"
        await schedule.delete()

        namespace = f"space-{run}"
        await client.workflow_service.register_namespace(
            RegisterNamespaceRequest(namespace=namespace, workflow_execution_retention_period={"seconds": 86400})
        )
        known = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=namespace))
        assert known.namespace_info.name == namespace

    count = 0
    replayer = Replayer(workflows=workflows, workflow_runner=UnsandboxedWorkflowRunner())
    async for one in client.list_workflows(f"WorkflowId STARTS_WITH '{run}-'"):
        handle = client.get_workflow_handle(one.id, run_id=one.run_id)
        history = await handle.fetch_history()
        await replayer.replay_workflow(WorkflowHistory(one.id, history.events))
        count += 1
    assert count >= 20, count
    print(f"{count} histories replayed")
    print("all ok")


asyncio.run(main())
# Threads of the SDK's native part may outlive the interpreter, which then does not always end with 0.
sys.stdout.flush()
os._exit(0)
