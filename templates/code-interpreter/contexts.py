"""What every context has in common: a language, a place, one execution at a time, and the words in which it tells what
happens. Each line that is told is one JSON object of the stream that `server.py` sends."""

import asyncio
import datetime
import os

HOME = "/home/user"
HERE = os.path.dirname(os.path.abspath(__file__))
FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


class Refused(Exception):
    """What is asked for cannot be: no such language, no such directory. The text says why."""


class Ended(Exception):
    """What ran is over because its interpreter is."""


class Died(Ended):
    """The interpreter ended by itself; its context is started anew before whoever used it is told."""


def said(stream, text):
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"type": stream, "text": text, "timestamp": now.isoformat()}


def counted(count):
    return {"type": "number_of_executions", "execution_count": count}


def failed(name, value, traceback=""):
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def result(data, main):
    """A bundle of representations by media type."""
    line = {"type": "result", "is_main_result": main}
    extra = {}
    for media, value in data.items():
        if media in FORMATS:
            line[FORMATS[media]] = value
        else:
            extra[media] = value
    text = line.get("text")
    # Strings are told without their quotes.
    if text and len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        line["text"] = text[1:-1]
    if extra:
        line["extra"] = extra
    return line


class Context:
    def __init__(self, language, id, cwd):
        self.language, self.id, self.cwd = language, id, cwd
        # One execution at a time, in the order in which they came.
        self.lock = asyncio.Lock()
        # Held while the interpreter is being replaced.
        self.changing = asyncio.Lock()

    def view(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def run(self, code, env, tell):
        """Runs code with these variables on top of the environment, and tells what happens, in order. One at a time."""
        async with self.changing:
            pass
        try:
            await self.execute(code, env, tell)
        except Died:
            await self.restart()
            raise

    async def restart(self):
        async with self.changing:
            self.abandon(Ended("The context was restarted"))
            await self.stop()
            await self.start()

    async def remove(self):
        async with self.changing:
            self.abandon(Ended("The context was removed"))
            await self.stop()

    async def start(self):
        raise NotImplementedError

    async def stop(self):
        raise NotImplementedError

    async def execute(self, code, env, tell):
        raise NotImplementedError

    async def interrupt(self):
        """Ends what runs, if anything does; the state stays where the language can do that."""
        raise NotImplementedError

    def abandon(self, error):
        """Whoever waits for what runs gets this error instead."""
        raise NotImplementedError
