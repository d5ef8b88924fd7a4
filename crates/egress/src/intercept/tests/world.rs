//! A server with a test authority, a guest, and the interceptor between them.

use parking_lot::{Mutex, RwLock};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_broker::{Broker, MasterKey, Secret, TrustId};
use atoll_policy::{Decision, Floor, FloorConfig, Grant, Name, Policy};
use atoll_types::{
    Injection, NetworkPolicy, NetworkRule, ProjectId, RuleAction, SandboxId, SecretBinding, SecretId,
    SecretRef, Timestamp,
};
use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::Tenant;
use crate::intercept::authority::pem;
use crate::intercept::route::{Route, Undialled};
use crate::intercept::{InterceptConfig, Interceptor};

pub(super) const HOST: &str = "api.test";
/// What the route says it dialled. The policy would refuse loopback.
pub(super) const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));

pub(super) type Payload = BoxBody<Bytes, hyper::Error>;

pub(super) trait Io: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug> Io for S {}

pub(super) fn full(text: impl Into<Bytes>) -> Payload {
    Full::new(text.into()).map_err(|never| match never {}).boxed()
}

pub(super) fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

/// The authority that the servers of the test have their certificates from.
pub(super) struct TestAuthority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl TestAuthority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Self {
            issuer: Issuer::new(params, key),
            certificate,
        }
    }

    /// `padding` further certificates go with it, that nobody needs.
    pub(super) fn server(&self, names: &[&str], alpn: &[&str], padding: usize) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let leaf = CertificateParams::new(names)
            .unwrap()
            .signed_by(&key, &self.issuer)
            .unwrap();
        let mut chain = vec![leaf.der().clone()];
        chain.extend(std::iter::repeat_n(self.certificate.clone(), padding));
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

pub(super) fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

type Handler =
    Arc<dyn Fn(Request<Incoming>) -> Pin<Box<dyn Future<Output = Response<Payload>> + Send>> + Send + Sync>;

type Speaker = Arc<dyn Fn(Box<dyn Io>) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// How the one server of a world behaves.
#[derive(Clone)]
pub(super) enum Behaviour {
    Http(Handler),
    /// Speaks bytes. Gets the stream after TLS.
    Raw(Speaker),
}

pub(super) fn http<F, A>(handler: F) -> Behaviour
where
    F: Fn(Request<Incoming>) -> A + Send + Sync + 'static,
    A: Future<Output = Response<Payload>> + Send + 'static,
{
    Behaviour::Http(Arc::new(move |request| Box::pin(handler(request))))
}

pub(super) fn raw<F, A>(handler: F) -> Behaviour
where
    F: Fn(Box<dyn Io>) -> A + Send + Sync + 'static,
    A: Future<Output = ()> + Send + 'static,
{
    Behaviour::Raw(Arc::new(move |stream| Box::pin(handler(stream))))
}

/// Says what it was asked.
pub(super) fn echo() -> Behaviour {
    http(|request: Request<Incoming>| async move {
        let mut text = format!("{} {}\n", request.method(), request.uri());
        for (name, value) in request.headers() {
            text.push_str(&format!(
                "{name}: {}\n",
                String::from_utf8_lossy(value.as_bytes())
            ));
        }
        let body = request
            .into_body()
            .collect()
            .await
            .map(http_body_util::Collected::to_bytes);
        text.push_str(&format!("body: {}\n", body.map_or(0, |body| body.len())));
        Response::new(full(text))
    })
}

/// What was told to the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Told {
    Decided {
        allowed: bool,
        rule: String,
        method: String,
    },
    Used(String),
}

#[derive(Clone)]
pub(super) struct TestRoute {
    name: Name,
    port: u16,
    tls: bool,
    tenant: Arc<RwLock<Tenant>>,
    changes: watch::Sender<u64>,
    told: Arc<Mutex<Vec<Told>>>,
    server: Arc<Server>,
}

pub(super) struct Server {
    tls: Option<TlsAcceptor>,
    behaviour: Behaviour,
    pub(super) dialled: AtomicUsize,
    pub(super) refuses: Mutex<VecDeque<Undialled>>,
    /// Happens while it is dialled.
    pub(super) meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Between the interceptor and the server.
    buffer: usize,
    tasks: Mutex<JoinSet<()>>,
}

