//! Interfaces, addresses, routes, neighbours, rules and filters, by rtnetlink. Written by hand: it is a dozen messages, and
//! a library for them would bring a dozen crates.
//!
//! Messages are collected and sent in one call. The kernel carries out all of them, also behind one that it refuses, so a
//! refusal is told only after the last answer. A socket belongs to the namespace in which it was opened.

use std::cell::Cell;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::error::{Doing, Error, Result};

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NEW: u16 = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
const PUT: u16 = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
const CHANGE: u16 = NLM_F_REQUEST | NLM_F_ACK;
/// The length of `struct nlmsghdr`.
const HEADER: usize = 16;
const UP: u32 = libc::IFF_UP as u32;
const IFLA_IFALIAS: u16 = 20;
const IFLA_GROUP: u16 = 27;
const RTA_DST: u16 = 1;
/// The group of interfaces that are to go.
const LEAVING: u32 = 1;
/// Of interfaces and of filters.
const KIND: u16 = 1;
pub(crate) const LOOPBACK: u32 = 1;
/// Where a rule for packets of our own looks first.
pub(crate) const GUESTS: u8 = 100;
const LOCAL: u8 = 255;
const MAIN: u8 = 254;

/// One end of a pair.
#[derive(Debug)]
pub(crate) struct End<'a> {
    pub(crate) name: &'a str,
    pub(crate) index: u32,
    pub(crate) mac: [u8; 6],
}

/// An interface as the kernel tells it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) index: u32,
    /// The text that was left with it.
    pub(crate) alias: Option<String>,
    works: bool,
}

impl Interface {
    fn read(body: &[u8]) -> Option<Self> {
        const IFLA_OPERSTATE: u16 = 16;
        const IF_OPER_UP: u8 = 6;
        let mut interface = Self {
            index: number(body, 4)?,
            alias: None,
            works: false,
        };
        for (kind, value) in Attributes(body.get(16..)?) {
            match kind {
                IFLA_IFALIAS => {
                    let text = value.strip_suffix(&[0]).unwrap_or(value);
                    interface.alias = Some(String::from_utf8_lossy(text).into_owned());
                }
                IFLA_OPERSTATE => interface.works = value == [IF_OPER_UP],
                _ => {}
            }
        }
        Some(interface)
    }
}

#[derive(Debug)]
pub(crate) struct Netlink {
    socket: OwnedFd,
    /// Of the next request; so that a late answer is not taken for another's.
    sequence: Cell<u32>,
}

impl Netlink {
    /// Speaks for the namespace that the calling thread is in.
    pub(crate) fn open() -> Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        );
        Ok(Self {
            socket: socket.doing(|| "opening a netlink socket")?,
            sequence: Cell::new(1),
        })
    }

    /// Has everything carried out; the first refusal is the result.
    pub(crate) fn carry_out(&self, batch: &Batch) -> Result<()> {
        if batch.parts.is_empty() {
            return Ok(());
        }
        let base = self.send(batch)?;
        let mut first = Ok(());
        let mut answered = 0;
        let mut buffer = vec![0; 32 << 10];
        while answered < batch.parts.len() {
            let length = self.receive(&mut buffer)?;
            for message in Messages(&buffer[..length]) {
                let Some((part, error)) = message.acknowledged(batch, base) else {
                    continue;
                };
                answered += 1;
                let refused = error != 0 && !part.tolerated.contains(&error);
                if refused && first.is_ok() {
                    first = Err(Error::Io {
                        what: part.what.clone(),
                        source: io::Error::from_raw_os_error(error),
                    });
                }
            }
        }
        first
    }

    /// All interfaces of the namespace.
    pub(crate) fn interfaces(&self) -> Result<Vec<Interface>> {
        let mut batch = Batch::default();
        batch.put(
            "listing interfaces",
            libc::RTM_GETLINK,
            NLM_F_REQUEST | NLM_F_DUMP,
            &interface(0, 0),
        );
        self.ask(&batch, Interface::read)
    }

    /// Whether packets go through an interface: it is switched on, and so is its other end, and the kernel has taken note.
    pub(crate) fn works(&self, index: u32) -> Result<bool> {
        let mut batch = Batch::default();
        batch.put(
            "looking at an interface",
            libc::RTM_GETLINK,
            CHANGE,
            &interface(index, 0),
        );
        let found = self.ask(&batch, Interface::read)?;
        Ok(found.iter().any(|interface| interface.works))
    }

    /// Whether packets to this address are for this namespace.
    pub(crate) fn is_local(&self, address: IpAddr) -> Result<bool> {
        let (family, bytes) = encoded(address);
        let mut batch = Batch::default();
        let header = [family, bytes.len() as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        batch
            .put("looking up a route", libc::RTM_GETROUTE, CHANGE, &header)
            .attribute(RTA_DST, &bytes);
        // The eighth byte of the answer is the sort of route.
        let found = self.ask(&batch, |body| body.get(7).copied())?;
        Ok(found.contains(&libc::RTN_LOCAL))
    }

    /// Sends one question; what can be read of the answers is the result.
    fn ask<T>(&self, batch: &Batch, read: impl Fn(&[u8]) -> Option<T>) -> Result<Vec<T>> {
        let base = self.send(batch)?;
        let mut found = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let length = self.receive(&mut buffer)?;
            for message in Messages(&buffer[..length]).filter(|message| message.sequence == base) {
                match message.acknowledged(batch, base) {
                    Some((_, 0)) => return Ok(found),
                    Some((part, error)) => {
                        return Err(io::Error::from_raw_os_error(error)).doing(|| part.what.as_str());
                    }
                    None if i32::from(message.kind) == libc::NLMSG_DONE => return Ok(found),
                    None => found.extend(read(message.body)),
                }
            }
        }
    }

    /// Gives the number of the first request; the others follow.
    fn send(&self, batch: &Batch) -> Result<u32> {
        let base = self.sequence.get();
        let mut bytes = batch.bytes.clone();
        for (part, sequence) in batch.parts.iter().zip(base..) {
            bytes[part.start + 8..part.start + 12].copy_from_slice(&sequence.to_ne_bytes());
        }
        self.sequence.set(base.wrapping_add(batch.parts.len() as u32));
        rustix::net::send(&self.socket, &bytes, SendFlags::empty()).doing(|| "sending to netlink")?;
        Ok(base)
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            match rustix::net::recv(&self.socket, &mut *buffer, RecvFlags::empty()) {
                Ok((length, _)) => return Ok(length),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).doing(|| "reading from netlink"),
            }
        }
    }
}

