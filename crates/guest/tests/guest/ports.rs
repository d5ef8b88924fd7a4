use atoll_guest_protocol::{FailureKind, Message, Request, SUB_MAIN, SUB_STDOUT};

use crate::client::{Event, Guest, exec};

/// A server in the guest: upper-cases what it gets until the end, then answers with a count.
fn server(guest: &mut Guest, host: &str) -> u16 {
    let family = if host.contains(':') { "AF_INET6" } else { "AF_INET" };
    let script = format!(
        "import socket,sys\n\
         s=socket.socket(socket.{family}); s.bind(('{host}',0)); s.listen(); print(s.getsockname()[1], flush=True)\n\
         while True:\n  \
         c,_=s.accept(); n=0\n  \
         while True:\n    \
         d=c.recv(65536)\n    \
         if not d: break\n    \
         n+=len(d); c.sendall(d.upper())\n  \
         c.sendall(str(n).encode()); c.close()"
    );
    let stream = guest.open(&Request::Exec(exec("server", &["python3", "-c", &script])));
    assert!(matches!(guest.message(stream), Message::Started { .. }));
    match guest.next(stream) {
        Event::Data(SUB_STDOUT, bytes) => String::from_utf8(bytes)
            .expect("text")
            .trim()
            .parse()
            .expect("a port"),
        other => panic!("unexpected {other:?}"),
    }
}

fn answer(guest: &mut Guest, stream: u32) -> Vec<u8> {
    let mut got = Vec::new();
    loop {
        match guest.next(stream) {
            Event::Data(SUB_MAIN, bytes) if bytes.is_empty() => {
                assert_eq!(guest.end(stream), Ok(()));
                return got;
            }
            Event::Data(SUB_MAIN, bytes) => got.extend(bytes),
            other => panic!("unexpected {other:?}"),
        }
    }
}

#[test]
fn bytes_flow_both_ways_with_half_close() {
    let mut guest = Guest::start();
    let port = server(&mut guest, "127.0.0.1");
    let Ok(Message::Ports(ports)) = guest.ask(&Request::ListPorts) else {
        panic!("no ports");
    };
    assert!(
        ports
            .iter()
            .any(|found| found.port == port && found.address == "127.0.0.1"),
        "{ports:?}"
    );

    let stream = guest.open(&Request::Connect { port });
    assert_eq!(guest.message(stream), Message::Connected);
    guest.send(stream, b"hello");
    assert_eq!(guest.next(stream), Event::Data(SUB_MAIN, b"HELLO".to_vec()));
    guest.send_end(stream);
    assert_eq!(answer(&mut guest, stream), b"5");

    // More than all the windows on the way hold, with a reader that begins late.
    let stream = guest.open(&Request::Connect { port });
    assert_eq!(guest.message(stream), Message::Connected);
    let mut got = 0;
    for _ in 0..60 {
        guest.send(stream, &[b'x'; 50_000]);
        while guest.unread(stream) > 0 {
            if let Event::Data(_, bytes) = guest.next(stream) {
                got += bytes.len();
            }
        }
    }
    guest.send_end(stream);
    got += answer(&mut guest, stream).len();
    assert_eq!(got, 3_000_000 + "3000000".len());
}

#[test]
fn servers_on_the_other_loopback_are_found() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: no IPv6 here");
        return;
    }
    let mut guest = Guest::start();
    let port = server(&mut guest, "::1");
    let stream = guest.open(&Request::Connect { port });
    assert_eq!(guest.message(stream), Message::Connected);
    guest.send_end(stream);
    assert_eq!(answer(&mut guest, stream), b"0");
}

#[test]
fn a_closed_port_refuses() {
    let mut guest = Guest::start();
    let failure = guest
        .call(&Request::Connect { port: 1 })
        .expect_err("nobody there");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert_eq!(failure.message, "nothing listens on port 1");
}

#[test]
fn usage_is_plausible() {
    let mut guest = Guest::start();
    let Ok(Message::Usage(usage)) = guest.ask(&Request::Usage) else {
        panic!("no usage");
    };
    assert!(usage.memory_total_bytes > 0 && usage.memory_available_bytes <= usage.memory_total_bytes);
    assert!(usage.disk_total_bytes > 0 && usage.disk_used_bytes <= usage.disk_total_bytes);
    assert!(usage.processes >= 1);
}
