//! The doors: one request each, of every kind that any API of the server answers.

use atoll_proof::to_base64;
use reqwest::{Method, RequestBuilder};

use crate::cast::Cast;

/// How a secret is brought to a door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Bearer,
    Basic,
    ApiKey,
    AccessToken,
    AtollToken,
    TrafficToken,
    Cookie,
    Query,
    /// A link to `/etc/hostname`, signed with it.
    Signature,
    Proof,
}

/// Those that any request may carry.
const HEADERS: [Way; 7] = [
    Way::Bearer,
    Way::Basic,
    Way::ApiKey,
    Way::AccessToken,
    Way::AtollToken,
    Way::TrafficToken,
    Way::Cookie,
];

#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) name: &'static str,
    method: Method,
    /// With a query or without.
    path: String,
    /// Whose port it is: by `Host`, or by E2B's headers.
    host: Option<String>,
    headers: Option<(String, u16)>,
    json: Option<&'static str>,
    body: Option<&'static str>,
    /// How this door is meant to be opened; a refusal is shown of this way.
    own: Way,
    /// In the answer of gRPC the status is another.
    grpc: bool,
}

impl Door {
    fn new(name: &'static str, method: Method, path: impl Into<String>, own: Way) -> Self {
        Self {
            name,
            method,
            path: path.into(),
            host: None,
            headers: None,
            json: None,
            body: None,
            own,
            grpc: false,
        }
    }

    fn get(name: &'static str, path: impl Into<String>, own: Way) -> Self {
        Self::new(name, Method::GET, path, own)
    }

    fn post(name: &'static str, path: impl Into<String>, own: Way, json: &'static str) -> Self {
        Self {
            json: Some(json),
            ..Self::new(name, Method::POST, path, own)
        }
    }

    fn body(self, body: &'static str) -> Self {
        Self {
            body: Some(body),
            ..self
        }
    }

    /// Of a port of a sandbox, `{port}-{sandbox}`.
    fn host(self, cast: &Cast, port: u16, bare: &str) -> Self {
        let own = cast.anonymous.authority().rsplit_once(':').unwrap().1;
        Self {
            host: Some(format!("{port}-{bare}.localhost:{own}")),
            ..self
        }
    }

    fn headers(self, port: u16, bare: &str) -> Self {
        Self {
            headers: Some((bare.to_owned(), port)),
            ..self
        }
    }

    /// `yes`, or how whoever has nothing better is refused.
    pub(crate) async fn try_with(&self, cast: &Cast, secret: Option<&str>) -> String {
        let Some(secret) = secret else {
            return self.knock(cast, None).await;
        };
        let mut ways = vec![self.own];
        ways.extend(HEADERS.into_iter().filter(|way| *way != self.own));
        // Where parameters that nobody knows are refused it would hide what the others do.
        if self.host.is_some() && self.headers.is_none() {
            ways.push(Way::Query);
        }
        let mut first = None;
        for way in ways {
            let answer = self.knock(cast, Some((way, secret))).await;
            if answer == "yes" {
                return answer;
            }
            first.get_or_insert(answer);
        }
        first.unwrap()
    }

    async fn knock(&self, cast: &Cast, shown: Option<(Way, &str)>) -> String {
        if self.grpc {
            return self.call(cast, shown).await;
        }
        let request = self.dress(
            &cast
                .anonymous
                .request(self.method.clone(), &self.addressed(shown)),
            shown,
        );
        let request = request.unwrap();
        let answer = cast.anonymous.send(request).await;
        match answer.status {
            ..400 => "yes".to_owned(),
            refused => refused.to_string(),
        }
    }

    /// The path with what is shown in it.
    fn addressed(&self, shown: Option<(Way, &str)>) -> String {
        let join = if self.path.contains('?') { '&' } else { '?' };
        match shown {
            Some((Way::Query, secret)) => format!("{}{join}atoll_token={secret}", self.path),
            Some((Way::Signature, secret)) => {
                let signature = signed(&format!("/etc/hostname:read::{secret}"));
                format!("{}{join}signature={signature}", self.path)
            }
            Some((Way::Proof, secret)) => format!("{}{join}proof={secret}", self.path),
            _ => self.path.clone(),
        }
    }

