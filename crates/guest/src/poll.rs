//! What the loop sleeps on: one epoll, whose events name their owner.
//!
//! The channel is level-triggered, so that nothing is missed when a checkpoint is restored under it. Everything else is
//! edge-triggered and registered once: owners remember readiness themselves and clear it when a call would block, so
//! that back-pressure costs no system call.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;
pub(crate) use rustix::event::epoll::EventFlags;
use rustix::time::Timespec;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    Input,
    Output,
    Signals,
    Stream(u32),
    Command(u32, End),
}

/// Which of a command's descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Stdin,
    Stdout,
    Stderr,
    Terminal,
}

impl Token {
    fn pack(self) -> u64 {
        let (tag, id) = match self {
            Self::Input => (0, 0),
            Self::Output => (1, 0),
            Self::Signals => (2, 0),
            Self::Stream(id) => (3, id),
            Self::Command(id, End::Stdin) => (4, id),
            Self::Command(id, End::Stdout) => (5, id),
            Self::Command(id, End::Stderr) => (6, id),
            Self::Command(id, End::Terminal) => (7, id),
        };
        tag << 32 | u64::from(id)
    }

    fn unpack(packed: u64) -> Self {
        let id = packed as u32; // the lower half, as packed
        match packed >> 32 {
            0 => Self::Input,
            1 => Self::Output,
            2 => Self::Signals,
            3 => Self::Stream(id),
            4 => Self::Command(id, End::Stdin),
            5 => Self::Command(id, End::Stdout),
            6 => Self::Command(id, End::Stderr),
            _ => Self::Command(id, End::Terminal),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        })
    }

    pub(crate) fn add(&self, fd: impl AsFd, token: Token, interest: EventFlags) -> io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), interest)?;
        Ok(())
    }

    /// Edge-triggered, both ways: for everything but the channel.
    pub(crate) fn watch(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        let both = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        self.add(fd, token, both)
    }

    pub(crate) fn change(&self, fd: impl AsFd, token: Token, interest: EventFlags) -> io::Result<()> {
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), interest)?;
        Ok(())
    }

    /// Sleeps until something happens or the time is over, and appends what happened.
    pub(crate) fn wait(
        &self,
        timeout: Option<std::time::Duration>,
        happened: &mut Vec<(Token, EventFlags)>,
    ) -> io::Result<()> {
        let mut events = [epoll::Event {
            flags: EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        // Rounded up: a timer that fires early would spin.
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.tv_sec.min(86_400),
            tv_nsec: timeout.tv_nsec,
        });
        match epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()) {
            Ok(count) => {
                // Copied out: the struct is packed on x86-64.
                happened.extend(events[..count].iter().map(|event| {
                    let (data, flags) = (event.data, event.flags);
                    (Token::unpack(data.u64()), flags)
                }));
                Ok(())
            }
            Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_packing() {
        for token in [
            Token::Input,
            Token::Output,
            Token::Signals,
            Token::Stream(u32::MAX),
            Token::Command(7, End::Stdin),
            Token::Command(u32::MAX, End::Terminal),
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
