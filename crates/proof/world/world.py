"""A small internet for tests: names, a package index, an npm registry, git over HTTPS and an echo API.

Runs inside a network namespace that has the addresses below on its loopback interface and nothing else, so that no packet
leaves the machine. Everything that reaches it is written down, one JSON object a line, in `seen.jsonl`; a test reads there
what really arrived. Prints "ready" when all of it listens.

Usage: world.py DIRECTORY
"""

import base64
import hashlib
import http.server
import io
import json
import os
import pathlib
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile

HERE = pathlib.Path(sys.argv[1])
PUBLIC, OTHER, PUBLIC6 = "203.0.113.10", "203.0.113.20", "2001:db8::10"
RESOLVER = "203.0.113.53"
METADATA, PRIVATE = "169.254.169.254", "10.0.0.5"
# An address that a test gives the host itself.
HOST = "198.51.100.7"

# Names and what they resolve to. A list of lists answers in turn: the first time one thing, then another.
NAMES = {
    "index.example.org": [PUBLIC],
    "files.example.org": [PUBLIC],
    "registry.example.org": [PUBLIC],
    "git.example.org": [PUBLIC],
    "api.example.org": [PUBLIC, PUBLIC6],
    "bulk.example.org": [PUBLIC],
    "other.example.org": [OTHER],
    "v6.example.org": [PUBLIC6],
    "redirect.example.org": [PUBLIC],
    "internal.example.org": [PRIVATE],
    "meta.example.org": [METADATA],
    "mapped.example.org": ["::ffff:" + METADATA],
    "loop.example.org": ["127.0.0.1"],
    "rebind.example.org": [[PUBLIC], [METADATA], [METADATA], [METADATA], [METADATA], [METADATA]],
    "mixed.example.org": [PUBLIC, METADATA],
    "a.wild.example.org": [PUBLIC],
    "host.example.org": [HOST],
    # bücher.example.org
    "xn--bcher-kva.example.org": [PUBLIC],
}
CERTIFIED = sorted(name for name in NAMES if name != "a.wild.example.org") + ["*.wild.example.org"]

lock = threading.Lock()
seen_file = open(HERE / "seen.jsonl", "a", buffering=1)
turns = {}


def saw(**what):
    with lock:
        seen_file.write(json.dumps(what) + "\n")


# ---- names


def answer(query):
    (ident, flags, questions, _, _, _) = struct.unpack("!6H", query[:12])
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("latin-1"))
        at += query[at] + 1
    end = at + 5
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    name = ".".join(labels).lower()
    saw(what="dns", name=name, type=kind)
    found = NAMES.get(name)
    records = b""
    count = 0
    if found is not None:
        if found and isinstance(found[0], list):
            with lock:
                turn = turns.get(name, 0)
                if kind == 1:
                    turns[name] = turn + 1
            found = found[min(turn, len(found) - 1)]
        for address in found:
            is6 = ":" in address
            if kind not in (1, 28) or is6 != (kind == 28):
                continue
            packed = socket.inet_pton(socket.AF_INET6 if is6 else socket.AF_INET, address)
            records += struct.pack("!HHHIH", 0xC00C, kind, 1, 1, len(packed)) + packed
            count += 1
        if kind == 16:
            text = b"some text"
            records += struct.pack("!HHHIH", 0xC00C, 16, 1, 1, len(text) + 1) + bytes([len(text)]) + text
            count += 1
    code = 0 if found is not None else 3
    header = struct.pack("!6H", ident, 0x8180 | code, 1, count, 0, 0)
    return header + query[12:end] + records


class Udp(socketserver.BaseRequestHandler):
    def handle(self):
        data, sock = self.request
        sock.sendto(answer(data), self.client_address)


class TcpNames(socketserver.StreamRequestHandler):
    def handle(self):
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                return
            out = answer(self.rfile.read(struct.unpack("!H", head)[0]))
            self.wfile.write(struct.pack("!H", len(out)) + out)


# ---- what is served


