//! What outlives a server: its database, the vault of saved state, volumes, and files that only its user may read.

use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;

use atoll_client::output::{Doing, Error, Result};
use atoll_helper::front::Helper;
use atoll_identity::Identity;
use atoll_image::Templates;
use atoll_node::Bytes;
use atoll_sandboxes::Settings;
use atoll_store::Stores;
use atoll_vault::{Vault, VaultKey};
use atoll_volumes::Volumes;

use crate::config::Config;

/// Opens everything that outlives a server: what control writes down, and what the node keeps.
pub(super) async fn open(
    config: &Config,
    data: &Path,
    templates: Templates,
    helper: Option<&Helper>,
) -> Result<(Stores, Bytes)> {
    if helper.is_none() {
        fresh_scratch(data)?;
    }
    let store = open_store(data).await?;
    let key = config.vault_key.as_deref().map(read_vault_key).transpose()?;
    let dir = data.join("vault");
    let vault = tokio::task::spawn_blocking(move || Vault::open(dir, key))
        .await
        .doing("opening the vault")?
        .doing("cannot open the vault of saved state")?;
    let volumes = match helper {
        Some(helper) => helper.volumes(),
        None => Volumes::open(data.join("volumes")).doing("cannot open the volumes")?,
    };
    let bytes = Bytes {
        templates,
        vault,
        volumes,
    };
    Ok((store, bytes))
}

/// Who may do what, by the rows of this store.
pub(super) async fn identity(store: &Stores, settings: &Settings) -> Result<Identity> {
    let rows = Arc::clone(&store.identity);
    Ok(Identity::open(rows, &settings.data_dir, settings.now).await?)
}

/// An empty directory for what is on its way; a killed server may have left something there in the middle of an upload.
pub(crate) fn fresh_scratch(data: &Path) -> Result<()> {
    let scratch = data.join("scratch");
    let _absent = std::fs::remove_dir_all(&scratch);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&scratch)
        .doing("cannot create the scratch directory")
}

/// The key is a secret: readable by nobody else, and never on a command line.
fn read_vault_key(path: &Path) -> Result<VaultKey> {
    let doing = || format!("cannot read the vault key {}", path.display());
    VaultKey::parse(&read_private("the vault key", path)?).doing(doing())
}

pub(super) fn read_private(what: &str, path: &Path) -> Result<Vec<u8>> {
    let doing = || format!("cannot read {what} {}", path.display());
    let file = std::fs::metadata(path).doing(doing())?;
    if file.mode() & 0o077 != 0 {
        return Err(Error::new(format!(
            "{what} {} can be read by others; run: chmod 600 {}",
            path.display(),
            path.display()
        )));
    }
    std::fs::read(path).doing(doing())
}

async fn open_store(data: &Path) -> Result<Stores> {
    let path = data.join("atoll.db");
    let shown = path.clone();
    tokio::task::spawn_blocking(move || atoll_store::sqlite::open(&path))
        .await
        .doing("opening the database")?
        .doing(format_args!("cannot open the database {}", shown.display()))
}
