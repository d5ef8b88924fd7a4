"""A small MCP server for the tests, without a library so that it starts at once: `echo`, `pid`, `secret`, and `die`."""

import json
import os
import sys

TOOLS = {
    "echo": lambda given: f"{sys.argv[1]}: {given['text']}",
    "pid": lambda _: str(os.getpid()),
    "secret": lambda _: os.environ.get("GATEWAY_ACCESS_TOKEN", "none") + os.environ.get("GIVEN", ""),
    "die": lambda _: os._exit(1),
}


def answer(method: str, params: dict) -> dict | None:
    match method:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "echo", "version": "1"},
            }
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
        case "tools/call":
            said = TOOLS[params["name"]](params.get("arguments") or {})
            return {"content": [{"type": "text", "text": said}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    reply = {"jsonrpc": "2.0", "id": request["id"]}
    result = answer(request["method"], request.get("params") or {})
    if result is None:
        reply["error"] = {"code": -32601, "message": "no such method"}
    else:
        reply["result"] = result
    print(json.dumps(reply), flush=True)
