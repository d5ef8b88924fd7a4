//! On this machine: real namespaces, real packets. Needs root; without it every test says that it was skipped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;
use crate::netlink::{Batch, Netlink};

/// For what must happen, and for what must not.
const SOON: Duration = Duration::from_secs(5);
const WHILE: Duration = Duration::from_millis(100);
const SOMEWHERE: [&str; 2] = ["203.0.113.7", "2001:db8::7"];
/// Of [`a_server_that_is_killed`]: where it is to run.
const VICTIM: &str = "ATOLL_TEST_LINKS_VICTIM";

fn can() -> bool {
    match Links::probe() {
        Ok(()) => true,
        Err(error) => {
            eprintln!("SKIPPED, links are NOT tested here: {error}");
            false
        }
    }
}

/// A directory that keeps no gateway when a test has failed.
struct Dir(TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = gateway::forget(&self.path().join("gateway"));
    }
}

struct Place {
    dir: Dir,
    links: Links,
    sockets: Arc<Sockets>,
}

impl Place {
    async fn open(ready: usize) -> Option<Self> {
        if !can() {
            return None;
        }
        let dir = Dir::new();
        let (links, sockets) = start(dir.path(), ready).await;
        Some(Self { dir, links, sockets })
    }

    /// Leaves nothing behind.
    async fn close(self) {
        assert!(self.links.close().await.unwrap());
        assert!(matches!(self.links.discover().await, Err(Error::Closed)));
        assert!(!self.dir.path().join("gateway").exists());
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.dir.path().to_str().unwrap()), "{mounts}");
    }
}

async fn start(dir: &Path, ready: usize) -> (Links, Arc<Sockets>) {
    let config = LinksConfig {
        state_dir: dir.to_owned(),
        ready,
    };
    let (links, sockets) = Links::start(config).await.unwrap();
    (links, Arc::new(sockets))
}

fn instance(number: u8) -> InstanceId {
    InstanceId::from_entropy([number; 20])
}

/// Does something where the guest is.
fn inside<T: Send>(namespace: &Path, task: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(namespace).unwrap();
    namespace::within(&namespace, || Ok(task())).unwrap()
}

/// Waits for the next connection; gives who came and where to.
fn accepted(listener: &TcpListener, within: Duration) -> Option<(TcpStream, SocketAddr, SocketAddr)> {
    let end = Instant::now() + within;
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                stream.set_nonblocking(false).unwrap();
                let asked = stream.local_addr().unwrap();
                return Some((stream, peer, asked));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Waits for the next datagram; gives it and who sent it.
fn received(socket: &UdpSocket, within: Duration) -> Option<(Vec<u8>, SocketAddr)> {
    let end = Instant::now() + within;
    let mut buffer = [0; 2000];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((length, from)) => return Some((buffer[..length].to_vec(), from)),
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return None,
        }
    }
}

/// What the kernel counted in the caller's namespace.
fn counter(name: &str) -> u64 {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap();
    let Some((table, column)) = name.split_once(' ') else {
        let counted = read("snmp6");
        let line = counted.lines().find(|line| line.starts_with(name)).unwrap();
        return line.split_whitespace().last().unwrap().parse().unwrap();
    };
    // Names in one line, numbers in the next.
    let counted = read("snmp");
    let table = format!("{table}:");
    let mut lines = counted.lines().filter(|line| line.starts_with(&table));
    let mut words = || lines.next().unwrap().split_whitespace();
    let mut pairs = words().zip(words());
    pairs
        .find(|(name, _)| *name == column)
        .unwrap()
        .1
        .parse()
        .unwrap()
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// Sends one datagram and waits for what comes back to it.
fn exchange(to: SocketAddr) -> io::Result<Vec<u8>> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(SOON))?;
    socket.send(b"question")?;
    let mut answer = [0; 100];
    let length = socket.recv(&mut answer)?;
    Ok(answer[..length].to_vec())
}

