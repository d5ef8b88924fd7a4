//! Asking a registry: who we are, and answers that are not believed to end.
//!
//! A caller may name any registry, so all that one says is hostile: manifests, tokens and what it says about errors are
//! read up to a bound, blobs are handed out as they come. (This is why no finished client is used: those at hand gather
//! an answer first and look at its size afterwards.) The login goes to the registry that was named, or to where that one
//! sends for tokens, as the protocol has it; never to where it redirects to.

use std::time::Duration;

use oci_client::Reference;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;
use tokio::sync::Mutex;

use super::Login;

const ACCEPTED: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";
const MAX_TOKEN: u64 = 1 << 20;

/// One repository of a registry. Errors are sentences for people.
pub(super) struct Registry {
    http: Client,
    repository: String,
    /// The URL of the repository, with a slash at the end.
    base: String,
    login: Option<Login>,
    /// What the registry wanted to see when it was last asked.
    authorization: Mutex<Option<HeaderValue>>,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// Plain HTTP is for registries on this machine only.
    pub(super) fn new(reference: &Reference, login: Option<Login>) -> Result<Self, String> {
        let registry = reference.resolve_registry();
        let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
        let loopback = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
        let http = Client::builder()
            .connect_timeout(Duration::from_secs(20))
            .read_timeout(Duration::from_secs(60))
            .https_only(!loopback)
            .user_agent(concat!("atoll/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| all_of(&error))?;
        let login = login.filter(|login| match &login.registry {
            Some(whose) => whose == reference.registry() || whose == registry,
            None => true,
        });
        let scheme = if loopback { "http" } else { "https" };
        let repository = reference.repository().to_owned();
        Ok(Self {
            http,
            base: format!("{scheme}://{registry}/v2/{repository}/"),
            repository,
            login,
            authorization: Mutex::new(None),
        })
    }

    /// Something of the repository, to be read by the caller, piece by piece.
    pub(super) async fn get(&self, path: &str) -> Result<Response, String> {
        let ask = |authorization: Option<HeaderValue>| {
            let mut request = self.http.get(format!("{}{path}", self.base));
            // Blobs are what they are.
            if path.starts_with("manifests/") {
                request = request.header(ACCEPT, ACCEPTED);
            }
            if let Some(value) = authorization {
                request = request.header(AUTHORIZATION, value);
            }
            send(request)
        };
        let known = self.authorization.lock().await.clone();
        let mut response = ask(known).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            let wanted = self.authorize(response.headers()).await?;
            self.authorization.lock().await.replace(wanted.clone());
            response = ask(Some(wanted)).await?;
        }
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if self.login.is_none() => {
                Err("the registry wants a login".into())
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err("the registry refuses the login".into()),
            StatusCode::NOT_FOUND => Err("the registry does not have it".into()),
            status => Err(format!("the registry answers {status}")),
        }
    }

    /// A small document of the repository.
    pub(super) async fn document(&self, path: &str, most: u64) -> Result<Vec<u8>, String> {
        read(self.get(path).await?, most).await
    }

    /// What to show to a registry that asked who we are.
    async fn authorize(&self, headers: &HeaderMap) -> Result<HeaderValue, String> {
        let challenges = headers
            .get_all(WWW_AUTHENTICATE)
            .iter()
            .filter_map(|value| value.to_str().ok());
        let mut basic = false;
        for challenge in challenges {
            let (kind, parameters) = challenge.split_once(' ').unwrap_or((challenge, ""));
            if kind.eq_ignore_ascii_case("bearer") {
                return self.token(parameters).await;
            }
            basic |= kind.eq_ignore_ascii_case("basic");
        }
        match &self.login {
            Some(login) if basic => {
                use base64::Engine as _;
                let pair = format!("{}:{}", login.user, login.password);
                let engine = base64::engine::general_purpose::STANDARD;
                secret(&format!("Basic {}", engine.encode(pair)))
            }
            _ => Err("the registry wants a login".into()),
        }
    }

    async fn token(&self, parameters: &str) -> Result<HeaderValue, String> {
        let of = |wanted: &str| {
            let mut found = parameters_of(parameters).into_iter();
            found.find_map(|(name, value)| (name == wanted).then_some(value))
        };
        let realm = of("realm").ok_or("the registry does not say where tokens are")?;
        let mut url = Url::parse(&realm).map_err(|_| "the registry does not say where tokens are")?;
        if let Some(service) = of("service") {
            url.query_pairs_mut().append_pair("service", &service);
        }
        let scope = format!("repository:{}:pull", self.repository);
        url.query_pairs_mut()
            .append_pair("scope", &of("scope").unwrap_or(scope));
        let mut request = self.http.get(url);
        if let Some(login) = &self.login {
            request = request.basic_auth(&login.user, Some(&login.password));
        }
        let response = send(request).await?;
        if !response.status().is_success() {
            return Err(format!("the registry gives no token: {}", response.status()));
        }
        let bytes = read(response, MAX_TOKEN).await?;
        let token: Token =
            serde_json::from_slice(&bytes).map_err(|_| "the registry's token is not readable")?;
        let token = token
            .token
            .or(token.access_token)
            .ok_or("the registry's token is not readable")?;
        secret(&format!("Bearer {token}"))
    }
}

fn secret(text: &str) -> Result<HeaderValue, String> {
    let mut value =
        HeaderValue::from_str(text).map_err(|_| "the registry's token or the login is no text")?;
    value.set_sensitive(true);
    Ok(value)
}

async fn send(request: RequestBuilder) -> Result<Response, String> {
    request.send().await.map_err(|error| all_of(&error))
}

/// At most `most` bytes, whatever was announced.
async fn read(mut response: Response, most: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|error| all_of(&error))? {
        bytes.extend_from_slice(&piece);
        if bytes.len() as u64 > most {
            return Err(format!("an answer of the registry is larger than {most} bytes"));
        }
    }
    Ok(bytes)
}

