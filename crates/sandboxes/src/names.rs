//! Sandboxes by name.
//!
//! What must hold: of all living sandboxes of a project, at most one has a name; the store sees to that, in the commit that
//! gives it. So a name means one sandbox at a time, and another one only after that is over.

use atoll_types::{Code, Fault, SandboxId, SandboxName};

use crate::faults::from_store;
use crate::{Caller, Sandboxes};

impl Sandboxes {
    /// The living sandbox of the caller's project that has this name.
    pub async fn named(&self, caller: &Caller, name: &str) -> Result<SandboxId, Fault> {
        let found = match name.parse::<SandboxName>() {
            Ok(name) => {
                self.store()
                    .sandboxes
                    .sandbox_named(caller.project(), &name)
                    .await
            }
            // Nothing can have it.
            Err(_) => Ok(None),
        };
        found.map_err(|e| from_store(&e))?.ok_or_else(|| {
            Fault::new(
                Code::SandboxNotFound,
                "there is no living sandbox of this name in the project",
            )
            .hint("`atoll ls` shows those that live; ids begin with `sbx_`")
        })
    }
}

/// For whoever wants a name that a living sandbox has.
pub(crate) fn taken(error: &atoll_store::Error) -> Fault {
    Fault::new(Code::NameTaken, error.to_string())
        .hint("choose another name, or use the sandbox that has it; the name is free when that is deleted")
}
