//! TLS on both sides: towards the guest with a certificate of its own authority, towards the server with the usual checks.

use std::path::Path;
use std::sync::Arc;

use atoll_policy::Name;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::InterceptError;

const H2: &[u8] = b"h2";
const H1: &[u8] = b"http/1.1";

/// What both sides of a connection speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speech {
    Http1,
    Http2,
}

impl Speech {
    fn protocol(self) -> &'static [u8] {
        match self {
            Self::Http1 => H1,
            Self::Http2 => H2,
        }
    }
}

/// What a client offers to speak, as far as Atoll speaks it too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Offer {
    /// In the client's order.
    speeches: Vec<Speech>,
    /// Whether it offered anything; without, it speaks HTTP/1.1 and is not told so.
    silent: bool,
}

impl Offer {
    /// `None` where nothing of it can be spoken here.
    pub(super) fn of(hello: &ClientHello<'_>) -> Option<Self> {
        let Some(offered) = hello.alpn() else {
            return Some(Self {
                speeches: vec![Speech::Http1],
                silent: true,
            });
        };
        let speeches: Vec<_> = offered
            .filter_map(|protocol| {
                [Speech::Http1, Speech::Http2]
                    .into_iter()
                    .find(|it| it.protocol() == protocol)
            })
            .take(2)
            .collect();
        (!speeches.is_empty()).then_some(Self {
            speeches,
            silent: false,
        })
    }

    pub(super) fn only(speech: Speech) -> Self {
        Self {
            speeches: vec![speech],
            silent: false,
        }
    }

    /// What to answer refusals in where no server can be asked.
    pub(super) fn fallback(&self) -> Speech {
        match self.speeches.as_slice() {
            [only] => *only,
            _ => Speech::Http1,
        }
    }

    fn protocols(&self) -> Vec<Vec<u8>> {
        match self.silent {
            true => Vec::new(),
            false => self
                .speeches
                .iter()
                .map(|speech| speech.protocol().to_vec())
                .collect(),
        }
    }

    /// What a server's choice means.
    pub(super) fn chosen(&self, protocol: Option<&[u8]>) -> Option<Speech> {
        let speech = match protocol {
            // A server that knows nothing of the choice speaks HTTP/1.1.
            None => Speech::Http1,
            Some(protocol) => [Speech::Http1, Speech::Http2]
                .into_iter()
                .find(|it| it.protocol() == protocol)?,
        };
        self.speeches.contains(&speech).then_some(speech)
    }
}

/// What all connections have in common.
#[derive(Debug)]
pub(super) struct Tls {
    client: Arc<ClientConfig>,
    server: ServerConfig,
}

impl Tls {
    pub(super) fn new(extra_roots: Option<&Path>) -> Result<Self, InterceptError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        Ok(Self {
            client: Arc::new(client(&provider, extra_roots)?),
            server: server(&provider)?,
        })
    }

    /// Towards a guest.
    pub(super) fn server(
        &self,
        certified: Arc<CertifiedKey>,
        offer: &Offer,
        speech: Speech,
    ) -> Arc<ServerConfig> {
        let mut config = self.server.clone();
        config.cert_resolver = Arc::new(Always(certified));
        if !offer.silent {
            config.alpn_protocols = vec![speech.protocol().to_vec()];
        }
        Arc::new(config)
    }

    /// Towards a server.
    pub(super) fn client(&self, offer: &Offer) -> Arc<ClientConfig> {
        let mut config = ClientConfig::clone(&self.client);
        config.alpn_protocols = offer.protocols();
        Arc::new(config)
    }
}

pub(super) fn server_name(name: &Name) -> Result<ServerName<'static>, InterceptError> {
    ServerName::try_from(name.as_str().to_owned()).map_err(|_| InterceptError::Library)
}

fn server(provider: &Arc<CryptoProvider>) -> Result<ServerConfig, InterceptError> {
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Nobody));
    // Sessions are resumed with tickets that the guest keeps; nothing of them is kept here.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.ticketer = aws_lc_rs::Ticketer::new()?;
    config.send_tls13_tickets = 1;
    Ok(config)
}

fn client(
    provider: &Arc<CryptoProvider>,
    extra_roots: Option<&Path>,
) -> Result<ClientConfig, InterceptError> {
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if let Some(path) = extra_roots {
        let failed = |why: String| InterceptError::Roots {
            path: path.display().to_string(),
            why,
        };
        let extra: Vec<_> = CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect)
            .map_err(|error| failed(error.to_string()))?;
        if extra.is_empty() {
            return Err(failed("it has no certificate".to_owned()));
        }
        for certificate in extra {
            roots
                .add(certificate)
                .map_err(|error| failed(error.to_string()))?;
        }
    }
    let builder =
        ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
    if roots.is_empty() {
        // Nothing can be verified, so every intercepted connection fails. That must not keep the server from starting.
        tracing::warn!(errors = ?native.errors, "this host has no certificate authorities; install ca-certificates");
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// The one certificate of a connection whose name is known already.
#[derive(Debug)]
struct Always(Arc<CertifiedKey>);

impl ResolvesServerCert for Always {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

#[derive(Debug)]
struct Nobody;

impl ResolvesServerCert for Nobody {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}