/// A request within a [`Batch`].
#[derive(Debug)]
struct Part {
    what: String,
    start: usize,
    tolerated: Vec<i32>,
}

/// Requests that are sent together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    parts: Vec<Part>,
}

impl Batch {
    /// A pair of interfaces, both down: `near` here, `far` in that namespace.
    pub(crate) fn pair(
        &mut self,
        near: &End<'_>,
        far: &End<'_>,
        into: BorrowedFd<'_>,
        mtu: u32,
    ) -> &mut Self {
        const IFLA_LINKINFO: u16 = 18;
        const IFLA_NET_NS_FD: u16 = 28;
        const IFLA_INFO_DATA: u16 = 2;
        const VETH_INFO_PEER: u16 = 1;
        let into = into.as_raw_fd().to_ne_bytes();
        self.put(
            format!("making the link {}", near.name),
            libc::RTM_NEWLINK,
            NEW,
            &interface(near.index, 0),
        );
        self.end(near, mtu).nest(IFLA_LINKINFO, |info| {
            info.attribute(KIND, b"veth").nest(IFLA_INFO_DATA, |data| {
                data.nest(VETH_INFO_PEER, |peer| {
                    peer.bytes.extend(interface(far.index, 0));
                    peer.end(far, mtu).attribute(IFLA_NET_NS_FD, &into);
                });
            });
        })
    }

    fn end(&mut self, end: &End<'_>, mtu: u32) -> &mut Self {
        const IFLA_ADDRESS: u16 = 1;
        const IFLA_IFNAME: u16 = 3;
        const IFLA_MTU: u16 = 4;
        const IFLA_NUM_TX_QUEUES: u16 = 31;
        const IFLA_NUM_RX_QUEUES: u16 = 32;
        self.attribute(IFLA_IFNAME, end.name.as_bytes())
            .attribute(IFLA_ADDRESS, &end.mac)
            .attribute(IFLA_MTU, &mtu.to_ne_bytes())
            // Else as many as there are processors, which is slow to make.
            .attribute(IFLA_NUM_TX_QUEUES, &1_u32.to_ne_bytes())
            .attribute(IFLA_NUM_RX_QUEUES, &1_u32.to_ne_bytes())
    }

    pub(crate) fn up(&mut self, index: u32) -> &mut Self {
        self.put(
            "switching an interface on",
            libc::RTM_NEWLINK,
            CHANGE,
            &interface(index, UP),
        )
    }

    /// Leaves a text with an interface.
    pub(crate) fn alias(&mut self, index: u32, alias: &str) -> &mut Self {
        self.put(
            "naming an interface",
            libc::RTM_NEWLINK,
            CHANGE,
            &interface(index, 0),
        )
        .attribute(IFLA_IFALIAS, alias.as_bytes())
    }

