//! A value that nobody can print.

use zeroize::Zeroizing;

use crate::BrokerError;

/// The value of a secret. It has no `Debug`, no `Display`, no `Clone` and no serialization on purpose, and is wiped when
/// dropped.
#[allow(
    missing_debug_implementations,
    reason = "whatever can be printed ends up in a log"
)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// As long as a head of a request can carry, with room for the rest of it.
    pub const MAX_BYTES: usize = 16 * 1024;

    pub fn new(value: Vec<u8>) -> Result<Self, BrokerError> {
        let value = Zeroizing::new(value);
        match value.len() {
            0 => Err(BrokerError::Empty),
            size if size > Self::MAX_BYTES => Err(BrokerError::TooLong {
                size,
                max: Self::MAX_BYTES,
            }),
            _ => Ok(Self(value)),
        }
    }

    /// From a file or a pipe, where a line usually ends with a newline that does not belong to the value.
    pub fn from_input(mut input: Vec<u8>) -> Result<Self, BrokerError> {
        if input.last() == Some(&b'\n') {
            input.pop();
            if input.last() == Some(&b'\r') {
                input.pop();
            }
        }
        Self::new(input)
    }

    pub(crate) fn expose(&self) -> &[u8] {
        &self.0
    }
}
