//! The authority of a sandbox and its leaves.

use std::sync::Arc;

use atoll_broker::{MasterKey, TrustId};
use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject;
use rustls::server::ServerConfig;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::world::{name, provider};
use crate::intercept::authority::Authority;

fn authority(key: u8, trust: &str) -> Authority {
    Authority::derive(&MasterKey::new([key; 32]), &TrustId::new(trust)).unwrap()
}

/// Whether a client that trusts `trusted` accepts a leaf of `issuer` for `host` when it asks for `asked`.
async fn accepts(trusted: &Authority, issuer: &Authority, host: &str, asked: &str) -> bool {
    struct Always(Arc<rustls::sign::CertifiedKey>);
    impl std::fmt::Debug for Always {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Always")
        }
    }
    impl rustls::server::ResolvesServerCert for Always {
        fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<rustls::sign::CertifiedKey>> {
            Some(self.0.clone())
        }
    }
    let leaf = issuer.issue(&name(host), std::time::SystemTime::now()).unwrap();
    let server = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Always(leaf)));
    let mut roots = rustls::RootCertStore::empty();
    let pem = rustls::pki_types::CertificateDer::from_pem_slice(trusted.pem().as_bytes()).unwrap();
    roots.add(pem).unwrap();
    let client = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let (near, far) = tokio::io::duplex(64 * 1024);
    let serving = tokio::spawn(TlsAcceptor::from(Arc::new(server)).accept(far));
    let asked = ServerName::try_from(asked.to_owned()).unwrap();
    let accepted = TlsConnector::from(Arc::new(client))
        .connect(asked, near)
        .await
        .is_ok();
    let _ = serving.await;
    accepted
}

#[tokio::test]
async fn an_authority_is_the_same_after_a_restart_and_another_for_others() {
    let first = authority(1, "origin");
    // The certificate that a sandbox was given before goes on working.
    assert!(accepts(&first, &authority(1, "origin"), "api.test", "api.test").await);
    for other in [authority(1, "other"), authority(2, "origin")] {
        assert!(!accepts(&first, &other, "api.test", "api.test").await);
    }
}

#[tokio::test]
async fn a_leaf_is_for_one_name_of_whatever_length() {
    let authority = authority(1, "origin");
    let long = format!("{}.{}.example.com", "a".repeat(60), "b".repeat(60));
    for (host, asked, good) in [
        ("api.test", "api.test", true),
        ("api.test", "www.api.test", false),
        ("api.test", "test", false),
        ("under_score.test", "under_score.test", true),
        (long.as_str(), long.as_str(), true),
    ] {
        assert_eq!(
            accepts(&authority, &authority, host, asked).await,
            good,
            "{host} {asked}"
        );
    }
}
