"""The sandbox of OpenAI's Agents SDK on E2B, with the version of E2B's SDK that it pins: a workspace, commands, a terminal, a port,
and a session that is put to rest and taken up again."""

import asyncio
import io
import os
import urllib.request
from importlib.metadata import version
from pathlib import Path

from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions


async def main():
    print(f"openai-agents {version('openai-agents')} on e2b {version('e2b')}")
    client = E2BSandboxClient()
    options = E2BSandboxClientOptions(
        sandbox_type="e2b", template="base", timeout=300, exposed_ports=(8000,), pause_on_exit=True, envs={"WHO": "agent"}
    )
    session = await client.create(options=options)
    async with session:
        said = await session.exec("echo $WHO; echo to-stderr >&2; exit 3")
        assert (said.exit_code, said.stdout, said.stderr) == (3, b"agent\n", b"to-stderr\n"), said
        await session.write(Path("index.html"), io.BytesIO(b"from the workspace"))
        assert (await session.read(Path("index.html"))).read() == b"from the workspace"
        assert "index.html" in [Path(entry.path).name for entry in await session.ls(".")]
        assert await session.running()
        await session.exec("nohup python3 -m http.server 8000 >/dev/null 2>&1 &")
        await session.exec("until curl -sf http://localhost:8000/ >/dev/null; do sleep 0.1; done")
        endpoint = await session.resolve_exposed_port(8000)
        assert f"{endpoint.host}:{endpoint.port}".endswith(os.environ["E2B_DOMAIN"]), endpoint
        answer = urllib.request.urlopen(endpoint.url_for("http")).read()
        assert answer == b"from the workspace", answer
        state = session.state

    again = await client.resume(state)
    assert again.state.sandbox_id == state.sandbox_id, "it rested, and another was made instead"
    again.state.pause_on_exit = False
    async with again:
        assert (await again.read(Path("index.html"))).read() == b"from the workspace"
    print("all ok")


asyncio.run(main())
