//! How an action ends.

use std::borrow::Cow;

use atoll_types::{Fault, FaultKind};

/// The most that a result may hold, as text: workflows keep it in their history, and models read it.
pub const MOST: usize = 1024 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a JSON text.
    Done(Vec<u8>),
    /// A person was asked, and has not answered. The engine tells the workflow when they have.
    Asked,
}

/// What was refused or went wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// A stable name that programs tell failures apart by: a fault's code, or one that is spelled `LikeThis`.
    pub kind: Cow<'static, str>,
    pub message: String,
    /// Whether another attempt may go better.
    pub again: bool,
}

impl Failure {
    pub(crate) fn new(kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            message: message.into(),
            again: false,
        }
    }

    /// The input is not what the action takes.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new("InvalidInput", message)
    }

    pub(crate) fn too_large() -> Self {
        Self::new(
            "TooLarge",
            format!("the answer is larger than {MOST} bytes, the most that a step may return"),
        )
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self {
            kind: fault.code.text().into(),
            again: may_help(fault.kind()),
            message: fault.to_string(),
        }
    }
}

/// Whether time may help: not where the request itself, or the state of what it names, is in the way.
fn may_help(kind: FaultKind) -> bool {
    match kind {
        FaultKind::LimitExceeded
        | FaultKind::GuestFailed
        | FaultKind::Unavailable
        | FaultKind::TimedOut
        | FaultKind::Internal => true,
        FaultKind::Invalid
        | FaultKind::Unauthenticated
        | FaultKind::Forbidden
        | FaultKind::NotFound
        | FaultKind::Conflict
        | FaultKind::Gone
        | FaultKind::TooLarge
        | FaultKind::Unsupported => false,
    }
}

#[cfg(test)]
mod tests {
    use atoll_types::Code;

    use super::*;

    /// Whoever speaks HTTP tries again on 429 and 5xx, and so do workflows.
    #[test]
    fn the_same_is_tried_again_as_over_http() {
        // The client took too long to send, and what a sandbox met on its own way out: no action is answered with these.
        let of_connections = [
            Code::BodyTooSlow,
            Code::RequestTooLong,
            Code::UpstreamUnreachable,
            Code::UpstreamTlsFailed,
            Code::UpstreamFailed,
            Code::UpstreamEncoded,
        ];
        for code in Code::SECTIONS.iter().flat_map(|(_, codes)| *codes) {
            let status = atoll_front::status::http(*code).as_u16();
            let failure = Failure::from(Fault::new(*code, "no").hint("go home"));
            assert_eq!((&*failure.kind, &*failure.message), (code.text(), "no (go home)"));
            if !of_connections.contains(code) {
                assert_eq!(
                    failure.again,
                    status == 429 || status >= 500,
                    "{code:?}: {status}"
                );
            }
        }
    }
}
