"""What every version of E2B's Python SDK has, from 1.11 on, against the server that the environment names: the first hour of
anybody who comes with a version that they cannot choose. Unmodified SDK, our own questions; `through_e2b.py` asks for all the
rest that the newest one has.

Prints one line per part; ends with an exception if an answer is not what E2B documents.
"""

import os
import ssl
import time
import urllib.request
from importlib.metadata import version

from e2b import CommandExitException, Sandbox

VERSION = tuple(int(part) for part in version("e2b").split(".")[:2])
# Whether the domain alone leads to the server, or addresses do that older versions do not know.
BY_DOMAIN = "E2B_API_URL" not in os.environ


def make(**options):
    return Sandbox(template="base", **options) if VERSION < (2, 0) else Sandbox.create("base", **options)


def commands(sandbox):
    run = sandbox.commands.run
    assert run("echo out; echo err >&2").stderr == "err\n"
    try:
        run("exit 3")
        raise AssertionError("an exit code was expected")
    except CommandExitException as error:
        assert error.exit_code == 3
    assert run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert run("id -un", user="root").stdout == "root\n"
    assert run("echo $FOO", envs={"FOO": "bar"}).stdout == "bar\n"
    seen = []
    run("printf a", on_stdout=seen.append)
    assert seen == ["a"], seen
    sleeper = run("sleep 60", background=True)
    assert sleeper.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.connect(sleeper.pid).kill() is True


def files(sandbox):
    f = sandbox.files
    f.write("dir/a.txt", "content")
    assert f.read("dir/a.txt") == "content"
    assert bytes(f.read("dir/a.txt", format="bytes")) == b"content"
    write_files = f.write if VERSION < (2, 0) else f.write_files
    write_files([{"path": "dir/x", "data": "1"}, {"path": "dir/y/z", "data": b"2"}])
    assert sorted(entry.name for entry in f.list("dir")) == ["a.txt", "x", "y"]
    assert f.make_dir("dir/new") is True and f.make_dir("dir/new") is False
    f.rename("dir/a.txt", "dir/b.txt")
    assert f.exists("dir/b.txt") and not f.exists("dir/a.txt")
    watch = f.watch_dir("dir")
    f.write("dir/watched", "now")
    assert "watched" in [event.name for event in watch.get_new_events()]
    watch.stop()
    f.remove("dir")
    assert not f.exists("dir/b.txt")


def ports(sandbox):
    host = sandbox.get_host(8000)
    assert host == f"8000-{sandbox.sandbox_id}.{os.environ['E2B_DOMAIN']}", f"{host} leads elsewhere"
    if not BY_DOMAIN:
        return
    sandbox.files.write("site/index.html", "from inside")
    sandbox.commands.run("python3 -m http.server 8000 --directory site", background=True)
    sandbox.commands.run("until curl -sf http://localhost:8000/ >/dev/null; do sleep 0.1; done")
    # What people write, and what they should.
    for scheme in ("http", "https"):
        assert urllib.request.urlopen(f"{scheme}://{host}/").read() == b"from inside", scheme
    sandbox.files.write("signed.txt", "by link")
    link = sandbox.download_url("signed.txt")
    assert urllib.request.urlopen(link).read() == b"by link", link


def lives(sandbox):
    sandbox.files.write("kept.txt", "kept")
    assert sandbox.is_running()
    sandbox.set_timeout(240)
    assert sandbox.get_info().sandbox_id.startswith(sandbox.sandbox_id)
    listed = Sandbox.list()
    listed = listed if isinstance(listed, list) else listed.next_items()
    assert any(item.sandbox_id.startswith(sandbox.sandbox_id) for item in listed)
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.files.read("kept.txt") == "kept"
    assert again.commands.run("cat kept.txt").stdout == "kept"
    pause = getattr(sandbox, "pause", None) or getattr(sandbox, "beta_pause", None)
    if pause:
        pause()
        assert not sandbox.is_running()
        woken = Sandbox.connect(sandbox.sandbox_id, timeout=120)
        assert woken.files.read("kept.txt") == "kept" and woken.is_running()


def others_are_trusted_still(_):
    """Whoever takes our certificate in has not lost everybody else's."""
    if "SSL_CERT_FILE" in os.environ:
        assert len(ssl.create_default_context().get_ca_certs()) > 10


def main():
    print(f"e2b {version('e2b')} by {'domain' if BY_DOMAIN else 'addresses'}")
    sandbox = make(timeout=300, metadata={"who": "me"}, envs={"GIVEN": "yes"})
    try:
        assert sandbox.commands.run("echo $GIVEN").stdout == "yes\n"
        for function in (commands, files, ports, lives, others_are_trusted_still):
            began = time.time()
            function(sandbox)
            print(f"ok {function.__name__} {time.time() - began:.2f}s", flush=True)
    finally:
        sandbox.kill()
    assert Sandbox.kill(sandbox.sandbox_id) is False
    print("all ok")


main()
