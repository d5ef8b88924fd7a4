"""Contexts that are a program with pipes: it is started with the number of a descriptor, gets a request for each execution
on stdin, and answers in JSON lines on that descriptor, the last of them `{"type": "done"}`. A SIGINT ends what it runs. What
it and its children write to stdout and stderr is what the code says.

What must hold: all that was written before `done` is told before the execution ends. The program writes to its pipes
before it says `done`, so what is in them by then is all there is, and is read to the last byte."""

import asyncio
import base64
import codecs
import json
import os
import re
import shlex
import signal
import subprocess

from contexts import HERE, Context, Died, Refused, counted, result, said
from descriptors import Pipe, Writer

# How long an interpreter has to end what it runs before it is ended itself, and its state with it.
PATIENCE_SECONDS = 2


def told(answer):
    """A program's words in those of the stream."""
    if answer["type"] == "result":
        return result(answer["data"], True)
    if answer["type"] in ("stdout", "stderr"):
        return said(answer["type"], answer["text"])
    return answer


class Program(Context):
    def argv(self):
        raise NotImplementedError

    def request(self, code, env):
        raise NotImplementedError

    def __init__(self, language, id, cwd):
        super().__init__(language, id, cwd)
        self.count = 0
        # While something runs: whom to tell, and what comes true when it is done.
        self.tell = self.done = None

    async def start(self):
        pairs = [os.pipe() for _ in range(3)]
        (out, _), (err, _), (answers, answer) = pairs
        try:
            self.process = subprocess.Popen(
                [*self.argv(), str(answer)],
                cwd=self.cwd,
                stdin=subprocess.PIPE,
                stdout=pairs[0][1],
                stderr=pairs[1][1],
                pass_fds=(answer,),
                start_new_session=True,
            )
        except OSError as error:
            for reader, _ in pairs:
                os.close(reader)
            raise Refused(f"The {self.language} interpreter cannot be started in {self.cwd}: {error.strerror}") from error
        finally:
            for _, writer in pairs:
                os.close(writer)
        self.half = b""
        self.said = [Pipe(out, self.speaks("stdout")), Pipe(err, self.speaks("stderr"))]
        self.answers = Pipe(answers, self.answered)
        self.stdin = Writer(self.process.stdin)

    def speaks(self, stream):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def take(data):
            text = decoder.decode(data)
            if text and self.tell:
                self.tell(said(stream, text))

        return take

    def answered(self, data):
        if not data:
            return self.abandon(Died("The interpreter ended; its context was started anew"))
        *lines, self.half = (self.half + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if answer["type"] == "done":
                self.drain()
                if self.done and not self.done.done():
                    self.done.set_result(None)
            elif self.tell:
                # What was written before this was said comes before it.
                self.drain()
                self.tell(told(answer))

    def drain(self):
        for pipe in self.said:
            pipe.drain()

    def abandon(self, error):
        if self.done and not self.done.done():
            self.drain()
            self.done.set_exception(error)

    async def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await asyncio.get_running_loop().run_in_executor(None, self.process.wait)
        self.stdin.close()
        for pipe in (*self.said, self.answers):
            pipe.close()

    async def interrupt(self):
        done = self.done
        if done is None or done.done():
            return
        try:
            os.killpg(self.process.pid, signal.SIGINT)
        except ProcessLookupError:
            pass
        await asyncio.wait([done], timeout=PATIENCE_SECONDS)
        if not done.done():
            # It does not listen. Its end is the end of what it runs.
            os.killpg(self.process.pid, signal.SIGKILL)

    async def execute(self, code, env, tell):
        self.count += 1
        tell(counted(self.count))
        self.tell, self.done = tell, asyncio.get_running_loop().create_future()
        try:
            self.stdin.write(self.request(code, env))
            await self.done
        finally:
            self.tell = self.done = None


class Node(Program):
    """JavaScript and TypeScript, by `run.js`."""

    def argv(self):
        return ["node", "--no-warnings", f"{HERE}/run.js", self.language]

    def request(self, code, env):
        return json.dumps({"code": code, "env": env}).encode() + b"\n"


class Java(Program):
    """By `Run.java`. Its environment are the system's properties, since a Java program cannot change the other one."""

    def argv(self):
        options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-XX:SharedArchiveFile={HERE}/run.jsa", "-Xlog:disable"]
        return ["java", *options, "-cp", f"{HERE}/run.jar", "Run"]

    def request(self, code, env):
        words = [code] + [word for pair in env.items() for word in pair]
        return b" ".join(base64.b64encode(word.encode()) or b"=" for word in words) + b"\n"


class Bash(Program):
    """A shell that reads what we write for it. The code is sourced: so it is at the top level, and the trap can leave it
    half-way."""

    def argv(self):
        return ["bash", "--noprofile", "--norc", "-s"]

    async def start(self):
        await super().start()
        self.stdin.write(b"_answers=$1; set --; trap 'return 130 2>/dev/null' INT\n")

    def request(self, code, env):
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} cannot be a variable of a shell")
        before = (f'_had_{name}="${{{name}+x}}" _was_{name}="${{{name}-}}"' for name in env)
        during = (f"export {name}={shlex.quote(value)}" for name, value in env.items())
        # Its own word is the last one: what is left of the names goes too.
        after = (
            f'if [ -n "$_had_{name}" ]; then {name}="$_was_{name}"; else unset {name}; fi; unset _had_{name} _was_{name}'
            for name in env
        )
        error = '{"type":"error","name":"ExitStatus","value":"%d","traceback":""}\\n'
        lines = [
            *before,
            *during,
            f". <(printf %s {shlex.quote(code)}) </dev/null",
            f"_status=$?; [ $_status = 0 ] || printf '{error}' $_status >&$_answers",
            *after,
            "echo '{\"type\":\"done\"}' >&$_answers",
        ]
        return "\n".join(lines).encode() + b"\n"
