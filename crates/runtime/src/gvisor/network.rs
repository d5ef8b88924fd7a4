//! The network of an instance: the sentry's own stack, with loopback and, if it is given one, a cable.
//!
//! ```text
//!   sentry (own stack, an empty namespace) ── packet socket ──> eth0 of the instance's namespace ── cable ──> gateway
//! ```
//! The sentry itself is never in the namespace of its cable: all that it has of it is a socket for whole packets, which
//! we open for it, and which keeps that namespace alive. `runsc run`, which starts the instances that need a gofer, does
//! it otherwise for those that start fresh: it puts the sentry into the namespace and finds out by itself what is there.
//!
//! What must hold: the addresses are the sentry's, so the kernel's own stack must not have them any more: it would answer
//! for it, and refuse every connection.
#![expect(
    unsafe_code,
    reason = "packet sockets and interfaces are set up by raw system calls"
)]

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};

use crate::cause::Doing;
use crate::{Cause, Network};

/// The namespace of a sentry that we start ourselves: a new one, in which there is nothing.
pub(super) const NAMESPACE: libc::c_int = libc::CLONE_NEWNET;
/// The interface in the namespace of a cable.
const INTERFACE: &std::ffi::CStr = c"eth0";
/// Room for packets on their way, each direction.
const BUFFER: libc::c_int = 4 << 20;

/// How `runsc` is told.
pub(super) fn flag(network: Option<&Network>) -> &'static str {
    match network {
        Some(_) => "--network=sandbox",
        None => "--network=none",
    }
}

/// What a sentry is told of its interfaces before it starts or is filled.
#[derive(Debug)]
pub(super) struct Wire {
    cable: Option<(Network, OwnedFd)>,
}

impl Wire {
    /// Loopback and nothing else.
    pub(super) const LOOPBACK: Self = Self { cable: None };

    /// Takes the namespace's end of the cable for a sentry. Blocking, about a millisecond.
    pub(super) fn plug(network: Option<&Network>) -> Result<Self, Cause> {
        let Some(network) = network else {
            return Ok(Self::LOOPBACK);
        };
        // A thread that enters a namespace is never given to anybody else.
        let taken = std::thread::scope(|scope| {
            let path = &network.namespace;
            let thread = std::thread::Builder::new().spawn_scoped(scope, move || take_interface(path));
            thread.and_then(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(io::Error::other("a thread died")))
            })
        });
        let socket = taken.doing(|| "taking its end of the network")?;
        Ok(Self {
            cable: Some((network.clone(), socket)),
        })
    }

    /// Descriptors of interfaces, which travel beside [`Wire::links`].
    pub(super) fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        self.cable.iter().map(|(_, socket)| socket.as_fd()).collect()
    }

    pub(super) fn links(&self, restore: bool) -> Value {
        let route =
            |ip: &str, mask: &str| json!({"Destination": {"IP": ip, "Mask": mask}, "Gateway": "", "MTU": 0});
        let mut links = json!({
            "LoopbackLinks": [{
                "Name": "lo",
                "Addresses": [
                    {"Address": "127.0.0.1", "PrefixLen": 8},
                    {"Address": "::1", "PrefixLen": 128},
                ],
                // Go writes masks as base64: 255.0.0.0, and 128 bits.
                "Routes": [route("127.0.0.0", "/wAAAA=="), route("::1", "/////////////////////w==")],
                "GVisorGRO": false,
            }],
            "IsRestore": restore,
        });
        let Some((network, _)) = &self.cable else {
            return links;
        };
        let (guest, gateway) = (&network.guest, &network.gateway);
        let name = INTERFACE.to_string_lossy();
        let neighbour = |ip: String| json!({"IP": ip, "HardwareAddr": BASE64.encode(gateway.mac)});
        links["FDBasedLinks"] = json!([{
            "Name": name,
            "MTU": network.mtu,
            "Addresses": [
                {"Address": guest.v4.to_string(), "PrefixLen": 32},
                {"Address": guest.v6.to_string(), "PrefixLen": 128},
            ],
            "Routes": [],
            "GSOMaxSize": 65536,
            "GVisorGSOEnabled": false,
            "GVisorGRO": false,
            // With it no connection comes about.
            "TXChecksumOffload": false,
            "RXChecksumOffload": true,
            "LinkAddress": BASE64.encode(guest.mac),
            "QDisc": 1,
            // Nobody answers questions about addresses at the other end.
            "Neighbors": [neighbour(gateway.v4.to_string()), neighbour(gateway.v6.to_string())],
            "NumChannels": 1,
            "ProcessorsPerChannel": 0,
        }]);
        let everything = |ip: &str, mask: &[u8], gateway: String| {
            let destination = json!({"IP": ip, "Mask": BASE64.encode(mask)});
            json!({"Route": {"Destination": destination, "Gateway": gateway, "MTU": 0}, "Name": name})
        };
        links["Defaultv4Gateway"] = everything("0.0.0.0", &[0; 4], gateway.v4.to_string());
        links["Defaultv6Gateway"] = everything("::", &[0; 16], gateway.v6.to_string());
        links
    }
}

/// Opens the interface for whole packets and takes its addresses from the kernel. The calling thread stays in the
/// namespace and must end.
fn take_interface(namespace: &Path) -> io::Result<OwnedFd> {
    let namespace = File::open(namespace)?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    // SAFETY: a plain system call; protocol 0 receives nothing until it is bound.
    let socket = own(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the name is NUL-terminated and outlives the call.
    let index = unsafe { libc::if_nametoindex(INTERFACE.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeroes is a valid value of this plain structure.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index.cast_signed();
    // SAFETY: the address is a whole `sockaddr_ll` and its length is given.
    check(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as u32,
        )
    })?;
    for (level, option, value) in [
        // Large segments in one piece, with a header that says so.
        (libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1),
        (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER),
        (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, BUFFER),
    ] {
        // SAFETY: the value is an int and its length is given.
        check(unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as u32,
            )
        })?;
    }
    forget_addresses()?;
    Ok(socket)
}

fn forget_addresses() -> io::Result<()> {
    // SAFETY: a plain system call.
    let asking = own(unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: all zeroes is a valid value of this plain structure: no name, and no address.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(INTERFACE.to_bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_addr.sa_family = libc::AF_INET as u16;
    // SAFETY: the request is whole and outlives the call; 0.0.0.0 means: none.
    check(unsafe { libc::ioctl(asking.as_raw_fd(), libc::SIOCSIFADDR, &raw const request) })?;
    match std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1") {
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn own(fd: libc::c_int) -> io::Result<OwnedFd> {
    check(fd.min(0))?;
    // SAFETY: just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
