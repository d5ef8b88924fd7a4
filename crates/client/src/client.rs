//! The client's side of the native API: requests and answers over HTTP, and server-sent events.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use reqwest::{Method, RequestBuilder, Response, Url};
use serde_json::Value;

use crate::local;
use crate::output::{Doing, Error, OWN_FAILURE, Result};

#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    key: Option<String>,
}

impl Client {
    pub fn new(url: &str, key: Option<String>) -> Result<Self> {
        Self::trusting(url, key, None)
    }

    /// `authority`: the file of a certificate authority that is trusted beside those of this machine.
    fn trusting(url: &str, key: Option<String>, authority: Option<&Path>) -> Result<Self> {
        let base = Url::parse(url)
            .ok()
            .filter(|url| url.has_host() && matches!(url.scheme(), "http" | "https"))
            .ok_or_else(|| {
                Error::new(format!("`{url}` is not the URL of a server"))
                    .hint("write for example http://127.0.0.1:7070")
            })?;
        let mut http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(10))
            .tcp_nodelay(true);
        // No proxy stands between us and this machine, whatever the environment says.
        if matches!(base.host_str(), Some("127.0.0.1" | "localhost" | "[::1]")) {
            http = http.no_proxy();
        }
        if let Some(path) = authority {
            let doing = || format!("cannot read the certificate authority {}", path.display());
            let pem = std::fs::read(path).doing(doing())?;
            let certificate = reqwest::Certificate::from_pem(&pem).doing(doing())?;
            http = http.add_root_certificate(certificate);
        }
        let http = http.build().doing("cannot set up HTTP")?;
        Ok(Self { http, base, key })
    }

    /// The server that the user has named, or else the one that runs on the data directory. `None`: there is none.
    pub fn find(url: Option<&str>, key: Option<String>, data: &Path) -> Result<Option<Self>> {
        match url {
            Some(url) => {
                // The admin key is only for the server that it belongs to, and so is its authority.
                let server = local::running_server(data);
                let secured = server
                    .as_ref()
                    .and_then(|server| server.tls.as_ref())
                    .filter(|tls| leads_to(url, tls));
                let is_local =
                    secured.is_some() || server.as_ref().is_some_and(|server| same_url(&server.url, url));
                let key = key.or_else(|| is_local.then(|| local::read_admin_key(data)).flatten());
                let authority = secured.and_then(|tls| tls.authority.as_deref());
                Self::trusting(url, key, authority).map(Some)
            }
            None => match local::running_server(data).filter(|server| !server.embedded) {
                Some(server) => Self::new(&server.url, key.or_else(|| local::read_admin_key(data))).map(Some),
                None => Ok(None),
            },
        }
    }

    /// As `find`, for commands that make no sense without a server.
    pub fn require(url: Option<&str>, key: Option<String>, data: &Path) -> Result<Self> {
        Self::find(url, key, data)?.ok_or_else(|| {
            Error::new(format!("no atoll server runs on the data directory {}", data.display()))
                .hint("start one with `atoll server`, name its data directory with --data or ATOLL_DATA, or its address with --url")
        })
    }

    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    pub fn base(&self) -> &Url {
        &self.base
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let mut url = self.base.clone();
        // Paths are ours; what users give goes into the query or through `segment`.
        url.set_path(&format!("{}{path}", self.base.path().trim_end_matches('/')));
        let request = self.http.request(method, url);
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Sends a request; an answer that is not a success becomes an error.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        if response.status().is_success() || response.status().as_u16() == 101 {
            return Ok(response);
        }
        Err(refusal(response).await)
    }

    pub async fn json(&self, request: RequestBuilder) -> Result<Value> {
        let response = self.send(request).await?;
        let bytes = response.bytes().await.map_err(|error| self.unreachable(&error))?;
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&bytes)
            .doing("the server's answer is not JSON; is this the URL of an atoll server?")
    }

    pub async fn get(&self, path: &str) -> Result<Value> {
        self.json(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.json(self.request(Method::POST, path).json(body)).await
    }

    pub async fn put(&self, path: &str, body: &Value) -> Result<Value> {
        self.json(self.request(Method::PUT, path).json(body)).await
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Result<Value> {
        self.json(self.request(Method::PATCH, path).json(body)).await
    }

    pub async fn delete(&self, path: &str) -> Result<Value> {
        self.json(self.request(Method::DELETE, path)).await
    }

    /// Follows the cursor to the end.
    pub async fn list(&self, path: &str, query: &[(String, String)]) -> Result<Vec<Value>> {
        let mut items = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let mut request = self
                .request(Method::GET, path)
                .query(query)
                .query(&[("limit", "100")]);
            if let Some(cursor) = &cursor {
                request = request.query(&[("cursor", cursor)]);
            }
            let mut page = self.json(request).await?;
            if let Some(Value::Array(found)) = page.get_mut("items").map(Value::take) {
                items.extend(found);
            }
            match page.get("next").and_then(Value::as_str) {
                Some(next) => cursor = Some(next.to_owned()),
                None => return Ok(items),
            }
        }
    }

    fn unreachable(&self, error: &reqwest::Error) -> Error {
        let cause = std::iter::successors(std::error::Error::source(error), |e| e.source())
            .last()
            .map_or_else(|| error.to_string(), ToString::to_string);
        Error::new(format!("cannot talk to the server at {}: {cause}", self.base))
            .hint(match self.base.scheme() {
                "https" => {
                    "is it running? where its certificate is of its own authority, SSL_CERT_FILE names that: DATA/tls/ca.pem"
                }
                _ => "is it running? `atoll server` starts one; --url names another",
            })
    }
}

