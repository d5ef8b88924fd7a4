"""Every call of E2B's desktop SDK for Python, against the server that the environment names. Unmodified SDK, our own
questions: what was clicked and typed is asked of programs on the screen.

    through_e2b_desktop.py [SCREENSHOT.png]

Prints one line per part; ends with an exception if an answer is not what E2B documents.
"""

import base64
import os
import re
import socket
import struct
import sys
import time
import urllib.parse

from e2b import CommandExitException
from e2b_desktop import Sandbox

PATIENCE = 60  # seconds; a screen without a graphics card, maybe on a busy machine
parts = []


def part(function):
    parts.append(function)
    return function


def until(what, check):
    """What is done on a screen takes its time; that it happens is what counts."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            found = check()
        except CommandExitException:
            found = None
        if found:
            return found
        assert time.monotonic() < end, f"{what}: not within {PATIENCE} s"
        time.sleep(0.2)


def window(desktop, application):
    found = until(f"a window of {application}", lambda: desktop.get_application_windows(application))
    assert all(id.isdigit() for id in found), found
    return found[0]


def place(desktop, window):
    """Where what is inside of its frame begins."""
    told = desktop.commands.run(f"xwininfo -id {window}").stdout
    return tuple(int(found) for found in re.findall(r"Absolute upper-left [XY]: +(-?\d+)", told))


def size_of(png):
    assert bytes(png[:8]) == b"\x89PNG\r\n\x1a\n", bytes(png[:16])
    return struct.unpack(">II", bytes(png[16:24]))


@part
def screen(desktop):
    assert desktop.get_screen_size() == (1024, 768)
    assert desktop.get_cursor_position() == (512, 384)
    assert size_of(desktop.screenshot()) == (1024, 768)
    assert size_of(b"".join(desktop.screenshot(format="stream"))) == (1024, 768)


@part
def mouse(desktop):
    log = "/tmp/xev.log"
    handle = desktop.commands.run(f"xev -geometry 400x300+300+200 -event button > {log}", background=True, timeout=0)
    search = "xdotool search --onlyvisible --name 'Event Tester'"
    where = until("a window to click at", lambda: desktop.commands.run(search).stdout.strip())
    left, top = place(desktop, where)
    x, y = left + 200, top + 200

    def pressed():
        log_so_far = desktop.files.read(log)
        return [int(b) for b in re.findall(r"ButtonPress event.*?button (\d)", log_so_far, re.DOTALL)]

    desktop.left_click(x, y)
    assert desktop.get_cursor_position() == (x, y)
    desktop.right_click(x, y)
    desktop.middle_click(x, y)
    desktop.double_click(x, y)
    desktop.scroll("up", 2)
    desktop.scroll("down", 1)
    until("all buttons", lambda: pressed() == [1, 3, 2, 1, 1, 4, 4, 5])
    desktop.mouse_press("left")
    desktop.mouse_release("left")
    until("a press", lambda: len(pressed()) == 9)
    desktop.drag((x - 50, y - 40), (x + 60, y + 30))
    wanted = [("Press", str(x - 50), str(y - 40)), ("Release", str(x + 60), str(y + 30))]
    buttons = re.compile(r"Button(Press|Release) event.*?root:\((\d+),(\d+)\)", re.DOTALL)
    until("a drag", lambda: buttons.findall(desktop.files.read(log))[-2:] == wanted)
    handle.kill()
    desktop.move_mouse(20, 700)
    assert desktop.get_cursor_position() == (20, 700)


@part
def typing(desktop):
    desktop.launch("xfce4-terminal")
    terminal = window(desktop, "xfce4-terminal")
    until("the focus", lambda: desktop.get_current_window_id() == terminal)
    assert "Terminal" in desktop.get_window_title(terminal)
    # Its shell listens when it has said so.
    until("a prompt", lambda: desktop.commands.run("pgrep -P $(pgrep -xo xfce4-terminal) bash").stdout)
    desktop.write("echo 'typed & said \"ok\"' > typed; echo $0; uname -a; id; ls -la /\n")
    assert until("what was typed", lambda: desktop.files.exists("/home/user/typed") and desktop.files.read("/home/user/typed"))
    assert desktop.files.read("/home/user/typed") == 'typed & said "ok"\n'
    desktop.write("touch pressed")
    desktop.press("enter")
    until("a key", lambda: desktop.files.exists("/home/user/pressed"))
    if len(sys.argv) > 1:
        with open(sys.argv[1], "wb") as file:
            file.write(desktop.screenshot())
    desktop.press(["ctrl", "d"])
    until("the terminal's end", lambda: not desktop.commands.run("xdotool search --onlyvisible --class xfce4-terminal || true").stdout)


@part
def opening(desktop):
    desktop.files.write("/home/user/letter.txt", "hello")
    desktop.open("/home/user/letter.txt")
    editor = window(desktop, "mousepad")
    until("its title", lambda: "letter.txt" in desktop.get_window_title(editor))
    desktop.wait(100)


def connect(desktop, path, headers=()):
    """A socket to the sandbox's port 6080, by headers: the names in the stream's URL need a domain."""
    url = urllib.parse.urlsplit(os.environ["E2B_SANDBOX_URL"])
    channel = socket.create_connection((url.hostname, url.port), timeout=PATIENCE)
    lines = [f"GET {path} HTTP/1.1", f"Host: {url.netloc}", f"E2b-Sandbox-Id: {desktop.sandbox_id}", "E2b-Sandbox-Port: 6080"]
    channel.sendall("\r\n".join([*lines, *headers, "", ""]).encode())
    return channel.makefile("rwb")


def security(desktop):
    """The kinds of authentication that the stream offers, as RFB tells them behind its WebSocket."""
    key = base64.b64encode(os.urandom(16)).decode()
    upgrade = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Protocol: binary"]
    with connect(desktop, "/websockify", upgrade) as stream:
        status = stream.readline()
        assert b" 101 " in status, status
        while stream.readline().strip():
            pass

        def message():
            length = stream.read(2)[1] & 127
            return stream.read(struct.unpack(">H", stream.read(2))[0] if length == 126 else length)

        version = message()
        assert version.startswith(b"RFB 003."), version
        mask = os.urandom(4)
        stream.write(bytes([0x82, 0x80 | len(version)]) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(version)))
        stream.flush()
        offered = message()
        return list(offered[1 : 1 + offered[0]])


@part
def stream(desktop):
    desktop.stream.start()
    url = desktop.stream.get_url()
    assert url.startswith(f"https://6080-{desktop.sandbox_id}.") and "/vnc.html?autoconnect=true" in url, url
    with connect(desktop, "/vnc.html", ["Connection: close"]) as page:
        text = page.read()
    assert b" 200 " in text[:20] and b"noVNC" in text, text[:200]
    assert security(desktop) == [1]  # none
    try:
        desktop.stream.start()
    except RuntimeError:
        pass
    else:
        raise AssertionError("it runs already")
    desktop.stream.stop()
    until("its end", lambda: not desktop.commands.run("pgrep -x x11vnc || true").stdout and not desktop.commands.run("netstat -tln | grep :6080 || true").stdout)
    desktop.stream.start(require_auth=True)
    key = desktop.stream.get_auth_key()
    assert len(key) == 16 and f"password={key}" in desktop.stream.get_url(auth_key=key)
    assert security(desktop) == [2]  # a password
    desktop.stream.stop()


def main():
    began = time.monotonic()
    desktop = Sandbox.create(timeout=900)
    try:
        print(f"a desktop in {time.monotonic() - began:.1f} s", flush=True)
        for one in parts:
            one(desktop)
            print(one.__name__, "ok", flush=True)
    finally:
        desktop.kill()
    print("all ok")


main()
