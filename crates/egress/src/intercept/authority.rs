//! The certificate authority of one lineage of sandboxes, and the certificates that it issues.
//!
//! Its key is derived from the master key, so it lives in memory only and is the same after a restart: a sandbox goes on
//! trusting what it was told to trust. What must hold: one lineage's key opens nothing of another's; a leaf is for exactly
//! one name, so that no client reuses a connection for another; and the usual strict verifiers accept the pair (key
//! identifiers that match, key usages, critical basic constraints, dates that hold also where a guest's clock is wrong).

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use atoll_broker::{MasterKey, TrustId};
use atoll_policy::Name;
use aws_lc_rs::agreement::{ECDH_P256, PrivateKey};
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber,
    SignatureAlgorithm, SigningKey, date_time_ymd,
};
use rustls::crypto::aws_lc_rs::sign::any_ecdsa_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;

use super::InterceptError;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// How far a leaf reaches back, for guests whose clock stands still while they are paused.
const LEAF_BEFORE: Duration = DAY.saturating_mul(30);
/// With the days before it less than the 398 that clients accept of a leaf.
const LEAF_AFTER: Duration = DAY.saturating_mul(365);
/// The longest text that a common name may be (RFC 5280).
const COMMON_NAME_MAX: usize = 64;

pub(super) struct Authority {
    issuer: Issuer<'static, AuthorityKey>,
    pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// The same for the same key and lineage, but for the random part of its own signature, which nobody looks at: a
    /// root is trusted for its name and key.
    pub(super) fn derive(key: &MasterKey, trust: &TrustId) -> Result<Self, InterceptError> {
        let key = AuthorityKey::derive(key, trust)?;
        let fingerprint = digest(&SHA256, key.public());
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.use_authority_key_identifier_extension = true;
        // Fixed, because the certificate must come out the same whenever it is made. Its key is never kept anywhere, so a
        // short life would protect nothing, and paused sandboxes may wake up years later.
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2049, 12, 31);
        params.serial_number = Some(serial(&fingerprint.as_ref()[..16]));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "Atoll");
        params.distinguished_name.push(
            DnType::CommonName,
            // Its own name: verifiers look up issuers by it.
            format!("Atoll sandbox egress {}", hex::encode(&fingerprint.as_ref()[..8])),
        );
        let certificate = params.self_signed(&key)?;
        Ok(Self {
            pem: pem(certificate.der()),
            issuer: Issuer::new(params, key),
        })
    }

    /// The certificate as trust stores take it.
    pub(super) fn pem(&self) -> &str {
        &self.pem
    }

    pub(super) fn issue(&self, name: &Name, now: SystemTime) -> Result<Arc<CertifiedKey>, InterceptError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::DnsName(Ia5String::try_from(name.as_str())?)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        params.not_before = date_time_ymd(1970, 1, 1) + since.saturating_sub(LEAF_BEFORE);
        params.not_after = date_time_ymd(1970, 1, 1) + since.saturating_add(LEAF_AFTER);
        params.distinguished_name = DistinguishedName::new();
        let common_name = match name.as_str() {
            text if text.len() <= COMMON_NAME_MAX => text,
            _ => "Atoll",
        };
        params.distinguished_name.push(DnType::CommonName, common_name);
        let certificate = params.signed_by(&key, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok(Arc::new(CertifiedKey::new(
            vec![certificate.der().clone()],
            any_ecdsa_type(&key).map_err(|_| InterceptError::Library)?,
        )))
    }
}

struct AuthorityKey(EcdsaKeyPair);

impl AuthorityKey {
    fn derive(key: &MasterKey, trust: &TrustId) -> Result<Self, InterceptError> {
        // Almost every string of 32 bytes is a private key; the few that are not (one in four thousand million) are
        // passed over.
        for attempt in 0..4 {
            let scalar = key
                .authority(trust, attempt)
                .map_err(|_| InterceptError::Library)?;
            let Ok(public) = PrivateKey::from_private_key(&ECDH_P256, scalar.as_slice())
                .map_err(drop)
                .and_then(|private| private.compute_public_key().map_err(drop))
            else {
                continue;
            };
            return EcdsaKeyPair::from_private_key_and_public_key(
                &ECDSA_P256_SHA256_ASN1_SIGNING,
                scalar.as_slice(),
                public.as_ref(),
            )
            .map(Self)
            .map_err(|_| InterceptError::Library);
        }
        Err(InterceptError::Library)
    }

    fn public(&self) -> &[u8] {
        self.0.public_key().as_ref()
    }
}

impl PublicKeyData for AuthorityKey {
    fn der_bytes(&self) -> &[u8] {
        self.public()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl SigningKey for AuthorityKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        self.0
            .sign(&SystemRandom::new(), message)
            .map(|signature| signature.as_ref().to_vec())
            .map_err(|_| rcgen::Error::RemoteKeyError)
    }
}

/// A positive number: its first bit is not set.
fn serial(bytes: &[u8]) -> SerialNumber {
    let mut bytes = bytes.to_vec();
    if let Some(first) = bytes.first_mut() {
        *first = *first & 0x7f | 0x40;
    }
    SerialNumber::from(bytes)
}

pub(super) fn pem(certificate: &CertificateDer<'_>) -> String {
    let text = STANDARD.encode(certificate);
    let mut pem = String::with_capacity(text.len() + 100);
    pem.push_str("-----BEGIN CERTIFICATE-----\n");
    for line in text.as_bytes().chunks(64) {
        pem.extend(line.iter().copied().map(char::from));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}
