"""Contexts that are a Jupyter kernel: Python and R.

The kernel's messages are read as they come and what matters of them is told at once: the way from the end of an execution
to its last line is one wake-up. They are not checked against forgery: whoever can speak to a
kernel's socket is in the same sandbox and may do all that the kernel may."""

import asyncio
import json
import socket
import tempfile

import zmq
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec

from contexts import HERE, Context, Died, Refused, counted, failed, result, said
from descriptors import Pipe

try:
    from orjson import loads
except ImportError:
    from json import loads

READY_SECONDS = 60
# How often it is looked whether the kernel still lives, while it runs something.
LIFE_SECONDS = 1
DIED = "The kernel ended; its context was started anew"


class Kernel(Context):
    kernel = None

    async def start(self):
        # Where its sockets are: a restart finds no port taken, and they are quicker than ports.
        self.directory = tempfile.TemporaryDirectory(prefix="kernel-")
        self.manager = AsyncKernelManager(
            transport="ipc", ip=f"{self.directory.name}/socket", connection_file=f"{self.directory.name}/connection.json"
        )
        self.manager._kernel_spec = KernelSpec(argv=self.kernel, display_name=self.language, language=self.language)
        # Whom to tell, and what comes true at the end, by the id of the request.
        self.running = {}
        try:
            await self.manager.start_kernel(cwd=self.cwd)
        except OSError as error:
            raise Refused(f"A {self.language} kernel cannot be started in {self.cwd}: {error.strerror}") from error
        self.client = self.manager.client()
        self.client.start_channels(stdin=False, hb=False)
        try:
            await self.client.wait_for_ready(timeout=READY_SECONDS)
        except RuntimeError as error:
            await self.manager.shutdown_kernel(now=True)
            raise Refused(f"The {self.language} kernel does not start: {error}") from error
        # From here on the sockets are read without the client's help.
        self.replies = zmq.Socket.shadow(self.client.shell_channel.socket.underlying)
        self.news = zmq.Socket.shadow(self.client.iopub_channel.socket.underlying)
        asyncio.get_running_loop().add_reader(self.news.FD, self.read)
        self.read()
        self.told = None
        await self.hear()

    async def stop(self):
        asyncio.get_running_loop().remove_reader(self.news.FD)
        if self.told:
            self.told.close()
        self.client.stop_channels()
        await self.manager.shutdown_kernel(now=True)
        self.directory.cleanup()

    async def interrupt(self):
        if self.running:
            await self.manager.interrupt_kernel()

    def abandon(self, error):
        for _, done in self.running.values():
            if not done.done():
                done.set_exception(error)

    def read(self):
        """Takes all messages there are: the descriptor says only once that there are some."""
        try:
            while True:
                frames = self.news.recv_multipart(zmq.NOBLOCK)
                header, parent, _, content = frames[frames.index(b"<IDS|MSG>") + 2 :][:4]
                running = self.running.get(loads(parent).get("msg_id"))
                if running:
                    self.take(loads(header)["msg_type"], loads(content), *running)
        except zmq.Again:
            pass

    async def hear(self):
        """Whatever is to be done before the first execution."""

    def take(self, kind, content, tell, done):
        if kind == "status":
            if content["execution_state"] == "idle" and not done.done():
                done.set_result(None)
        elif kind == "stream":
            tell(said(content["name"], content["text"]))
        elif kind == "execute_input":
            tell(counted(content["execution_count"]))
        elif kind in ("execute_result", "display_data"):
            tell(result(content["data"], kind == "execute_result"))
        elif kind == "error":
            tell(failed(content["ename"], content["evalue"], "\n".join(content["traceback"])))

    async def execute(self, code, env, tell):
        if env:
            await self.follow(self.entering(env), lambda line: None, silent=True)
        await self.follow(code, tell)
        if env:
            await self.follow(self.leaving(env), lambda line: None, silent=True)

    async def follow(self, code, tell, silent=False):
        self.forget_replies()
        done = asyncio.get_running_loop().create_future()
        asked = self.client.execute(code, silent=silent, store_history=not silent, allow_stdin=False)
        self.running[asked] = tell, done
        try:
            while not (await asyncio.wait([done], timeout=LIFE_SECONDS))[0]:
                if not await self.manager.is_alive():
                    raise Died(DIED)
            done.result()
        finally:
            self.running.pop(asked, None)

    def forget_replies(self):
        """All that is in them was told already."""
        try:
            while True:
                self.replies.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            pass

    def entering(self, env):
        raise NotImplementedError

    def leaving(self, env):
        raise NotImplementedError


class Python(Kernel):
    kernel = [
        "python3",
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
        f"--InteractiveShellApp.exec_files={HERE}/kernel.py",
        "--InteractiveShell.colors=NoColor",
        "--PlainTextFormatter.max_seq_length=0",
        # What was run is kept in memory, not in a database on disk at each execution.
        "--HistoryManager.enabled=False",
    ]

    async def hear(self):
        """Has the kernel tell what it tells on a socket of its own (see `kernel.py`): a message there is one write and one
        read, not the forty system calls and four changes of threads that it is by ZeroMQ."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as listener:
            path = f"{self.directory.name}/told"
            listener.bind(path)
            listener.listen()
            listener.setblocking(False)
            asked = asyncio.ensure_future(self.follow(f"get_ipython().tell_at({path!r})", lambda line: None, silent=True))
            connection, _ = await asyncio.wait_for(loop.sock_accept(listener), READY_SECONDS)
        self.half = b""
        self.told = Pipe(connection.detach(), self.heard)
        await asked

    def heard(self, data):
        if not data:
            return self.abandon(Died(DIED))
        *lines, self.half = (self.half + data).split(b"\n")
        for line in lines:
            header, parent, content = loads(line)
            running = self.running.get(parent.get("msg_id"))
            if running:
                self.take(header["msg_type"], content, *running)

    def entering(self, env):
        return f"get_ipython().enter_environment({env!r})"

    def leaving(self, env):
        return "get_ipython().leave_environment()"


class R(Kernel):
    kernel = ["R", "--slave", "-e", f'source("{HERE}/kernel.R")', "--args", "{connection_file}"]

    def entering(self, env):
        quoted = {json.dumps(name, ensure_ascii=False): json.dumps(value, ensure_ascii=False) for name, value in env.items()}
        pairs = ", ".join(f"{name} = {value}" for name, value in quoted.items())
        # Options are where R keeps what is nobody's variable.
        return (
            f"options(environment.before = Sys.getenv(c({', '.join(quoted)}), unset = NA, names = TRUE));"
            f"do.call(Sys.setenv, list({pairs}))"
        )

    def leaving(self, env):
        return (
            "local({ before <- getOption('environment.before'); for (name in names(before)) if (is.na(before[[name]]))"
            " Sys.unsetenv(name) else do.call(Sys.setenv, setNames(list(before[[name]]), name)) })"
        )
