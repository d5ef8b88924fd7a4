"""Every call of E2B's Python SDK, against the server that the environment names. Unmodified SDK, our own questions.

Prints one line per part; ends with an exception if an answer is not what E2B documents.
"""

import io
import os
import sys
import time
import uuid

import e2b
from e2b import (
    CommandExitException,
    FileNotFoundException,
    FileType,
    FilesystemEventType,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
    Template,
    TimeoutException,
    Volume,
    VolumeException,
)

MEMORY = os.environ["ATOLL_TIER"] != "jail"  # a jail keeps files only
parts = []


def part(function):
    parts.append(function)
    return function


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


@part
def sandboxes(sandbox):
    label = str(uuid.uuid4())
    other = Sandbox.create("base", timeout=120, metadata={"k &é": label}, envs={"FOO": "bar"})
    try:
        info = other.get_info()
        assert info.metadata == {"k &é": label} and info.state == SandboxState.RUNNING, info
        assert other.commands.run("echo $FOO $E2B_SANDBOX").stdout == "bar true\n"
        found = Sandbox.list(query=SandboxQuery(metadata={"k &é": label})).next_items()
        assert [item.sandbox_id for item in found] == [other.sandbox_id], found
        pages = Sandbox.list(limit=1)
        assert len(pages.next_items()) == 1 and pages.has_next
        other.set_timeout(300)
        assert other.get_info().end_at > info.end_at
        again = Sandbox.connect(other.sandbox_id, timeout=60)
        assert again.commands.run("echo again").stdout == "again\n"
        assert len(other.get_metrics()) >= 1
    finally:
        assert other.kill() is True
    assert other.is_running() is False
    assert Sandbox.kill(other.sandbox_id) is False
    raises(NotFoundException, lambda: Sandbox.get_info(other.sandbox_id))
    raises(SandboxException, lambda: Sandbox.create("no-such-template", timeout=60))


@part
def commands(sandbox):
    run = sandbox.commands.run
    assert run("echo out; echo err >&2").stderr == "err\n"
    error = raises(CommandExitException, lambda: run("exit 3"))
    assert error.exit_code == 3
    assert run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert run("pwd", cwd="~").stdout == "/home/user\n"
    raises(e2b.InvalidArgumentException, lambda: run("pwd", cwd="~/missing"))
    raises(e2b.AuthenticationException, lambda: run("pwd", user="nobody-here"))
    assert run("id -un", user="root").stdout == "root\n"
    seen = []
    run("printf a; printf b >&2", on_stdout=seen.append, on_stderr=seen.append)
    assert sorted(seen) == ["a", "b"], seen
    raises(TimeoutException, lambda: run("sleep 30", timeout=1))
    assert len(run("head -c 3000000 /dev/zero | tr '\\0' x").stdout) == 3_000_000
    cat = run("cat", background=True, stdin=True)
    assert cat.pid in [process.pid for process in sandbox.commands.list()]
    sandbox.commands.send_stdin(cat.pid, "hello")
    cat.close_stdin()
    assert cat.wait().stdout == "hello"
    sleeper = run("sleep 60", background=True)
    assert sandbox.commands.connect(sleeper.pid).kill() is True
    assert sandbox.commands.kill(999_999) is False
    raises(NotFoundException, lambda: sandbox.commands.connect(999_999))


@part
def terminals(sandbox):
    terminal = sandbox.pty.create(e2b.PtySize(rows=24, cols=80), timeout=60)
    sandbox.pty.resize(terminal.pid, e2b.PtySize(rows=30, cols=100))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    seen = b"".join(pty or b"" for _, _, pty in terminal)
    assert b"30 100" in seen, seen


@part
def files(sandbox):
    f = sandbox.files
    assert f.write("dir/a.txt", "content").path == "/home/user/dir/a.txt"
    assert f.read("dir/a.txt") == "content"
    assert bytes(f.read("dir/a.txt", format="bytes")) == b"content"
    assert b"".join(f.read("dir/a.txt", format="stream")) == b"content"
    f.write("dir/bytes", io.BytesIO(bytes(range(256)) * 4096))
    assert f.get_info("dir/bytes").size == 256 * 4096
    f.write_files([{"path": "dir/x", "data": "1"}, {"path": "dir/y/z", "data": "2"}])
    assert sorted(entry.name for entry in f.list("dir")) == ["a.txt", "bytes", "x", "y"]
    assert "/home/user/dir/y/z" in [entry.path for entry in f.list("dir", depth=2)]
    assert f.make_dir("dir/new") is True and f.make_dir("dir/new") is False
    moved = f.rename("dir/a.txt", "elsewhere/b.txt")
    assert moved.path == "/home/user/elsewhere/b.txt" and f.exists("elsewhere/b.txt")
    f.remove("elsewhere")
    assert not f.exists("elsewhere/b.txt")
    info = f.get_info("dir/y")
    assert (info.type, info.owner, info.permissions) == (FileType.DIR, "user", "drwxr-xr-x"), info
    f.write("dir/noted", "x", metadata={"author": "me"})
    assert f.get_info("dir/noted").metadata == {"author": "me"}
    raises(FileNotFoundException, lambda: f.read("nowhere"))
    raises(SandboxException, lambda: f.read("dir"))
    watch = f.watch_dir("dir", recursive=True)
    f.write("dir/y/watched", "now")
    kinds = [event.type for event in watch.get_new_events() if event.name == "y/watched"]
    watch.stop()
    assert FilesystemEventType.CREATE in kinds and FilesystemEventType.WRITE in kinds, kinds


