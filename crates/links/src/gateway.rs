//! The namespace at the other end of all links, and the sockets in it.
//!
//! It is kept by a mount, `<state_dir>/gateway`, so that running sandboxes keep their links when the server goes and
//! comes. The mount is made last, so what is found there is complete; `lo` says in which layout.
//!
//! What must hold:
//! - Nothing leads out of it: no interface but links' ends, no forwarding.
//! - Every packet that a guest sends is for this namespace, whatever its address. Only what we send goes to a link.
//! - The settings do not come from the host, whose own a new namespace partly inherits.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use atoll_types::InstanceId;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::error::{Doing, Result};
use crate::netlink::{Batch, End, Interface, LOOPBACK, Netlink};
use crate::slot::{GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, MTU, Slot};
use crate::{bpf, namespace, sys};

/// What `lo` of a finished gateway is called. To be changed with anything in [`configure`].
const LAYOUT: &str = "atoll gateway 1";
const NSFS: i64 = 0x6e73_6673;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;
/// What a datagram socket may hold for all guests together: more than any of them may send at once, see `bpf`.
const DATAGRAM_BYTES: usize = 16 << 20;
/// The guest's end of its link: `lo` is 1, and nothing else was there before.
const GUEST_INDEX: u32 = 2;
const READY_WITHIN: Duration = Duration::from_secs(2);
const READY_EVERY: Duration = Duration::from_micros(200);

/// Where everything arrives that guests send. All are non-blocking. Those for IPv6 are missing where the kernel has none.
///
/// Accepted connections have the address that the guest dialled as their own. The UDP ones tell the address in control
/// messages (`IP_ORIGDSTADDR` and `IP_PKTINFO`, or the same of IPv6) and may send from any. Peers are guests' addresses:
/// see [`Slot::of_source`].
#[derive(Debug)]
pub struct Sockets {
    pub tcp4: TcpListener,
    pub tcp6: Option<TcpListener>,
    /// UDP to port 53.
    pub dns4: UdpSocket,
    pub dns6: Option<UdpSocket>,
    /// All other UDP, except to port 443, which is refused.
    pub udp4: UdpSocket,
    pub udp6: Option<UdpSocket>,
}

/// Belongs to one thread, which is in its namespace.
#[derive(Debug)]
pub(crate) struct Gateway {
    namespace: OwnedFd,
    netlink: Netlink,
    source_check: OwnedFd,
    v6: bool,
    /// Our sockets get the packets while this is open.
    _choice: OwnedFd,
}

impl Gateway {
    /// Takes the calling thread into the gateway's namespace, which is made if it is not there.
    pub(crate) fn open(path: &Path) -> Result<(Self, Sockets)> {
        let v6 = namespace::has_v6();
        let kept = reopen(path).unwrap_or_else(|error| {
            tracing::warn!(%error, "the gateway's namespace is unusable and made anew");
            false
        });
        if !kept {
            forget(path)?;
            sys::leave_network().doing(|| "making the gateway's namespace")?;
            configure(v6)?;
            keep(path)?;
        }
        Self::here(v6)
    }

    /// Of the calling thread's namespace, which is configured.
    fn here(v6: bool) -> Result<(Self, Sockets)> {
        let namespace = namespace::own()?;
        let netlink = Netlink::open()?;
        let source_check = bpf::source_check().doing(|| "loading the source check into the kernel")?;
        let sockets = Sockets::open(v6).doing(|| "opening the gateway's sockets")?;
        let choice = sockets
            .choose(namespace.as_fd())
            .doing(|| "letting the kernel choose the gateway's sockets")?;
        let gateway = Self {
            namespace,
            netlink,
            source_check,
            v6,
            _choice: choice,
        };
        Ok((gateway, sockets))
    }

    /// Tries everything once, in namespaces that vanish with the calling thread.
    pub(crate) fn rehearse() -> Result<()> {
        let v6 = namespace::has_v6();
        sys::leave_network().doing(|| "making a network namespace")?;
        configure(v6)?;
        let (gateway, _sockets) = Self::here(v6)?;
        gateway.make(Slot::FIRST).map(drop)
    }

