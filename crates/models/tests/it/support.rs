//! A gateway on a database of its own, and a provider that answers with fixed bytes.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use atoll_broker::{Broker, MasterKey};
use atoll_dialects::Dialect;
use atoll_gateway_core::Spender;
use atoll_identity::Identity;
use atoll_models::{ModelKey, Models, Refusal, Request, Served, SetProvider, Settings, Who};
use atoll_policy::Floor;
use atoll_providers::Timeouts;
use atoll_store::sqlite::Memory;
use atoll_store::{ModelCallRow, ModelRates, Stores};
use atoll_types::{ProjectId, ProviderKind, Timestamp};
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use zeroize::Zeroizing;

/// Taken for an address of this machine; no range of the floor contains it.
pub(crate) const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);

pub(crate) fn clock() -> Timestamp {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    Timestamp(i64::try_from(since.as_millis()).unwrap())
}

pub(crate) struct Context {
    pub(crate) models: Models,
    identity: Identity,
    pub(crate) store: Stores,
    pub(crate) project: ProjectId,
    pub(crate) directory: tempfile::TempDir,
}

impl Context {
    pub(crate) async fn new() -> Self {
        Self::at(tempfile::tempdir().unwrap()).await
    }

    /// A gateway that waits for a busy provider, and keeps no bodies.
    pub(crate) async fn patient() -> Self {
        Self::with(tempfile::tempdir().unwrap(), Duration::from_secs(60), None).await
    }

    /// A gateway on what an earlier one left.
    pub(crate) async fn at(directory: tempfile::TempDir) -> Self {
        Self::with(
            directory,
            Duration::from_millis(500),
            Some(Duration::from_secs(60)),
        )
        .await
    }

    /// A gateway on a database whose disk can be filled.
    pub(crate) async fn on_memory(memory: &Memory) -> Self {
        let (store, directory) = (memory.stores(), tempfile::tempdir().unwrap());
        Self::on(store, directory, Duration::from_secs(60), None).await
    }

    async fn with(directory: tempfile::TempDir, idle: Duration, keep_bodies: Option<Duration>) -> Self {
        let store = atoll_store::sqlite::open(&directory.path().join("atoll.db")).unwrap();
        Self::on(store, directory, idle, keep_bodies).await
    }

    async fn on(
        store: Stores,
        directory: tempfile::TempDir,
        idle: Duration,
        keep_bodies: Option<Duration>,
    ) -> Self {
        let project = store
            .identity
            .ensure_project("default", ProjectId::from_entropy([1; 20]), clock())
            .await
            .unwrap();
        let opened = Identity::open(Arc::clone(&store.identity), directory.path(), clock);
        let identity = opened.await.unwrap();
        let broker = Arc::new(Broker::new(&MasterKey::new([7; 32])).unwrap());
        let timeouts = Timeouts {
            connect: Duration::from_secs(1),
            first_byte: Duration::from_secs(20),
            idle,
        };
        let models = Models::start(
            Settings {
                timeouts,
                floor: Floor::default(),
                is_own: |address| address == OWN,
                keep_bodies,
                now: clock,
            },
            store.clone(),
            identity.clone(),
            broker,
        )
        .await
        .unwrap();
        Self {
            models,
            identity,
            store,
            project: project.id,
            directory,
        }
    }

    /// What whoever holds this secret may do, if anything.
    pub(crate) async fn key(&self, secret: &str) -> Option<Arc<ModelKey>> {
        let holder = self.identity.authenticate_for_models(secret).await.unwrap()?;
        self.models.key(holder.key()?)
    }

    pub(crate) fn who(&self) -> Who {
        let spender = Spender {
            project: self.project.clone(),
            key: None,
            sandbox: None,
            workflow: None,
            run: None,
        };
        Who {
            spender,
            key: None,
            tags: vec!["test".into()],
        }
    }

    pub(crate) fn set_provider(
        &self,
        name: &str,
        kind: ProviderKind,
        base_url: &str,
        serves: &str,
    ) -> SetProvider {
        SetProvider {
            name: name.into(),
            kind,
            base_url: Some(base_url.into()),
            key: Some(Zeroizing::new(b"sk-secret".to_vec())),
            serves: Some(vec![serves.into()]),
            responses: None,
        }
    }

    pub(crate) async fn provider(&self, name: &str, kind: ProviderKind, base_url: &str, serves: &str) {
        let request = self.set_provider(name, kind, base_url, serves);
        self.models.set_provider(&self.project, request).await.unwrap();
    }