    /// Takes the text away and puts an interface, which may be gone already, among those that [`Batch::remove_all`] removes.
    pub(crate) fn leave(&mut self, index: u32) -> &mut Self {
        self.put(
            "giving up a link",
            libc::RTM_NEWLINK,
            CHANGE,
            &interface(index, 0),
        )
        .attribute(IFLA_IFALIAS, &[])
        .attribute(IFLA_GROUP, &LEAVING.to_ne_bytes())
        .tolerate(libc::ENODEV)
    }

    /// Removes all pairs that were left, which takes hardly longer than one.
    pub(crate) fn remove_all(&mut self) -> &mut Self {
        self.put("removing links", libc::RTM_DELLINK, CHANGE, &interface(0, 0))
            .attribute(IFLA_GROUP, &LEAVING.to_ne_bytes())
            // There are none.
            .tolerate(libc::ENODEV)
    }

    /// Gives an interface this one address and no network around it.
    pub(crate) fn address(&mut self, index: u32, address: IpAddr) -> &mut Self {
        const IFA_ADDRESS: u16 = 1;
        const IFA_LOCAL: u16 = 2;
        // Nobody else is there who could have it.
        const IFA_F_NODAD: u8 = 2;
        let (family, bytes) = encoded(address);
        let mut header = vec![family, bytes.len() as u8 * 8, IFA_F_NODAD, 0];
        header.extend(index.to_ne_bytes());
        self.put(
            format!("adding the address {address}"),
            libc::RTM_NEWADDR,
            NEW,
            &header,
        )
        .attribute(IFA_LOCAL, &bytes)
        .attribute(IFA_ADDRESS, &bytes)
    }

    /// Says whose hardware address this is, so that nobody asks for it.
    pub(crate) fn neighbour(&mut self, index: u32, address: IpAddr, mac: [u8; 6]) -> &mut Self {
        const NDA_DST: u16 = 1;
        const NDA_LLADDR: u16 = 2;
        const NUD_PERMANENT: u16 = 0x80;
        let (family, bytes) = encoded(address);
        let mut header = vec![family, 0, 0, 0];
        header.extend(index.to_ne_bytes());
        header.extend(NUD_PERMANENT.to_ne_bytes());
        header.extend([0, 0]);
        self.put(
            format!("adding the neighbour {address}"),
            libc::RTM_NEWNEIGH,
            PUT,
            &header,
        )
        .attribute(NDA_DST, &bytes)
        .attribute(NDA_LLADDR, &mac)
    }

    /// Everything else goes by this neighbour.
    pub(crate) fn default_route(&mut self, index: u32, gateway: IpAddr) -> &mut Self {
        const RTA_GATEWAY: u16 = 5;
        const RTNH_F_ONLINK: u32 = 4;
        let (family, bytes) = encoded(gateway);
        self.route(
            family,
            0,
            MAIN,
            libc::RTN_UNICAST,
            libc::RT_SCOPE_UNIVERSE,
            RTNH_F_ONLINK,
            index,
        )
        .attribute(RTA_GATEWAY, &bytes)
    }

    /// What we send to a guest goes to its link.
    pub(crate) fn guest_route(&mut self, index: u32, address: IpAddr) -> &mut Self {
        let (family, bytes) = encoded(address);
        let prefix = bytes.len() as u8 * 8;
        self.route(
            family,
            prefix,
            GUESTS,
            libc::RTN_UNICAST,
            libc::RT_SCOPE_LINK,
            0,
            index,
        )
        .attribute(RTA_DST, &bytes)
    }

