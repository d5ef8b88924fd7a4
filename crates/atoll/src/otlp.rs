//! Traces to a collector, as OTLP over HTTP in its JSON encoding.
//!
//! Written here because it is small: a tracing layer that notes when a span began and with which fields, and a task that
//! posts what has ended once a second. The OpenTelemetry SDK would bring some thirty crates for the same bytes. Spans are
//! dropped, and counted, when the collector cannot keep up: telemetry never slows a request.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use atoll_client::output::{Doing, Result};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

const QUEUE: usize = 4096;
const BATCH: usize = 512;
const EVERY: Duration = Duration::from_secs(1);

/// Notes spans and hands them over when they close.
#[derive(Debug)]
struct SpanLayer {
    sender: mpsc::Sender<Message>,
    dropped: Arc<AtomicU64>,
}

/// Sends what is left when flushed.
#[derive(Debug)]
pub(crate) struct Exporter {
    sender: mpsc::Sender<Message>,
}

#[derive(Debug)]
enum Message {
    Span(Value),
    Flush(oneshot::Sender<()>),
}

/// Kept with each open span.
struct Open {
    trace_id: String,
    span_id: String,
    parent_id: Option<String>,
    began_nanos: u128,
    fields: Fields,
}

/// Must be called inside a Tokio runtime: the exporting task lives on it.
pub(crate) fn start(endpoint: &str) -> Result<(Box<dyn Layer<Registry> + Send + Sync>, Exporter)> {
    let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    let http = reqwest::Client::builder()
        .timeout(Duration::from_secs(10))
        .build()
        .doing("cannot set up the export of traces")?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let dropped = Arc::new(AtomicU64::new(0));
    tokio::spawn(export(http, url, receiver, Arc::clone(&dropped)));
    let layer = SpanLayer {
        sender: sender.clone(),
        dropped,
    };
    // A filter of this layer alone: `Layer::enabled` would decide for the log as well, which would then be empty.
    let exported = filter_fn(|metadata| metadata.is_span() && *metadata.level() <= Level::INFO);
    Ok((layer.with_filter(exported).boxed(), Exporter { sender }))
}

impl Exporter {
    pub(crate) async fn flush(self) {
        let (done, wait) = oneshot::channel();
        if self.sender.send(Message::Flush(done)).await.is_ok() {
            let _late = tokio::time::timeout(Duration::from_secs(3), wait).await;
        }
    }
}

/// Posts what has ended, and says in the log what was lost: spans that found the queue full, and those of a post that the
/// collector did not take.
async fn export(
    http: reqwest::Client,
    url: String,
    mut receiver: mpsc::Receiver<Message>,
    dropped: Arc<AtomicU64>,
) {
    let mut spans = Vec::new();
    let mut tick = tokio::time::interval(EVERY);
    loop {
        let flushed = tokio::select! {
            message = receiver.recv() => match message {
                Some(Message::Span(span)) => {
                    spans.push(span);
                    if spans.len() < BATCH {
                        continue;
                    }
                    None
                }
                Some(Message::Flush(done)) => Some(done),
                None => return,
            },
            _ = tick.tick() => None,
        };
        let mut lost = dropped.swap(0, Ordering::Relaxed);
        let mut refused = None;
        if !spans.is_empty() {
            let sent = std::mem::take(&mut spans);
            let body = envelope(&sent);
            let answer = http
                .post(&url)
                .json(&body)
                .send()
                .await
                .and_then(reqwest::Response::error_for_status);
            if let Err(error) = answer {
                lost += sent.len() as u64;
                refused = Some(error);
            }
        }
        match refused {
            Some(error) => tracing::warn!(%error, lost, "the trace collector did not take the spans"),
            None if lost > 0 => tracing::warn!(lost, "spans ended faster than the trace collector took them"),
            None => {}
        }
        if let Some(done) = flushed {
            let _gone = done.send(());
        }
    }
}

fn envelope(spans: &[Value]) -> Value {
    json!({"resourceSpans": [{
        "resource": {"attributes": [text("service.name", "atoll"), text("service.version", env!("CARGO_PKG_VERSION"))]},
        "scopeSpans": [{"scope": {"name": "atoll"}, "spans": spans}],
    }]})
}