    pub(crate) async fn price(&self, model: &str, input: &str, output: &str) {
        let rates = ModelRates {
            input: Some(input.into()),
            output: Some(output.into()),
            ..ModelRates::default()
        };
        let price = atoll_models::SetPrice {
            model: model.into(),
            rates,
        };
        self.models.set_price(&self.project, price).await.unwrap();
    }

    pub(crate) async fn ask(&self, dialect: Dialect, body: &str) -> Result<Served, Refusal> {
        self.models.call(&self.who(), request(dialect, body)).await
    }

    /// The newest call, once it is settled.
    pub(crate) async fn settled(&self) -> ModelCallRow {
        for _ in 0..500 {
            let page = self
                .store
                .models
                .model_calls(&self.project, None, None, 1)
                .await
                .unwrap();
            if let Some(row) = page.items.first().filter(|row| row.ended_at.is_some()) {
                return row.clone();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no call was settled");
    }
}

pub(crate) fn request(dialect: Dialect, body: &str) -> Request {
    Request {
        dialect,
        body: Bytes::copy_from_slice(body.as_bytes()),
        model: None,
        stream: None,
        headers: Vec::new(),
        keep: None,
    }
}

pub(crate) async fn whole(served: Result<Served, Refusal>) -> String {
    match served.unwrap() {
        Served::Whole { body, .. } => String::from_utf8(body.to_vec()).unwrap(),
        Served::Stream { events, .. } => {
            let chunks: Vec<Bytes> = events.collect().await;
            String::from_utf8(chunks.concat()).unwrap()
        }
    }
}

/// A provider that gives every request the next of its answers, the last for ever.
pub(crate) struct Provider {
    pub(crate) url: String,
    pub(crate) requests: Arc<parking_lot::Mutex<Vec<String>>>,
    pub(crate) answered: Arc<AtomicUsize>,
    /// Connections that clients have closed before the answer was complete.
    pub(crate) abandoned: Arc<AtomicUsize>,
}

#[derive(Clone)]
pub(crate) struct Reply {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// Keep the connection open and say nothing more.
    pub(crate) hangs: bool,
}

pub(crate) fn json(body: &str) -> Reply {
    answer("200 OK", "application/json", body)
}

pub(crate) fn events(body: &str) -> Reply {
    answer("200 OK", "text/event-stream", body)
}

pub(crate) fn answer(status: &str, kind: &str, body: &str) -> Reply {
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n");
    Reply {
        head,
        body: body.as_bytes().to_vec(),
        hangs: false,
    }
}

impl Provider {
    pub(crate) async fn start(replies: Vec<Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let (answered, abandoned) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (seen, count, gone) = (
            Arc::clone(&requests),
            Arc::clone(&answered),
            Arc::clone(&abandoned),
        );
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let at = count.fetch_add(1, Ordering::SeqCst).min(replies.len() - 1);
                let (reply, seen, gone) = (replies[at].clone(), Arc::clone(&seen), Arc::clone(&gone));
                tokio::spawn(async move { Box::pin(serve(stream, reply, &seen, &gone)).await });
            }
        });
        Self {
            url,
            requests,
            answered,
            abandoned,
        }
    }

    pub(crate) fn last_request(&self) -> String {
        self.requests.lock().last().cloned().unwrap_or_default()
    }

    pub(crate) async fn until_abandoned(&self) {
        while self.abandoned.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn serve(
    mut stream: TcpStream,
    reply: Reply,
    seen: &parking_lot::Mutex<Vec<String>>,
    gone: &AtomicUsize,
) {
    let mut request = Vec::new();
    loop {
        let mut buffer = [0; 16 * 1024];
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(count) => request.extend_from_slice(&buffer[..count]),
        }
        let text = String::from_utf8_lossy(&request);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head.lines().find_map(|line| {
            line.to_lowercase()
                .strip_prefix("content-length: ")
                .and_then(|n| n.parse::<usize>().ok())
        });
        if body.len() >= length.unwrap_or(0) {
            break;
        }
    }
    seen.lock().push(String::from_utf8_lossy(&request).into_owned());
    let _ = stream.write_all(reply.head.as_bytes()).await;
    let _ = stream.write_all(&reply.body).await;
    if reply.hangs {
        // Until the other side is gone.
        let mut buffer = [0; 16];
        let _ = stream.read(&mut buffer).await;
        gone.fetch_add(1, Ordering::SeqCst);
    }
}
