//! A byte stream to a port inside the sandbox, with half-close and back-pressure both ways.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use atoll_guest_protocol::{FRAME_COST, FailureKind, MAX_PAYLOAD, Message, SUB_MAIN};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType};

use crate::failure::{Outcome, failure, from_io};
use crate::job::{Context, Job, Shared, Step};
use crate::poll::{EventFlags, Poller, Token};

#[derive(Debug)]
pub(crate) struct Connect {
    socket: OwnedFd,
    port: u16,
    phase: Phase,
    readable: bool,
    writable: bool,
    /// Bytes of the host that the socket had no room for; bounded by the stream's window.
    waiting: VecDeque<u8>,
    /// The host will send no more; the socket is shut down once `waiting` is out.
    host_over: bool,
    write_over: bool,
    read_over: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Whether the answer is there is told by the first event.
    Connecting {
        address: Address,
        answered: bool,
    },
    Announcing,
    Open,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Address {
    V4,
    V6,
}

impl Connect {
    pub(crate) fn open(port: u16, stream: u32, shared: &Shared) -> Outcome<Box<dyn Job>> {
        let (socket, answered, address) = match dial(Address::V4, port, stream, &shared.poller) {
            Ok((socket, answered)) => (socket, answered, Address::V4),
            Err(_) => {
                let (socket, answered) =
                    dial(Address::V6, port, stream, &shared.poller).map_err(|error| refused(port, &error))?;
                (socket, answered, Address::V6)
            }
        };
        Ok(Box::new(Self {
            socket,
            port,
            phase: Phase::Connecting { address, answered },
            readable: false,
            writable: false,
            waiting: VecDeque::new(),
            host_over: false,
            write_over: false,
            read_over: false,
        }))
    }

    fn settle(&mut self, address: Address, cx: &mut Context<'_>) -> Step {
        let result = match rustix::net::sockopt::socket_error(&self.socket) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) | Err(error) => Err(error),
        };
        match (result, address) {
            (Ok(()), _) => {
                self.phase = Phase::Announcing;
                Step::Again
            }
            // Servers that listen on ::1 only.
            (Err(_), Address::V4) => match dial(Address::V6, self.port, cx.port.id(), &cx.shared.poller) {
                Ok((socket, answered)) => {
                    self.socket = socket;
                    self.phase = Phase::Connecting {
                        address: Address::V6,
                        answered,
                    };
                    if answered { Step::Again } else { Step::Wait }
                }
                Err(error) => Step::Done(Err(refused(self.port, &error))),
            },
            (Err(error), Address::V6) => Step::Done(Err(refused(self.port, &error.into()))),
        }
    }

    /// Writes what waits, as far as the socket takes it.
    fn drain(&mut self, cx: &mut Context<'_>) {
        let mut waiting = std::mem::take(&mut self.waiting);
        while !waiting.is_empty() && (self.writable || self.write_over) {
            let done = match self.write_over {
                true => waiting.len(),
                false => self.write(waiting.as_slices().0).unwrap_or(0),
            };
            waiting.drain(..done);
            cx.consumed(done);
        }
        self.waiting = waiting;
        if self.host_over && self.waiting.is_empty() && !self.write_over {
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
            self.write_over = true;
        }
    }

    /// `None` when the socket is full. A peer that no longer listens takes everything.
    fn write(&mut self, bytes: &[u8]) -> Option<usize> {
        loop {
            match rustix::net::send(&self.socket, bytes, rustix::net::SendFlags::NOSIGNAL) {
                Ok(count) => return Some(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.writable = false;
                    return None;
                }
                Err(_) => {
                    self.write_over = true;
                    return Some(bytes.len());
                }
            }
        }
    }

    fn pass_on(&mut self, cx: &mut Context<'_>) -> Step {
        if self.read_over && self.write_over {
            return Step::Done(Ok(()));
        }
        if self.read_over || !self.readable || cx.port.data_room() == 0 {
            return Step::Wait;
        }
        let (port, out) = (&mut *cx.port, &mut cx.shared.out);
        let read = port.data_with(out, SUB_MAIN, MAX_PAYLOAD, |space| {
            Ok(rustix::io::read(&self.socket, space)?)
        });
        match read {
            Ok(0) => {
                port.data(out, SUB_MAIN, &[]);
                self.read_over = true;
                Step::Again
            }
            Ok(_) => Step::Again,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => {
                    self.readable = false;
                    Step::Wait
                }
                Some(libc::EINTR) => Step::Again,
                _ => Step::Done(Err(from_io(format!("port {}", self.port), &error))),
            },
        }
    }
}

impl Job for Connect {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        match self.phase {
            Phase::Connecting { answered: false, .. } => Step::Wait,
            Phase::Connecting { address, .. } => self.settle(address, cx),
            Phase::Announcing => {
                if !cx.message(&Message::Connected) {
                    return Step::Wait;
                }
                self.phase = Phase::Open;
                self.readable = true;
                self.writable = true;
                Step::Again
            }
            Phase::Open => {
                self.drain(cx);
                self.pass_on(cx)
            }
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
        cx.consumed(FRAME_COST as usize);
        if bytes.is_empty() {
            self.host_over = true;
        } else if !self.host_over {
            let mut done = 0;
            if self.phase == Phase::Open && self.waiting.is_empty() && self.writable && !self.write_over {
                done = self.write(bytes).unwrap_or(0);
                cx.consumed(done);
            }
            self.waiting.extend(&bytes[done..]);
        }
        Ok(())
    }

    fn ready(&mut self, flags: EventFlags) {
        if let Phase::Connecting { answered, .. } = &mut self.phase {
            *answered = true;
        }
        let gone = EventFlags::HUP | EventFlags::ERR;
        self.readable |= flags.intersects(EventFlags::IN | EventFlags::RDHUP | gone);
        self.writable |= flags.intersects(EventFlags::OUT | gone);
    }
}

/// Whether it is already decided.
fn dial(address: Address, port: u16, stream: u32, poller: &Poller) -> io::Result<(OwnedFd, bool)> {
    let (family, to) = match address {
        Address::V4 => (AddressFamily::INET, SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        Address::V6 => (
            AddressFamily::INET6,
            SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
        ),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
    let answered = match rustix::net::connect(&socket, &to) {
        Ok(()) => true,
        Err(Errno::INPROGRESS) => false,
        Err(error) => return Err(error.into()),
    };
    poller.watch(&socket, Token::Stream(stream))?;
    Ok((socket, answered))
}

fn refused(port: u16, error: &io::Error) -> atoll_guest_protocol::Failure {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED | libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT | libc::ENETUNREACH) => {
            failure(FailureKind::Refused, format!("nothing listens on port {port}"))
        }
        _ => from_io(format!("cannot connect to port {port}"), error),
    }
}
