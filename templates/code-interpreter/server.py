"""The code interpreter: contexts of several languages behind HTTP on port 49999.

    GET    /health                    "OK"
    POST   /execute                   {code, context_id?, language?, env_vars?} -> one JSON object per line, until the end
    POST   /contexts                  {language?, cwd?} -> {id, language, cwd}
    GET    /contexts                  all of them
    POST   /contexts/{id}/restart
    DELETE /contexts/{id}

What must hold: one execution at a time in each context; whoever hangs up interrupts what runs for them; the default
contexts of Python and JavaScript run before the port opens, so that a sandbox that was saved comes up with them.
"""

import asyncio
import json
import uuid

import tornado.httpserver
import tornado.iostream
import tornado.netutil
import tornado.web

from contexts import HOME, Ended, Refused, failed
from kernels import Python, R
from programs import Bash, Java, Node

PORT = 49999
KEEPALIVE_SECONDS = 5
# When an answer begins that nothing was told for yet: clients tell a sandbox that ended from one that never answered.
OPENING_SECONDS = 0.05
LANGUAGES = {"python": Python, "javascript": Node, "typescript": Node, "bash": Bash, "r": R, "java": Java}
ALIASES = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash"}
RUN_AT_HAND_OVER = ("python", "javascript")


class NotFound(Refused):
    """What is named is not there."""


class Registry:
    """The contexts there are, and which of them are meant when only a language is named."""

    def __init__(self, languages):
        self.languages = languages
        self.contexts = {}
        self.defaults = {}

    def language(self, asked):
        name = (asked or "python").strip().lower()
        name = ALIASES.get(name, name)
        if name not in self.languages:
            raise Refused(f"There is no interpreter for {asked} here; there are {', '.join(self.languages)}")
        return name

    async def create(self, language=None, cwd=None):
        language = self.language(language)
        context = self.languages[language](language, str(uuid.uuid4()), cwd or HOME)
        await context.start()
        self.contexts[context.id] = context
        return context

    async def default(self, language=None):
        language = self.language(language)
        if language not in self.defaults:
            # Two who come at once wait for the same one.
            self.defaults[language] = asyncio.ensure_future(self.create(language))
        try:
            return await asyncio.shield(self.defaults[language])
        except Exception:
            self.defaults.pop(language, None)
            raise

    async def remove(self, context):
        del self.contexts[context.id]
        for language, future in list(self.defaults.items()):
            if future.done() and not future.exception() and future.result() is context:
                del self.defaults[language]
        await context.remove()


class Handler(tornado.web.RequestHandler):
    def initialize(self, registry):
        self.registry = registry

    def write_error(self, status, exc_info=None, **_):
        error = exc_info[1] if exc_info else None
        if isinstance(error, Refused):
            self.set_status(404 if isinstance(error, NotFound) else 400)
        self.set_header("Content-Type", "text/plain")
        self.finish(str(error) if error else self._reason)

    def log_exception(self, kind, error, trace):
        if not isinstance(error, Refused):
            super().log_exception(kind, error, trace)

    def asked(self):
        try:
            asked = json.loads(self.request.body or b"{}")
        except ValueError as error:
            raise Refused(f"The body is not JSON: {error}") from error
        if not isinstance(asked, dict):
            raise Refused("The body is not a JSON object")
        return asked

    def context(self, id):
        if id not in self.registry.contexts:
            raise NotFound(f"Context {id} not found")
        return self.registry.contexts[id]


class Health(Handler):
    def get(self):
        self.finish("OK")


class Execute(Handler):
    left = False
    news = None

    def on_connection_close(self):
        self.left = True
        self.wake()

    def wake(self):
        if self.news and not self.news.done():
            self.news.set_result(None)

    async def post(self):
        asked = self.asked()
        code, env = asked.get("code"), asked.get("env_vars") or {}
        if not isinstance(code, str):
            raise Refused("code must be a string")
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise Refused("env_vars must be strings by name")
        if asked.get("context_id") and asked.get("language"):
            raise Refused("Only one of context_id or language can be provided")
        if asked.get("context_id"):
            context = self.context(asked["context_id"])
        else:
            context = await self.registry.default(asked.get("language"))
        self.set_header("Content-Type", "application/x-ndjson")
        async with context.lock:
            if not self.left:
                await self.stream(context, code, env)

    async def stream(self, context, code, env):
        """Sends what is told as it comes; what is soon followed by more, together with that: so a short execution is
        one write."""
        told = []

        def tell(line):
            told.append(line)
            if not (line["type"] == "number_of_executions" or line.get("is_main_result")):
                self.wake()

        async def run():
            try:
                await context.run(code, env, tell)
            except Ended as error:
                tell(failed("ContextEnded", str(error)))
            except Exception as error:  # what breaks a context is told to whoever uses it
                tell(failed(type(error).__name__, str(error)))
            tell({"type": "end_of_execution"})

        loop = asyncio.get_running_loop()
        self.news = loop.create_future()
        running = asyncio.ensure_future(run())
        begun = False
        try:
            while not self.left:
                timer = loop.call_later(KEEPALIVE_SECONDS if begun else OPENING_SECONDS, self.wake)
                await self.news
                timer.cancel()
                self.news = loop.create_future()
                lines, told[:] = told[:], []
                if begun and not lines:
                    lines = [{"type": "keepalive"}]
                begun = True
                self.write("".join(json.dumps(line) + "\n" for line in lines))
                if lines and lines[-1]["type"] == "end_of_execution":
                    break
                await self.flush()
        except tornado.iostream.StreamClosedError:
            pass
        finally:
            if not running.done():
                # Nobody listens: it ends before the next one begins.
                await context.interrupt()
            await running


class Contexts(Handler):
    def get(self):
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps([context.view() for context in self.registry.contexts.values()]))

    async def post(self):
        asked = self.asked()
        context = await self.registry.create(asked.get("language"), asked.get("cwd"))
        self.finish(context.view())


class Context(Handler):
    async def delete(self, id):
        await self.registry.remove(self.context(id))
        self.finish()


class Restart(Handler):
    async def post(self, id):
        await self.context(id).restart()
        self.finish()


def application(registry):
    own = {"registry": registry}
    return tornado.web.Application(
        [
            ("/health", Health, own),
            ("/execute", Execute, own),
            ("/contexts", Contexts, own),
            ("/contexts/([^/]+)", Context, own),
            ("/contexts/([^/]+)/restart", Restart, own),
        ],
        log_function=lambda handler: None,
    )


async def main():
    registry = Registry(LANGUAGES)
    await asyncio.gather(*(registry.default(language) for language in RUN_AT_HAND_OVER))
    server = tornado.httpserver.HTTPServer(application(registry), max_body_size=256 << 20)
    server.add_sockets(tornado.netutil.bind_sockets(PORT, "0.0.0.0"))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