    fn dress(&self, request: &RequestBuilder, shown: Option<(Way, &str)>) -> Option<RequestBuilder> {
        let mut request = request.try_clone()?;
        if let Some(host) = &self.host {
            request = request.header("host", host);
        }
        if let Some((id, port)) = &self.headers {
            request = request
                .header("e2b-sandbox-id", id)
                .header("e2b-sandbox-port", port.to_string());
        }
        if let Some(json) = self.json {
            request = request.header("content-type", "application/json").body(json);
        }
        if let Some(body) = self.body {
            request = request.body(body);
        }
        let Some((way, secret)) = shown else {
            return Some(request);
        };
        Some(match way {
            Way::Bearer => request.bearer_auth(secret),
            Way::Basic => {
                let pair = to_base64(format!("{secret}:{secret}").as_bytes());
                request.header("authorization", format!("Basic {pair}"))
            }
            Way::ApiKey => request.header("x-api-key", secret),
            Way::AccessToken => request.header("x-access-token", secret),
            Way::AtollToken => request.header("x-atoll-token", secret),
            Way::TrafficToken => request.header("e2b-traffic-access-token", secret),
            Way::Cookie => request.header("cookie", format!("atoll_token={secret}")),
            Way::Query | Way::Signature | Way::Proof => request,
        })
    }

    /// An empty message over gRPC. Who is not let in is told so in the head of the answer.
    async fn call(&self, cast: &Cast, shown: Option<(Way, &str)>) -> String {
        let client = reqwest::Client::builder()
            .http2_prior_knowledge()
            .no_proxy()
            .build()
            .unwrap();
        let url = format!("http://127.0.0.1:{}{}", cast.workflows, self.path);
        let request = client
            .post(url)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(vec![0; 5]);
        let answer = self.dress(&request, shown).unwrap().send().await.unwrap();
        assert_eq!(answer.status(), 200, "gRPC says no in its own words");
        match answer.headers().get("grpc-status") {
            None => "yes".to_owned(),
            Some(status) if status == "0" => "yes".to_owned(),
            Some(status) => status.to_str().unwrap().to_owned(),
        }
    }
}

/// As E2B's clients sign, percent-encoded.
pub(crate) fn signed(text: &str) -> String {
    use base64::Engine as _;
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(text);
    let encoded = base64::engine::general_purpose::STANDARD_NO_PAD.encode(digest);
    format!("v1_{}", encoded.replace('+', "%2B").replace('/', "%2F"))
}