@part
def signed_links(sandbox):
    import urllib.request

    sandbox.files.write("signed.txt", "by link")
    link = sandbox.download_url("signed.txt", use_signature_expiration=60)
    assert urllib.request.urlopen(link).read() == b"by link"


@part
def rest(sandbox):
    sandbox.files.write("kept.txt", "kept")
    assert sandbox.pause() and not sandbox.is_running()
    assert sandbox.get_info().state == SandboxState.PAUSED
    sandbox.connect(timeout=120)
    assert sandbox.is_running() and sandbox.files.read("kept.txt") == "kept"
    assert sandbox.pause(keep_memory=False)
    sandbox.connect(timeout=120)
    assert sandbox.files.read("kept.txt") == "kept"


@part
def copies(sandbox):
    sandbox.files.write("state.txt", "before")
    fork = sandbox.fork(timeout=60)[0]
    assert fork.files.read("state.txt") == "before"
    fork.kill()
    name = f"snap-{uuid.uuid4().hex[:8]}"
    snapshot = sandbox.create_snapshot(name=name)
    assert any(name in known for known in snapshot.names)
    assert snapshot.snapshot_id in [s.snapshot_id for s in Sandbox.list_snapshots(name=name).next_items()]
    copy = Sandbox.create(snapshot.snapshot_id, timeout=60)
    assert copy.files.read("state.txt") == "before"
    copy.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False


@part
def auto_pause(sandbox):
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    sleepy = Sandbox.create("base", timeout=60, lifecycle=lifecycle)
    sleepy.files.write("x", "1")
    sleepy.set_timeout(0)
    deadline = time.time() + 30
    # Not `is_running`: that is a request like any other, and wakes it.
    while sleepy.get_info().state != SandboxState.PAUSED and time.time() < deadline:
        time.sleep(0.1)
    assert sleepy.get_info().state == SandboxState.PAUSED
    assert sleepy.files.read("x") == "1", "a use wakes it"
    sleepy.kill()


@part
def volumes(sandbox):
    volume = Volume.create(f"vol-{uuid.uuid4().hex[:8]}")
    try:
        for content in ("first", None):
            box = Sandbox.create("base", timeout=60, volume_mounts={"/data": volume})
            if content:
                box.files.write("/data/a", content)
            else:
                assert box.files.read("/data/a") == "first"
            box.kill()
        # Without a sandbox, and with one that looks on.
        assert volume.read_file("/a") == "first" and volume.list("/")[0].name == "a"
        raises(VolumeException, lambda: volume.write_file("/a", "second"))
        entry = volume.write_file("/a", io.BytesIO(b"second"), force=True, uid=1000, gid=1000, mode=0o600)
        assert (entry.path, entry.size, entry.uid, entry.mode) == ("/a", 6, 1000, 0o600), entry
        assert volume.make_dir("/b/c", force=True, uid=1000).uid == 1000
        assert volume.update_metadata("/b", gid=7).gid == 7
        box = Sandbox.create("base", timeout=60, volume_mounts={"/data": volume})
        try:
            assert box.commands.run("cat /data/a; stat -c %u:%a /data/a").stdout == "second1000:600\n"
            box.commands.run("echo more > /data/b/c/d; ln -s /etc /data/out")
            assert b"".join(volume.read_file("/b/c/d", format="stream")) == b"more\n"
            assert {e.path for e in volume.list("/", depth=3)} >= {"/b/c/d", "/out"}
            assert volume.get_info("/out").target == "/etc"
            for path in ("/out/passwd", "/../etc/passwd"):
                raises(VolumeException, lambda: volume.read_file(path))
            volume.remove("/b")
            assert box.commands.run("ls /data/b || true").stdout == ""
        finally:
            box.kill()
        assert not volume.exists("/b")
        raises(NotFoundException, lambda: volume.remove("/b"))
        assert Volume.connect(volume.volume_id).read_file("/a", format="bytes") == b"second"
    finally:
        assert Volume.destroy(volume.volume_id) is True


@part
def templates(sandbox):
    assert Template.exists("base") and not Template.exists("no-such-template")
    name = f"e2b-{uuid.uuid4().hex[:8]}"
    built = Template.build(Template().from_template("base").set_envs({"COLOUR": "blue"}), name)
    assert built.name == name, built
    box = Sandbox.create(name, timeout=60)
    assert box.commands.run("echo $COLOUR").stdout == "blue\n"
    box.kill()
    tags = Template.assign_tags(name, "stable")
    assert "stable" in tags.tags
    error = raises(Exception, lambda: Template.build(Template().from_template("no-such-template"), name))
    assert "no-such-template" in str(error), error


def main():
    only = sys.argv[1:]
    print(f"e2b {e2b.__version__ if hasattr(e2b, '__version__') else ''} tier {os.environ['ATOLL_TIER']}")
    sandbox = Sandbox.create("base", timeout=300)
    try:
        for function in parts:
            if only and function.__name__ not in only:
                continue
            began = time.time()
            function(sandbox)
            print(f"ok {function.__name__} {time.time() - began:.2f}s", flush=True)
    finally:
        sandbox.kill()
    print("all ok")


main()
