//! Why an instance could not be started, taken over or saved.
//!
//! What must hold: whoever decides by the sort of trouble looks at its [`Kind`] and never into a text. Where words are all
//! that another program gives, they are read once, where they come in ([`Cause::said`]).

use std::io;

use serde::{Deserialize, Serialize};

use crate::cgroup::CgroupError;
use crate::channel::ChannelError;

/// How much of another program's words is passed on.
const LONGEST: usize = 2000;

/// The sort of trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// The disk of the host is full; not that of an instance.
    HostFull,
    /// The host refused something else.
    Io,
    /// The sentry, `runsc` or the jailer failed.
    Program,
    /// Something took longer than it may.
    TimedOut,
    /// What was saved is damaged, or not what can be restored.
    Saved,
    /// The limits, and what they hold for: the cgroup.
    Limits,
    /// The agent, or the channel to it.
    Agent,
    /// What was restored does not answer: whoever had it before saw to that.
    Silent,
    /// The instance is gone, or in no state for this.
    State,
    /// What was asked for cannot be had, from this tier or on this host.
    Unsupported,
    /// Whoever did it was stopped half way.
    Interrupted,
}

impl Kind {
    fn of(error: &io::Error) -> Self {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Cause>());
        match (inner, error.kind()) {
            (Some(cause), _) => cause.kind(),
            (None, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => Self::HostFull,
            (None, io::ErrorKind::TimedOut) => Self::TimedOut,
            (None, _) => Self::Io,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// A call to the host failed.
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Limits(#[from] CgroupError),
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Interrupted(#[from] tokio::task::JoinError),
    #[error(transparent)]
    Told(#[from] Told),
    /// A cause, and what else was found.
    #[error("{cause}{between}{more}")]
    With {
        #[source]
        cause: Box<Self>,
        between: &'static str,
        more: Told,
    },
}

/// A cause of which no more is left, or ever was there, than a sentence. It can be sent to another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Told {
    pub kind: Kind,
    pub text: String,
}

impl Told {
    pub fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    /// The words of a program of the host that writes into the host's files: of the sentry too, which has no more to lose
    /// by a lie than its own guest. It gives no error numbers; this is how C and Go put the one that is not its own fault.
    pub(crate) fn by_host(words: &str) -> Self {
        let full = words.to_lowercase().contains("no space left on device");
        Self::by(if full { Kind::HostFull } else { Kind::Program }, words)
    }

    /// The words of whoever sees only an instance, and so not the disk of the host.
    pub(crate) fn by(kind: Kind, words: &str) -> Self {
        Self::new(kind, words.chars().take(LONGEST).collect::<String>())
    }
}

impl Cause {
    pub fn new(kind: Kind, text: impl Into<String>) -> Self {
        Told::new(kind, text).into()
    }

    /// What a program of the host said; see [`Told::by_host`].
    pub(crate) fn said(words: &str) -> Self {
        Told::by_host(words).into()
    }

    pub(crate) fn with(self, between: &'static str, more: Option<Told>) -> Self {
        match more {
            Some(more) => Self::With {
                cause: Box::new(self),
                between,
                more,
            },
            None => self,
        }
    }

    pub fn kind(&self) -> Kind {
        match self {
            Self::Io { source, .. } => Kind::of(source),
            Self::Limits(_) => Kind::Limits,
            Self::Channel(ChannelError::TimedOut(_)) => Kind::TimedOut,
            Self::Channel(_) => Kind::Agent,
            Self::Interrupted(_) => Kind::Interrupted,
            Self::Told(told) => told.kind,
            // A process that ends because the disk is full may say so only in its log.
            Self::With { more, .. } if more.kind == Kind::HostFull => Kind::HostFull,
            Self::With { cause, .. } => cause.kind(),
        }
    }
}

impl From<Cause> for Told {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Told(told) => told,
            other => Self::new(other.kind(), other.to_string()),
        }
    }
}

impl From<&io::Error> for Told {
    fn from(error: &io::Error) -> Self {
        Self::new(Kind::of(error), error.to_string())
    }
}

/// Keeps its kind.
impl From<Cause> for io::Error {
    fn from(cause: Cause) -> Self {
        let kind = match cause.kind() {
            Kind::HostFull => io::ErrorKind::StorageFull,
            Kind::TimedOut => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, cause)
    }
}

impl From<CgroupError> for io::Error {
    fn from(error: CgroupError) -> Self {
        Cause::from(error).into()
    }
}

impl From<Told> for io::Error {
    fn from(told: Told) -> Self {
        Cause::from(told).into()
    }
}

impl crate::Error {
    /// What sort of trouble it is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Start { source, .. } | Self::Adopt { source, .. } | Self::Save { source, .. } => {
                source.kind()
            }
            Self::NotFound(_) => Kind::State,
            Self::Generation { .. } => Kind::Agent,
            Self::Io { source, .. } => Kind::of(source),
        }
    }
}

/// Says what was being done when a call to the host failed.
pub(crate) trait Doing<T> {
    fn doing<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T, Cause>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T, Cause> {
        self.map_err(|source| Cause::Io {
            what: what().into(),
            source: source.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_survives_every_way_up() {
        let full = || Err::<(), _>(io::Error::from(io::ErrorKind::StorageFull)).doing(|| "writing");
        let cause = full().unwrap_err();
        assert_eq!(cause.kind(), Kind::HostFull);
        let (text, told) = (cause.to_string(), Told::from(cause));
        assert_eq!((told.kind, &told.text), (Kind::HostFull, &text));
        let again = Err::<(), _>(io::Error::from(told))
            .doing(|| "asking")
            .unwrap_err();
        assert_eq!(again.kind(), Kind::HostFull);
        assert_eq!(again.to_string(), format!("asking: {text}"));
        for kind in [Kind::Saved, Kind::TimedOut, Kind::Agent] {
            let wrapped = io::Error::from(Cause::new(kind, "x"));
            assert_eq!(Told::from(&wrapped), Told::new(kind, "x"));
        }
    }

    #[test]
    fn only_the_host_s_programs_know_of_its_disk() {
        for words in [
            "write x: no space left on device",
            "No space left on device (os error 28)",
        ] {
            assert_eq!(Told::by_host(words).kind, Kind::HostFull);
            assert_eq!(Told::by(Kind::Agent, words).kind, Kind::Agent);
        }
        assert_eq!(Told::by_host("no").kind, Kind::Program);
        assert_eq!(Told::by_host(&"é".repeat(9999)).text.chars().count(), LONGEST);
        let gone = Cause::new(Kind::Program, "it ended");
        let logged = gone.with(": ", Some(Told::by_host("no space left on device")));
        assert_eq!(logged.to_string(), "it ended: no space left on device");
        assert_eq!(logged.kind(), Kind::HostFull);
    }
}
