"""The servers that a configuration may name, and how each is started.

What must hold: nothing of a configuration is passed over. A server that is not here, an option that a server does not
have, one that is missing or of another type: each is refused by name, before anything is started.
"""

import re
from dataclasses import dataclass, field

NODE = "/opt/mcp-gateway/node/node_modules/.bin"
PYTHON = "/opt/mcp-gateway/servers/bin"
# Where servers keep what they remember, and repositories are cloned to.
STATE = "/var/lib/mcp-gateway"

_GITHUB = re.compile(r"github/([A-Za-z0-9_][A-Za-z0-9_.-]*)/([A-Za-z0-9_][A-Za-z0-9_.-]*)")


class Refused(Exception):
    """A configuration that cannot be served; says what is wrong with it."""


@dataclass(frozen=True)
class Server:
    """A program that speaks MCP on its standard input and output."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    # A public repository to clone, and what is to be run in it first.
    repository: str | None = None
    install: str | None = None

    @property
    def prefix(self) -> str:
        """What is put before names that another server has too."""
        return re.sub(r"[^A-Za-z0-9]+", "_", self.name.removeprefix("github/"))


def _git(options: dict) -> Server:
    paths = options["paths"]
    if len(paths) > 1:
        raise Refused("git: one path is served, not several")
    return Server("git", [f"{PYTHON}/mcp-server-git", "--repository", paths[0]])


# Name: the options it needs, and what they make of it. Names and options are those of E2B's SDKs.
_CATALOGUE = {
    "context7": (
        {"apiKey": str},
        lambda options: Server("context7", [f"{NODE}/context7-mcp"], {"CONTEXT7_API_KEY": options["apiKey"]}),
    ),
    "fetch": ({}, lambda _: Server("fetch", [f"{PYTHON}/mcp-server-fetch"])),
    "filesystem": (
        {"paths": list},
        lambda options: Server("filesystem", [f"{NODE}/mcp-server-filesystem", *options["paths"]]),
    ),
    "git": ({"paths": list}, _git),
    "memory": (
        {},
        lambda _: Server("memory", [f"{NODE}/mcp-server-memory"], {"MEMORY_FILE_PATH": f"{STATE}/memory.jsonl"}),
    ),
    "sequentialthinking": ({}, lambda _: Server("sequentialthinking", [f"{NODE}/mcp-server-sequential-thinking"])),
    "time": ({}, lambda _: Server("time", [f"{PYTHON}/mcp-server-time"])),
}


def known() -> list[str]:
    return sorted(_CATALOGUE)


def check_name(name: str) -> None:
    if name not in _CATALOGUE:
        raise Refused(
            f"there is no MCP server `{name}` here; there are {', '.join(known())}, "
            "and any public repository as `github/<owner>/<repository>`"
        )


def servers(config: object) -> list[Server]:
    """The servers that a configuration asks for."""
    if not isinstance(config, dict) or not config:
        raise Refused("the configuration is not an object with the servers' names")
    return [_server(name, options) for name, options in config.items()]


def _server(name: str, options: object) -> Server:
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise Refused(f"{name}: its options are not an object")
    found = _GITHUB.fullmatch(name)
    if found:
        return _from_github(name, found[1], found[2], options)
    check_name(name)
    needs, make = _CATALOGUE[name]
    _check_options(name, options, needs, {})
    for option, kind in needs.items():
        if kind is list and (not options[option] or not all(isinstance(item, str) and item for item in options[option])):
            raise Refused(f"{name}: `{option}` is not a list of paths")
    return make(options)


def _from_github(name: str, owner: str, repository: str, options: dict) -> Server:
    _check_options(name, options, {"runCmd": str}, {"installCmd": str, "envs": dict})
    envs = options.get("envs") or {}
    if not all(isinstance(value, str) for value in envs.values()):
        raise Refused(f"{name}: `envs` is not an object of strings")
    return Server(
        name,
        ["bash", "-c", options["runCmd"]],
        dict(envs),
        repository=f"https://github.com/{owner}/{repository}",
        install=options.get("installCmd") or None,
    )


def _check_options(name: str, options: dict, needs: dict, may: dict) -> None:
    known_options = {**needs, **may}
    for option, value in options.items():
        if option not in known_options:
            raise Refused(f"{name}: it has no option `{option}`")
        if value is not None and not isinstance(value, known_options[option]):
            raise Refused(f"{name}: `{option}` is not of the right type")
    for option in needs:
        if not options.get(option):
            raise Refused(f"{name}: `{option}` is missing")
