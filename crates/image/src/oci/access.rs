//! Asking a registry: who we are, and answers that are not believed to end.
//!
//! A caller may name any registry, so all that one says is hostile: manifests, tokens and what it says about errors are
//! read up to a bound, blobs are handed out as they come. (This is why no finished client is used: those at hand gather
//! an answer first and look at its size afterwards.) The login goes to the registry that was named, or to where that one
//! sends for tokens, as the protocol has it; never to where it redirects to.
//!
//! Where the operator builds, the registry that is named is meant: that one may be anywhere. Where it leads to, by redirects and
//! for tokens, is the registry's word: each of these names and addresses is asked about ([`Reach`]), an address right before it is
//! connected to. For all others the registry itself is asked about as well.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use oci_client::Reference;
use reqwest::dns::{Name, Resolve, Resolving};
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, WWW_AUTHENTICATE};
use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;
use tokio::sync::Mutex;

use super::{Login, Reach};

const ACCEPTED: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";
const MAX_TOKEN: u64 = 1 << 20;
const MAX_REDIRECTS: usize = 10;

/// One repository of a registry. Errors are sentences for people.
pub(super) struct Registry {
    /// To the registry itself.
    named: Client,
    /// To wherever that leads.
    led: Client,
    reach: Option<Arc<dyn Reach>>,
    repository: String,
    /// The URL of the repository, with a slash at the end.
    base: Url,
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
    /// Plain HTTP is for registries on this machine only. Without a `reach` it may lead anywhere.
    pub(super) fn new(
        reference: &Reference,
        login: Option<Login>,
        reach: Option<Arc<dyn Reach>>,
    ) -> Result<Self, String> {
        let registry = reference.resolve_registry();
        let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
        let loopback = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
        let client = || {
            Client::builder()
                .connect_timeout(Duration::from_secs(20))
                .read_timeout(Duration::from_secs(60))
                .https_only(!loopback)
                .redirect(Policy::none())
                .user_agent(concat!("atoll/", env!("CARGO_PKG_VERSION")))
        };
        let named = client().build().map_err(|error| all_of(&error))?;
        let led = match &reach {
            Some(reach) => client().dns_resolver(Arc::new(Asking::new(reach))).build(),
            None => client().build(),
        };
        let led = led.map_err(|error| all_of(&error))?;
        let login = login.filter(|login| match &login.registry {
            Some(whose) => whose == reference.registry() || whose == registry,
            None => true,
        });
        let scheme = if loopback { "http" } else { "https" };
        let repository = reference.repository().to_owned();
        let base = format!("{scheme}://{registry}/v2/{repository}/");
        Ok(Self {
            named,
            led,
            reach,
            base: Url::parse(&base).map_err(|_| format!("{base} is not a URL"))?,
            repository,
            login,
            authorization: Mutex::new(None),
        })
    }

