"""Uses the activities that Atoll carries out itself, and the command line for the person who is asked.

Prints "kill" where the server should be killed and started again, and then reads a line. Prints "all ok" at the end, or
fails.
"""

import asyncio
import json
import os
import subprocess
import sys
import uuid
from datetime import timedelta

from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker


async def step(name: str, /, **fields):
    return await workflow.execute_activity(
        name,
        fields,
        task_queue="atoll",
        start_to_close_timeout=timedelta(minutes=5),
        heartbeat_timeout=timedelta(seconds=30),
        retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100)),
    )


@workflow.defn
class Pipeline:
    @workflow.run
    async def run(self, spec: dict) -> list:
        box = (await step("sandbox.create", **spec))["id"]
        await step("sandbox.write", sandbox=box, path="/tmp/work/in.txt", content="6 7\n")
        done = await step("sandbox.exec", sandbox=box, cmd="read a b < /tmp/work/in.txt; echo $((a * b)) | tee /tmp/work/out.txt")
        assert done["exit_code"] == 0, done
        deliver = {"sandbox": box, "cmd": "cp /tmp/work/out.txt /tmp/work/delivered.txt"}
        action = {"step": "sandbox.exec", "input": deliver}
        granted = await step("approval.request", action=action, reason="deliver it?")
        try:
            # Nobody has said yes to this.
            await step("sandbox.exec", **{**deliver, "cmd": "rm -rf /tmp/work"}, approval=granted["approval"])
            raise ApplicationError("another action was let through", non_retryable=True)
        except ActivityError as error:
            assert isinstance(error.cause, ApplicationError) and error.cause.type == "NotApproved", error.cause
        await step("sandbox.exec", **deliver, approval=granted["approval"])
        try:
            # Nobody has said yes to doing it twice.
            await step("sandbox.exec", **deliver, approval=granted["approval"])
            raise ApplicationError("a yes was used twice", non_retryable=True)
        except ActivityError as error:
            assert isinstance(error.cause, ApplicationError) and error.cause.type == "NotApproved", error.cause
        read = await step("sandbox.read", sandbox=box, path="/tmp/work/delivered.txt")
        await step("artifact.save", sandbox=box, path="/tmp/work/delivered.txt", name=workflow.info().workflow_id)
        return [box, read["content"], granted["by"], granted["note"]]


@workflow.defn
class Long:
    """A command that outlives its server, a model that is paid for, and a budget that ends it."""

    @workflow.run
    async def run(self, spec: dict) -> list:
        box = (await step("sandbox.create", **spec))["id"]
        wait = "echo ran >> /tmp/times; until [ -e /tmp/go ]; do sleep 0.05; done; wc -l < /tmp/times"
        done = await workflow.execute_activity(
            "sandbox.exec",
            {"sandbox": box, "cmd": wait},
            task_queue="atoll",
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=2),
        )
        snapshot = await step("sandbox.snapshot", sandbox=box)
        call = {"model": "scripted-echo", "messages": [{"role": "user", "content": "good morning"}], "max_tokens": 50}
        said = await step("model.call", **call)
        try:
            await step("model.call", **{**call, "max_tokens": 4_000_000})
            raise ApplicationError("the budget did not hold", non_retryable=True)
        except ActivityError as error:
            refused = error.cause.type
        text = said["answer"]["choices"][0]["message"]["content"]
        return [done["stdout"].strip(), snapshot["sandbox"] == box, text, refused]


@workflow.defn
class Canceled:
    @workflow.run
    async def run(self, spec: dict) -> str:
        box = (await step("sandbox.create", **spec))["id"]
        running = workflow.start_activity(
            "sandbox.exec",
            {"sandbox": box, "cmd": "sleep 1000"},
            task_queue="atoll",
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=1),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        await workflow.wait_condition(lambda: self.enough)
        running.cancel()
        try:
            await running
        except ActivityError:
            pass
        # It was ended, not left behind.
        ps = await step("sandbox.exec", sandbox=box, cmd="pgrep -x sleep || echo none")
        return ps["stdout"].strip()

    def __init__(self) -> None:
        self.enough = False

    @workflow.signal
    def stop(self) -> None:
        self.enough = True


@workflow.defn
class Asks:
    @workflow.run
    async def run(self, limit: int) -> str:
        try:
            await step("approval.request", action={"drop": "everything"}, reason="really?", timeout_ms=limit)
            return "granted"
        except ActivityError as error:
            assert isinstance(error.cause, ApplicationError) and error.cause.type == "ApprovalDenied", error.cause
            return error.cause.message


@workflow.defn
class Mistaken:
    @workflow.run
    async def run(self, name: str) -> str:
        try:
            await step(name, sandbox="sbx_aaaaaaaaaaaaaaaaaaaa", cmd="true")
            return "done"
        except ActivityError as error:
            return error.cause.type