#[tokio::test]
async fn tcp_to_any_address_arrives_with_that_address() {
    let Some(place) = Place::open(0).await else { return };
    let link = place.links.lease(&instance(1)).await.unwrap();
    let namespace = link.namespace().unwrap();
    let other_guest = link.slot().next().v4().to_string();
    for (address, port) in [
        (SOMEWHERE[0], 443),
        (SOMEWHERE[0], 1),
        (SOMEWHERE[1], 443),
        ("198.18.0.1", 53),
        ("fd61:746f:6c6c:18::1", 53),
        // Also what is another guest's, and what would be somebody's on the host.
        (&other_guest, 22),
        ("10.0.0.1", 22),
        ("169.254.169.254", 80),
    ] {
        let asked = at(address, port);
        let sockets = Arc::clone(&place.sockets);
        let server = std::thread::spawn(move || {
            let listener = match asked {
                SocketAddr::V4(_) => &sockets.tcp4,
                SocketAddr::V6(_) => sockets.tcp6.as_ref().unwrap(),
            };
            let (mut stream, peer, arrived) = accepted(listener, SOON).unwrap();
            stream.write_all(b"welcome").unwrap();
            (peer, arrived)
        });
        let greeting = inside(&namespace, || {
            let mut text = String::new();
            TcpStream::connect_timeout(&asked, SOON)
                .unwrap()
                .read_to_string(&mut text)
                .unwrap();
            text
        });
        assert_eq!(greeting, "welcome");
        let (peer, arrived) = server.join().unwrap();
        assert_eq!(arrived, asked);
        let slot = place.links.slot_of(peer.ip()).unwrap();
        assert_eq!(slot, link.slot());
        assert_eq!(place.links.instance_of(slot), Some(instance(1)));
    }
    place.links.release(&instance(1)).await.unwrap();
    assert_eq!(place.links.instance_of(link.slot()), None);
    drop(link);
    place.close().await;
}

#[tokio::test]
async fn datagrams_are_answered_from_the_address_and_port_that_were_asked() {
    let Some(place) = Place::open(0).await else { return };
    let link = place.links.lease(&instance(1)).await.unwrap();
    let namespace = link.namespace().unwrap();
    for (address, port) in [
        (SOMEWHERE[0], 53),
        (SOMEWHERE[1], 53),
        (SOMEWHERE[0], 123),
        (SOMEWHERE[1], 123),
    ] {
        let asked = at(address, port);
        let (sockets, links) = (Arc::clone(&place.sockets), place.links.clone());
        let server = std::thread::spawn(move || {
            let socket = match (asked, port) {
                (SocketAddr::V4(_), 53) => &sockets.dns4,
                (SocketAddr::V6(_), 53) => sockets.dns6.as_ref().unwrap(),
                (SocketAddr::V4(_), _) => &sockets.udp4,
                (SocketAddr::V6(_), _) => sockets.udp6.as_ref().unwrap(),
            };
            let (question, from) = received(socket, SOON).unwrap();
            assert_eq!(question, b"question");
            let answers = links.answer_from(asked).unwrap();
            // Another guest asked there too.
            let _also = links.answer_from(asked).unwrap();
            answers.send_to(b"answer", from).unwrap();
            from
        });
        assert_eq!(inside(&namespace, || exchange(asked)).unwrap(), b"answer");
        let from = server.join().unwrap();
        assert_eq!(place.links.slot_of(from.ip()), Some(link.slot()));
    }
    place.links.release(&instance(1)).await.unwrap();
    drop(link);
    place.close().await;
}

#[tokio::test]
async fn quic_is_refused_at_once_every_time() {
    let Some(place) = Place::open(0).await else { return };
    let link = place.links.lease(&instance(1)).await.unwrap();
    let began = Instant::now();
    inside(&link.namespace().unwrap(), || {
        for _ in 0..50 {
            for address in SOMEWHERE {
                let error = exchange(at(address, 443)).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{address}");
            }
        }
    });
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    place.links.release(&instance(1)).await.unwrap();
    drop(link);
    place.close().await;
}

