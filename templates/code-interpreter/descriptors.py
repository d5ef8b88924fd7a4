"""Pipes and sockets of interpreters, read and written as they are ready, without a task for each."""

import asyncio
import os

CHUNK = 65536


class Pipe:
    """The read end of a pipe, whose bytes go to `take` as they come; none at the end."""

    def __init__(self, fd, take):
        self.fd, self.take = fd, take
        os.set_blocking(fd, False)
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(fd, self.read)

    def read(self):
        """Takes what is there; whether there may be more."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
        self.take(data)
        return bool(data)

    def drain(self):
        while self.fd is not None and self.read():
            pass

    def close(self):
        if self.fd is not None:
            self.loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = None


class Writer:
    """The write end of a pipe. Never blocks: what does not fit waits here."""

    def __init__(self, file):
        self.file, self.fd, self.waiting = file, file.fileno(), b""
        os.set_blocking(self.fd, False)

    def write(self, data):
        self.waiting += data
        self.flush()

    def flush(self):
        loop = asyncio.get_running_loop()
        try:
            while self.waiting:
                self.waiting = self.waiting[os.write(self.fd, self.waiting) :]
        except BlockingIOError:
            return loop.add_writer(self.fd, self.flush)
        except BrokenPipeError:
            self.waiting = b""  # it ended; whoever waits for an answer is told
        loop.remove_writer(self.fd)

    def close(self):
        asyncio.get_running_loop().remove_writer(self.fd)
        self.file.close()
