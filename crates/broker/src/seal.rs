//! How a secret rests: AES-256-GCM, bound to its project and its id.
//!
//! ```text
//!   1 byte  format (1)
//!  12 bytes nonce, random for each sealing
//!   n bytes encrypted: 2 bytes length of the shape, shape, value
//!  16 bytes tag                                     additional data: format, project, id
//! ```
//! The shape travels with the value, so that a rotated secret keeps the placeholders of its first value.

use atoll_types::{ProjectId, SecretId};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::Zeroizing;

use crate::shape::Shape;
use crate::{BrokerError, MasterKey, Secret};

const FORMAT: u8 = 1;

pub(crate) struct Sealer(LessSafeKey);

impl Sealer {
    pub(crate) fn new(key: &MasterKey) -> Result<Self, BrokerError> {
        let key = key.derive::<32>("sealing", &[])?;
        UnboundKey::new(&AES_256_GCM, key.as_slice())
            .map(|key| Self(LessSafeKey::new(key)))
            .map_err(|_| BrokerError::Library)
    }

    pub(crate) fn seal(
        &self,
        project: &ProjectId,
        id: &SecretId,
        shape: &Shape,
        value: &Secret,
    ) -> Result<Vec<u8>, BrokerError> {
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(|_| BrokerError::Library)?;
        let shape = shape.encode();
        let shape_len = u16::try_from(shape.len()).map_err(|_| BrokerError::Library)?;
        // Reserved at once: growing would leave a copy of the value behind.
        let mut plain = Zeroizing::new(Vec::with_capacity(2 + shape.len() + value.expose().len()));
        plain.extend_from_slice(&shape_len.to_be_bytes());
        plain.extend_from_slice(shape.as_bytes());
        plain.extend_from_slice(value.expose());
        let tag = self
            .0
            .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), aad(project, id), &mut plain)
            .map_err(|_| BrokerError::Library)?;
        Ok([&[FORMAT], nonce.as_slice(), &plain, tag.as_ref()].concat())
    }

    pub(crate) fn open(
        &self,
        project: &ProjectId,
        id: &SecretId,
        sealed: &[u8],
    ) -> Result<(Shape, Secret), BrokerError> {
        let cannot = || BrokerError::CannotOpen { id: id.clone() };
        let (&format, rest) = sealed.split_first().ok_or_else(cannot)?;
        if format != FORMAT {
            return Err(match format {
                0 => cannot(),
                format => BrokerError::NewerFormat {
                    id: id.clone(),
                    format,
                },
            });
        }
        let (nonce, sealed) = rest.split_first_chunk::<NONCE_LEN>().ok_or_else(cannot)?;
        let mut sealed = Zeroizing::new(sealed.to_vec());
        let plain = self
            .0
            .open_in_place(
                Nonce::assume_unique_for_key(*nonce),
                aad(project, id),
                sealed.as_mut_slice(),
            )
            .map_err(|_| cannot())?;
        let (shape_len, rest) = plain.split_first_chunk::<2>().ok_or_else(cannot)?;
        let (shape, value) = rest
            .split_at_checked(usize::from(u16::from_be_bytes(*shape_len)))
            .ok_or_else(cannot)?;
        let shape = std::str::from_utf8(shape)
            .ok()
            .and_then(Shape::decode)
            .ok_or_else(cannot)?;
        Ok((shape, Secret::new(value.to_vec())?))
    }
}

/// Ids have one length each, so no two pairs read the same.
fn aad(project: &ProjectId, id: &SecretId) -> Aad<Vec<u8>> {
    Aad::from([&[FORMAT], project.as_str().as_bytes(), id.as_str().as_bytes()].concat())
}