/// Turns the server's typed error into ours.
async fn refusal(response: Response) -> Error {
    let status = response.status();
    let body = response.bytes().await.unwrap_or_default();
    let parsed: Option<Value> = serde_json::from_slice(&body).ok();
    let Some(error) = parsed.as_ref().and_then(|body| body.get("error")) else {
        let text = String::from_utf8_lossy(&body[..body.len().min(200)])
            .trim()
            .to_owned();
        return Error::new(format!("the server answered {status}: {text}"));
    };
    from_wire(error)
}

/// `{"code","message","hint"}` as the server writes it.
pub fn from_wire(error: &Value) -> Error {
    let field = |name: &str| error.get(name).and_then(Value::as_str).map(str::to_owned);
    let code = field("code");
    let hint = match code.as_deref() {
        Some("missing_key" | "invalid_key") => Some("give a key with --key or ATOLL_API_KEY".to_owned()),
        _ => field("hint"),
    };
    Error {
        message: field("message").unwrap_or_else(|| error.to_string()),
        hint,
        code,
        exit: OWN_FAILURE,
    }
}

/// A field as text; numbers and booleans too, nothing for null.
pub fn text(value: &Value, field: &str) -> String {
    match &value[field] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Whether a URL is that of the TLS listener of this machine's server.
fn leads_to(url: &str, tls: &local::TlsFile) -> bool {
    let Ok(url) = Url::parse(url) else { return false };
    let here = |host: &str| matches!(host, "127.0.0.1" | "localhost" | "[::1]") || host == tls.domain;
    url.scheme() == "https"
        && url.port_or_known_default() == Some(tls.port)
        && url.host_str().is_some_and(here)
}

fn same_url(a: &str, b: &str) -> bool {
    matches!((Url::parse(a), Url::parse(b)), (Ok(a), Ok(b)) if a.origin() == b.origin())
}

/// Reads the `data:` of server-sent events as `(event name, JSON)`, as they come.
pub fn events(response: Response) -> impl Stream<Item = Result<(String, Value)>> + Unpin {
    let body = response.bytes_stream().boxed();
    futures_util::stream::try_unfold((body, Parser::default()), |(mut body, mut parser)| {
        Box::pin(async move {
            loop {
                if let Some(event) = parser.next()? {
                    return Ok(Some((event, (body, parser))));
                }
                match body.next().await {
                    Some(chunk) => parser.push(&chunk.doing("the stream broke off")?),
                    None => return Ok(None),
                }
            }
        })
    })
}

#[derive(Debug, Default)]
struct Parser {
    buffer: Vec<u8>,
}

impl Parser {
    fn push(&mut self, chunk: &Bytes) {
        self.buffer.extend_from_slice(chunk);
    }

    /// The next whole event with data in it, if it has arrived.
    fn next(&mut self) -> Result<Option<(String, Value)>> {
        while let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
            let (mut name, mut data) = (String::new(), String::new());
            for line in String::from_utf8_lossy(&block).lines() {
                if let Some(value) = line.strip_prefix("event:") {
                    value.trim().clone_into(&mut name);
                } else if let Some(value) = line.strip_prefix("data:") {
                    data.push_str(value.strip_prefix(' ').unwrap_or(value));
                    data.push('\n');
                }
            }
            if !data.is_empty() {
                let value = serde_json::from_str(&data).doing("an event of the server is not JSON")?;
                return Ok(Some((name, value)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use atoll_http_rules::segment;

    use super::*;

    #[test]
    fn events_are_put_together_from_pieces() {
        let mut parser = Parser::default();
        parser.push(&Bytes::from_static(b": keep-alive\n\nevent: stdout\nda"));
        assert!(parser.next().unwrap().is_none());
        parser.push(&Bytes::from_static(b"ta: {\"a\":1}\n\n"));
        let (name, value) = parser.next().unwrap().unwrap();
        assert_eq!((name.as_str(), value["a"].as_i64()), ("stdout", Some(1)));
        assert!(parser.next().unwrap().is_none());
    }

    #[test]
    fn segments_stay_one_segment() {
        let client = Client::new("http://127.0.0.1:7070/", None).unwrap();
        let request = client
            .request(Method::GET, &format!("/v1/artifacts/{}", segment("a/b%")))
            .build()
            .unwrap();
        assert_eq!(
            request.url().as_str(),
            "http://127.0.0.1:7070/v1/artifacts/a%2Fb%25"
        );
    }

    #[test]
    fn only_urls_are_urls() {
        assert!(Client::new("127.0.0.1:7070", None).is_err());
        assert!(Client::new("ftp://x", None).is_err());
        assert!(Client::new("http://127.0.0.1:7070", None).is_ok());
    }
}