    pub(crate) fn namespace(&self) -> Result<OwnedFd> {
        self.namespace
            .try_clone()
            .doing(|| "copying a descriptor of the gateway's namespace")
    }

    /// Makes a namespace for a guest, with `lo` and its link, all ready. On an error nothing is left.
    pub(crate) fn make(&self, slot: Slot) -> Result<OwnedFd> {
        let (inside, netlink) = self.make_namespace()?;
        let near = End {
            name: &slot.name(),
            index: slot.index(),
            mac: GATEWAY_MAC,
        };
        let far = End {
            name: "eth0",
            index: GUEST_INDEX,
            mac: GUEST_MAC,
        };
        // Not one of ours until it exists: another may have the place.
        let mut batch = Batch::default();
        self.netlink
            .carry_out(batch.pair(&near, &far, inside.as_fd(), MTU))?;
        let made = self.complete(slot, &netlink);
        if made.is_err() {
            let _ = self.leave(&[slot]).and_then(|()| self.remover()?.remove());
        }
        made.map(|()| inside)
    }

    /// Makes a pair that is there into a link.
    fn complete(&self, slot: Slot, guest: &Netlink) -> Result<()> {
        let near = slot.index();
        // Checked before anything can come.
        let mut batch = Batch::default();
        batch.check_incoming(near, self.source_check.as_fd()).up(near);
        self.netlink.carry_out(&batch)?;
        let mut batch = Batch::default();
        batch.up(LOOPBACK).up(GUEST_INDEX);
        let gateways = [IpAddr::from(GATEWAY_V4), IpAddr::from(GATEWAY_V6)];
        for (address, gateway) in self.addresses(slot).zip(gateways) {
            batch
                .address(GUEST_INDEX, address)
                .neighbour(GUEST_INDEX, gateway, GATEWAY_MAC)
                .default_route(GUEST_INDEX, gateway);
        }
        guest.carry_out(&batch)?;
        let mut batch = Batch::default();
        for address in self.addresses(slot) {
            batch
                .guest_route(near, address)
                .neighbour(near, address, GUEST_MAC);
        }
        self.netlink.carry_out(&batch)?;
        self.await_ready(slot, guest)
    }

    /// Waits for what the kernel does on its own time, and drops packets until then: the end that was switched on first
    /// learns that the other is there, and the guest's IPv6 address becomes one.
    fn await_ready(&self, slot: Slot, guest: &Netlink) -> Result<()> {
        let until = Instant::now() + READY_WITHIN;
        let address = IpAddr::from(slot.v6());
        while !(self.netlink.works(slot.index())? && (!self.v6 || guest.is_local(address)?)) {
            if Instant::now() > until {
                return Err(io::Error::from(io::ErrorKind::TimedOut))
                    .doing(|| format!("waiting for the link {slot} to come up"));
            }
            std::thread::sleep(READY_EVERY);
        }
        Ok(())
    }

    /// A namespace for a guest, and how to speak to it. Made by another thread: this one is never anywhere else.
    fn make_namespace(&self) -> Result<(OwnedFd, Netlink)> {
        let v6 = self.v6;
        namespace::new(move || {
            // It has no capability over its network, not even for low ports. And no host's settings.
            namespace::set("ipv4/ip_unprivileged_port_start", "0")?;
            namespace::set("ipv4/ip_forward", "0")?;
            if v6 {
                configure_v6()?;
            }
            Netlink::open()
        })
    }

    fn addresses(&self, slot: Slot) -> impl Iterator<Item = IpAddr> + use<> {
        let v6 = self.v6.then(|| slot.v6().into());
        [slot.v4().into()].into_iter().chain(v6)
    }

    /// Which links there are, and whose; without an owner are those that were ready when a server was killed.
    pub(crate) fn links(&self) -> Result<Vec<(Slot, Option<InstanceId>)>> {
        let owned = |interface: Interface| {
            let owner = interface.alias.and_then(|alias| alias.parse().ok());
            Some((Slot::of_index(interface.index)?, owner))
        };
        Ok(self.netlink.interfaces()?.into_iter().filter_map(owned).collect())
    }

