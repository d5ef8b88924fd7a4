//! A provider's key on its way into a request, and out of the answer.
//!
//! What must hold: a key goes to the address that it was set for, also where a call knows the provider as it was before its
//! last change. Whatever a provider says is searched for the key that it was sent, at every status and on every path; a
//! provider that wants to repeat it in a form of its own still can.

use atoll_broker::{Redactor, Scanner};
use atoll_providers::{Blot, Call, Error, Ready};
use bytes::Bytes;

use crate::Models;
use crate::setup::KnownProvider;

/// The key in what its provider says.
struct Echo {
    redactor: Redactor,
    scanner: Scanner,
}

impl Blot for Echo {
    fn text(&self, text: &str) -> String {
        self.redactor.text(text)
    }

    fn piece(&mut self, piece: Bytes) -> Bytes {
        self.scanner.push(piece)
    }

    fn rest(&mut self) -> Bytes {
        self.scanner.finish()
    }
}

impl Models {
    /// Puts the provider's key into a call, where it has one.
    pub(crate) fn with_key(&self, provider: &KnownProvider, call: Call<'_>) -> Result<Ready, Error> {
        let now = self.now();
        if provider.row.sealed.is_none() {
            return call.with_key(None, now);
        }
        let version = provider
            .key
            .ok_or_else(|| Error::Unusable("its key cannot be opened".into()))?;
        let put = |key: &[u8], redactor: Redactor| {
            let echo = Echo {
                scanner: redactor.clone().scanner(),
                redactor,
            };
            Ok(call.with_key(Some(key), now)?.blotting(Box::new(echo)))
        };
        self.inner
            .broker
            .lend(&provider.row.id, version, now, put)
            .unwrap_or_else(|| {
                Err(Error::Unusable(
                    "it was given another key, or removed, while the call was under way".into(),
                ))
            })
    }
}