#[tokio::test]
async fn nobody_can_speak_for_another() {
    let Some(place) = Place::open(0).await else { return };
    let honest = place.links.lease(&instance(1)).await.unwrap();
    let liar = place.links.lease(&instance(2)).await.unwrap();
    let sockets = Arc::clone(&place.sockets);
    let strangers = ["198.18.0.1", "10.1.2.3", "fd61:746f:6c6c:18::1", "2001:db8::9"];
    let strangers = strangers.map(|address| address.parse().unwrap());
    let stolen = [IpAddr::from(honest.slot().v4()), honest.slot().v6().into()];
    inside(&liar.namespace().unwrap(), || {
        let netlink = Netlink::open().unwrap();
        for source in stolen.into_iter().chain(strangers) {
            netlink.carry_out(Batch::default().address(2, source)).unwrap();
            let (to, v6) = match source {
                IpAddr::V4(_) => (SOMEWHERE[0], false),
                IpAddr::V6(_) => (SOMEWHERE[1], true),
            };
            for port in [53, 123, 443] {
                let socket = UdpSocket::bind((source, 0)).unwrap();
                socket.send_to(b"lie", at(to, port)).unwrap();
                // Not even the refusal of 443 comes back: it would go to the other.
                socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
                assert!(socket.recv(&mut [0; 10]).is_err());
            }
            let (dns, udp, tcp) = match v6 {
                false => (&sockets.dns4, &sockets.udp4, &sockets.tcp4),
                true => (
                    sockets.dns6.as_ref().unwrap(),
                    sockets.udp6.as_ref().unwrap(),
                    sockets.tcp6.as_ref().unwrap(),
                ),
            };
            assert_eq!(received(dns, WHILE), None, "{source}");
            assert_eq!(received(udp, WHILE), None, "{source}");
            // A connection from there goes nowhere.
            let family = match v6 {
                false => rustix::net::AddressFamily::INET,
                true => rustix::net::AddressFamily::INET6,
            };
            let socket = rustix::net::socket_with(
                family,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::NONBLOCK,
                None,
            )
            .unwrap();
            rustix::net::bind(&socket, &SocketAddr::new(source, 0)).unwrap();
            assert!(rustix::net::connect(&socket, &at(to, 443)).is_err());
            assert!(accepted(tcp, WHILE).is_none(), "{source}");
        }
        // With its own it is heard.
        let socket = UdpSocket::bind((liar.slot().v4(), 0)).unwrap();
        socket.send_to(b"truth", at(SOMEWHERE[0], 123)).unwrap();
    });
    let (text, from) = received(&sockets.udp4, SOON).unwrap();
    assert_eq!(
        (text.as_slice(), from.ip()),
        (&b"truth"[..], liar.slot().v4().into())
    );
    for number in [1, 2] {
        place.links.release(&instance(number)).await.unwrap();
    }
    drop((honest, liar, sockets));
    place.close().await;
}

