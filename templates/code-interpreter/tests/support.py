"""What the tests share: the modules on the path, and a context that is stopped whatever happens."""

import contextlib
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@contextlib.asynccontextmanager
async def started(kind, language):
    with tempfile.TemporaryDirectory() as directory:
        context = kind(language, "id", os.path.realpath(directory))
        await context.start()
        try:
            yield context
        finally:
            await context.stop()


async def run(context, code, env=None):
    """What was told, without the count that comes first."""
    lines = []
    await context.run(code, env or {}, lines.append)
    assert lines[0]["type"] == "number_of_executions", lines
    return lines[1:]


def text(lines, stream="stdout"):
    return "".join(line["text"] for line in lines if line["type"] == stream)


def result(lines):
    return next((line for line in lines if line["type"] == "result"), None)


def error(lines):
    return next((line for line in lines if line["type"] == "error"), None)
