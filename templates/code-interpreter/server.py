"""The code interpreter: contexts of Python, JavaScript, TypeScript and Bash behind HTTP on port 49999.

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

from contexts import HOME, Unsupported, start

PORT = 49999
KEEPALIVE_SECONDS = 5
ALIASES = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash"}

contexts = {}
defaults = {}


async def create(language, cwd=None):
    language = ALIASES.get(language or "python", language or "python")
    context = await start(language, str(uuid.uuid4()), cwd or HOME)
    contexts[context.id] = context
    return context


async def default(language):
    language = ALIASES.get(language or "python", language or "python")
    if language not in defaults:
        # Two who come at once wait for the same one.
        defaults[language] = asyncio.ensure_future(create(language))
    try:
        return await asyncio.shield(defaults[language])
    except Exception:
        defaults.pop(language, None)
        raise


class Handler(tornado.web.RequestHandler):
    def body(self):
        return json.loads(self.request.body or b"{}")

    def refuse(self, status, text):
        self.set_status(status)
        self.set_header("Content-Type", "text/plain")
        self.finish(text)

    def context(self, id):
        found = contexts.get(id)
        if found is None:
            self.refuse(404, f"Context {id} not found")
        return found


class Health(Handler):
    def get(self):
        self.finish("OK")


class Execute(Handler):
    def on_connection_close(self):
        if getattr(self, "running", None):
            asyncio.ensure_future(self.running.interrupt())

    async def post(self):
        asked = self.body()
        if asked.get("context_id") and asked.get("language"):
            return self.refuse(400, "Only one of context_id or language can be provided")
        try:
            if asked.get("context_id"):
                context = self.context(asked["context_id"])
                if context is None:
                    return
            else:
                context = await default(asked.get("language"))
        except Unsupported as error:
            return self.refuse(400, str(error))
        self.set_header("Content-Type", "application/x-ndjson")
        async with context.lock:
            self.running = context
            lines = asyncio.Queue()
            task = asyncio.ensure_future(self.run(context, asked, lines))
            try:
                while True:
                    try:
                        line = await asyncio.wait_for(lines.get(), KEEPALIVE_SECONDS)
                    except asyncio.TimeoutError:
                        line = {"type": "keepalive"}
                    if line is None:
                        break
                    self.write(json.dumps(line) + "\n")
                    await self.flush()
            except tornado.iostream.StreamClosedError:
                pass
            finally:
                self.running = None
                if not task.done():
                    # Nobody listens: it was interrupted, and ends before the next one begins.
                    await context.interrupt()
                await task

    async def run(self, context, asked, lines):
        try:
            await context.execute(asked["code"], asked.get("env_vars") or {}, lines.put_nowait)
        except Exception as error:  # what breaks a context is told to whoever uses it
            lines.put_nowait({"type": "error", "name": type(error).__name__, "value": str(error), "traceback": ""})
        lines.put_nowait({"type": "end_of_execution"})
        lines.put_nowait(None)


class Contexts(Handler):
    def get(self):
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps([context.view() for context in contexts.values()]))

    async def post(self):
        asked = self.body()
        try:
            context = await create(asked.get("language"), asked.get("cwd"))
        except Unsupported as error:
            return self.refuse(400, str(error))
        self.finish(context.view())


class Context(Handler):
    async def delete(self, id):
        context = self.context(id)
        if context:
            del contexts[id]
            for language, future in list(defaults.items()):
                if future.done() and not future.exception() and future.result() is context:
                    del defaults[language]
            await context.stop()
            self.finish()


class Restart(Handler):
    async def post(self, id):
        context = self.context(id)
        if context:
            await context.restart()
            self.finish()


async def main():
    await asyncio.gather(default("python"), default("javascript"))
    app = tornado.web.Application(
        [
            ("/health", Health),
            ("/execute", Execute),
            ("/contexts", Contexts),
            ("/contexts/([^/]+)", Context),
            ("/contexts/([^/]+)/restart", Restart),
        ]
    )
    server = tornado.httpserver.HTTPServer(app, max_body_size=256 << 20)
    server.add_sockets(tornado.netutil.bind_sockets(PORT, "0.0.0.0"))
    await asyncio.Event().wait()


asyncio.run(main())
