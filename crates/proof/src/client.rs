//! A client of the public API that hides nothing: status, headers and body of every answer are there to be asserted.

use std::fmt;
use std::time::Duration;

use reqwest::header::HeaderMap;
use reqwest::{Method, RequestBuilder};
use serde_json::Value;

/// No request of a test takes longer, unless it streams.
const PATIENCE: Duration = Duration::from_secs(90);

#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    url: String,
    key: Option<String>,
}

/// What came back.
#[derive(Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    request: String,
}

impl Client {
    pub(crate) fn new(url: &str, key: Option<&str>) -> Self {
        let http = reqwest::Client::builder()
            .no_proxy()
            .build()
            .expect("a plain client can be made");
        Self {
            http,
            url: url.to_owned(),
            key: key.map(str::to_owned),
        }
    }

    /// The same server with another key, or none.
    pub fn with_key(&self, key: Option<&str>) -> Self {
        Self {
            key: key.map(str::to_owned),
            ..self.clone()
        }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// `127.0.0.1:PORT`.
    pub fn authority(&self) -> &str {
        self.url
            .strip_prefix("http://")
            .expect("the server speaks plain HTTP")
    }

    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.url));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Sends a request and reads the whole answer.
    pub async fn send(&self, request: RequestBuilder) -> Answer {
        match self.try_send(request).await {
            Ok(answer) => answer,
            Err(error) => panic!("the server gave no answer: {}", causes(&error)),
        }
    }

    /// For a server that may be dead or dying.
    pub async fn try_send(&self, request: RequestBuilder) -> Result<Answer, reqwest::Error> {
        let request = request.timeout(PATIENCE).build()?;
        let shown = format!("{} {}", request.method(), request.url());
        let response = self.http.execute(request).await?;
        Ok(Answer {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            body: response.bytes().await?.to_vec(),
            request: shown,
        })
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    pub async fn get_with(&self, path: &str, query: &[(&str, &str)]) -> Answer {
        self.send(self.request(Method::GET, path).query(query)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path)).await
    }

    /// The request goes out, the answer stays a stream.
    pub async fn open(&self, request: RequestBuilder) -> reqwest::Response {
        request
            .send()
            .await
            .unwrap_or_else(|error| panic!("the server gave no answer: {}", causes(&error)))
    }
}

impl Answer {
    /// Asserts a status.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    /// The body of a success.
    #[track_caller]
    pub fn ok(self) -> Value {
        assert!((200..300).contains(&self.status), "{self:?}");
        self.json()
    }

    /// The body as JSON; `null` if there is none.
    #[track_caller]
    pub fn json(&self) -> Value {
        if self.body.is_empty() {
            return Value::Null;
        }
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Asserts a refusal with this status and code in our one error shape, and returns its detail.
    #[track_caller]
    pub fn refused(&self, status: u16, code: &str) -> Value {
        let detail = self.error();
        assert_eq!(
            (self.status, detail["code"].as_str()),
            (status, Some(code)),
            "{self:?}"
        );
        detail
    }

    /// The detail of any refusal; asserts that it is complete.
    #[track_caller]
    pub fn error(&self) -> Value {
        assert!(self.status >= 400, "was not refused: {self:?}");
        let detail = self.json()["error"].clone();
        for field in ["code", "message", "request_id"] {
            let text = detail[field].as_str().unwrap_or_default();
            assert!(!text.is_empty(), "a refusal without `{field}`: {self:?}");
        }
        let id = self.headers.get("x-request-id").and_then(|id| id.to_str().ok());
        assert_eq!(id, detail["request_id"].as_str(), "{self:?}");
        detail
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.text();
        let shown: String = text.chars().take(2000).collect();
        write!(
            f,
            "{} -> {} ({} bytes) {shown}",
            self.request,
            self.status,
            self.body.len()
        )
    }
}

/// An error with all that lies behind it, in one line.
pub fn causes(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
