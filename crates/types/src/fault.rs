//! The one error that crosses from the application to the front ends.
//!
//! A fault says what was refused or went wrong, by which rule or limit, and what to do now. Front ends map its kind to
//! their own status; nobody below them knows a status. What went wrong is a [`Code`], and the kind follows from it.

use std::fmt;

use crate::Code;

/// Whose turn it is to act, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The request can never work as it stands.
    Invalid,
    /// No valid key came with the request.
    Unauthenticated,
    /// The key is valid but may not do this.
    Forbidden,
    /// The thing named does not exist in this project.
    NotFound,
    /// The thing exists but its state does not allow this now.
    Conflict,
    /// The thing existed and is gone for good.
    Gone,
    /// A limit or quota of the caller stands in the way.
    LimitExceeded,
    /// What was asked exceeds a size that the server accepts.
    TooLarge,
    /// This server or machine cannot do it at all (an isolation floor that cannot be met, a missing tool).
    Unsupported,
    /// The guest did something that its side of the protocol does not allow, or died.
    GuestFailed,
    /// Try again later: the server is starting, stopping or overloaded.
    Unavailable,
    /// It took longer than the caller allowed.
    TimedOut,
    /// Our own mistake.
    Internal,
}

#[derive(Debug, Clone)]
pub struct Fault {
    pub code: Code,
    /// One sentence for a person: what was refused and why.
    pub message: String,
    /// What to do about it, if anything useful can be said.
    pub hint: Option<String>,
    /// Which line it is about of what the caller wrote, from 1 on.
    pub line: Option<usize>,
}

impl Fault {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            hint: None,
            line: None,
        }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    #[must_use]
    pub fn at_line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }

    pub fn kind(&self) -> FaultKind {
        self.code.kind()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Fault {}
