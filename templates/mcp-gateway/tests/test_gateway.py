"""The gateway as the SDK starts it: the program itself, real servers, a real client. Needs fastmcp, git and bash."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request
from pathlib import Path

from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import catalogue  # noqa: E402

TOKEN = "a-token"
ECHO = str(HERE / "echo.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port: int, body: object, headers: dict[str, str]) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/mcp", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def said(client: Client, tool: str, **arguments: str) -> str:
    return (await client.call_tool(tool, arguments)).content[0].text


class Configurations(unittest.TestCase):
    def test_what_is_not_here_is_refused_by_name(self):
        for config, words in [
            ([], "not an object"),
            ({}, "not an object"),
            ({"nothing": {}}, "`nothing`"),
            ({"time": {"zone": "UTC"}}, "`zone`"),
            ({"time": 3}, "time"),
            ({"filesystem": {}}, "`paths`"),
            ({"filesystem": {"paths": "/"}}, "`paths`"),
            ({"filesystem": {"paths": [1]}}, "`paths`"),
            ({"git": {"paths": ["/a", "/b"]}}, "one path"),
            ({"context7": {}}, "`apiKey`"),
            ({"github/a/b": {}}, "`runCmd`"),
            ({"github/a/b": {"runCmd": "x", "port": 1}}, "`port`"),
            ({"github/a/b": {"runCmd": "x", "envs": {"A": 1}}}, "`envs`"),
            ({"github/a": {"runCmd": "x"}}, "`github/a`"),
            ({"github/../b": {"runCmd": "x"}}, "`github/../b`"),
            ({"github/-a/b": {"runCmd": "x"}}, "`github/-a/b`"),
            ({"github/a/b/c": {"runCmd": "x"}}, "`github/a/b/c`"),
        ]:
            with self.subTest(config=config), self.assertRaises(catalogue.Refused) as refused:
                catalogue.servers(config)
            self.assertIn(words, str(refused.exception))

    def test_servers_are_started_with_what_they_were_given(self):
        config = {"filesystem": {"paths": ["/a", "/b"]}, "time": None, "github/own/repo": {"runCmd": "node x"}}
        files, time, own = catalogue.servers(config)
        self.assertEqual(files.command[1:], ["/a", "/b"])
        self.assertEqual(time.name, "time")
        self.assertEqual((own.repository, own.prefix), ("https://github.com/own/repo", "own_repo"))


class Running(unittest.TestCase):
    """Servers come from repositories here, which git is told to find beside us."""

    def setUp(self):
        self.place = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.port = free_port()
        for name in ("one", "two"):
            self.repository(name)
        settings = self.place / "gitconfig"
        settings.write_text(f'[url "{self.place}/origin/"]\n\tinsteadOf = https://github.com/\n')
        self.env = {
            **os.environ,
            "GIT_CONFIG_GLOBAL": str(settings),
            "MCP_GATEWAY_PORT": str(self.port),
            "MCP_GATEWAY_STATE": str(self.place / "state"),
            "MCP_GATEWAY_LOG": str(self.place / "log" / "gateway.log"),
            "MCP_GATEWAY_HOME": str(self.place / "home"),
            "MCP_GATEWAY_USER": "",
            "GATEWAY_ACCESS_TOKEN": TOKEN,
        }
        (self.place / "home").mkdir()
        self.addCleanup(self.stop)

    def repository(self, name: str) -> None:
        place = self.place / "origin" / "own" / name
        place.mkdir(parents=True)
        (place / "file").write_text(name)
        who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
            subprocess.run(["git", *command], cwd=place, check=True)

    def start(self, config: object, **env: str) -> subprocess.CompletedProcess:
        text = config if isinstance(config, str) else json.dumps(config)
        command = [sys.executable, str(HERE.parent / "mcp-gateway"), "--config", text]
        return subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=120)

    def stop(self) -> None:
        # The gateway is the leader of its own session.
        for process in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"MCP_GATEWAY_PORT={self.port}\0".encode() in process.read_bytes():
                    os.kill(int(process.parent.name), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                pass

    def client(self, token: str = TOKEN) -> Client:
        return Client(StreamableHttpTransport(f"http://127.0.0.1:{self.port}/mcp", auth=token))

    def serve(self, name: str, **more: object) -> dict:
        run = f"exec {shlex.quote(sys.executable)} {shlex.quote(ECHO)} \"$(cat file)\""
        return {f"github/own/{name}": {"runCmd": run, **more}}

    def test_tools_of_all_servers_are_served_to_whoever_has_the_token(self):
        done = self.start({**self.serve("one", installCmd="printf ' more' >> file", envs={"GIVEN": " given"}), **self.serve("two")})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual((self.place / "state" / ".token").read_text(), TOKEN)
        self.assertEqual((self.place / "state" / ".token").stat().st_mode & 0o777, 0o600)

        async def talk():
            async with self.client() as client:
                names = {tool.name for tool in await client.list_tools()}
                self.assertEqual(
                    names,
                    {"echo", "pid", "secret", "die", "own_two_echo", "own_two_pid", "own_two_secret", "own_two_die"},
                )
                self.assertEqual(await said(client, "echo", text="hi"), "one more: hi")
                self.assertEqual(await said(client, "own_two_echo", text="hi"), "two: hi")
                self.assertEqual(await said(client, "secret"), "none given")
                first = await said(client, "pid")
            # One program for all clients; another when it ended.
            async with self.client() as client:
                self.assertEqual(await said(client, "pid"), first)
                with self.assertRaises(Exception):
                    await client.call_tool("die")
                self.assertNotEqual(await said(client, "pid"), first)

        asyncio.run(talk())
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {TOKEN}"}):
            self.assertEqual(post(self.port, {}, headers)[0], 401, headers)

    def test_a_host_that_nobody_here_knows_is_served(self):
        self.assertEqual(self.start(self.serve("one")).returncode, 0)
        hello = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
        }
        headers = {
            "Authorization": f"Bearer {TOKEN}",
            "Accept": "application/json, text/event-stream",
            "Host": "50005-abc.sandboxes.example",
        }
        status, text = post(self.port, hello, headers)
        self.assertEqual(status, 200, text)
        self.assertIn("mcp-gateway", text)

    def test_what_does_not_start_fails_and_serves_nothing(self):
        for config, words in [
            ("{", "JSON"),
            ({"nothing": {}}, "`nothing`"),
            ({**self.serve("one"), "github/own/none": {"runCmd": "true"}}, "github/own/none"),
            (self.serve("one", installCmd="echo why it failed; false"), "why it failed"),
            ({"github/own/two": {"runCmd": "exit 3"}}, "github/own/two"),
        ]:
            with self.subTest(config=config):
                done = self.start(config)
                self.assertEqual(done.returncode, 1)
                self.assertIn(words, done.stderr)
                self.assertFalse((self.place / "state" / ".token").exists())
                with self.assertRaises(urllib.error.URLError):
                    post(self.port, {}, {})
        self.assertIn("GATEWAY_ACCESS_TOKEN", self.start(self.serve("one"), GATEWAY_ACCESS_TOKEN="").stderr)

    def test_pull_knows_what_is_here(self):
        def pull(*names):
            command = [sys.executable, str(HERE.parent / "mcp-gateway"), "pull", *names]
            return subprocess.run(command, capture_output=True, text=True)

        self.assertEqual(pull("time", "memory").returncode, 0)
        self.assertIn("`exa`", pull("time", "exa").stderr)
        self.assertEqual(pull().returncode, 1)


if __name__ == "__main__":
    unittest.main()
