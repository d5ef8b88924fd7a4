"""What the examples share: steps that Atoll carries out, and where Atoll is."""

import os
from datetime import timedelta

from temporalio import workflow
from temporalio.client import Client
from temporalio.exceptions import ApplicationError


async def step(name: str, /, **fields):
    """An activity on the task queue `atoll`: the server carries it out, no worker of yours is needed."""
    return await workflow.execute_activity(
        name,
        fields,
        task_queue="atoll",
        start_to_close_timeout=timedelta(hours=24),
        # A step that died with the server is tried again this soon, and finds what it did before.
        heartbeat_timeout=timedelta(seconds=5),
    )


async def run(box: str, cmd: str) -> str:
    """A command in a sandbox that must succeed."""
    done = await step("sandbox.exec", sandbox=box, cmd=cmd)
    if done["exit_code"] != 0:
        raise ApplicationError(f"`{cmd}` failed: {done['stderr'] or done['stdout']}", non_retryable=True)
    return done["stdout"]


async def connect() -> Client:
    with open(os.environ.get("ATOLL_KEY_FILE", "/var/lib/atoll/admin.key")) as file:
        key = file.read().strip()
    return await Client.connect(os.environ.get("TEMPORAL_ADDRESS", "127.0.0.1:7233"), api_key=key, tls=False)