def atoll(*words: str):
    done = subprocess.run([os.environ["ATOLL_CLI"], "--json", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return json.loads(done.stdout) if done.stdout.strip() else None


async def until(what):
    for _ in range(3000):
        found = await asyncio.to_thread(what)
        if found:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError("it never came")


def question_of(workflow_id: str):
    return next((one for one in atoll("approval", "list") if one["workflow"] == workflow_id), None)


async def told(process_says: str) -> None:
    print(process_says, flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def boxes_of(workflow_id: str):
    found = [one for one in atoll("ls") if (one.get("owner") or "").endswith(f":{workflow_id}")]
    return [one["id"] for one in found if one["state"] == "running"]


async def through_a_kill(client: Client, queue: str, run: str, spec: dict, provider: str) -> None:
    atoll("provider", "set", "scripted", "--kind", "openai", "--base-url", f"{provider}/v1", "--no-key")
    atoll("model", "set", "scripted-echo", "--to", "scripted/scripted-echo")
    atoll("model", "price", "set", "scripted/scripted-echo", "--input", "1", "--output", "1")
    long = await client.start_workflow(Long.run, spec, id=f"{run}-long", task_queue=queue)
    atoll("budget", "set", "long", "1", "--scope", "workflow", "--subject", long.id)
    box = (await until(lambda: boxes_of(long.id)))[0]
    await until(lambda: atoll("exec", box, "--", "sh", "-c", "cat /tmp/times || true")["stdout"])
    await told("kill")
    atoll("exec", box, "--", "touch", "/tmp/go")
    times, taken, text, refused = await long.result()
    assert (times, taken, text) == ("1", True, "[scripted] good morning"), (times, taken, text)
    assert refused == "budget_exhausted", refused
    spent = [row for row in atoll("spend", "--by", "workflow")["items"] if row["group"] == long.id]
    assert len(spent) == 1 and spent[0]["calls"] == 1, spent

    canceled = await client.start_workflow(Canceled.run, spec, id=f"{run}-canceled", task_queue=queue)
    box = (await until(lambda: boxes_of(canceled.id)))[0]
    await until(lambda: [one for one in atoll("ps", box) if one["state"] == "running"])
    await canceled.signal(Canceled.stop)
    assert await canceled.result() == "none"


async def main() -> None:
    address, key = os.environ["TEMPORAL_ADDRESS"], os.environ["TEMPORAL_API_KEY"]
    spec = json.loads(os.environ["SANDBOX_SPEC"])
    client = await Client.connect(address, api_key=key, tls=False)
    queue, run = f"steps-{uuid.uuid4()}", uuid.uuid4().hex
    worker = Worker(
        client, task_queue=queue, workflows=[Pipeline, Long, Canceled, Asks, Mistaken], workflow_runner=UnsandboxedWorkflowRunner()
    )
    async with worker:
        name = f"{run}-pipeline"
        pipeline = await client.start_workflow(Pipeline.run, spec, id=name, task_queue=queue)
        question = await until(lambda: question_of(name))
        assert question["reason"] == "deliver it?" and question["state"] == "waiting", question
        assert question["action"]["input"]["cmd"].startswith("cp "), question
        await told("kill")
        # What was asked is asked still, and the sandbox is the same.
        assert await until(lambda: question_of(name)) == question
        wrong = subprocess.run(
            [os.environ["ATOLL_CLI"], "approval", "grant", question["id"], "--digest", "sha256:00"], capture_output=True
        )
        assert wrong.returncode != 0 and b"digest" in wrong.stderr, wrong
        shown = atoll("workflow", "show", name)
        assert shown["status"] == "running" and shown["activities"][0]["type"] == "approval.request", shown
        atoll("approval", "grant", question["id"], "--by", "Ada", "--note", "well done")
        box, content, by, note = await pipeline.result()
        assert (content, by, note) == ("42\n", "Ada", "well done"), (content, by, note)
        again = subprocess.run([os.environ["ATOLL_CLI"], "approval", "deny", question["id"]], capture_output=True)
        assert again.returncode != 0 and b"already" in again.stderr, again
        await until(lambda: all(one["id"] != box for one in atoll("ls")))
        assert [one["name"] for one in atoll("artifact", "list", name)] == [name]
        kinds = [event["type"] for event in atoll("workflow", "history", name)]
        assert kinds[0] == "WorkflowExecutionStarted" and kinds[-1] == "WorkflowExecutionCompleted", kinds
        assert kinds.count("ActivityTaskFailed") == 2, kinds

        scripted = subprocess.Popen(
            [os.environ["ATOLL_CLI"], "scripted-provider", "--listen", "127.0.0.1:0", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        said = ""
        while "}" not in said:
            said += scripted.stdout.readline()
        try:
            await through_a_kill(client, queue, run, spec, json.loads(said)["url"])
        finally:
            scripted.kill()

        denied = await client.start_workflow(Asks.run, 600_000, id=f"{run}-denied", task_queue=queue)
        question = await until(lambda: question_of(denied.id))
        atoll("approval", "deny", question["id"], "--by", "Ada", "--note", "not today")
        assert "denied by Ada: not today" in await denied.result()
        silent = await client.execute_workflow(Asks.run, 300, id=f"{run}-silent", task_queue=queue)
        assert "time limit" in silent, silent
        # One that nobody waits for any more is nobody's to answer.
        ended = await client.start_workflow(Asks.run, 600_000, id=f"{run}-ended", task_queue=queue)
        await until(lambda: question_of(ended.id))
        atoll("workflow", "terminate", ended.id, "--reason", "enough")
        await until(lambda: question_of(ended.id) is None)
        try:
            await ended.result()
            raise AssertionError("it was terminated")
        except WorkflowFailureError as error:
            assert "enough" in str(error.cause), error.cause

        assert await client.execute_workflow(Mistaken.run, "sandbox.boil", id=f"{run}-a", task_queue=queue) == "UnknownStep"
        gone = await client.execute_workflow(Mistaken.run, "sandbox.exec", id=f"{run}-b", task_queue=queue)
        assert gone == "sandbox_not_found", gone
        listed = atoll("workflow", "list", "--query", f"WorkflowId STARTS_WITH '{run}-'")
        assert len(listed) == 8, listed
    print("all ok")


asyncio.run(main())
