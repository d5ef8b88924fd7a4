//! The JSON documents of OCI and Docker images, as far as we read them.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};
use crate::store::is_digest;

/// Manifests and configs are small; anything larger is not one.
pub(super) const MAX_DOCUMENT: u64 = 8 << 20;
const MAX_LAYERS: usize = 1024;

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) digest: String,
    pub(crate) size: u64,
    pub(crate) platform: Option<Platform>,
    #[serde(default)]
    pub(crate) annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Platform {
    pub(crate) os: String,
    pub(crate) architecture: String,
}

/// An index has `manifests`, an image manifest `config` and `layers`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) schema_version: Option<u32>,
    pub(crate) config: Option<Descriptor>,
    pub(crate) layers: Option<Vec<Descriptor>>,
    pub(crate) manifests: Option<Vec<Descriptor>>,
}

/// One image in the `manifest.json` of `docker save`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct SavedImage {
    pub(crate) config: String,
    pub(crate) repo_tags: Option<Vec<String>>,
    pub(crate) layers: Vec<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct ImageConfig {
    #[serde(default)]
    pub(crate) os: String,
    #[serde(default)]
    pub(crate) architecture: String,
    #[serde(default)]
    pub(crate) config: RunConfig,
    pub(crate) rootfs: RootFs,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct RunConfig {
    #[serde(deserialize_with = "null_is_default")]
    pub(crate) env: Vec<String>,
    #[serde(deserialize_with = "null_is_default")]
    pub(crate) working_dir: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(crate) user: String,
    pub(crate) entrypoint: Option<Vec<String>>,
    pub(crate) cmd: Option<Vec<String>>,
    pub(crate) exposed_ports: Option<BTreeMap<String, serde_json::Value>>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct RootFs {
    pub(crate) diff_ids: Vec<String>,
}

fn null_is_default<'de, D: serde::Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Option::<T>::deserialize(from).map(Option::unwrap_or_default)
}

pub(crate) fn parse<T: DeserializeOwned>(image: &str, what: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| bad(image, format!("its {what} is not readable: {error}")))
}

pub(super) fn bad(image: &str, why: impl Into<String>) -> Error {
    Error::BadImage {
        image: image.to_owned(),
        why: why.into(),
    }
}

/// The hex part of a SHA-256 digest: checked, so it may become part of a path.
pub(super) fn sha256(image: &str, digest: &str) -> Result<String> {
    digest
        .strip_prefix("sha256:")
        .filter(|hex| is_digest(hex))
        .map(str::to_owned)
        .ok_or_else(|| {
            let digest: String = digest.chars().take(90).collect();
            bad(image, format!("`{digest}` is not a SHA-256 digest"))
        })
}

/// This machine's, as images name it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Picks what fits this machine from an index.
pub(crate) fn choose<'a>(image: &str, manifests: &'a [Descriptor]) -> Result<&'a Descriptor> {
    let wanted = architecture();
    let fits = |descriptor: &&Descriptor| {
        descriptor
            .platform
            .as_ref()
            .is_some_and(|platform| platform.os == "linux" && platform.architecture == wanted)
    };
    if let Some(found) = manifests.iter().find(fits) {
        return Ok(found);
    }
    match manifests {
        [only] if only.platform.is_none() => Ok(only),
        _ => {
            let offered: Vec<String> = manifests
                .iter()
                .filter_map(|descriptor| descriptor.platform.as_ref())
                .map(|platform| format!("{}/{}", platform.os, platform.architecture))
                .take(20)
                .collect();
            Err(bad(
                image,
                format!("it has nothing for linux/{wanted}, only [{}]", offered.join(", ")),
            ))
        }
    }
}

/// Config and layers of an image manifest, refusing what is not one.
pub(crate) fn image_parts(image: &str, manifest: Manifest) -> Result<(Descriptor, Vec<Descriptor>)> {
    match manifest {
        Manifest {
            schema_version: Some(1),
            ..
        } => Err(bad(
            image,
            "it has the old manifest schema 1; push it again with a current tool",
        )),
        Manifest {
            config: Some(config),
            layers: Some(layers),
            ..
        } if layers.len() <= MAX_LAYERS => Ok((config, layers)),
        Manifest { layers: Some(_), .. } => Err(bad(image, "it has too many layers")),
        _ => Err(bad(image, "its manifest has no config or no layers")),
    }
}

/// Reads a config and checks that it goes with so many layers.
pub(crate) fn config(image: &str, bytes: &[u8], layers: usize) -> Result<ImageConfig> {
    let config: ImageConfig = parse(image, "config", bytes)?;
    if config.rootfs.diff_ids.len() != layers {
        return Err(bad(
            image,
            format!(
                "its config names {} layers, its manifest {layers}",
                config.rootfs.diff_ids.len()
            ),
        ));
    }
    if !config.os.is_empty() && config.os != "linux" {
        return Err(bad(
            image,
            format!("it is for {}/{}, not for Linux", config.os, config.architecture),
        ));
    }
    Ok(config)
}
