# The client of `atoll bench egress`, the same wherever it runs. It measures inside, so that its own start does not count.
import json, os, socket, ssl, sys, time

mode, host, address, socks, count = sys.argv[1:6]
count = int(count)
if not address:
    address = socket.getaddrinfo(host, 443, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# The same for all: whether it is the right server is not measured.
tls.check_hostname = False
tls.verify_mode = ssl.CERT_NONE
BODY = 64
REQUEST = f"GET /{BODY} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()


def exactly(sock, size):
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            sys.exit("it ended too early")
        data += part
    return data


def dial():
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if socks:
        proxy, port = socks.split(":")
        sock.connect((proxy, int(port)))
        sock.sendall(b"\x05\x01\x00")
        exactly(sock, 2)
        sock.sendall(b"\x05\x01\x00\x01" + socket.inet_aton(address) + (443).to_bytes(2, "big"))
        if exactly(sock, 10)[1] != 0:
            sys.exit("the proxy refused")
    else:
        sock.connect((address, 443))
    return tls.wrap_socket(sock, server_hostname=host)


def ask(sock):
    sock.sendall(REQUEST)
    data = b""
    while True:
        part = sock.recv(4096)
        if not part:
            sys.exit("it ended too early")
        data += part
        head, found, body = data.partition(b"\r\n\r\n")
        if found and len(body) >= BODY:
            break
    if not head.startswith(b"HTTP/1.1 200"):
        sys.exit(repr(head))


def timed(work):
    times = []
    for turn in range(count + 5):
        begin = time.perf_counter()
        work()
        # The first ones warm up both sides.
        if turn >= 5:
            times.append((time.perf_counter() - begin) * 1000)
    print(json.dumps(times))


def connect():
    sock = dial()
    ask(sock)
    sock.close()


if mode == "connect":
    timed(connect)
elif mode == "request":
    sock = dial()
    timed(lambda: ask(sock))
elif mode == "hold":
    # One set of connections after the other; the next when it is told to.
    turn = 0
    while True:
        held = [dial() for _ in range(count)]
        for sock in held:
            ask(sock)
        open(f"/tmp/held-{turn}", "w").close()
        turn += 1
        while not os.path.exists(f"/tmp/next-{turn}"):
            time.sleep(0.05)
        for sock in held:
            ask(sock)
            sock.close()
