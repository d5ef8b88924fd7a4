//! Pulls an image from a registry into a scratch directory, each blob checked while it is written.

use std::sync::Arc;

use futures_util::StreamExt;
use oci_client::Reference;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use super::access::{Registry, all_of};
use super::format::{self, Descriptor, MAX_DOCUMENT, Manifest, bad, choose, image_parts, parse, sha256};
use super::{FetchedImage, ImageConfig, Layer, Login, Reach};
use crate::content::Content;
use crate::error::{Error, IoContext, Result};
use crate::progress::Job;
use crate::store::Scratch;
use crate::tree::Limits;

pub(super) async fn pull(
    text: &str,
    login: Option<Login>,
    reach: Option<Arc<dyn Reach>>,
    limits: Limits,
    scratch: &Scratch,
    job: &Job,
) -> Result<FetchedImage> {
    Pull::new(text, login, reach, scratch, job)?.run(limits).await
}

/// The digest and the config of what a reference stands for now, without its layers.
pub(super) async fn resolve(
    text: &str,
    login: Option<Login>,
    reach: Option<Arc<dyn Reach>>,
    scratch: &Scratch,
    job: &Job,
) -> Result<(String, ImageConfig)> {
    let head = Pull::new(text, login, reach, scratch, job)?.head().await?;
    Ok((head.digest, head.config))
}

struct Pull<'a> {
    registry: Registry,
    reference: Reference,
    image: String,
    scratch: &'a Scratch,
    job: &'a Job,
}

/// What is known of an image before its layers are here.
struct Head {
    digest: String,
    config: ImageConfig,
    layers: Vec<Descriptor>,
}

impl<'a> Pull<'a> {
    fn new(
        text: &str,
        login: Option<Login>,
        reach: Option<Arc<dyn Reach>>,
        scratch: &'a Scratch,
        job: &'a Job,
    ) -> Result<Self> {
        let reference: Reference = text.parse().map_err(|error| Error::BadReference {
            reference: text.to_owned(),
            why: format!("{error}; write for example debian:trixie or registry.example/team/app:1.2"),
        })?;
        Ok(Self {
            registry: Registry::new(&reference, login, reach).map_err(|why| Error::Registry {
                reference: text.to_owned(),
                why,
            })?,
            image: reference.whole(),
            reference,
            scratch,
            job,
        })
    }

    async fn head(&self) -> Result<Head> {
        self.job.report("finding image", 0, 0, &self.image)?;
        let (mut digest, mut document) = self.manifest(&self.reference).await?;
        if let Some(manifests) = &document.manifests {
            let chosen = choose(&self.image, manifests)?;
            sha256(&self.image, &chosen.digest)?;
            let pinned = self.reference.clone_with_digest(chosen.digest.clone());
            (digest, document) = self.manifest(&pinned).await?;
        }
        let (config, layers) = image_parts(&self.image, document)?;
        if config.size > MAX_DOCUMENT {
            return Err(bad(&self.image, "its config is too large"));
        }
        let bytes = self
            .blob(&config, "config", 0, 0)
            .await?
            .read_to_vec(MAX_DOCUMENT)?;
        let config = format::config(&self.image, &bytes, layers.len())?;
        Ok(Head {
            digest,
            config,
            layers,
        })
    }

    async fn run(self, limits: Limits) -> Result<FetchedImage> {
        let Head {
            digest,
            config,
            layers,
        } = self.head().await?;
        let total = layers
            .iter()
            .try_fold(0u64, |sum, layer| sum.checked_add(layer.size))
            .filter(|total| *total <= limits.bytes)
            .ok_or(Error::Limit {
                what: "the size of the image's layers".into(),
                limit: limits.bytes,
            })?;
        let mut pulled = Vec::with_capacity(layers.len());
        let mut done = 0;
        for (index, (descriptor, diff_id)) in layers.iter().zip(&config.rootfs.diff_ids).enumerate() {
            pulled.push(Layer {
                blob: self
                    .blob(descriptor, &format!("blob-{index}"), done, total)
                    .await?,
                digest: None,
                diff_id: sha256(&self.image, diff_id)?,
            });
            done += descriptor.size;
        }
        Ok(FetchedImage {
            reference: self.image,
            digest,
            config,
            layers: pulled,
        })
    }

    async fn manifest(&self, reference: &Reference) -> Result<(String, Manifest)> {
        let which = reference.digest().or(reference.tag()).unwrap_or("latest");
        let bytes = self
            .registry
            .document(&format!("manifests/{which}"), MAX_DOCUMENT)
            .await
            .map_err(|why| self.failed(why))?;
        let actual = format!("sha256:{}", hex::encode(Sha256::digest(&bytes)));
        if let Some(expected) = reference.digest()
            && expected != actual
        {
            return Err(Error::Digest {
                what: format!("the manifest of `{}`", self.image),
                expected: expected.to_owned(),
                actual,
            });
        }
        Ok((actual, parse(&self.image, "manifest", &bytes)?))
    }

    /// Streams a blob to disk; fails as soon as it is longer than declared, and at its end if the digest differs.
    async fn blob(&self, descriptor: &Descriptor, name: &str, before: u64, total: u64) -> Result<Content> {
        let expected = sha256(&self.image, &descriptor.digest)?;
        let path = self.scratch.path().join(name);
        let mut file = tokio::fs::File::create(&path).await.doing("write", &path)?;
        let response = self.registry.get(&format!("blobs/sha256:{expected}")).await;
        let mut stream = response.map_err(|why| self.failed(why))?.bytes_stream();
        let (mut sha, mut len) = (Sha256::new(), 0u64);
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|error| self.failed(all_of(&error)))?;
            len += piece.len() as u64;
            if len > descriptor.size {
                return Err(bad(
                    &self.image,
                    format!(
                        "blob {} is longer than the {} bytes declared",
                        descriptor.digest, descriptor.size
                    ),
                ));
            }
            sha.update(&piece);
            file.write_all(&piece).await.doing("write", &path)?;
            self.job.report("pulling image", before + len, total, "")?;
        }
        file.flush().await.doing("write", &path)?;
        let actual = hex::encode(sha.finalize());
        if actual != expected || len != descriptor.size {
            return Err(Error::Digest {
                what: format!("blob of `{}` ({len} of {} bytes)", self.image, descriptor.size),
                expected,
                actual,
            });
        }
        Content::whole_file(&path)
    }

    fn failed(&self, why: String) -> Error {
        Error::Registry {
            reference: self.image.clone(),
            why,
        }
    }
}