impl Server {
    fn accept(self: &Arc<Self>, stream: DuplexStream) {
        let (tls, behaviour) = (self.tls.clone(), self.behaviour.clone());
        self.tasks.lock().spawn(async move {
            let mut http2 = false;
            let stream: Box<dyn Io> = match tls {
                None => Box::new(stream),
                Some(tls) => match tls.accept(stream).await {
                    Err(_) => return,
                    Ok(stream) => {
                        http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                        Box::new(stream)
                    }
                },
            };
            let handler = match behaviour {
                Behaviour::Raw(handler) => return handler(stream).await,
                Behaviour::Http(handler) => handler,
            };
            let service = service_fn(move |request| {
                let answer = handler(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            let io = TokioIo::new(stream);
            if http2 {
                let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(io, service)
                    .await;
            } else {
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(io, service)
                    .with_upgrades()
                    .await;
            }
        });
    }
}

impl TestRoute {
    pub(super) fn change(&self, change: impl FnOnce(&mut Tenant)) {
        change(&mut self.tenant.write());
        self.changes.send_modify(|change| *change += 1);
    }
}

impl Route for TestRoute {
    type Stream = DuplexStream;

    fn name(&self) -> &Name {
        &self.name
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn tls(&self) -> bool {
        self.tls
    }

    fn tenant(&self) -> Arc<Tenant> {
        Arc::new(self.tenant.read().clone())
    }

    async fn dial(&self) -> Result<(DuplexStream, IpAddr), Undialled> {
        if let Some(refusal) = self.server.refuses.lock().pop_front() {
            return Err(refusal);
        }
        self.server.dialled.fetch_add(1, Ordering::Relaxed);
        if let Some(happens) = self.server.meanwhile.lock().take() {
            happens();
        }
        let (near, far) = tokio::io::duplex(self.server.buffer);
        self.server.accept(far);
        Ok((near, ADDRESS))
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn sever(&self) {}

    fn decided(&self, decision: &Decision, _: Option<IpAddr>, method: &str) {
        self.told.lock().push(Told::Decided {
            allowed: decision.is_allowed(),
            rule: decision.rule.to_string(),
            method: method.to_owned(),
        });
    }

    fn used(&self, secret: &SecretRef, _: Option<IpAddr>, _: &str) {
        self.told.lock().push(Told::Used(secret.name.clone()));
    }
}

/// How a world is to be.
pub(super) struct Setup {
    pub(super) behaviour: Behaviour,
    pub(super) names: Vec<&'static str>,
    pub(super) alpn: Vec<&'static str>,
    pub(super) padding: usize,
    pub(super) tls: bool,
    pub(super) port: u16,
    pub(super) buffer: usize,
    pub(super) rules: Vec<NetworkRule>,
    pub(super) secrets: Vec<(&'static str, &'static str, SecretBinding)>,
}

impl Setup {
    pub(super) fn new(behaviour: Behaviour) -> Self {
        Self {
            behaviour,
            names: vec![HOST],
            alpn: vec!["h2", "http/1.1"],
            padding: 0,
            tls: true,
            port: 443,
            buffer: 64 * 1024,
            rules: vec![NetworkRule::new(RuleAction::Allow, HOST)],
            secrets: Vec::new(),
        }
    }

    pub(super) fn plain(behaviour: Behaviour) -> Self {
        Self {
            tls: false,
            port: 80,
            ..Self::new(behaviour)
        }
    }

    pub(super) fn secret(mut self, name: &'static str, value: &'static str, inject: Injection) -> Self {
        self.secrets.push((name, value, binding(inject)));
        self
    }

    pub(super) fn bound(mut self, name: &'static str, value: &'static str, binding: SecretBinding) -> Self {
        self.secrets.push((name, value, binding));
        self
    }

    pub(super) fn start(self) -> World {
        let authority = TestAuthority::new();
        let mut roots = tempfile::NamedTempFile::new().unwrap();
        roots.write_all(pem(&authority.certificate).as_bytes()).unwrap();
        let key = MasterKey::new([7; 32]);
        let broker = Arc::new(Broker::new(&key).unwrap());
        let config = InterceptConfig {
            key,
            extra_roots: Some(roots.path().to_owned()),
        };
        let interceptor = Interceptor::new(&config, broker.clone()).unwrap();
        let project = ProjectId::from_entropy([1; 20]);
        let trust = TrustId::new("origin");
        let mut grants = Vec::new();
        let mut placeholders = Vec::new();
        for (number, (name, value, binding)) in self.secrets.into_iter().enumerate() {
            let id = SecretId::from_entropy([u8::try_from(number).unwrap() + 1; 20]);
            let secret = SecretRef {
                id: id.clone(),
                name: name.to_owned(),
            };
            let value = Secret::new(value.as_bytes().to_vec()).unwrap();
            let sealed = broker.seal(&project, &id, &value).unwrap();
            broker.load(&project, &id, &sealed, None).unwrap();
            placeholders.push((secret.clone(), broker.placeholder(&trust, &id).unwrap()));
            grants.push(Grant {
                secret,
                binding,
                expires: None,
                env: None,
            });
        }
        let tenant = Tenant {
            sandbox: SandboxId::from_entropy([2; 20]),
            project,
            policy: policy(self.rules, &grants),
            used: crate::Used::default(),
            placeholders,
            trust,
        };
        let server = Server {
            tls: self
                .tls
                .then(|| TlsAcceptor::from(authority.server(&self.names, &self.alpn, self.padding))),
            behaviour: self.behaviour,
            dialled: AtomicUsize::new(0),
            refuses: Mutex::default(),
            meanwhile: Mutex::default(),
            buffer: self.buffer,
            tasks: Mutex::default(),
        };
        World {
            interceptor,
            broker,
            route: TestRoute {
                name: name(HOST),
                port: self.port,
                tls: self.tls,
                tenant: Arc::new(RwLock::new(tenant)),
                changes: watch::Sender::new(0),
                told: Arc::default(),
                server: Arc::new(server),
            },
            grants,
            _roots: roots,
            tasks: JoinSet::new(),
        }
    }
}

pub(super) fn binding(inject: Injection) -> SecretBinding {
    SecretBinding {
        hosts: vec![HOST.to_owned()],
        ports: Vec::new(),
        methods: Vec::new(),
        paths: Vec::new(),
        plain_http: false,
        redact: false,
        inject,
    }
}

pub(super) fn policy(rules: Vec<NetworkRule>, grants: &[Grant]) -> Arc<Policy> {
    let written = NetworkPolicy {
        rules,
        ..NetworkPolicy::default()
    };
    let floor = Floor::new(&FloorConfig::default()).unwrap();
    Arc::new(Policy::compile(&written, &floor, grants).unwrap())
}

pub(super) struct World {
    pub(super) interceptor: Interceptor,
    pub(super) broker: Arc<Broker>,
    pub(super) route: TestRoute,
    pub(super) grants: Vec<Grant>,
    _roots: tempfile::NamedTempFile,
    tasks: JoinSet<io::Result<()>>,
}

impl World {
    pub(super) fn server(&self) -> &Server {
        &self.route.server
    }

    pub(super) fn dialled(&self) -> usize {
        self.server().dialled.load(Ordering::Relaxed)
    }

    pub(super) fn told(&self) -> Vec<Told> {
        self.route.told.lock().clone()
    }

    pub(super) fn denials(&self) -> Vec<String> {
        let denied = |told| match told {
            Told::Decided {
                allowed: false, rule, ..
            } => Some(rule),
            _ => None,
        };
        self.told().into_iter().filter_map(denied).collect()
    }

    pub(super) fn placeholder(&self, secret: &str) -> String {
        let tenant = self.route.tenant();
        let found = tenant.placeholders.iter().find(|(it, _)| it.name == secret);
        found.unwrap().1.clone()
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Tenant)) {
        self.route.change(change);
    }

    /// The same rules with other grants, or other rules with the same.
    pub(super) fn set_policy(&self, rules: Vec<NetworkRule>, grants: &[Grant]) {
        self.change(|tenant| tenant.policy = policy(rules, grants));
    }

    /// A new value for a secret of this world.
    pub(super) fn rotate(&self, secret: &str, value: &str, expires: Option<Timestamp>) {
        let tenant = self.route.tenant();
        let (secret, _) = tenant
            .placeholders
            .iter()
            .find(|(it, _)| it.name == secret)
            .unwrap();
        let value = Secret::new(value.as_bytes().to_vec()).unwrap();
        let broker = &self.broker;
        let first = broker.seal(&tenant.project, &secret.id, &value).unwrap();
        let sealed = broker
            .reseal(&tenant.project, &secret.id, &first, &value)
            .unwrap();
        broker
            .load(&tenant.project, &secret.id, &sealed, expires)
            .unwrap();
    }

    pub(super) fn authority_pem(&self) -> String {
        self.interceptor
            .authority_pem(&self.route.tenant().trust)
            .unwrap()
    }

    /// A connection of the guest, before TLS.
    pub(super) fn raw(&mut self) -> DuplexStream {
        let (near, far) = tokio::io::duplex(64 * 1024);
        let (interceptor, route) = (self.interceptor.clone(), self.route.clone());
        self.tasks
            .spawn(async move { interceptor.serve(far, Bytes::new(), route).await });
        near
    }

    /// How the first connection that ended did so.
    pub(super) async fn ended(&mut self) -> io::Result<()> {
        self.tasks.join_next().await.unwrap().unwrap()
    }

    /// Ends all connections of the guest as the flow would: without notice.
    pub(super) async fn cut(&mut self) {
        self.tasks.shutdown().await;
    }

    pub(super) fn client_config(&self, alpn: &[&str]) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.authority_pem().as_bytes()).unwrap())
            .unwrap();
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    /// After TLS, if there is any.
    pub(super) async fn bytes(&mut self, alpn: &[&str]) -> Box<dyn Io> {
        let stream = self.raw();
        if !self.route.tls {
            return Box::new(stream);
        }
        let server = ServerName::try_from(HOST).unwrap();
        let connector = TlsConnector::from(self.client_config(alpn));
        Box::new(connector.connect(server, stream).await.unwrap())
    }

    pub(super) async fn http1(&mut self) -> conn::http1::SendRequest<Payload> {
        let stream = self.bytes(&["http/1.1"]).await;
        let (sender, connection) = conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        sender
    }

    pub(super) async fn http2(&mut self) -> conn::http2::SendRequest<Payload> {
        let stream = self.bytes(&["h2"]).await;
        let (sender, connection) = conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        sender
    }

    /// One request on a connection of its own: status, headers, body.
    pub(super) async fn get(&mut self, path: &str, headers: &[(&str, &str)]) -> (Response<()>, String) {
        let mut sender = self.http1().await;
        exchange(&mut sender, "GET", path, headers, "").await
    }

    /// Listens for guests on loopback, for clients that are programs.
    pub(super) async fn listen(&mut self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (interceptor, route) = (self.interceptor.clone(), self.route.clone());
        self.tasks.spawn(async move {
            let mut guests = JoinSet::new();
            loop {
                let (mut stream, _) = listener.accept().await?;
                let (interceptor, route) = (interceptor.clone(), route.clone());
                guests.spawn(async move {
                    let prefix = peek(&mut stream).await?;
                    interceptor.serve(stream, prefix, route).await
                });
            }
        });
        address
    }
}

async fn peek(stream: &mut TcpStream) -> io::Result<Bytes> {
    let mut first = vec![0; 4096];
    let size = stream.read(&mut first).await?;
    first.truncate(size);
    Ok(first.into())
}

pub(super) async fn exchange(
    sender: &mut conn::http1::SendRequest<Payload>,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> (Response<()>, String) {
    let mut request = Request::builder().method(method).uri(path);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", HOST);
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    sender.ready().await.unwrap();
    let response = sender
        .send_request(request.body(full(body.to_owned())).unwrap())
        .await
        .unwrap();
    read(response).await
}

pub(super) async fn read(response: Response<Incoming>) -> (Response<()>, String) {
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (
        Response::from_parts(parts, ()),
        String::from_utf8_lossy(&body).into_owned(),
    )
}
