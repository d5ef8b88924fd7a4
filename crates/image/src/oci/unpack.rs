//! Layers onto the tree: decompressed to a file of the scratch directory, checked against both digests, then applied.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};

use sha2::{Digest, Sha256};

use super::Layer;
use crate::content::{Content, Reader};
use crate::error::{Error, IoContext, Result};
use crate::layer::{self, Whiteouts};
use crate::progress::Job;
use crate::store::Scratch;
use crate::tree::{Limits, Tree};

pub(super) fn layers(
    tree: &mut Tree,
    layers: &[Layer],
    limits: Limits,
    scratch: &Scratch,
    job: &Job,
) -> Result<()> {
    let mut budget = limits.bytes;
    for (index, layer) in layers.iter().enumerate() {
        let stage = format!("unpacking layer {} of {}", index + 1, layers.len());
        let archive = decompress(layer, index, &mut budget, scratch, |done| {
            job.report(&stage, done, layer.blob.len(), "")
        })
        .map_err(|error| match error {
            Error::Limit { what, .. } => Error::Limit {
                what,
                limit: limits.bytes,
            },
            other => other,
        })?;
        layer::apply(tree, archive, Whiteouts::Oci, |_| job.check())?;
    }
    Ok(())
}

/// The layer as a plain tar archive: the blob itself if it is one already.
fn decompress(
    layer: &Layer,
    index: usize,
    budget: &mut u64,
    scratch: &Scratch,
    mut progress: impl FnMut(u64) -> Result<()>,
) -> Result<Content> {
    let mut magic = [0; 4];
    if layer.blob.len() >= 4 {
        layer.blob.read_at(&mut magic, 0)?;
    }
    let path = scratch.path().join(format!("layer-{index}.tar"));
    let failed = |error: io::Error| match error.downcast::<Error>() {
        Ok(ours) => ours,
        Err(error) => Error::layer(
            format!("layer {}", index + 1).as_bytes(),
            format!("cannot be decompressed: {error}"),
        ),
    };
    let mut blob = Hashing::new(layer.blob.reader());
    let mut plain = Sha256::new();
    let is_plain = !(magic.starts_with(&[0x1f, 0x8b]) || magic == [0x28, 0xb5, 0x2f, 0xfd]);
    let mut out = match is_plain {
        true => None,
        false => Some(File::create(&path).doing("write", &path)?),
    };
    {
        let counted = Counting {
            inner: &mut blob,
            progress: &mut progress,
        };
        let mut reader: Box<dyn Read + '_> = if is_plain {
            Box::new(counted)
        } else if magic[0] == 0x1f {
            Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(
                1 << 17,
                counted,
            )))
        } else {
            let mut decoder = zstd::Decoder::new(counted).map_err(failed)?;
            // Bounds the memory that a frame may ask for: 128 MiB, as `zstd` itself does.
            decoder.window_log_max(27).map_err(failed)?;
            Box::new(decoder)
        };
        let mut buf = vec![0; 1 << 17];
        loop {
            let n = match reader.read(&mut buf).map_err(failed)? {
                0 => break,
                n => n,
            };
            *budget = budget.checked_sub(n as u64).ok_or_else(|| Error::Limit {
                what: "the size of the unpacked layers".into(),
                limit: 0,
            })?;
            plain.update(&buf[..n]);
            if let Some(out) = &mut out {
                out.write_all(&buf[..n]).doing("write", &path)?;
            }
        }
    }
    // What follows the compressed stream is part of the blob's digest too.
    io::copy(&mut blob, &mut io::sink()).map_err(failed)?;
    if let Some(expected) = &layer.digest {
        check(index, "layer", expected, blob.sha)?;
    }
    check(index, "content of layer", &layer.diff_id, plain)?;
    match out {
        None => Ok(layer.blob.clone()),
        Some(_) => Content::whole_file(&path),
    }
}

fn check(index: usize, what: &str, expected: &str, sha: Sha256) -> Result<()> {
    let actual = hex::encode(sha.finalize());
    if actual != expected {
        return Err(Error::Digest {
            what: format!("{what} {}", index + 1),
            expected: expected.to_owned(),
            actual,
        });
    }
    Ok(())
}

struct Hashing {
    inner: Reader,
    sha: Sha256,
    at: u64,
}

impl Hashing {
    fn new(inner: Reader) -> Self {
        Self {
            inner,
            sha: Sha256::new(),
            at: 0,
        }
    }
}

impl Read for Hashing {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.sha.update(&buf[..n]);
        self.at += n as u64;
        Ok(n)
    }
}

/// Reports how much was read; an error of the report ends the reading.
struct Counting<'a> {
    inner: &'a mut Hashing,
    progress: &'a mut dyn FnMut(u64) -> Result<()>,
}

impl Read for Counting<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        (self.progress)(self.inner.at).map_err(io::Error::other)?;
        Ok(n)
    }
}
