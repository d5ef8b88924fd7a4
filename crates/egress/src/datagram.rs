//! UDP sockets on which datagrams to many addresses arrive, and which answer from the address that was asked.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::AsRawFd;

use nix::libc;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, SockaddrIn6, SockaddrLike,
    SockaddrStorage, cmsg_space, recvmsg, sendmsg, setsockopt, sockopt,
};
use tokio::io::Interest;

/// One that takes what guests send.
#[derive(Debug)]
pub(crate) struct Datagrams {
    socket: tokio::net::UdpSocket,
}

/// What came: how long it is, from whom, and to which address it was sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub len: usize,
    pub source: SocketAddr,
    pub destination: SocketAddr,
}

impl Datagrams {
    pub(crate) fn new(socket: UdpSocket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        match socket.local_addr()? {
            SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4OrigDstAddr, &true)?,
            SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6OrigDstAddr, &true)?,
        }
        Ok(Self {
            socket: tokio::net::UdpSocket::from_std(socket)?,
        })
    }

    /// The next datagram that fits into `buffer`; longer ones, and those of which the kernel does not tell where they
    /// were sent, are dropped.
    pub(crate) async fn receive(&self, buffer: &mut [u8]) -> io::Result<Arrival> {
        loop {
            let arrival = self
                .socket
                .async_io(Interest::READABLE, || receive(&self.socket, buffer))
                .await?;
            if let Some(arrival) = arrival {
                return Ok(arrival);
            }
        }
    }

    /// Sends to `to` as if from `from`, at this socket's own port. Where the guest's queue is full it is lost, as
    /// datagrams may be.
    pub(crate) fn send(&self, data: &[u8], from: IpAddr, to: SocketAddr) -> io::Result<()> {
        self.socket
            .try_io(Interest::WRITABLE, || send(&self.socket, data, from, to))
    }
}

fn receive(socket: &impl AsRawFd, buffer: &mut [u8]) -> io::Result<Option<Arrival>> {
    let mut parts = [IoSliceMut::new(buffer)];
    // Whoever opened the socket may have asked for more to be told.
    let mut control = vec![0; cmsg_space::<libc::sockaddr_in6>() + cmsg_space::<libc::in6_pktinfo>() + 128];
    let message = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut control),
        MsgFlags::MSG_DONTWAIT,
    )?;
    if message.flags.contains(MsgFlags::MSG_TRUNC) {
        return Ok(None);
    }
    let destination = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4OrigDstAddr(address) => {
            Some(SocketAddr::V4(SocketAddrV4::from(SockaddrIn::from(address))))
        }
        ControlMessageOwned::Ipv6OrigDstAddr(address) => {
            Some(SocketAddr::V6(SocketAddrV6::from(SockaddrIn6::from(address))))
        }
        _ => None,
    });
    let source = message.address.as_ref().and_then(socket_address);
    Ok(source.zip(destination).map(|(source, destination)| Arrival {
        len: message.bytes,
        source,
        destination,
    }))
}

fn send(socket: &impl AsRawFd, data: &[u8], from: IpAddr, to: SocketAddr) -> io::Result<()> {
    let parts = [IoSlice::new(data)];
    let to = SockaddrStorage::from(to);
    let (four, six);
    let control = match from {
        IpAddr::V4(from) => {
            four = libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(from.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            ControlMessage::Ipv4PacketInfo(&four)
        }
        IpAddr::V6(from) => {
            six = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: from.octets(),
                },
                ipi6_ifindex: 0,
            };
            ControlMessage::Ipv6PacketInfo(&six)
        }
    };
    sendmsg(
        socket.as_raw_fd(),
        &parts,
        &[control],
        MsgFlags::MSG_DONTWAIT,
        Some(&to),
    )?;
    Ok(())
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    match address.family()? {
        AddressFamily::Inet => address.as_sockaddr_in().map(|a| SocketAddr::V4((*a).into())),
        AddressFamily::Inet6 => address.as_sockaddr_in6().map(|a| SocketAddr::V6((*a).into())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answered_from_where_it_was_asked(bind: &str, asked: &str) {
        let socket = UdpSocket::bind((bind, 0)).unwrap();
        // What the gateway's sockets have on as well.
        match socket.local_addr().unwrap() {
            SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4PacketInfo, &true).unwrap(),
            SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true).unwrap(),
        }
        let service = Datagrams::new(socket).unwrap();
        let port = service.socket.local_addr().unwrap().port();
        let asked = SocketAddr::new(asked.parse().unwrap(), port);
        let client = tokio::net::UdpSocket::bind((asked.ip(), 0)).await.unwrap();
        client.send_to(&[7; 100], asked).await.unwrap();
        client.send_to(b"question", asked).await.unwrap();
        let mut buffer = [0; 64];
        let arrival = service.receive(&mut buffer).await.unwrap();
        // The one that did not fit was dropped.
        assert_eq!(&buffer[..arrival.len], b"question");
        assert_eq!(arrival.destination, asked);
        assert_eq!(arrival.source, client.local_addr().unwrap());
        service
            .send(b"answer", arrival.destination.ip(), arrival.source)
            .unwrap();
        let (len, from) = client.recv_from(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..len], b"answer");
        assert_eq!(from, asked);
    }

    #[tokio::test]
    async fn version_4() {
        answered_from_where_it_was_asked("0.0.0.0", "127.0.0.53").await;
    }

    #[tokio::test]
    async fn version_6() {
        // Where the machine has no such loopback there is nothing to show.
        if UdpSocket::bind("[::1]:0").is_ok() {
            answered_from_where_it_was_asked("::", "::1").await;
        }
    }
}