    /// Puts the source check of this server in the place of a former one's.
    pub(crate) fn check_again(&self, slot: Slot) -> Result<()> {
        let mut batch = Batch::default();
        self.netlink
            .carry_out(batch.check_incoming(slot.index(), self.source_check.as_fd()))
    }

    /// Writes the owner's name on a link.
    pub(crate) fn give(&self, slot: Slot, owner: &InstanceId) -> Result<()> {
        let mut batch = Batch::default();
        self.netlink.carry_out(batch.alias(slot.index(), owner.as_str()))
    }

    /// Links that [`Remover::remove`] is to remove; they have no owner any more. Those that are gone are fine.
    pub(crate) fn leave(&self, slots: &[Slot]) -> Result<()> {
        let mut batch = Batch::default();
        for slot in slots {
            batch.leave(slot.index());
        }
        self.netlink.carry_out(&batch)
    }

    pub(crate) fn remover(&self) -> Result<Remover> {
        Netlink::open().map(Remover)
    }
}

/// Removes links, on any thread: the kernel needs some 20 ms for it, most of which others can work.
#[derive(Debug)]
pub(crate) struct Remover(Netlink);

impl Remover {
    pub(crate) fn remove(&self) -> Result<()> {
        let mut batch = Batch::default();
        self.0.carry_out(batch.remove_all())
    }
}

/// Enters what is kept at the path, if it is a gateway; `false` if nothing is kept there, as after a boot.
fn reopen(path: &Path) -> Result<bool> {
    if !is_kept(path)? {
        return Ok(false);
    }
    let kept = File::open(path).doing(|| format!("opening {}", path.display()))?;
    namespace::enter(kept.as_fd())?;
    let is_gateway =
        |interface: &Interface| interface.index == LOOPBACK && interface.alias.as_deref() == Some(LAYOUT);
    match Netlink::open()?.interfaces()?.iter().any(is_gateway) {
        true => Ok(true),
        false => {
            Err(io::Error::other("it is not a gateway of this version")).doing(|| path.display().to_string())
        }
    }
}

fn is_kept(path: &Path) -> Result<bool> {
    match rustix::fs::statfs(path) {
        Ok(found) => Ok(found.f_type == NSFS),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error).doing(|| format!("looking at {}", path.display())),
    }
}

fn keep(path: &Path) -> Result<()> {
    File::create(path).doing(|| format!("making {}", path.display()))?;
    rustix::mount::mount_bind(namespace::OWN, path)
        .doing(|| format!("keeping the gateway's namespace at {}", path.display()))
}

