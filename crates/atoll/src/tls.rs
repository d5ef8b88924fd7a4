//! TLS, for clients that speak nothing else: with the operator's certificate, or with one of an authority of our own.
//!
//! ```text
//! <data>/tls/ca.pem    the authority that clients are told to trust (SSL_CERT_FILE, NODE_EXTRA_CA_CERTS)
//! <data>/tls/ca.key    its key, mode 0600
//! ```
//!
//! Whoever uses the machine may read the certificate; it is its key that is secret.
//!
//! What must hold: the authority's key never leaves the data directory, and the authority stays the same for as long as
//! its files do. The server's own certificate is made anew at each start.

use std::fs;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_client::output::{Doing, Error, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::Tls;

/// How long our own certificates are good for.
const DAYS: i64 = 3650;

pub(crate) fn acceptor(tls: &Tls, domain: &str, data: &Path) -> Result<TlsAcceptor> {
    let (chain, key) = match (&tls.certificate, &tls.key) {
        (Some(certificate), Some(key)) => read(certificate, key)?,
        (None, None) => own(domain, data)?,
        _ => {
            return Err(Error::new(
                "`tls.certificate` and `tls.key` belong together; give both, or neither for a local authority",
            ));
        }
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .doing("cannot set up TLS")?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .doing("cannot use the TLS certificate")?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn read(certificate: &Path, key: &Path) -> Result<Pair> {
    let doing = |path: &Path| format!("cannot read {}", path.display());
    let chain: std::result::Result<Vec<_>, _> = CertificateDer::pem_file_iter(certificate)
        .doing(doing(certificate))?
        .collect();
    let chain = chain.doing(doing(certificate))?;
    let key = PrivateKeyDer::from_pem_file(key).doing(doing(key))?;
    Ok((chain, key))
}

/// The authority's certificate.
pub(crate) fn authority(data: &Path) -> PathBuf {
    data.join("tls/ca.pem")
}

/// A certificate for the domain, what is below it, and this machine, from an authority in the data directory.
fn own(domain: &str, data: &Path) -> Result<Pair> {
    let dir = data.join("tls");
    fs::DirBuilder::new()
        .recursive(true)
        .create(&dir)
        .doing("cannot make the directory of the TLS authority")?;
    let (ca_pem, key_path) = (authority(data), dir.join("ca.key"));
    if !key_path.exists() || !ca_pem.exists() {
        make_authority(&ca_pem, &key_path)?;
    }
    // Confined, the server may only look; it has been here before.
    for (path, mode) in [(&dir, 0o711), (&ca_pem, 0o644)] {
        let is = fs::metadata(path).doing("cannot look at the TLS authority")?;
        if is.permissions().mode() & 0o777 != mode {
            fs::set_permissions(path, fs::Permissions::from_mode(mode))
                .doing("cannot let others read the certificate of the TLS authority")?;
        }
    }
    let doing = "cannot use the TLS authority in the data directory";
    let authority_key = KeyPair::from_pem(&fs::read_to_string(&key_path).doing(doing)?).doing(doing)?;
    let issuer = Issuer::new(authority_params()?, authority_key);
    let names = [
        domain.to_owned(),
        format!("*.{domain}"),
        "localhost".to_owned(),
        "*.localhost".to_owned(),
    ];
    let mut params = CertificateParams::new(names).doing("cannot make a TLS certificate")?;
    for address in [
        IpAddr::from([127, 0, 0, 1]),
        IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1_u16]),
    ] {
        params.subject_alt_names.push(rcgen::SanType::IpAddress(address));
    }
    params.distinguished_name.push(DnType::CommonName, domain);
    params
        .extended_key_usages
        .push(ExtendedKeyUsagePurpose::ServerAuth);
    params.use_authority_key_identifier_extension = true;
    valid(&mut params)?;
    let key = KeyPair::generate().doing("cannot make a TLS key")?;
    let leaf = params
        .signed_by(&key, &issuer)
        .doing("cannot sign a TLS certificate")?;
    let key = PrivateKeyDer::try_from(key.serialize_der())
        .map_err(|why| Error::new(format!("cannot use the TLS key: {why}")))?;
    Ok((vec![leaf.der().clone()], key))
}

fn make_authority(certificate: &Path, key_path: &Path) -> Result<()> {
    let doing = "cannot make the TLS authority";
    let params = authority_params()?;
    let key = KeyPair::generate().doing(doing)?;
    let authority = params.self_signed(&key).doing(doing)?;
    let mut options = fs::OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(key_path);
    file.and_then(|mut file| file.write_all(key.serialize_pem().as_bytes()))
        .doing(doing)?;
    fs::write(certificate, authority.pem()).doing(doing)
}

/// The same each time, except for the dates: what it signs names it by these.
fn authority_params() -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, "Atoll local authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid(&mut params)?;
    Ok(params)
}

fn valid(params: &mut CertificateParams) -> Result<()> {
    let now = jiff::Zoned::now().with_time_zone(jiff::tz::TimeZone::UTC);
    let until = now
        .checked_add(jiff::SignedDuration::from_hours(24 * DAYS))
        .doing("cannot reckon the end of a certificate")?;
    let date = |at: &jiff::Zoned| {
        let month = u8::try_from(at.month()).unwrap_or(1);
        let day = u8::try_from(at.day()).unwrap_or(1);
        rcgen::date_time_ymd(i32::from(at.year()), month, day)
    };
    params.not_before = date(&now);
    params.not_after = date(&until);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_authority_stays_and_its_key_is_private() {
        use std::os::unix::fs::MetadataExt as _;
        let data = tempfile::tempdir().unwrap();
        let tls = Tls::default();
        acceptor(&tls, "boxes.test", data.path()).unwrap();
        let before = fs::read(data.path().join("tls/ca.pem")).unwrap();
        acceptor(&tls, "boxes.test", data.path()).unwrap();
        assert_eq!(fs::read(data.path().join("tls/ca.pem")).unwrap(), before);
        let key = fs::metadata(data.path().join("tls/ca.key")).unwrap();
        assert_eq!(key.mode() & 0o777, 0o600);
        // What others must trust, they may read; also where an earlier version kept it to itself.
        let (dir, certificate) = (data.path().join("tls"), authority(data.path()));
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(&certificate, fs::Permissions::from_mode(0o600)).unwrap();
        acceptor(&tls, "boxes.test", data.path()).unwrap();
        assert_eq!(fs::metadata(dir).unwrap().mode() & 0o777, 0o711);
        assert_eq!(fs::metadata(certificate).unwrap().mode() & 0o777, 0o644);
    }

    #[test]
    fn half_a_pair_is_refused() {
        let tls = Tls {
            certificate: Some("x".into()),
            ..Tls::default()
        };
        let Err(error) = acceptor(&tls, "boxes.test", Path::new("/nonexistent")) else {
            unreachable!("there is no key");
        };
        assert!(error.to_string().contains("tls.key"));
    }
}