fn text(key: &str, value: impl Into<String>) -> Value {
    json!({"key": key, "value": {"stringValue": value.into()}})
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let parent = span.parent().and_then(|parent| {
            parent
                .extensions()
                .get::<Open>()
                .map(|open| (open.trace_id.clone(), open.span_id.clone()))
        });
        let (trace_id, parent_id) = match parent {
            Some((trace_id, span_id)) => (trace_id, Some(span_id)),
            None => (random_hex::<16>(), None),
        };
        let mut fields = Fields::default();
        fields
            .attributes
            .push(text("code.namespace", span.metadata().target()));
        attributes.record(&mut fields);
        span.extensions_mut().insert(Open {
            trace_id,
            span_id: random_hex::<8>(),
            parent_id,
            began_nanos: now_nanos(),
            fields,
        });
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            record.record(&mut open.fields);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(open) = span.extensions_mut().remove::<Open>() else {
            return;
        };
        let Fields {
            attributes,
            name,
            is_client,
            failed,
        } = open.fields;
        let ended = json!({
            "traceId": open.trace_id,
            "spanId": open.span_id,
            "parentSpanId": open.parent_id.unwrap_or_default(),
            "name": name.as_deref().unwrap_or(span.name()),
            // Internal, or a call of somebody else.
            "kind": if is_client { 3 } else { 1 },
            // Unset, or an error.
            "status": {"code": if failed { 2 } else { 0 }},
            "startTimeUnixNano": open.began_nanos.to_string(),
            "endTimeUnixNano": now_nanos().to_string(),
            "attributes": attributes,
        });
        if self.sender.try_send(Message::Span(ended)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Collects fields as OTLP attributes. `otel.name` and `otel.kind` are about the span itself, as is `error.type` beside being
/// an attribute; those are the words that other exporters for `tracing` read, too.
#[derive(Debug, Default)]
struct Fields {
    attributes: Vec<Value>,
    name: Option<String>,
    is_client: bool,
    failed: bool,
}

impl Fields {
    fn push(&mut self, field: &Field, value: &Value) {
        self.attributes.push(json!({"key": field.name(), "value": value}));
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let said = json!({"stringValue": value});
        match field.name() {
            "otel.name" => self.name = Some(value.to_owned()),
            "otel.kind" => self.is_client = value == "client",
            // A list in the conventions, though nobody gives more than one.
            "gen_ai.response.finish_reasons" => self.push(field, &json!({"arrayValue": {"values": [said]}})),
            name => {
                self.failed |= name == "error.type";
                self.push(field, &said);
            }
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, &json!({"intValue": value.to_string()}));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, &json!({"intValue": value.to_string()}));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, &json!({"boolValue": value}));
    }
}

fn random_hex<const N: usize>() -> String {
    let mut bytes = [0; N];
    // All zeroes means "no id", which a collector drops: no worse than losing a span.
    let _unavailable = getrandom::fill(&mut bytes);
    hex::encode(bytes)
}

fn now_nanos() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Where log lines go in a test.
    #[derive(Clone, Default)]
    struct Log(Arc<parking_lot::Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What the log says after so many spans, with a collector that always answers the same.
    async fn logged(answer: axum::http::StatusCode, spans: usize) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let collector = axum::Router::new().fallback(move || async move { answer });
        let serving = tokio::spawn(async move { axum::serve(listener, collector).await });
        let log = Log::default();
        let (writer, (layer, exporter)) = (log.clone(), start(&format!("http://{address}")).unwrap());
        let lines = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .with_filter(tracing_subscriber::EnvFilter::new("warn"))
            .boxed();
        // As the server has them: both in one list.
        let subscriber = tracing_subscriber::registry().with(vec![lines, layer]);
        let _here = tracing::subscriber::set_default(subscriber);
        // One thread: the exporter sees none of them before all have ended.
        for _ in 0..spans {
            drop(tracing::info_span!("one"));
        }
        exporter.flush().await;
        serving.abort();
        String::from_utf8(log.0.lock().clone()).unwrap()
    }

    #[tokio::test]
    async fn what_is_lost_is_counted_and_said_in_the_log() {
        use axum::http::StatusCode;
        assert_eq!(logged(StatusCode::OK, 2).await, "");
        let refused = logged(StatusCode::SERVICE_UNAVAILABLE, 2).await;
        assert!(
            refused.contains("did not take") && refused.contains("lost=2"),
            "{refused}"
        );
        let too_many = logged(StatusCode::OK, QUEUE + 10).await;
        assert!(
            too_many.contains("faster") && too_many.contains("lost=10"),
            "{too_many}"
        );
    }

    #[tokio::test]
    async fn spans_reach_a_collector_with_their_parents_and_fields() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let collector = tokio::spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            loop {
                let mut buffer = [0; 4096];
                let count = socket.read(&mut buffer).await.unwrap();
                request.extend_from_slice(&buffer[..count]);
                if let Some(end) = request.windows(4).position(|w| w == b"\r\n\r\n")
                    && let Ok(body) = serde_json::from_slice::<Value>(&request[end + 4..])
                {
                    socket
                        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                        .await
                        .unwrap();
                    return body;
                }
            }
        });
        let (layer, exporter) = start(&format!("http://{address}")).unwrap();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let outer = tracing::info_span!("outer", sandbox = "sbx_1");
            let _inside = outer.enter();
            let kind = "client";
            drop(tracing::info_span!(
                "inner",
                count = 3_u64,
                otel.name = "chat m",
                otel.kind = kind,
                "error.type" = "lost"
            ));
        });
        exporter.flush().await;
        let body = collector.await.unwrap();
        let spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
            .as_array()
            .unwrap()
            .clone();
        assert_eq!(spans.len(), 2);
        let about = (&spans[0]["name"], &spans[0]["kind"], &spans[0]["status"]["code"]);
        assert_eq!(about, (&json!("chat m"), &json!(3), &json!(2)));
        assert_eq!(
            (&spans[1]["name"], &spans[1]["kind"]),
            (&json!("outer"), &json!(1))
        );
        assert_eq!(spans[0]["parentSpanId"], spans[1]["spanId"]);
        assert_eq!(spans[0]["traceId"], spans[1]["traceId"]);
        assert!(spans[1]["attributes"].to_string().contains("sbx_1"));
    }
}
