"""One MCP server in front of several: streamable HTTP with a token outside, programs with pipes inside.

    client ── HTTP, Bearer ──> /mcp ──┬── filesystem
                                      ├── memory            each a program of its own, started once for all clients,
                                      └── github/...        and again should it end

What must hold:
- Without the token nothing is answered but 401; the token is compared in constant time.
- Ready means ready: every server was started and has told its tools before anybody hears that the gateway runs; one that
  cannot is named, and nothing is served.
- Tools, resources and prompts have the names that their servers give them; only where two give the same one, those of
  the later server get its name in front.
"""

import asyncio
import hmac
import os
import shutil
import subprocess
from pathlib import Path
from typing import Callable

import uvicorn
from fastmcp import Client, FastMCP
from fastmcp.client.transports import StdioTransport
from fastmcp.server import create_proxy
from fastmcp.server.auth import AccessToken, TokenVerifier

from catalogue import Refused, Server

# The SDK gives the whole start a minute.
PATIENCE = 45
# Of what a program said before it failed.
TAIL = 2000


class Token(TokenVerifier):
    """The one token of this gateway."""

    def __init__(self, token: str):
        super().__init__()
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        if not hmac.compare_digest(token.encode(), self._token):
            return None
        return AccessToken(token=token, client_id="gateway", scopes=[])


class Announcing(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]):
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()


class Gateway:
    def __init__(self, servers: list[Server], token: str, home: Path, log: Path, user: str | None):
        self._servers = servers
        self._token = token
        # Where repositories are cloned to.
        self._home = home
        self._log = log
        self._as_user = _as_user(user)

    async def serve(self, port: int, announce: Callable[[], None]) -> None:
        front = FastMCP("mcp-gateway", auth=Token(self._token))
        taken: set[str] = set()
        for server in self._servers:
            try:
                async with asyncio.timeout(PATIENCE):
                    client, names = await self._start(server)
            except TimeoutError:
                raise Refused(f"{server.name}: it did not start within {PATIENCE} seconds") from None
            clash = bool(names & taken)
            taken |= {f"{server.prefix}_{name}" for name in names} if clash else names
            front.mount(create_proxy(client), namespace=server.prefix if clash else None)
        # Whoever reaches the port comes through the sandbox's proxy, under a name that nobody here knows.
        app = front.http_app(path="/mcp", host_origin_protection=False)
        config = uvicorn.Config(app, host="0.0.0.0", port=port, log_level="warning", lifespan="on")
        await Announcing(config, announce).serve()

    async def _start(self, server: Server) -> tuple[Client, set[str]]:
        """Starts a server and asks for its tools."""
        cwd = await asyncio.to_thread(self._checkout, server) if server.repository else str(self._home)
        command = [*self._as_user, *server.command]
        transport = StdioTransport(command[0], command[1:], env=self._env(server), cwd=cwd, log_file=self._log)
        client = Client(transport)
        try:
            async with client:
                return client, {tool.name for tool in await client.list_tools()}
        except Exception as error:
            raise Refused(f"{server.name}: it does not start: {error}; see {self._log}") from error

    def _checkout(self, server: Server) -> str:
        place = self._home / "repositories" / server.name.removeprefix("github/")
        # What an earlier start left may be half of it.
        self._run(["rm", "-rf", "--", str(place)], server, str(self._home))
        self._run(["mkdir", "-p", "--", str(place)], server, str(self._home))
        self._run(["git", "clone", "--quiet", "--depth", "1", "--", server.repository, str(place)], server, str(self._home))
        if server.install:
            self._run(["bash", "-c", server.install], server, str(place))
        return str(place)

    def _run(self, command: list[str], server: Server, cwd: str) -> None:
        done = subprocess.run(
            [*self._as_user, *command],
            cwd=cwd,
            env=self._env(server),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with open(self._log, "a") as log:
            log.write(done.stdout)
        if done.returncode != 0:
            raise Refused(f"{server.name}: `{command[0]}` failed ({done.returncode}): {done.stdout[-TAIL:].strip()}")

    def _env(self, server: Server) -> dict[str, str]:
        # The token is the gateway's: no server needs it.
        env = {name: value for name, value in os.environ.items() if name != "GATEWAY_ACCESS_TOKEN"}
        env.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
        if self._as_user:
            env |= {"HOME": "/home/user", "USER": "user", "LOGNAME": "user"}
        return {**env, "GIT_TERMINAL_PROMPT": "0", **server.env}


def _as_user(user: str | None) -> list[str]:
    """How to start a program as that user; nothing where that cannot be done (nothing in a jail changes its user)."""
    if user is None or os.getuid() != 0 or not shutil.which("setpriv"):
        return []
    prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
    tried = subprocess.run([*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True)
    return prefix if tried.returncode == 0 else []
