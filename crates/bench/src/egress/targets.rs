//! What the clients of `atoll bench egress` ask for: HTTPS that answers with as many bytes as the path says, and names.

use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use atoll_client::output::{Doing, Error, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use super::world::{TARGET, enter};

/// Its requests are not read by Atoll.
pub(super) const SPLICED: &str = "spliced.example.com";
/// Its requests are read, and get a secret.
pub(super) const READ: &str = "read.example.com";

/// Who the servers are, and who says so.
#[derive(Clone)]
pub(super) struct Identity {
    authority: String,
    acceptor: TlsAcceptor,
}

impl Identity {
    pub(super) fn new() -> Result<Self> {
        Self::issue().doing("cannot make certificates")
    }

    fn issue() -> std::result::Result<Self, Box<dyn std::error::Error>> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = pem(params.self_signed(&key)?.der());
        let issuer = Issuer::new(params, key);
        let key = KeyPair::generate()?;
        let leaf = CertificateParams::new([SPLICED.to_owned(), READ.to_owned()])?.signed_by(&key, &issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)?;
        Ok(Self {
            authority,
            acceptor: TlsAcceptor::from(Arc::new(config)),
        })
    }

    /// In PEM form.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }
}

fn pem(certificate: &[u8]) -> String {
    let text = BASE64.encode(certificate);
    format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
}

/// Servers in a namespace, on threads of their own; gone when dropped.
#[derive(Debug)]
pub(super) struct Targets {
    /// Clients that are connected.
    open: Arc<AtomicUsize>,
    _stop: oneshot::Sender<()>,
}

impl Targets {
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// HTTPS on `address`, and names on `names`.
    pub(super) fn start(
        namespace: PathBuf,
        identity: &Identity,
        address: &'static str,
        names: Option<&'static str>,
    ) -> Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let (ready, started) = mpsc::channel();
        let acceptor = identity.acceptor.clone();
        let open = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&open);
        std::thread::spawn(move || {
            let begin = || {
                enter(&namespace)?;
                tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .doing("cannot start threads")
            };
            let runtime = match begin() {
                Ok(runtime) => runtime,
                Err(error) => return drop(ready.send(Err(error))),
            };
            runtime.block_on(async {
                let open = async {
                    let listener = TcpListener::bind((address, 443)).await?;
                    let names = match names {
                        Some(names) => Some(UdpSocket::bind((names, 53)).await?),
                        None => None,
                    };
                    Ok::<_, io::Error>((listener, names))
                };
                let (listener, names) = match open.await {
                    Ok(opened) => opened,
                    Err(error) => return drop(ready.send(Err(error).doing("cannot open a server"))),
                };
                let _nobody = ready.send(Ok(()));
                tokio::spawn(https(listener, acceptor, counted));
                if let Some(names) = names {
                    tokio::spawn(resolver(names));
                }
                let _ended = stopped.await;
            });
            runtime.shutdown_background();
        });
        let started = started.recv().map_err(|_| Error::new("a server did not start"));
        started?.map(|()| Self { open, _stop: stop })
    }
}

async fn https(listener: TcpListener, acceptor: TlsAcceptor, open: Arc<AtomicUsize>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, open) = (acceptor.clone(), Arc::clone(&open));
        tokio::spawn(async move {
            open.fetch_add(1, Ordering::Relaxed);
            // A client that goes away is not ours to report.
            let _gone = serve(stream, acceptor).await;
            open.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

async fn serve(stream: TcpStream, acceptor: TlsAcceptor) -> io::Result<()> {
    static CHUNK: [u8; 64 * 1024] = [b'x'; 64 * 1024];
    stream.set_nodelay(true)?;
    let mut stream = acceptor.accept(stream).await?;
    let mut head = Vec::with_capacity(1024);
    loop {
        head.clear();
        while !head.ends_with(b"\r\n\r\n") {
            if stream.read_buf(&mut head).await? == 0 {
                return Ok(());
            }
        }
        let line = head.strip_prefix(b"GET /").unwrap_or_default();
        let digits = line.iter().take_while(|byte| byte.is_ascii_digit());
        let mut left = digits.fold(0, |sum, digit| sum * 10 + usize::from(digit - b'0'));
        let mut answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {left}\r\n\r\n").into_bytes();
        let first = left.min(1024);
        answer.extend_from_slice(&CHUNK[..first]);
        stream.write_all(&answer).await?;
        left -= first;
        while left > 0 {
            let part = left.min(CHUNK.len());
            stream.write_all(&CHUNK[..part]).await?;
            left -= part;
        }
        stream.flush().await?;
    }
}

/// Every name has one address.
async fn resolver(socket: UdpSocket) {
    let mut buffer = [0; 1500];
    while let Ok((len, from)) = socket.recv_from(&mut buffer).await {
        if let Some(reply) = answer(&buffer[..len]) {
            let _lost = socket.send_to(&reply, from).await;
        }
    }
}

fn answer(query: &[u8]) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    const A: [u8; 2] = [0, 1];
    let name = query.get(HEADER..)?.iter().position(|&byte| byte == 0)?;
    let question = query.get(HEADER..HEADER + name + 5)?;
    let is_a = question[name + 1..name + 3] == A;
    let mut reply = query[..2].to_vec();
    reply.extend_from_slice(&[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
    reply.extend_from_slice(question);
    if is_a {
        // The name of the question, type A, class IN, five minutes, four bytes.
        reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 1, 44, 0, 4]);
        reply.extend_from_slice(&TARGET.parse::<Ipv4Addr>().ok()?.octets());
    }
    Some(reply)
}