#[tokio::test]
async fn only_whole_unicast_tcp_and_udp_get_to_the_gateway() {
    let Some(place) = Place::open(0).await else { return };
    let link = place.links.lease(&instance(1)).await.unwrap();
    let received_any = |socket: &UdpSocket| received(socket, WHILE).is_some();
    let crate::Made::Here { gateway, .. } = &place.links.0.made else {
        panic!("links that are made elsewhere");
    };
    let gateway = format!("/proc/self/fd/{}", gateway.as_raw_fd());
    inside(&link.namespace().unwrap(), || {
        let socket = UdpSocket::bind((link.slot().v4(), 0)).unwrap();
        socket.set_broadcast(true).unwrap();
        for to in ["255.255.255.255", "224.0.0.1", "239.1.2.3"] {
            // Some have no route, which is fine as well.
            let _ = socket.send_to(b"all", at(to, 53));
            let _ = socket.send_to(b"all", at(to, 123));
        }
        let socket = UdpSocket::bind((link.slot().v6(), 0)).unwrap();
        let _ = socket.send_to(b"all", at("ff02::1", 53));
        let _ = socket.send_to(b"all", at("ff0e::1", 123));
        // In fragments, as it does not fit.
        for to in SOMEWHERE {
            let any = if to.contains(':') { "::" } else { "0.0.0.0" };
            let socket = UdpSocket::bind(at(any, 0)).unwrap();
            socket.send_to(&[0; 65500], at(to, 123)).unwrap();
        }
        // Nobody answers for the whole world.
        for (to, protocol, echo) in [
            (SOMEWHERE[0], rustix::net::ipproto::ICMP, 8),
            (SOMEWHERE[1], rustix::net::ipproto::ICMPV6, 128),
        ] {
            let ping = rustix::net::socket(
                match at(to, 0) {
                    SocketAddr::V4(_) => rustix::net::AddressFamily::INET,
                    SocketAddr::V6(_) => rustix::net::AddressFamily::INET6,
                },
                rustix::net::SocketType::RAW,
                Some(protocol),
            );
            let echo = [echo, 0, 255 - echo, 255, 0, 0, 0, 0];
            rustix::net::sendto(ping.unwrap(), &echo, rustix::net::SendFlags::empty(), &at(to, 0)).unwrap();
        }
    });
    std::thread::sleep(WHILE);
    let counted = |name: &str| inside(Path::new(&gateway), || counter(name));
    for name in ["Ip6ReasmReqds", "Icmp6InMsgs", "Ip ReasmReqds", "Icmp InMsgs"] {
        assert_eq!(counted(name), 0, "{name}");
    }
    let sockets = &place.sockets;
    assert!(![&sockets.dns4, &sockets.udp4].into_iter().any(received_any));
    let v6 = [sockets.dns6.as_ref(), sockets.udp6.as_ref()];
    assert!(!v6.into_iter().flatten().any(received_any));
    place.links.release(&instance(1)).await.unwrap();
    drop(link);
    place.close().await;
}

#[tokio::test]
async fn links_are_leased_once_and_released_as_often_as_one_likes() {
    let Some(place) = Place::open(3).await else { return };
    let first = place.links.lease(&instance(1)).await.unwrap();
    assert!(matches!(
        place.links.lease(&instance(1)).await,
        Err(Error::Leased(of)) if of == instance(1)
    ));
    let second = place.links.lease(&instance(2)).await.unwrap();
    assert_ne!(first.slot(), second.slot());
    let mut found = place.links.discover().await.unwrap();
    found.sort();
    assert_eq!(found, [instance(1), instance(2)]);
    assert_eq!(place.links.adopt(&instance(2)).unwrap().slot(), second.slot());
    assert!(place.links.adopt(&instance(3)).is_none());
    for _ in 0..2 {
        place.links.release(&instance(1)).await.unwrap();
        assert_eq!(place.links.discover().await.unwrap(), [instance(2)]);
    }
    // In use: the gateway stays, for the next server.
    assert!(!place.links.close().await.unwrap());
    let Place { dir, links, sockets } = place;
    drop((links, sockets));
    let (links, sockets) = start(dir.path(), 0).await;
    assert_eq!(links.adopt(&instance(2)).unwrap().slot(), second.slot());
    links.release(&instance(2)).await.unwrap();
    drop((first, second));
    Place { dir, links, sockets }.close().await;
}

