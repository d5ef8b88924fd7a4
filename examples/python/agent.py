"""An agent that survives crashes: a model decides, its tools run in a sandbox, each call is paid from the workflow's budget.

    atoll scripted-provider &
    atoll provider set scripted --kind openai --base-url http://127.0.0.1:7071/v1 --no-key
    atoll model set helper --to scripted/scripted-tool         # or a real one: --to anthropic/claude-…
    atoll budget set agents 0.50 --scope workflow
    python3 agent.py "What is the weather in Bern?"
"""

import asyncio
import json
import os
import shlex
import sys
import uuid

from temporalio import workflow
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from steps import connect, run, step

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
# What the model asks for is data for this program. It runs in a sandbox: whatever it turns out to do stays there.
WEATHER = "import sys, zlib; print(['sun', 'rain', 'snow'][zlib.crc32(sys.argv[1].encode()) % 3], 'in', sys.argv[1])"


@workflow.defn
class Agent:
    @workflow.run
    async def run(self, model: str, question: str) -> str:
        box = (await step("sandbox.create", template="base"))["id"]
        said = [{"role": "user", "content": question}]
        for _ in range(10):
            call = await step("model.call", model=model, messages=said, tools=TOOLS, max_tokens=500)
            message = call["answer"]["choices"][0]["message"]
            if not message.get("tool_calls"):
                return message["content"]
            said.append(message)
            for asked in message["tool_calls"]:
                city = json.loads(asked["function"]["arguments"])["city"]
                found = await run(box, f"python3 -c {shlex.quote(WEATHER)} {shlex.quote(city)}")
                said.append({"role": "tool", "tool_call_id": asked["id"], "content": found.strip()})
        raise ApplicationError("ten rounds and no answer", non_retryable=True)


async def main() -> None:
    client = await connect()
    question = " ".join(sys.argv[1:]) or "What is the weather in Bern?"
    model = os.environ.get("MODEL", "helper")
    async with Worker(
        client, task_queue="agent", workflows=[Agent], workflow_runner=UnsandboxedWorkflowRunner()
    ):
        agent = client.execute_workflow(Agent.run, args=[model, question], id=f"agent-{uuid.uuid4()}", task_queue="agent")
        print(await agent)


asyncio.run(main())
