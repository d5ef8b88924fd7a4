"""Sandboxes with MCP servers, through E2B's Python SDK and the `mcp` client, both unmodified, against the server that the
environment names. Needs the template `mcp-gateway`.

Prints one line per part; ends with an exception if an answer is not what E2B documents.
"""

import asyncio
import os

import httpx2
from e2b import Sandbox, SandboxException
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

SERVERS = {
    "filesystem": {"paths": ["/tmp"]},
    "memory": {},
    "sequentialthinking": {},
    "time": {},
    "fetch": {},
}


def headers(box, token):
    """No name leads to the sandbox here: the server is told by headers which one is meant."""
    return {
        **({"Authorization": f"Bearer {token}"} if token else {}),
        "E2b-Sandbox-Id": box.sandbox_id,
        "E2b-Sandbox-Port": "50005",
        **({"E2B-Traffic-Access-Token": box.traffic_access_token} if box.traffic_access_token else {}),
    }


def address():
    return os.environ["E2B_SANDBOX_URL"] + "/mcp"


async def talk(box):
    async with (
        httpx2.AsyncClient(headers=headers(box, box.get_mcp_token()), timeout=60) as http,
        streamable_http_client(address(), http_client=http) as streams,
        ClientSession(*streams[:2]) as session,
    ):
        hello = await session.initialize()
        assert hello.server_info.name == "mcp-gateway", hello
        names = {tool.name for tool in (await session.list_tools()).tools}
        for name in ("get_current_time", "read_text_file", "create_entities", "sequentialthinking", "fetch"):
            assert name in names, (name, names)
        print("tools", len(names), flush=True)

        async def call(name, **arguments):
            answer = await session.call_tool(name, arguments)
            assert not answer.is_error, answer
            return answer.content[0].text

        assert "Tokyo" in await call("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")
        await call("write_file", path="/tmp/note.txt", content="from outside")
        assert box.files.read("/tmp/note.txt") == "from outside"
        box.files.write("/tmp/other.txt", "from inside")
        assert "from inside" in await call("read_text_file", path="/tmp/other.txt")
        await call("create_entities", entities=[{"name": "a", "entityType": "b", "observations": ["c"]}])
        assert '"a"' in await call("read_graph")
        print("calls", flush=True)


def refuses_others(box):
    for token in ("", "wrong", box.get_mcp_token()[:-1]):
        answer = httpx2.post(address(), json={}, headers=headers(box, token))
        assert answer.status_code == 401, answer
    print("tokens", flush=True)


def start_fails(config, *words):
    try:
        Sandbox.create(mcp=config, timeout=60).kill()
    except SandboxException as error:
        assert "Failed to start MCP gateway" in str(error), error
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"{config} was not refused")


def main():
    box = Sandbox.create(mcp=SERVERS, timeout=300)
    try:
        assert box.get_mcp_url().endswith("/mcp") and "50005-" in box.get_mcp_url()
        asyncio.run(talk(box))
        refuses_others(box)
        again = Sandbox.connect(box.sandbox_id)
        assert again.get_mcp_token() == box.get_mcp_token()
        print("connect", flush=True)
    finally:
        box.kill()
    start_fails({"browserbase": {}}, "browserbase")
    start_fails({"filesystem": {}}, "filesystem", "paths")
    print("refusals", flush=True)
    print("all ok")


main()