def wheel():
    out = io.BytesIO()
    files = {
        "tinything/__init__.py": "ANSWER = 42\n",
        "tinything-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n",
        "tinything-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["tinything-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files) + (
        "tinything-1.0.dist-info/RECORD,,\n"
    )
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def package():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in {
            "package/package.json": json.dumps({"name": "tiny-thing", "version": "1.0.0", "main": "index.js"}),
            "package/index.js": "module.exports = 42;\n",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def repository():
    work, bare = HERE / "work", HERE / "repositories" / "thing.git"
    env = dict(os.environ, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null")
    for name in ("AUTHOR", "COMMITTER"):
        env[f"GIT_{name}_NAME"], env[f"GIT_{name}_EMAIL"] = "Somebody", "somebody@example.org"
    work.mkdir()
    (work / "README").write_text("forty-two\n")
    for command in (
        ["git", "init", "-q", "-b", "main", str(work)],
        ["git", "-C", str(work), "add", "."],
        ["git", "-C", str(work), "commit", "-q", "-m", "First"],
        ["git", "clone", "-q", "--bare", str(work), str(bare)],
    ):
        subprocess.run(command, check=True, env=env)


WHEEL, PACKAGE = wheel(), package()


class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def host(self):
        return (self.headers.get("host") or "").split(":")[0].lower()

    def body(self):
        if "chunked" in (self.headers.get("transfer-encoding") or "").lower():
            out = b""
            while True:
                size = int(self.rfile.readline().split(b";")[0], 16)
                out += self.rfile.read(size)
                self.rfile.readline()
                if not size:
                    return out
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def reply(self, body, kind="text/plain", status=200, headers=()):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_expect_100(self):
        saw(what="expect", host=self.host())
        return super().handle_expect_100()

    def serve(self):
        secure = isinstance(self.connection, ssl.SSLSocket)
        body = self.body()
        saw(
            what="http",
            tls=secure,
            at=self.connection.getsockname()[0],
            host=self.host(),
            method=self.command,
            path=self.path,
            headers={name.lower(): value for name, value in self.headers.items()},
            bytes=len(body),
        )
        path = self.path.split("?")[0]
        if self.headers.get("upgrade", "").lower() == "websocket":
            return self.websocket()
        if self.host() == "index.example.org":
            return self.index(path)
        if self.host() == "registry.example.org":
            return self.registry(path)
        if self.host() == "git.example.org":
            return self.git(path, body)
        if self.host() == "redirect.example.org":
            return self.reply(b"", status=302, headers=[("location", f"http://{METADATA}/latest/meta-data/")])
        if path.startswith("/bytes/"):
            return self.bulk(int(path.split("/")[2]))
        if path.startswith("/drip"):
            return self.drip(path)
        if path == "/trailers":
            return self.trailers()
        echoed = {
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): value for name, value in self.headers.items()},
            "bytes": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        echo = [("x-echo", self.headers["authorization"])] if self.headers.get("authorization") else []
        return self.reply(json.dumps(echoed).encode(), "application/json", headers=echo)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = serve

    def index(self, path):
        digest = hashlib.sha256(WHEEL).hexdigest()
        name = "tinything-1.0-py3-none-any.whl"
        if path == f"/files/{name}":
            return self.reply(WHEEL, "application/octet-stream")
        if path == "/simple/tinything/":
            page = f'<!DOCTYPE html><a href="/files/{name}#sha256={digest}">{name}</a>'
            return self.reply(page.encode(), "text/html")
        return self.reply(b"nothing here", status=404)

    def registry(self, path):
        if path == "/tiny-thing":
            sha = hashlib.sha512(PACKAGE).digest()
            version = {
                "name": "tiny-thing",
                "version": "1.0.0",
                "dist": {
                    "tarball": "https://registry.example.org/tiny-thing/-/tiny-thing-1.0.0.tgz",
                    "integrity": "sha512-" + base64.b64encode(sha).decode(),
                },
            }
            found = {"name": "tiny-thing", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
            return self.reply(json.dumps(found).encode(), "application/json")
        if path == "/tiny-thing/-/tiny-thing-1.0.0.tgz":
            return self.reply(PACKAGE, "application/octet-stream")
        return self.reply(b"{}", "application/json", status=404)

    def git(self, path, body):
        query = self.path.partition("?")[2]
        env = dict(
            os.environ,
            GIT_PROJECT_ROOT=str(HERE / "repositories"),
            GIT_HTTP_EXPORT_ALL="1",
            REQUEST_METHOD=self.command,
            PATH_INFO=path,
            QUERY_STRING=query,
            CONTENT_TYPE=self.headers.get("content-type", ""),
            CONTENT_LENGTH=str(len(body)),
            HTTP_CONTENT_ENCODING=self.headers.get("content-encoding", ""),
            HTTP_GIT_PROTOCOL=self.headers.get("git-protocol", ""),
            GIT_CONFIG_COUNT="1",
            GIT_CONFIG_KEY_0="safe.directory",
            GIT_CONFIG_VALUE_0="*",
        )
        ran = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True)
        head, _, out = ran.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n") if ": " in line)
        status = int(headers.pop("Status", "200").split()[0])
        kind = headers.pop("Content-Type", "text/plain")
        return self.reply(out, kind, status, list(headers.items()))

    def bulk(self, size):
        self.send_response(200)
        self.send_header("content-length", str(size))
        self.end_headers()
        piece = bytes(1 << 20)
        while size > 0:
            self.wfile.write(piece[: min(size, len(piece))])
            size -= len(piece)

    def drip(self, path):
        # An answer that never ends by itself; when it could no longer be sent is written down.
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"5\r\ntick\n\r\n")
                time.sleep(0.05)
        except OSError:
            saw(what="broken", path=path)
        self.close_connection = True

    def trailers(self):
        value = self.headers.get("authorization") or "nothing"
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.send_header("trailer", "x-echo")
        self.end_headers()
        self.wfile.write(b"4\r\nbody\r\n0\r\nx-echo: " + value.encode() + b"\r\n\r\n")

    def websocket(self):
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("upgrade", "websocket")
        self.send_header("connection", "Upgrade")
        self.send_header("sec-websocket-accept", accept)
        self.end_headers()
        # Echoes short masked text messages until one says "bye".
        while True:
            try:
                head = self.rfile.read(2)
            except OSError:
                head = b""
            if len(head) < 2:
                break
            size = head[1] & 0x7F
            mask = self.rfile.read(4)
            text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(size)))
            self.wfile.write(bytes([head[0], size]) + text)
            if text == b"bye" or head[0] & 0x0F == 8:
                break
        saw(what="broken", path=self.path)
        self.close_connection = True