/// `a="x",b=y`, as challenges have them.
fn parameters_of(mut text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    while let Some((name, rest)) = text.split_once('=') {
        let (value, rest) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => {
                let end = rest.find(',').unwrap_or(rest.len());
                rest.split_at(end)
            }
        };
        let name = name.trim_matches([' ', ',']).to_ascii_lowercase();
        found.push((name, value.to_owned()));
        text = rest;
    }
    found
}

/// An error with all that is behind it.
pub(super) fn all_of(error: &dyn std::error::Error) -> String {
    let mut why = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        why = format!("{why}: {next}");
        cause = next.source();
    }
    why
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    enum Says {
        Text(&'static str, String),
        Endless,
    }

    /// A registry that answers what `answer` says about a path and an authorization. Gives its address and how much of
    /// endless answers was taken.
    fn registry(answer: impl Fn(&str, &str, &str) -> Says + Send + 'static) -> (String, Arc<AtomicU64>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (own, taken) = (address.clone(), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&taken);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let head = head_of(&stream);
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                let authorization = head
                    .lines()
                    .find_map(|line| line.strip_prefix("authorization: "))
                    .unwrap_or_default();
                serve(stream, answer(&own, &path, authorization), &count);
            }
        });
        (address, taken)
    }

    fn head_of(mut stream: &TcpStream) -> String {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read > 0) {
            head.push(byte[0]);
        }
        String::from_utf8(head).unwrap()
    }

    fn serve(mut stream: TcpStream, says: Says, taken: &AtomicU64) {
        match says {
            Says::Text(status, body) => {
                let length = body.len();
                let _ = write!(
                    stream,
                    "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
                );
            }
            Says::Endless => {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
                let piece = vec![b' '; 1 << 16];
                while stream.write_all(&piece).is_ok() {
                    taken.fetch_add(piece.len() as u64, Ordering::Relaxed);
                }
            }
        }
    }

    fn of(address: &str, login: Option<Login>) -> Registry {
        let reference: Reference = format!("{address}/team/app:1").parse().unwrap();
        Registry::new(&reference, login).unwrap()
    }

    fn challenge(address: &str) -> Says {
        let status = format!(
            "401 Unauthorized\r\nWWW-Authenticate: Bearer realm=\"http://{address}/token\",service=\"the one\""
        );
        Says::Text(Box::leak(status.into_boxed_str()), "{}".into())
    }

    #[tokio::test]
    async fn endless_answers_are_refused() {
        let (address, taken) = registry(|_, _, _| Says::Endless);
        let error = of(&address, None)
            .document("manifests/1", 1 << 20)
            .await
            .unwrap_err();
        assert!(error.contains("larger than 1048576"), "{error}");
        assert!(taken.load(Ordering::Relaxed) < 64 << 20);

        let (address, taken) = registry(|own, path, _| match path.starts_with("/token") {
            true => Says::Endless,
            false => challenge(own),
        });
        let error = of(&address, None)
            .document("manifests/1", 1 << 20)
            .await
            .unwrap_err();
        assert!(error.contains("larger than 1048576"), "{error}");
        assert!(taken.load(Ordering::Relaxed) < 64 << 20);
    }

    #[tokio::test]
    async fn a_login_becomes_a_token() {
        let (address, _) = registry(|own, path, authorization| match authorization {
            "Bearer yes" => Says::Text("200 OK", format!("found {path}")),
            // me:pass
            "Basic bWU6cGFzcw==" if path == "/token?service=the+one&scope=repository%3Ateam%2Fapp%3Apull" => {
                Says::Text("200 OK", r#"{"token": "yes"}"#.into())
            }
            "" if path.starts_with("/token") => Says::Text("200 OK", r#"{"access_token": "no"}"#.into()),
            _ => challenge(own),
        });
        let login = |password: &str| {
            Some(Login {
                registry: None,
                user: "me".into(),
                password: password.into(),
            })
        };
        let found = of(&address, login("pass")).document("manifests/1", 100).await;
        assert_eq!(found.unwrap(), b"found /v2/team/app/manifests/1");
        let error = of(&address, None).document("manifests/1", 100).await.unwrap_err();
        assert_eq!(error, "the registry wants a login");
        let error = of(&address, login("wrong"))
            .document("manifests/1", 100)
            .await
            .unwrap_err();
        assert!(
            error.contains("gives no token") && !error.contains("wrong"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_registry_may_want_the_login_itself() {
        let (address, _) = registry(|_, _, authorization| match authorization {
            "Basic bWU6cGFzcw==" => Says::Text("200 OK", "{}".into()),
            _ => Says::Text(
                "401 Unauthorized\r\nWWW-Authenticate: Basic realm=x",
                String::new(),
            ),
        });
        let login = Login {
            registry: Some(address.clone()),
            user: "me".into(),
            password: "pass".into(),
        };
        let other = Login {
            registry: Some("registry.example".into()),
            ..login.clone()
        };
        let found = of(&address, Some(login)).document("manifests/1", 100).await;
        assert!(found.is_ok());
        // One that is for another registry is not shown to this one.
        let error = of(&address, Some(other)).document("manifests/1", 100).await;
        assert_eq!(error.unwrap_err(), "the registry wants a login");
        assert!(of(&address, None).document("manifests/1", 100).await.is_err());
    }
}