/// Removes the mount, and with it the namespace as soon as nobody is in it.
pub(crate) fn forget(path: &Path) -> Result<()> {
    while is_kept(path)? {
        rustix::mount::unmount(path, UnmountFlags::DETACH)
            .doing(|| format!("unmounting {}", path.display()))?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).doing(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Makes a gateway of the calling thread's namespace, which is new.
fn configure(v6: bool) -> Result<()> {
    for (name, value) in [
        ("ip_forward", "0"),
        ("conf/all/rp_filter", "0"),
        ("conf/default/rp_filter", "0"),
        ("conf/all/route_localnet", "0"),
        ("conf/default/route_localnet", "0"),
        ("conf/all/accept_source_route", "0"),
        ("conf/default/accept_source_route", "0"),
        ("conf/all/accept_redirects", "0"),
        ("conf/default/accept_redirects", "0"),
        // It would answer for the whole world.
        ("icmp_echo_ignore_all", "1"),
        // "Port unreachable" goes out each time, not six times a second.
        ("icmp_ratemask", "0"),
    ] {
        namespace::set(&format!("ipv4/{name}"), value)?;
    }
    let netlink = Netlink::open()?;
    let mut batch = Batch::default();
    batch.up(LOOPBACK);
    let mut families = vec![libc::AF_INET as u8];
    if v6 {
        configure_v6()?;
        namespace::set("ipv6/conf/all/forwarding", "0")?;
        namespace::try_set("ipv6/icmp/echo_ignore_all", "1");
        namespace::try_set("ipv6/icmp/ratemask", "0");
        families.push(libc::AF_INET6 as u8);
        // Where "unreachable" comes from. (In IPv4 it comes from the address that was asked.)
        batch.address(LOOPBACK, GATEWAY_V6.into());
    }
    for family in families {
        batch.any_address(family).guests_first(family);
    }
    netlink.carry_out(batch.alias(LOOPBACK, LAYOUT))
}

/// Of any namespace of ours: there is IPv6, and no address comes from anywhere but us.
fn configure_v6() -> Result<()> {
    for name in ["all", "default"] {
        namespace::set(&format!("ipv6/conf/{name}/disable_ipv6"), "0")?;
        namespace::set(&format!("ipv6/conf/{name}/accept_ra"), "0")?;
    }
    // None of the link's own either.
    namespace::set("ipv6/conf/default/addr_gen_mode", "1")
}

impl Sockets {
    fn open(v6: bool) -> io::Result<Self> {
        let v4_any = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        let v6_any = v6.then_some(IpAddr::from(Ipv6Addr::UNSPECIFIED));
        let listener = |address| listener(SocketAddr::new(address, 0));
        // Answers have the port to which the socket is bound; of the other, nothing is sent.
        let dns = |address| datagrams(SocketAddr::new(address, 53));
        let udp = |address| datagrams(SocketAddr::new(address, 0));
        Ok(Self {
            tcp4: listener(v4_any)?,
            tcp6: v6_any.map(listener).transpose()?,
            dns4: dns(v4_any)?,
            dns6: v6_any.map(dns).transpose()?,
            udp4: udp(v4_any)?,
            udp6: v6_any.map(udp).transpose()?,
        })
    }

    /// Sends everything here that arrives in the namespace, while the result is open.
    fn choose(&self, namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let map = sys::socket_map(bpf::SOCKETS)?;
        let put = |index, socket: Option<BorrowedFd<'_>>| match socket {
            Some(socket) => sys::put_socket(map.as_fd(), index, socket),
            None => Ok(()),
        };
        put(bpf::TCP, Some(self.tcp4.as_fd()))?;
        put(bpf::TCP + 1, self.tcp6.as_ref().map(AsFd::as_fd))?;
        put(bpf::DNS, Some(self.dns4.as_fd()))?;
        put(bpf::DNS + 1, self.dns6.as_ref().map(AsFd::as_fd))?;
        put(bpf::UDP, Some(self.udp4.as_fd()))?;
        put(bpf::UDP + 1, self.udp6.as_ref().map(AsFd::as_fd))?;
        let program = bpf::socket_choice(map.as_fd())?;
        sys::attach_lookup(program.as_fd(), namespace)
    }
}

fn socket(kind: SocketType, address: SocketAddr) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    if address.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(&socket, true)?;
    }
    Ok(socket)
}

fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket(SocketType::STREAM, address)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn datagrams(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = answering(address)?;
    let options = match address {
        SocketAddr::V4(_) => [
            (libc::SOL_IP, libc::IP_RECVORIGDSTADDR),
            (libc::SOL_IP, libc::IP_PKTINFO),
        ],
        SocketAddr::V6(_) => [
            (libc::SOL_IPV6, libc::IPV6_RECVORIGDSTADDR),
            (libc::SOL_IPV6, libc::IPV6_RECVPKTINFO),
        ],
    };
    for (level, option) in options {
        sys::set_option(&socket, level, option, 1)?;
    }
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, DATAGRAM_BYTES)?;
    Ok(socket)
}

/// A datagram socket that sends from this address, which can be anybody's.
pub(crate) fn answering(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = socket(SocketType::DGRAM, address)?;
    let (level, option) = match address {
        SocketAddr::V4(_) => (libc::SOL_IP, libc::IP_TRANSPARENT),
        SocketAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_TRANSPARENT),
    };
    sys::set_option(&socket, level, option, 1)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket.into())
}