pub(crate) fn all(cast: &Cast) -> Vec<Door> {
    use Way::{AccessToken, ApiKey, AtollToken, Bearer, Proof, Signature, TrafficToken};
    const PROCESSES: &str = "/process.Process/List";
    const FILE: &str = "/files?path=/etc/hostname";
    let native = cast.native.bare();
    let of = |rest: &str| cast.native.path(rest);
    let v1 = vec![
        Door::get("`/v1`: look at a sandbox", of(""), Bearer),
        Door::post("`/v1`: run in it", of("/exec"), Bearer, r#"{"argv":["true"]}"#),
        Door::get(
            "`/v1`: read its files",
            of("/files/content?path=/etc/hostname"),
            Bearer,
        ),
        Door::new(
            "`/v1`: write its files",
            Method::PUT,
            of("/files/content?path=/tmp/written"),
            Bearer,
        )
        .body("x"),
        Door::get("`/v1`: ask for a port's token", of("/ports/8000"), Bearer),
        Door::get(
            "`/v1`: look at one made by E2B's clients",
            format!("/v1/sandboxes/sbx_{}", cast.e2b),
            Bearer,
        ),
        Door::get("`/v1`: list keys", "/v1/keys", Bearer),
        Door::get("`/v1`: list secrets", "/v1/secrets", Bearer),
        Door::get(
            "`/v1`: look at its template",
            format!("/v1/templates/{}", cast.template),
            Bearer,
        ),
        Door::post(
            "`/v1`: prune templates of one's own",
            "/v1/templates/prune",
            Bearer,
            "{}",
        ),
        Door::post("`/v1`: share templates", "/v1/templates/base/share", Bearer, "{}"),
        Door::post("`/v1`: run the server (`gc`)", "/v1/gc", Bearer, "{}"),
        Door::get("models: call", "/v1/models", Bearer),
        Door::get("models: manage", "/v1/gateway/keys", Bearer),
        Door::get("`/metrics`", "/metrics", Bearer),
        Door::get("`/metrics/models`", "/metrics/models", Bearer),
        Door {
            grpc: true,
            ..Door::new(
                "Temporal (gRPC status)",
                Method::POST,
                "/temporal.api.workflowservice.v1.WorkflowService/ListNamespaces",
                Bearer,
            )
        },
    ];
    let ports = vec![
        Door::get("port 8000, by host", "/", AtollToken).host(cast, 8000, native),
        Door::get("port 8001, by host", "/", AtollToken).host(cast, 8001, native),
        Door::get("port 8000, by E2B's headers", "/", TrafficToken).headers(8000, native),
        Door::get("E2B, ports not public: by host", "/", TrafficToken).host(cast, 8000, &cast.e2b),
        Door::get("E2B, ports not public: by headers", "/", TrafficToken).headers(8000, &cast.e2b),
        Door::get("E2B, ports public: by host", "/", TrafficToken).host(cast, 8000, &cast.public),
        Door::get("port of a dead one, by host", "/", AtollToken).host(cast, 8000, &cast.dead),
    ];
    let list = |name| Door::post(name, PROCESSES, AccessToken, "{}");
    let stat = r#"{"path":"/etc/hostname"}"#;
    let e2b = vec![
        Door::get(
            "E2B: look at a sandbox",
            format!("/sandboxes/{}", cast.e2b),
            ApiKey,
        ),
        Door::post(
            "E2B: connect",
            format!("/sandboxes/{}/connect", cast.e2b),
            ApiKey,
            r#"{"timeout":60}"#,
        ),
        Door::post(
            "E2B: connect to one of `/v1`",
            format!("/sandboxes/{native}/connect"),
            ApiKey,
            r#"{"timeout":60}"#,
        ),
        Door::get(
            "E2B: ask for a volume's token",
            format!("/volumes/{}", cast.volume),
            ApiKey,
        ),
        Door::get(
            "E2B: look at its template",
            format!("/templates/{}", cast.template),
            ApiKey,
        ),
        list("envd: processes, by headers").headers(49983, &cast.e2b),
        list("envd: processes, by host").host(cast, 49983, &cast.e2b),
        Door::post(
            "envd: file system",
            "/filesystem.Filesystem/Stat",
            AccessToken,
            stat,
        )
        .headers(49983, &cast.e2b),
        Door::get("envd: read a file", FILE, AccessToken).headers(49983, &cast.e2b),
        Door::new(
            "envd: write a file",
            Method::POST,
            "/files?path=/tmp/written",
            AccessToken,
        )
        .body("x")
        .headers(49983, &cast.e2b),
        list("envd of one of `/v1`: processes, by headers").headers(49983, native),
        list("envd of one of `/v1`: processes, by host").host(cast, 49983, native),
        Door::get("envd of one of `/v1`: read a file", FILE, AccessToken).headers(49983, native),
        list("envd, `secure: false`: processes").headers(49983, &cast.public),
        list("envd of a dead one: processes").headers(49983, &cast.dead),
        Door::get("link to a file, signed with it", FILE, Signature).headers(49983, &cast.e2b),
        Door::get("the same for one of `/v1`", FILE, Signature).headers(49983, native),
        Door::get("the same for a dead one", FILE, Signature).headers(49983, &cast.dead),
        Door::get("the same without a sandbox's name", FILE, Signature),
        Door::get(
            "files of a volume",
            format!("/volumecontent/{}/dir?path=/", cast.volume),
            Bearer,
        ),
        Door::get(
            "files of a dead volume",
            format!("/volumecontent/{}/dir?path=/", cast.dead_volume),
            Bearer,
        ),
        Door::get(
            "builds: ask for an upload link",
            "/templates/any/files/abc123",
            ApiKey,
        ),
        Door::new("builds: upload", Method::PUT, cast.upload.clone(), Proof).body("x"),
    ];
    v1.into_iter().chain(ports).chain(e2b).collect()
}
