//! What has gone in and out of sandboxes, in SQLite.

use async_trait::async_trait;
use atoll_types::SandboxId;

use super::{Sandboxes, sql};
use crate::{Error, NetworkTotal, NetworkUsageStore};

#[async_trait]
impl NetworkUsageStore for Sandboxes {
    async fn add_network_usage(&self, sandbox: &SandboxId, more: NetworkTotal) -> Result<(), Error> {
        let sandbox = sandbox.clone();
        self.file.write("count network usage", move |db| {
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

    async fn network_usage(&self, sandbox: &SandboxId) -> Result<NetworkTotal, Error> {
        let sandbox = sandbox.clone();
        self.file
            .read("read network usage", move |db| {
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