class Threads(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024


class Threads6(Threads):
    address_family = socket.AF_INET6


class SecureMixin:
    def get_request(self):
        sock, address = super().get_request()
        # The handshake happens in the handler's thread, at its first read.
        return CONTEXT.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), address


class Secure(SecureMixin, Threads):
    pass


class Bomb(Threads):
    def get_request(self):
        sock, address = super().get_request()
        return BOMB.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), address


class Secure6(SecureMixin, Threads6):
    pass


class Banner(socketserver.BaseRequestHandler):
    """A protocol in which the server speaks first."""

    def handle(self):
        saw(what="tcp", port=self.server.server_address[1], at=self.request.getsockname()[0])
        self.request.sendall(b"WELCOME\r\n")
        while data := self.request.recv(65536):
            self.request.sendall(data)


class Forbidden(socketserver.BaseRequestHandler):
    """Stands where nothing may ever arrive."""

    def handle(self):
        saw(what="forbidden", at=self.request.getsockname()[0])
        self.request.sendall(b"HTTP/1.0 200 OK\r\n\r\nthe keys to everything\n")


class Datagrams(socketserver.BaseRequestHandler):
    def handle(self):
        data, sock = self.request
        saw(what="udp", port=self.server.server_address[1])
        sock.sendto(data, self.client_address)


class UdpServer(socketserver.ThreadingUDPServer):
    allow_reuse_address = True
    daemon_threads = True


def certificates():
    def openssl(*args, **more):
        subprocess.run(["openssl", *args], check=True, capture_output=True, **more)

    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    openssl(
        *("req", "-x509", *ec, "-subj", "/CN=Test authority", "-keyout", str(HERE / "ca.key")),
        *("-out", str(HERE / "ca.pem"), "-addext", "keyUsage=critical,keyCertSign"),
    )
    names = ",".join("DNS:" + name for name in CERTIFIED)
    openssl("req", *ec, "-subj", "/CN=server", "-keyout", str(HERE / "tls.key"), "-out", str(HERE / "tls.csr"))
    (HERE / "tls.ext").write_text(f"subjectAltName={names}\n")
    openssl(
        *("x509", "-req", "-in", str(HERE / "tls.csr"), "-CA", str(HERE / "ca.pem"), "-CAkey", str(HERE / "ca.key")),
        *("-CAcreateserial", "-days", "30", "-out", str(HERE / "tls.pem"), "-extfile", str(HERE / "tls.ext")),
    )


certificates()
repository()
CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
CONTEXT.load_cert_chain(HERE / "tls.pem", HERE / "tls.key")


def note_sni(_socket, name, _context):
    saw(what="tls", sni=name)


CONTEXT.sni_callback = note_sni
# A server with a certificate of many megabytes.
(HERE / "bomb.pem").write_bytes((HERE / "tls.pem").read_bytes() + (HERE / "ca.pem").read_bytes() * 20000)
BOMB = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
BOMB.load_cert_chain(HERE / "bomb.pem", HERE / "tls.key")
servers = [
    UdpServer((RESOLVER, 53), Udp),
    Threads((RESOLVER, 53), TcpNames),
    UdpServer((PUBLIC, 5000), Datagrams),
    UdpServer((PUBLIC, 443), Datagrams),
    Threads((PUBLIC, 2222), Banner),
    Threads((OTHER, 2222), Banner),
    Threads((METADATA, 80), Forbidden),
    Bomb((OTHER, 8444), Web),
    Threads((PRIVATE, 80), Forbidden),
    Threads((PRIVATE, 443), Forbidden),
]
for address in (PUBLIC, OTHER):
    servers += [Threads((address, 80), Web), Secure((address, 443), Web), Secure((address, 8443), Web)]
servers += [Threads6((PUBLIC6, 80), Web), Secure6((PUBLIC6, 443), Web)]
for server in servers:
    threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
# Whoever started us holds the other end; when it goes, so do we.
sys.stdin.read()