    /// Every address is one of ours.
    pub(crate) fn any_address(&mut self, family: u8) -> &mut Self {
        self.route(
            family,
            0,
            LOCAL,
            libc::RTN_LOCAL,
            libc::RT_SCOPE_HOST,
            0,
            LOOPBACK,
        )
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of `struct rtmsg`")]
    fn route(
        &mut self,
        family: u8,
        prefix: u8,
        table: u8,
        kind: u8,
        scope: u8,
        flags: u32,
        index: u32,
    ) -> &mut Self {
        const RTA_OIF: u16 = 4;
        const RTPROT_STATIC: u8 = 4;
        let mut header = vec![family, prefix, 0, 0, table, RTPROT_STATIC, scope, kind];
        header.extend(flags.to_ne_bytes());
        self.put("adding a route", libc::RTM_NEWROUTE, NEW, &header)
            .attribute(RTA_OIF, &index.to_ne_bytes())
    }

    /// Of a new namespace, whose rules are the kernel's: packets of our own look for guests first, and only then whether
    /// the address is ours. All others are ours, whatever their address, also if that is another guest's.
    pub(crate) fn guests_first(&mut self, family: u8) -> &mut Self {
        const FRA_IIFNAME: u16 = 3;
        self.rule("adding a rule", libc::RTM_NEWRULE, NEW, family, GUESTS, 10)
            .attribute(FRA_IIFNAME, b"lo\0")
            .rule("adding a rule", libc::RTM_NEWRULE, NEW, family, LOCAL, 20)
            // The first that leads there: the kernel's own.
            .rule("removing a rule", libc::RTM_DELRULE, CHANGE, family, LOCAL, 0)
    }

    fn rule(&mut self, what: &str, kind: u16, flags: u16, family: u8, table: u8, priority: u32) -> &mut Self {
        const FRA_PRIORITY: u16 = 6;
        const FR_ACT_TO_TBL: u8 = 1;
        self.put(
            what,
            kind,
            flags,
            &[family, 0, 0, 0, table, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0],
        )
        .attribute(FRA_PRIORITY, &priority.to_ne_bytes())
    }

    /// Every packet that comes in by this interface is put before the program, from now on, whoever lives.
    pub(crate) fn check_incoming(&mut self, index: u32, program: BorrowedFd<'_>) -> &mut Self {
        const TCA_OPTIONS: u16 = 2;
        const TCA_BPF_FD: u16 = 6;
        const TCA_BPF_NAME: u16 = 7;
        const TCA_BPF_FLAGS: u16 = 8;
        const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
        const TC_H_CLSACT: u32 = 0xffff_fff1;
        const TC_H_MIN_INGRESS: u32 = 0xffff_fff2;
        let traffic = |handle: u32, parent: u32, info: u32| {
            let mut header = vec![0; 4];
            for field in [index, handle, parent, info] {
                header.extend(field.to_ne_bytes());
            }
            header
        };
        let every_protocol = u32::from((libc::ETH_P_ALL as u16).to_be());
        let program = program.as_raw_fd().to_ne_bytes();
        self.put(
            "preparing the source check of a link",
            libc::RTM_NEWQDISC,
            NEW,
            &traffic(0xffff_0000, TC_H_CLSACT, 0),
        )
        .attribute(KIND, b"clsact\0")
        .tolerate(libc::EEXIST)
        .put(
            "adding the source check to a link",
            libc::RTM_NEWTFILTER,
            NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE,
            &traffic(1, TC_H_MIN_INGRESS, 1 << 16 | every_protocol),
        )
        .attribute(KIND, b"bpf\0")
        .nest(TCA_OPTIONS, |options| {
            options
                .attribute(TCA_BPF_FD, &program)
                .attribute(TCA_BPF_NAME, b"atoll-source\0")
                .attribute(TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
        })
    }

    /// Begins a request; attributes follow.
    fn put(&mut self, what: impl Into<String>, kind: u16, flags: u16, header: &[u8]) -> &mut Self {
        self.parts.push(Part {
            what: what.into(),
            start: self.bytes.len(),
            tolerated: Vec::new(),
        });
        self.bytes.extend(0_u32.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(flags.to_ne_bytes());
        // Its number, which it gets when it is sent, and who sends it.
        self.bytes.extend([0; 8]);
        self.bytes.extend(header);
        self.pad();
        self
    }

    /// This answer to the last request is fine as well.
    fn tolerate(&mut self, error: i32) -> &mut Self {
        if let Some(part) = self.parts.last_mut() {
            part.tolerated.push(error);
        }
        self
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.bytes.extend((value.len() as u16 + 4).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.pad();
        self
    }

    fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) -> &mut Self {
        let start = self.bytes.len();
        self.attribute(kind, &[]);
        fill(self);
        let length = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self
    }

    /// Everything starts at a multiple of four; the last request ends here for now.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        if let Some(part) = self.parts.last() {
            let length = (self.bytes.len() - part.start) as u32;
            self.bytes[part.start..part.start + 4].copy_from_slice(&length.to_ne_bytes());
        }
    }
}

/// `struct ifinfomsg`.
fn interface(index: u32, flags: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    // Which of the flags count.
    header[12..16].copy_from_slice(&flags.to_ne_bytes());
    header
}

fn encoded(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, address.octets().to_vec()),
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[derive(Debug)]
struct Message<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

impl Message<'_> {
    /// To which request this is the answer, and the errno, 0 if it was carried out.
    fn acknowledged<'b>(&self, batch: &'b Batch, base: u32) -> Option<(&'b Part, i32)> {
        let part = batch.parts.get(self.sequence.wrapping_sub(base) as usize)?;
        let is_answer = i32::from(self.kind) == libc::NLMSG_ERROR;
        is_answer.then_some((part, -(number(self.body, 0)? as i32)))
    }
}

/// The messages in what was received.
#[derive(Debug)]
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let length = number(self.0, 0)? as usize;
        let sequence = number(self.0, 8)?;
        let message = self.0.get(..length).filter(|bytes| bytes.len() >= HEADER)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([message[4], message[5]]),
            sequence,
            body: &message[HEADER..],
        })
    }
}

/// The attributes of a message: kind and value.
#[derive(Debug)]
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header = self.0.get(..4)?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]);
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}
