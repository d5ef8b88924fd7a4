//! Images in files: an OCI layout directory, or an archive that holds one or the older form of `docker save`.
//!
//! An archive is read as a tree in memory, so both are the same to the code below and a hostile archive has no paths.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::format::{self, Descriptor, MAX_DOCUMENT, Manifest, SavedImage, bad, image_parts, parse, sha256};
use super::{FetchedImage, Layer};
use crate::content::Content;
use crate::error::{Error, IoContext, Result};
use crate::layer::{self, Whiteouts};
use crate::tree::{Kind, LastLink, Tree};

const REF_NAME: &str = "org.opencontainers.image.ref.name";

pub(super) fn open_directory(dir: &Path) -> Result<FetchedImage> {
    if !dir.is_dir() {
        return Err(bad(&dir.display().to_string(), "it is not a directory"));
    }
    let image = dir.display().to_string();
    open_layout(&image, &|path| {
        let path = dir.join(path);
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).doing("read", &path),
            Ok(_) => Content::whole_file(&path).map(Some),
        }
    })
}

pub(super) fn open_archive(path: &Path) -> Result<FetchedImage> {
    let image = path.display().to_string();
    let content = Content::whole_file(path)?;
    let mut magic = [0; 2];
    if content.len() > 2 {
        content.read_at(&mut magic, 0)?;
    }
    if magic == [0x1f, 0x8b] {
        return Err(bad(&image, "it is compressed; decompress it first with `gunzip`"));
    }
    let mut tree = Tree::default();
    layer::apply(&mut tree, content, Whiteouts::None, |_| Ok(()))?;
    let open = |path: &str| -> Result<Option<Content>> {
        let found = tree.lookup(path.as_bytes(), LastLink::Follow)?;
        Ok(found.and_then(|id| match &tree.node(id).kind {
            Kind::File(content) => Some(content.clone()),
            Kind::Directory(_) | Kind::Symlink(_) | Kind::Fifo => None,
        }))
    };
    // Recent `docker save` writes both forms; the layout has digests for everything.
    if open("index.json")?.is_some() {
        return open_layout(&image, &open);
    }
    open_saved(&image, &open)
}

type Open<'a> = &'a dyn Fn(&str) -> Result<Option<Content>>;

fn open_layout(image: &str, open: Open<'_>) -> Result<FetchedImage> {
    let index = open("index.json")?
        .ok_or_else(|| bad(image, "it has neither `index.json` nor `manifest.json`"))?
        .read_to_vec(MAX_DOCUMENT)?;
    let mut document: Manifest = parse(image, "index.json", &index)?;
    let mut reference = image.to_owned();
    let mut digest = None;
    // An index may point to another index; two levels are what tools write.
    for _ in 0..4 {
        let Some(manifests) = &document.manifests else {
            break;
        };
        let chosen = match &manifests[..] {
            [only] => only,
            several => format::choose(image, several)?,
        };
        if let Some(name) = chosen.annotations.get(REF_NAME) {
            reference = format!("{image}:{name}");
        }
        let bytes = document_blob(image, open, chosen)?;
        digest = Some(chosen.digest.clone());
        document = parse(image, "manifest", &bytes)?;
    }
    let digest = digest.ok_or_else(|| bad(image, "its index names no image"))?;
    let (config, layers) = image_parts(image, document)?;
    let config = format::config(image, &document_blob(image, open, &config)?, layers.len())?;
    let layers = layers
        .iter()
        .zip(&config.rootfs.diff_ids)
        .map(|(descriptor, diff_id)| {
            Ok(Layer {
                blob: blob(image, open, descriptor)?,
                digest: Some(sha256(image, &descriptor.digest)?),
                diff_id: sha256(image, diff_id)?,
            })
        })
        .collect::<Result<_>>()?;
    Ok(FetchedImage {
        reference,
        digest,
        config,
        layers,
    })
}

fn open_saved(image: &str, open: Open<'_>) -> Result<FetchedImage> {
    let manifest = open("manifest.json")?
        .ok_or_else(|| {
            bad(
                image,
                "it has neither `index.json` nor `manifest.json`; make it with `docker save`",
            )
        })?
        .read_to_vec(MAX_DOCUMENT)?;
    let saved: Vec<SavedImage> = parse(image, "manifest.json", &manifest)?;
    let [saved] = &saved[..] else {
        return Err(bad(
            image,
            format!("it holds {} images; save one only", saved.len()),
        ));
    };
    let member = |path: &str| {
        open(path)?.ok_or_else(|| {
            let path: String = path.chars().take(200).collect();
            bad(image, format!("`{path}` is missing"))
        })
    };
    let config = member(&saved.config)?.read_to_vec(MAX_DOCUMENT)?;
    let digest = hex::encode(Sha256::digest(&config));
    let config = format::config(image, &config, saved.layers.len())?;
    let layers = saved
        .layers
        .iter()
        .zip(&config.rootfs.diff_ids)
        .map(|(path, diff_id)| {
            Ok(Layer {
                blob: member(path)?,
                digest: None,
                diff_id: sha256(image, diff_id)?,
            })
        })
        .collect::<Result<_>>()?;
    let reference = saved.repo_tags.iter().flatten().next();
    Ok(FetchedImage {
        reference: reference.cloned().unwrap_or_else(|| image.to_owned()),
        digest: format!("sha256:{digest}"),
        config,
        layers,
    })
}

fn blob(image: &str, open: Open<'_>, descriptor: &Descriptor) -> Result<Content> {
    let hex = sha256(image, &descriptor.digest)?;
    let blob = open(&format!("blobs/sha256/{hex}"))?
        .ok_or_else(|| bad(image, format!("blob {} is missing", descriptor.digest)))?;
    if blob.len() != descriptor.size {
        return Err(bad(
            image,
            format!(
                "blob {} has {} bytes, {} were declared",
                descriptor.digest,
                blob.len(),
                descriptor.size
            ),
        ));
    }
    Ok(blob)
}

fn document_blob(image: &str, open: Open<'_>, descriptor: &Descriptor) -> Result<Vec<u8>> {
    let bytes = blob(image, open, descriptor)?.read_to_vec(MAX_DOCUMENT)?;
    let actual = format!("sha256:{}", hex::encode(Sha256::digest(&bytes)));
    if actual != descriptor.digest {
        return Err(Error::Digest {
            what: format!("a document of `{image}`"),
            expected: descriptor.digest.clone(),
            actual,
        });
    }
    Ok(bytes)
}
