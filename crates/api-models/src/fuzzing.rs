//! What the fuzzer may see: the requests of the gateway's own API.

use serde::de::DeserializeOwned;

use crate::manage::{budgets, catalogue, guards, keys, providers};

fn reads<T: DeserializeOwned>(body: &[u8], more: Option<&[u8]>) -> bool {
    let read = serde_json::from_slice::<T>(body).is_ok();
    if let (true, Some(more)) = (read, more) {
        assert!(
            serde_json::from_slice::<T>(more).is_err(),
            "{} takes fields that it does not know",
            std::any::type_name::<T>()
        );
    }
    read
}

/// Whether any route can do something with a body. `more` is the same object with an unknown field, which must be refused.
pub fn bodies(body: &[u8], more: Option<&[u8]>) -> bool {
    let read = [
        reads::<budgets::SetBudgetRequest>(body, more),
        reads::<catalogue::SetModelRequest>(body, more),
        reads::<catalogue::Rates>(body, more),
        reads::<guards::Guards>(body, more),
        reads::<keys::CreateModelKeyRequest>(body, more),
        reads::<providers::SetProviderRequest>(body, more),
    ];
    read.contains(&true)
}
