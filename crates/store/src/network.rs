//! What has gone in and out of sandboxes over their whole lives: what budgets are held against.

use atoll_types::SandboxId;

use crate::{Error, Store, sql};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NetworkTotal {
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub connections: u64,
}

impl Store {
    /// Adds to what was counted; nothing happens where the sandbox is forgotten by now.
    pub async fn add_network_usage(&self, sandbox: &SandboxId, more: NetworkTotal) -> Result<(), Error> {
        let sandbox = sandbox.clone();
        self.write("count network usage", move |db| {
            // Never past what the column holds: a sum there would turn into a floating point number.
            sql::execute(
                db,
                "INSERT INTO network_usage (sandbox, bytes_up, bytes_down, connections)
                 SELECT id, ?2, ?3, ?4 FROM sandboxes WHERE id = ?1
                 ON CONFLICT (sandbox) DO UPDATE SET
                     bytes_up = bytes_up + min(excluded.bytes_up, 9223372036854775807 - bytes_up),
                     bytes_down = bytes_down + min(excluded.bytes_down, 9223372036854775807 - bytes_down),
                     connections = connections + min(excluded.connections, 9223372036854775807 - connections)",
                &[
                    &sandbox.as_str(),
                    &sql::as_count(more.bytes_up),
                    &sql::as_count(more.bytes_down),
                    &sql::as_count(more.connections),
                ],
            )?;
            Ok(())
        })
        .await
    }

    /// All that was counted; nothing for one that is not known.
    pub async fn network_usage(&self, sandbox: &SandboxId) -> Result<NetworkTotal, Error> {
        let sandbox = sandbox.clone();
        self.read("read network usage", move |db| {
            let found = sql::row(
                db,
                "SELECT * FROM network_usage WHERE sandbox = ?1",
                &[&sandbox.as_str()],
                |row| {
                    Ok(NetworkTotal {
                        bytes_up: sql::count(row, "bytes_up")?,
                        bytes_down: sql::count(row, "bytes_down")?,
                        connections: sql::count(row, "connections")?,
                    })
                },
            )?;
            Ok(found.unwrap_or_default())
        })
        .await
    }
}