    /// Asks at a URL, and where that leads to. Who we are is said there alone, and nowhere else.
    async fn ask(
        &self,
        url: Url,
        accept: Option<&'static str>,
        authorization: Option<HeaderValue>,
    ) -> Result<Response, String> {
        let asked = url.origin();
        let (mut url, mut authorization) = (url, authorization);
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.client_for(&url)?.get(url.clone());
            if let Some(accept) = accept {
                request = request.header(ACCEPT, accept);
            }
            if let Some(value) = &authorization {
                request = request.header(AUTHORIZATION, value);
            }
            let response = send(request).await?;
            let is_moved = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            let Some(location) = response.headers().get(LOCATION).filter(|_| is_moved) else {
                return Ok(response);
            };
            url = location
                .to_str()
                .ok()
                .and_then(|location| url.join(location).ok())
                .ok_or("the registry redirects to something that is not a URL")?;
            if url.origin() != asked {
                authorization = None;
            }
        }
        Err(format!("the registry redirects more than {MAX_REDIRECTS} times"))
    }

    /// By whom a URL is asked for, if it may be. Names are asked about here, and their addresses when they are known.
    fn client_for(&self, url: &Url) -> Result<&Client, String> {
        let bound = self.reach.as_ref().is_some_and(|reach| reach.binds_the_named());
        if url.origin() == self.base.origin() && !bound {
            return Ok(&self.named);
        }
        let host = url.host_str().unwrap_or_default();
        if let Some(reach) = &self.reach {
            // What is an address in any spelling is one here: URLs have only the usual one.
            let literal = host
                .trim_start_matches('[')
                .trim_end_matches(']')
                .parse::<IpAddr>();
            let allowed = match literal {
                Ok(address) => reach.address(address),
                Err(_) => reach.name(host),
            };
            allowed.map_err(|why| format!("the registry leads to {host}: {why}"))?;
        }
        Ok(&self.led)
    }

    /// Something of the repository, to be read by the caller, piece by piece.
    pub(super) async fn get(&self, path: &str) -> Result<Response, String> {
        let url = format!("{}{path}", self.base);
        let url = Url::parse(&url).map_err(|_| format!("{url} is not a URL"))?;
        // Blobs are what they are.
        let accept = path.starts_with("manifests/").then_some(ACCEPTED);
        let known = self.authorization.lock().await.clone();
        let mut response = self.ask(url.clone(), accept, known).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            let wanted = self.authorize(response.headers()).await?;
            self.authorization.lock().await.replace(wanted.clone());
            response = self.ask(url, accept, Some(wanted)).await?;
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
            Some(login) if basic => login.basic(),
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
        let authorization = self.login.as_ref().map(Login::basic).transpose()?;
        let response = self.ask(url, None, authorization).await?;
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

impl Login {
    fn basic(&self) -> Result<HeaderValue, String> {
        use base64::Engine as _;
        let pair = format!("{}:{}", self.user, self.password);
        let engine = base64::engine::general_purpose::STANDARD;
        secret(&format!("Basic {}", engine.encode(pair)))
    }
}

/// Looks names up, and gives those addresses alone that may be connected to.
struct Asking {
    reach: Arc<dyn Reach>,
    /// The operator's proxies, if the environment names some: those are connected to on behalf of others.
    proxies: Vec<String>,
}

impl Asking {
    fn new(reach: &Arc<dyn Reach>) -> Self {
        let named = ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"]
            .into_iter()
            .flat_map(|name| [name.to_owned(), name.to_ascii_lowercase()])
            .filter_map(|name| std::env::var(name).ok())
            .filter_map(|proxy| Url::parse(&proxy).ok()?.host_str().map(str::to_owned));
        Self {
            reach: Arc::clone(reach),
            proxies: named.collect(),
        }
    }
}

impl Resolve for Asking {
    fn resolve(&self, name: Name) -> Resolving {
        let reach = Arc::clone(&self.reach);
        let is_proxy = self.proxies.iter().any(|proxy| proxy == name.as_str());
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let (mut allowed, mut refused): (Vec<SocketAddr>, _) = (Vec::new(), None);
            for address in found {
                match reach.address(address.ip()) {
                    Err(why) if !is_proxy => refused = Some(why),
                    _ => allowed.push(address),
                }
            }
            if let (true, Some(why)) = (allowed.is_empty(), refused) {
                return Err(format!("the registry leads to {}: {why}", name.as_str()).into());
            }
            Ok(Box::new(allowed.into_iter()) as reqwest::dns::Addrs)
        })
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

    use super::super::Bound;
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
        Registry::new(&reference, login, None).unwrap()
    }

    /// Loopback and what is private or link-local is out of reach, but for those addresses.
    #[derive(Debug)]
    struct Public(Vec<IpAddr>);

    impl Reach for Public {
        fn name(&self, host: &str) -> Result<(), String> {
            match host {
                "metadata.google.internal" => Err("refused as a name".into()),
                _ => Ok(()),
            }
        }

        fn address(&self, address: IpAddr) -> Result<(), String> {
            let IpAddr::V4(four) = address.to_canonical() else {
                return Err(format!("{address} is refused"));
            };
            let is_refused = four.is_loopback() || four.is_private() || four.is_link_local();
            match is_refused && !self.0.contains(&address) {
                true => Err(format!("{address} is refused")),
                false => Ok(()),
            }
        }
    }

    fn within(address: &str, login: Option<Login>, exceptions: &[IpAddr]) -> Registry {
        let reference: Reference = format!("{address}/team/app:1").parse().unwrap();
        let reach = Arc::new(Public(exceptions.to_vec()));
        Registry::new(&reference, login, Some(reach)).unwrap()
    }

    fn moved(to: &str) -> Says {
        let status = format!("307 Temporary Redirect\r\nLocation: {to}");
        Says::Text(Box::leak(status.into_boxed_str()), String::new())
    }

    #[tokio::test]
    async fn a_registry_leads_to_nothing_that_is_out_of_reach() {
        let asked = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&asked);
        let (inside, _) = registry(move |_, _, authorization| {
            count.fetch_add(1, Ordering::Relaxed);
            assert_eq!(authorization, "", "who we are is told to the registry alone");
            Says::Text("200 OK", r#"{"token": "yes"}"#.into())
        });
        let port = inside.rsplit(':').next().unwrap().to_owned();
        let targets = [
            format!("http://{inside}/"),
            format!("http://2130706433:{port}/"),
            format!("http://[::ffff:127.0.0.1]:{port}/"),
            // A name, which leads to it.
            format!("http://localhost:{port}/"),
            "http://169.254.169.254/latest/meta-data/".to_owned(),
            "http://metadata.google.internal/".to_owned(),
            "http://10.0.0.1/".to_owned(),
        ];
        let login = || {
            Some(Login {
                registry: None,
                user: "me".into(),
                password: "pass".into(),
            })
        };
        for target in targets {
            let to = target.clone();
            // Blobs, where tokens are, and where those who ask there are sent.
            let (address, _) = registry(move |own, path, _| {
                let realm = match path.rsplit('/').next() {
                    Some("direct") => to.clone(),
                    Some("indirect") => format!("http://{own}/token"),
                    _ => return moved(&to),
                };
                let status = format!("401 Unauthorized\r\nWWW-Authenticate: Bearer realm=\"{realm}\"");
                Says::Text(Box::leak(status.into_boxed_str()), String::new())
            });
            let registry = within(&address, login(), &[]);
            for path in ["blobs/x", "manifests/direct", "manifests/indirect"] {
                let error = registry.document(path, 100).await.unwrap_err();
                assert!(
                    error.contains("the registry leads to"),
                    "{target}, {path}: {error}"
                );
                assert!(error.contains("refused"), "{target}, {path}: {error}");
            }
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0, "nobody was connected to");

        // What the operator allows is reached, by address and by name.
        for host in ["127.0.0.1", "localhost"] {
            let to = format!("http://{host}:{port}/");
            let (address, _) = registry(move |_, _, _| moved(&to));
            let registry = within(&address, None, &["127.0.0.1".parse().unwrap()]);
            let found = registry.document("blobs/x", 100).await;
            assert_eq!(found.unwrap(), br#"{"token": "yes"}"#);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }

    /// Whoever is not trusted to name a registry cannot have the server ask its own machine, or its neighbours.
    #[tokio::test]
    async fn a_stranger_names_no_registry_that_is_out_of_reach() {
        let asked = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&asked);
        let (inside, _) = registry(move |_, _, _| {
            count.fetch_add(1, Ordering::Relaxed);
            Says::Text("200 OK", "inside".into())
        });
        let port = inside.rsplit(':').next().unwrap().to_owned();
        let named = |host: &str, exceptions: &[IpAddr]| {
            let reference: Reference = format!("{host}/team/app:1").parse().unwrap();
            let reach = Bound(Arc::new(Public(exceptions.to_vec())));
            Registry::new(&reference, None, Some(Arc::new(reach))).unwrap()
        };
        for host in [
            inside.as_str(),
            &format!("localhost:{port}"),
            "169.254.169.254",
            "10.0.0.1:5000",
            "metadata.google.internal",
        ] {
            let error = named(host, &[]).document("blobs/x", 100).await.unwrap_err();
            assert!(error.contains("refused"), "{host}: {error}");
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0, "nobody was connected to");
        let listed = named(&inside, &["127.0.0.1".parse().unwrap()]);
        assert_eq!(listed.document("blobs/x", 100).await.unwrap(), b"inside");
    }

    #[tokio::test]
    async fn redirects_end_and_take_no_login_along() {
        let (address, _) = registry(|own, _, _| moved(&format!("http://{own}/again")));
        let error = of(&address, None).document("blobs/x", 100).await.unwrap_err();
        assert!(error.contains("more than 10 times"), "{error}");

        let (other, _) = registry(|_, _, authorization| Says::Text("200 OK", authorization.to_owned()));
        let (address, _) = registry(move |_, path, authorization| match authorization {
            "" => Says::Text(
                "401 Unauthorized\r\nWWW-Authenticate: Basic realm=x",
                String::new(),
            ),
            _ if path.contains("/here") => Says::Text("200 OK", "at home".into()),
            _ if path.contains("near") => moved("/here"),
            _ => moved(&format!("http://{other}/")),
        });
        let login = Login {
            registry: None,
            user: "me".into(),
            password: "pass".into(),
        };
        let registry = of(&address, Some(login));
        assert_eq!(registry.document("blobs/near", 100).await.unwrap(), b"at home");
        assert_eq!(registry.document("blobs/far", 100).await.unwrap(), b"");
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