#[tokio::test]
async fn an_instance_that_ends_takes_its_link_along() {
    let Some(place) = Place::open(0).await else { return };
    let link = place.links.lease(&instance(1)).await.unwrap();
    drop(link);
    let end = Instant::now() + SOON;
    while !place.links.discover().await.unwrap().is_empty() {
        assert!(Instant::now() < end, "the link stays");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    place.links.release(&instance(1)).await.unwrap();
    place.close().await;
}

#[tokio::test]
async fn two_servers_do_not_share_a_gateway() {
    let Some(place) = Place::open(0).await else { return };
    let config = LinksConfig {
        state_dir: place.dir.path().to_owned(),
        ready: 0,
    };
    assert!(matches!(Links::start(config).await, Err(Error::InUse(_))));
    place.close().await;
}

#[tokio::test]
async fn what_is_no_gateway_is_replaced() {
    if !can() {
        return;
    }
    let dir = Dir::new();
    let path = dir.path().join("gateway");
    // As after a boot.
    File::create(&path).unwrap();
    let (links, sockets) = start(dir.path(), 0).await;
    drop((links, sockets));
    gateway::forget(&path).unwrap();
    // Some other namespace, and twice.
    thread({
        let path = path.clone();
        move || {
            sys::leave_network().unwrap();
            File::create(&path).unwrap();
            for _ in 0..2 {
                rustix::mount::mount_bind(namespace::OWN, &path).unwrap();
            }
        }
    })
    .unwrap()
    .join()
    .unwrap();
    let (links, sockets) = start(dir.path(), 1).await;
    links.lease(&instance(1)).await.unwrap();
    links.release(&instance(1)).await.unwrap();
    Place { dir, links, sockets }.close().await;
}

/// Not a test of its own: [`a_killed_server_costs_running_instances_nothing_but_connections`] runs it and kills it.
#[tokio::test]
async fn a_server_that_is_killed() {
    let Some(dir) = std::env::var_os(VICTIM) else {
        return;
    };
    let (links, _sockets) = start(Path::new(&dir), 4).await;
    let link = links.lease(&instance(7)).await.unwrap();
    let guest = inside(&link.namespace().unwrap(), || sleeper().id());
    // Ready ones are there too, when it is killed.
    tokio::time::sleep(Duration::from_millis(100)).await;
    println!("\nguest {guest} slot {}", link.slot());
    tokio::time::sleep(Duration::from_secs(60)).await;
}

/// A process that does nothing, in the caller's namespace.
fn sleeper() -> Child {
    Command::new("sleep")
        .arg("120")
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn a_killed_server_costs_running_instances_nothing_but_connections() {
    if !can() {
        return;
    }
    let dir = Dir::new();
    let mut server = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::a_server_that_is_killed", "--nocapture"])
        .env(VICTIM, dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let said = lines.find_map(|line| line.unwrap().strip_prefix("guest ").map(str::to_owned));
    let (guest, slot) = said.as_deref().unwrap().split_once(" slot ").unwrap();
    let guest: i32 = guest.parse().unwrap();
    let namespace = PathBuf::from(format!("/proc/{guest}/ns/net"));
    server.kill().unwrap();
    server.wait().unwrap();

    // Nobody is there, and it is told so.
    let refused = |address: &str| {
        let to = at(address, 443);
        inside(&namespace, || TcpStream::connect_timeout(&to, SOON)).unwrap_err()
    };
    for address in SOMEWHERE {
        assert_eq!(refused(address).kind(), io::ErrorKind::ConnectionRefused);
    }
    let (links, sockets) = start(dir.path(), 0).await;
    assert_eq!(links.discover().await.unwrap(), [instance(7)]);
    let link = links.adopt(&instance(7)).unwrap();
    assert_eq!((link.slot().to_string().as_str(), link.namespace()), (slot, None));
    for (address, listener) in SOMEWHERE.iter().zip([Some(&sockets.tcp4), sockets.tcp6.as_ref()]) {
        let to = at(address, 80);
        let _stream = inside(&namespace, || TcpStream::connect_timeout(&to, SOON)).unwrap();
        let (_, peer, asked) = accepted(listener.unwrap(), SOON).unwrap();
        assert_eq!((asked, links.slot_of(peer.ip())), (to, Some(link.slot())));
    }
    links.release(&instance(7)).await.unwrap();
    // Its link is gone, although it still runs.
    let end = Instant::now() + SOON;
    while inside(&namespace, || {
        Netlink::open().unwrap().interfaces().unwrap().len()
    }) > 1
    {
        assert!(Instant::now() < end, "the link stays");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let guest = rustix::process::Pid::from_raw(guest).unwrap();
    rustix::process::kill_process(guest, rustix::process::Signal::KILL).unwrap();
    Place { dir, links, sockets }.close().await;
}

/// Numbers for whoever changes something: `cargo test -p atoll-links -- --ignored --nocapture how_long`.
#[tokio::test]
#[ignore = "measures"]
async fn how_long_it_takes() {
    let began = Instant::now();
    let Some(place) = Place::open(0).await else { return };
    println!("gateway and probe: {:?}", began.elapsed());
    let began = Instant::now();
    let mut links = Vec::new();
    for number in 0..30 {
        links.push(place.links.lease(&instance(number)).await.unwrap());
    }
    println!("30 leases, none ready: {:?}", began.elapsed());
    let began = Instant::now();
    for number in 0..30 {
        place.links.release(&instance(number)).await.unwrap();
    }
    println!("30 releases: {:?}", began.elapsed());
    let began = Instant::now();
    let link = place.links.lease(&instance(31)).await.unwrap();
    println!("a lease while they are removed: {:?}", began.elapsed());
    let began = Instant::now();
    place.links.answer_from(at(SOMEWHERE[0], 123)).unwrap();
    println!("a socket to answer from: {:?}", began.elapsed());
    place.links.release(&instance(31)).await.unwrap();
    drop((links, link));
    let began = Instant::now();
    place.close().await;
    println!("removing and closing: {:?}", began.elapsed());

    let place = Place::open(16).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    for number in 25..30 {
        let began = Instant::now();
        drop(place.links.lease(&instance(number)).await.unwrap());
        println!("a lease of a ready one: {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
        place.links.release(&instance(number)).await.unwrap();
    }
    // What its owner dropped goes when the kernel finds time for it.
    tokio::time::sleep(Duration::from_millis(200)).await;
    place.close().await;
}

/// All guests' datagrams wait in the same socket. However many one of them sends, there is room for the others'.
#[tokio::test]
async fn a_flood_takes_no_place_that_a_neighbour_needs() {
    const QUESTIONS: usize = 400;
    let Some(place) = Place::open(2).await else { return };
    let flooder = place.links.lease(&instance(1)).await.unwrap();
    let neighbour = place.links.lease(&instance(2)).await.unwrap();
    let (flooder_space, neighbour_space) = (flooder.namespace().unwrap(), neighbour.namespace().unwrap());
    for (port, socket, most, size) in [
        (53, &place.sockets.dns4, 2000, 100),
        (9999, &place.sockets.udp4, 60_000, 100),
        (9999, &place.sockets.udp4, 2000, 60_000),
    ] {
        let to = format!("203.0.113.7:{port}");
        // Nobody reads meanwhile.
        let sent = inside(&flooder_space, || {
            let flood = UdpSocket::bind("0.0.0.0:0").unwrap();
            let data = vec![7; size];
            (0..most * 2)
                .filter(|_| flood.send_to(&data, &to).is_ok())
                .count()
        });
        assert!(sent > most, "{sent}");
        inside(&neighbour_space, || {
            let asks = UdpSocket::bind("0.0.0.0:0").unwrap();
            for n in 0..QUESTIONS {
                asks.send_to(&(n as u32).to_be_bytes(), &to).unwrap();
            }
        });
        let (mut flood, mut heard) = (0, 0);
        while let Some((data, from)) = received(socket, WHILE) {
            match Slot::of_source(from.ip()) {
                Some(slot) if slot == neighbour.slot() => {
                    assert_eq!(
                        data,
                        (heard as u32).to_be_bytes(),
                        "in order, and none is missing"
                    );
                    heard += 1;
                }
                _ => flood += 1,
            }
        }
        assert_eq!(heard, QUESTIONS, "port {port}, beside {flood} of the flood");
        assert!(flood > 0 && flood < most, "{flood} of the flood got through");
    }
    drop((flooder, neighbour));
    place.links.release(&instance(1)).await.unwrap();
    place.links.release(&instance(2)).await.unwrap();
    place.close().await;
}

#[tokio::test]
async fn what_a_killed_server_still_holds_is_waited_for() {
    let dir = TempDir::new().unwrap();
    let open = || File::create(dir.path().join("lock")).unwrap();
    let held = open();
    assert!(lock_soon(&held).await);
    let next = open();
    // Tried once before the other lets go.
    let (taken, ()) = tokio::join!(biased; lock_soon(&next), async { drop(held) });
    assert!(taken);
}
