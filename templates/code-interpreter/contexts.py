"""Interpreters that keep their state: a Jupyter kernel for Python, a Node process for JavaScript and TypeScript, a shell
for Bash. Each tells what happens in the same words (see `server.py`)."""

import asyncio
import base64
import datetime
import json
import os
import shlex
import signal
import textwrap

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


class Unsupported(Exception):
    pass


async def start(language, id, cwd):
    kinds = {"python": Python, "javascript": Node, "typescript": Node, "bash": Bash}
    if language not in kinds:
        raise Unsupported(f"There is no interpreter for {language} in this template; use {', '.join(kinds)}")
    context = kinds[language](language, id, cwd)
    await context.start()
    return context


def said(stream, text):
    return {"type": stream, "text": text, "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat()}


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
    if text and len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        line["text"] = text[1:-1]
    if extra:
        line["extra"] = extra
    return line


class Context:
    def __init__(self, language, id, cwd):
        self.language, self.id, self.cwd = language, id, cwd
        self.lock = asyncio.Lock()

    def view(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def restart(self):
        await self.stop()
        await self.start()


class Python(Context):
    async def start(self):
        from jupyter_client import AsyncKernelManager

        self.manager = AsyncKernelManager(kernel_name="python3")
        arguments = ["--InteractiveShellApp.exec_files=['/opt/code-interpreter/charts.py']"]
        await self.manager.start_kernel(cwd=self.cwd, extra_arguments=arguments)
        self.client = self.manager.client()
        self.client.start_channels()
        await self.client.wait_for_ready(timeout=60)

    async def stop(self):
        self.client.stop_channels()
        await self.manager.shutdown_kernel(now=True)

    async def interrupt(self):
        await self.manager.interrupt_kernel()

    async def execute(self, code, env, tell):
        if env:
            await self.silently(f"import os as _o; _before = {{k: _o.environ.get(k) for k in {list(env)!r}}}; _o.environ.update({env!r})")
        try:
            await self.follow(textwrap.dedent(code), tell)
        finally:
            if env:
                await self.silently(
                    "[_o.environ.pop(k, None) if v is None else _o.environ.__setitem__(k, v) for k, v in _before.items()]"
                )

    async def silently(self, code):
        await self.follow(code, lambda line: None, silent=True)

    async def follow(self, code, tell, silent=False):
        asked = self.client.execute(code, silent=silent, store_history=not silent, allow_stdin=False)
        while True:
            try:
                message = await self.client.get_iopub_msg(timeout=1)
            except Exception:
                if not await self.manager.is_alive():
                    await self.restart()
                    raise RuntimeError("the kernel died and was started anew")
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            if kind == "stream":
                tell(said(content["name"], content["text"]))
            elif kind == "execute_input":
                tell({"type": "number_of_executions", "execution_count": content["execution_count"]})
            elif kind in ("execute_result", "display_data"):
                tell(result(content["data"], kind == "execute_result"))
            elif kind == "error":
                trace = "\n".join(content["traceback"])
                tell({"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": trace})


class Process(Context):
    """An interpreter of our own that is told one program after the other, and answers in JSON lines on descriptor 3."""

    count = 0

    async def spawn(self, *argv):
        ours, theirs = os.pipe()
        self.process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.cwd,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: os.dup2(theirs, 3) if theirs != 3 else os.set_inheritable(3, True),
            pass_fds=(theirs, 3) if theirs != 3 else (3,),
            start_new_session=True,
        )
        os.close(theirs)
        self.control = asyncio.StreamReader(limit=64 << 20)
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(self.control)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours, "rb", 0))
        self.tell = lambda line: None
        self.pumps = [
            asyncio.ensure_future(self.pump(self.process.stdout, "stdout")),
            asyncio.ensure_future(self.pump(self.process.stderr, "stderr")),
        ]

    async def pump(self, stream, name):
        while data := await stream.read(65536):
            self.tell(said(name, data.decode(errors="replace")))

    async def stop(self):
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        for pump in self.pumps:
            pump.cancel()

    async def interrupt(self):
        # It has no way to stop half-way and keep its state.
        await self.restart()

    async def ask(self, text, tell):
        self.count += 1
        tell({"type": "number_of_executions", "execution_count": self.count})
        self.tell = tell
        self.process.stdin.write(text)
        await self.process.stdin.drain()
        while line := await self.control.readline():
            answer = json.loads(line)
            if answer.get("type") == "done":
                break
            tell(answer)
        else:
            raise RuntimeError("the interpreter ended; its context was started anew")
        # What it has written is in the pipes by now.
        await asyncio.sleep(0.005)


class Node(Process):
    async def start(self):
        await self.spawn("node", "--experimental-repl-await", f"{HERE}/runner.js", self.language)

    async def execute(self, code, env, tell):
        await self.ask(json.dumps({"code": code, "env": env}).encode() + b"\n", tell)


class Bash(Process):
    async def start(self):
        await self.spawn("bash", "--noprofile", "--norc")

    async def execute(self, code, env, tell):
        program = base64.b64encode(code.encode()).decode()
        assignments = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in env.items())
        saved = "; ".join(f'_old_{name}="${{{name}-}}"; _had_{name}="${{{name}+x}}"' for name in env)
        restore = "; ".join(
            f'if [ -n "$_had_{name}" ]; then export {name}="$_old_{name}"; else unset {name}; fi' for name in env
        )
        lines = [saved, assignments, f'eval "$(echo {program} | base64 -d)" </dev/null', restore, "echo '{\"type\":\"done\"}' >&3"]
        await self.ask(("\n".join(line for line in lines if line) + "\n").encode(), tell)
