"""Clone, edit, test, wait for a person, deliver a diff. Kill this program or the server wherever you like, and start it again:
it goes on where it was.

    python3 pipeline.py                                  # waits for a person
    atoll approval list
    atoll approval grant apr_…
    atoll artifact get change -
"""

import asyncio
import os

from temporalio import workflow
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from steps import connect, run, step

# A repository to work on, made in the sandbox, so that the example needs no network. Another: REPOSITORY=https://…, with a
# policy that lets the sandbox reach it.
EXAMPLE = """
git config --global user.name example; git config --global user.email example@example.org
git config --global init.defaultBranch main
mkdir -p origin && cd origin && git init -q
printf 'def greet(name):\\n    return "Helo " + name\\n' > greet.py
printf 'import greet, unittest\\nclass T(unittest.TestCase):\\n    def test(self):\\n        self.assertEqual(greet.greet("Ada"), "Hello Ada")\\n' > test_greet.py
git add . && git commit -qm 'Greet people'
"""


@workflow.defn
class Pipeline:
    @workflow.run
    async def run(self, repository: str) -> str:
        box = (await step("sandbox.create", template="base"))["id"]
        if repository == "origin":
            await run(box, EXAMPLE)
        await run(box, f"git clone -q {repository} work")
        await run(box, "sed -i 's/Helo/Hello/' work/greet.py")
        await run(box, "cd work && python3 -m unittest -q 2>&1")
        diff = await run(box, "cd work && git diff | tee ../change.diff")
        # Exactly this and nothing else is what the person says yes to.
        delivery = {"sandbox": box, "path": "change.diff", "name": "change"}
        yes = await step(
            "approval.request", action={"step": "artifact.save", "input": delivery}, reason=f"deliver this?\n{diff}"
        )
        await step("artifact.save", **delivery, approval=yes["approval"])
        return f"delivered, as {yes['by'] or 'somebody'} said:\n{diff}"


async def main() -> None:
    client = await connect()
    async with Worker(
        client, task_queue="pipeline", workflows=[Pipeline], workflow_runner=UnsandboxedWorkflowRunner()
    ):
        handle = await client.start_workflow(
            Pipeline.run,
            os.environ.get("REPOSITORY", "origin"),
            id=os.environ.get("PIPELINE", "pipeline"),
            task_queue="pipeline",
            # Started again, it is the same workflow.
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        print("waiting; see `atoll approval list`", flush=True)
        print(await handle.result())


asyncio.run(main())
