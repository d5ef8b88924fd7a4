//! What a request with an idempotency key makes has an id that follows from the key, so that whoever asks again, of this
//! server or of the next, finds it without a table of keys.

use atoll_types::{Code, CommandId, Fault, Id, Kind, SandboxId};
use sha2::{Digest as _, Sha256};

/// The id of what `key` makes of or in a sandbox. A fork is another sandbox, so its keys make other things.
pub(crate) fn id<K: Kind>(sandbox: &SandboxId, key: &str) -> Result<Id<K>, Fault> {
    check(key)?;
    let mut hash = Sha256::new();
    // No part can be mistaken for the next: prefixes and ids hold no line end.
    for part in [K::PREFIX, "\n", sandbox.as_str(), "\n", key] {
        hash.update(part);
    }
    let digest = hash.finalize();
    Ok(Id::from_entropy(std::array::from_fn(|at| digest[at])))
}

/// The command that an exec with `key` starts in a sandbox.
pub fn keyed_command(sandbox: &SandboxId, key: &str) -> Result<CommandId, Fault> {
    id(sandbox, key)
}

pub(crate) fn check(key: &str) -> Result<(), Fault> {
    if key.is_empty() || key.len() > 256 || key.chars().any(char::is_control) {
        return Err(Fault::new(
            Code::IdempotencyKeyInvalid,
            "an idempotency key has 1 to 256 printable characters",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use atoll_types::SnapshotId;

    use super::*;

    #[test]
    fn the_same_key_names_the_same_thing_and_no_other() {
        let one = SandboxId::from_entropy([1; 20]);
        let other = SandboxId::from_entropy([2; 20]);
        let command: CommandId = id(&one, "run/3").unwrap();
        assert_eq!(command, id(&one, "run/3").unwrap());
        assert_ne!(command, id(&one, "run/4").unwrap());
        assert_ne!(command, id(&other, "run/3").unwrap());
        let snapshot: SnapshotId = id(&one, "run/3").unwrap();
        assert_ne!(snapshot.bare(), command.bare());
        for bad in ["", "a\nb", &"k".repeat(257)] {
            let refused: Result<CommandId, Fault> = id(&one, bad);
            assert!(refused.is_err(), "{bad:?}");
        }
    }
}
