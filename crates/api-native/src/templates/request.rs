//! What a build is asked for: in a body, in a query beside an upload, in headers.

use atoll_actions::words::{PolicyWords, ResourcesRequest};
use atoll_sandboxes::{BuildFrom, BuildStart, BuildTemplate, RegistryLogin};
use atoll_types::{Code, NetworkPolicy, ReadyCheck, Resources, StartCommand};
use axum::http::HeaderMap;
use base64::Engine as _;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::{Answer, Failure};
use crate::extract::parse_json;
use crate::wire;

/// How long a start command may take to be ready, unless the request says otherwise.
const READY_MILLIS: u64 = 60_000;

/// A template to build: from exactly one of `debian` and `image`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct BuildRequest {
    #[schema(min_length = 1, max_length = 255)]
    name: String,
    /// For every project, instead of for the caller's alone; takes `templates.share`.
    #[serde(default)]
    shared: bool,
    debian: Option<DebianRequest>,
    /// A registry reference.
    #[schema(min_length = 1, examples("docker.io/library/python:3.13-slim"))]
    image: Option<String>,
    start: Option<StartWords>,
    /// What sandboxes made from it may reach, unless they say so themselves.
    network: Option<PolicyWords>,
    /// What sandboxes made from it get, unless they say so themselves.
    resources: Option<ResourcesRequest>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DebianRequest {
    #[schema(examples("trixie"))]
    suite: Option<String>,
    /// Empty: those of the template `base`.
    #[serde(default)]
    packages: Vec<String>,
}

/// A process that runs in every sandbox made from the template.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = StartCommand)]
pub(crate) struct StartRequest {
    #[schema(min_items = 1)]
    argv: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ready: Option<ReadyRequest>,
}

/// What every sandbox made from the template starts with: a process, or `"image"` for what the image was made to run (its
/// `ENTRYPOINT` and `CMD`). Nothing unless said.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Start)]
pub(crate) enum StartWords {
    Image(StartOfImage),
    Command(StartRequest),
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StartOfImage {
    Image,
}

impl StartWords {
    fn into_start(self) -> Answer<BuildStart> {
        match self {
            Self::Image(StartOfImage::Image) => Ok(BuildStart::Image),
            Self::Command(command) => command.into_start().map(BuildStart::Command),
        }
    }
}

/// How to know that it is ready: exactly one of `port` and `argv`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ReadyCheck)]
pub(crate) struct ReadyRequest {
    /// Something listens on this port.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    port: Option<u16>,
    /// This command exits with 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    argv: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
}

impl StartRequest {
    fn into_start(self) -> Answer<StartCommand> {
        if self.argv.is_empty() {
            return Err(Failure::new(Code::InvalidBody, "`start.argv` is empty"));
        }
        Ok(StartCommand {
            argv: self.argv,
            ready: self.ready.map(ReadyRequest::into_check).transpose()?,
        })
    }

    pub(super) fn of(start: StartCommand) -> Self {
        let ready = start.ready.map(|ready| match ready {
            ReadyCheck::Port { port, timeout_millis } => ReadyRequest {
                port: Some(port),
                argv: None,
                timeout_ms: Some(timeout_millis),
            },
            ReadyCheck::Command { argv, timeout_millis } => ReadyRequest {
                port: None,
                argv: Some(argv),
                timeout_ms: Some(timeout_millis),
            },
        });
        Self {
            argv: start.argv,
            ready,
        }
    }
}

impl ReadyRequest {
    fn into_check(self) -> Answer<ReadyCheck> {
        let timeout_millis = wire::duration("ready.timeout_ms", self.timeout_ms.unwrap_or(READY_MILLIS))?;
        match (self.port, self.argv) {
            (Some(port), None) if port > 0 => Ok(ReadyCheck::Port { port, timeout_millis }),
            (None, Some(argv)) if !argv.is_empty() => Ok(ReadyCheck::Command { argv, timeout_millis }),
            _ => Err(Failure::new(
                Code::InvalidReadyCheck,
                "a ready check is either a `port` or an `argv`",
            )),
        }
    }
}

impl BuildRequest {
    /// `usual`: what of the resources is not said.
    pub(super) fn into_build(self, login: Option<RegistryLogin>, usual: Resources) -> Answer<BuildTemplate> {
        let from = match (self.debian, self.image) {
            (Some(debian), None) => BuildFrom::Debian {
                suite: debian.suite,
                packages: debian.packages,
            },
            (None, Some(reference)) => {
                if ["oci:", "docker-archive:"]
                    .iter()
                    .any(|scheme| reference.starts_with(scheme))
                {
                    return Err(Failure::new(
                        Code::ImageNotInARegistry,
                        format!("`{reference}` names a file, and files of the server cannot be named"),
                    )
                    .hint("send the archive to /v1/templates/build-archive"));
                }
                BuildFrom::Image { reference, login }
            }
            (None, None) => {
                return Err(Failure::new(
                    Code::MissingField,
                    "nothing to build from: give `debian` or `image`",
                )
                .hint("a Dockerfile's context goes to /v1/templates/build-context, an archive to /v1/templates/build-archive"));
            }
            (Some(_), Some(_)) => {
                return Err(Failure::new(
                    Code::ContradictingFields,
                    "`debian` and `image` exclude each other",
                ));
            }
        };
        Ok(BuildTemplate {
            name: wire::name("name", self.name)?,
            shared: self.shared,
            from,
            start: self
                .start
                .map(StartWords::into_start)
                .transpose()?
                .unwrap_or_default(),
            network: self.network.map(PolicyWords::into_policy),
            resources: self.resources.map(|asked| asked.into_asked().over(usual)),
        })
    }
}

/// Only documents the query; `arg` repeats, which no struct can say to the decoder.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "read by the OpenAPI generator only")]
pub(crate) struct ContextQuery {
    #[param(min_length = 1, max_length = 255)]
    name: String,
    /// `shared` of a build request.
    #[param(default = false)]
    shared: Option<bool>,
    /// Where in the context the Dockerfile is.
    #[param(default = "Dockerfile")]
    dockerfile: Option<String>,
    /// `NAME=VALUE`; repeat it to give several.
    #[param(style = Form, explode)]
    arg: Option<Vec<String>>,
    /// The stage to build; the last one unless said.
    #[param(min_length = 1)]
    target: Option<String>,
    /// Run every step again, instead of taking what an earlier build came to.
    #[param(default = false)]
    no_cache: Option<bool>,
    /// `start` of a build request, as JSON.
    start: Option<String>,
    /// `network` of a build request, as JSON.
    network: Option<String>,
    /// `resources` of a build request, as JSON.
    resources: Option<String>,
    /// What `RUN` steps may reach, as JSON, in the words of `network`; nothing unless said. Each step is held to its
    /// limits on its own.
    build_network: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ArchiveQuery {
    #[param(min_length = 1, max_length = 255)]
    pub(super) name: String,
    /// `shared` of a build request.
    #[param(default = false)]
    pub(super) shared: Option<bool>,
    /// `start` of a build request, as JSON.
    pub(super) start: Option<String>,
    /// `network` of a build request, as JSON.
    pub(super) network: Option<String>,
    /// `resources` of a build request, as JSON.
    pub(super) resources: Option<String>,
}

#[derive(Debug)]
pub(super) struct ContextBuild {
    pub(super) name: String,
    pub(super) shared: bool,
    pub(super) dockerfile: String,
    pub(super) args: Vec<(String, String)>,
    pub(super) target: Option<String>,
    pub(super) no_cache: bool,
    pub(super) start: BuildStart,
    pub(super) network: Option<NetworkPolicy>,
    pub(super) resources: Option<Resources>,
    pub(super) build_network: NetworkPolicy,
}

/// `usual`: what of the resources is not said.
pub(super) fn read_context_query(pairs: Vec<(String, String)>, usual: Resources) -> Answer<ContextBuild> {
    let (mut name, mut dockerfile, mut start) = (None, None, None);
    let (mut network, mut resources, mut build_network) = (None, None, None);
    let (mut target, mut no_cache, mut shared) = (None, None, None);
    let mut args = Vec::new();
    for (key, value) in pairs {
        let slot = match key.as_str() {
            "arg" => {
                args.push(wire::pair("arg", &value)?);
                continue;
            }
            "name" => &mut name,
            "dockerfile" => &mut dockerfile,
            "target" => &mut target,
            "no_cache" => &mut no_cache,
            "shared" => &mut shared,
            "start" => &mut start,
            "network" => &mut network,
            "resources" => &mut resources,
            "build_network" => &mut build_network,
            _ => {
                let message = format!(
                    "unknown query parameter `{key}`, expected one of `name`, `shared`, `dockerfile`, `arg`, \
                     `target`, `no_cache`, `start`, `network`, `resources`, `build_network`"
                );
                return Err(Failure::new(Code::InvalidQuery, message));
            }
        };
        if slot.replace(value).is_some() {
            return Err(Failure::new(
                Code::InvalidQuery,
                format!("`{key}` is given twice"),
            ));
        }
    }
    let name = name.ok_or_else(|| Failure::new(Code::MissingField, "`name` is missing"))?;
    Ok(ContextBuild {
        name: wire::name("name", name)?,
        dockerfile: dockerfile.unwrap_or_else(|| "Dockerfile".into()),
        args,
        target,
        shared: read_flag("shared", shared.as_deref())?,
        no_cache: read_flag("no_cache", no_cache.as_deref())?,
        start: read_start(start.as_deref())?,
        network: read_network("network", network)?,
        resources: read_resources(resources, usual)?,
        build_network: read_network("build_network", build_network)?.unwrap_or_default(),
    })
}

fn read_flag(field: &str, text: Option<&str>) -> Answer<bool> {
    match text {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(Failure::new(
            Code::InvalidQuery,
            format!("`{field}` is neither `true` nor `false`"),
        )),
    }
}

pub(super) fn read_start(json: Option<&str>) -> Answer<BuildStart> {
    match json {
        None => Ok(BuildStart::Nothing),
        // As JSON or as it is.
        Some("image" | "\"image\"") => Ok(BuildStart::Image),
        Some(json) => parse_json::<StartRequest>(json.as_bytes())?
            .into_start()
            .map(BuildStart::Command),
    }
}

/// The header that says who to be for registries. A header, because URLs end up in logs.
const REGISTRY_LOGIN: &str = "x-registry-auth";
/// The header that says which registry that is for.
const REGISTRY: &str = "x-registry";

/// `Basic`, then `user:password` in base64, as `Authorization` has it elsewhere.
pub(super) fn read_login(headers: &HeaderMap) -> Answer<Option<RegistryLogin>> {
    let Some(value) = headers.get(REGISTRY_LOGIN) else {
        return Ok(None);
    };
    // What is wrong with it is not shown: it is somebody's password.
    let wrong = || {
        Failure::new(
            Code::InvalidRegistryLogin,
            "`X-Registry-Auth` is not `Basic` with `user:password` in base64",
        )
    };
    let encoded = value
        .to_str()
        .ok()
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("basic"))
        .map(|(_, encoded)| encoded.trim())
        .ok_or_else(wrong)?;
    let pair = base64::engine::general_purpose::STANDARD
        .decode(encoded)
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .ok_or_else(wrong)?;
    let (user, password) = pair.split_once(':').ok_or_else(wrong)?;
    let registry = headers
        .get(REGISTRY)
        .map(|host| host.to_str().map(str::to_owned).map_err(|_| wrong()))
        .transpose()?;
    Ok(Some(RegistryLogin {
        registry,
        user: user.to_owned(),
        password: password.to_owned(),
    }))
}

pub(super) fn read_resources(json: Option<String>, usual: Resources) -> Answer<Option<Resources>> {
    json.map(|json| {
        let words = parse_json::<ResourcesRequest>(json.as_bytes());
        words
            .map(|asked| asked.into_asked().over(usual))
            .map_err(|fault| {
                let message = format!("`resources`: {}", fault.message);
                Failure::new(Code::InvalidQuery, message)
            })
    })
    .transpose()
}

pub(super) fn read_network(field: &str, json: Option<String>) -> Answer<Option<NetworkPolicy>> {
    json.map(|json| {
        let words = parse_json::<PolicyWords>(json.as_bytes());
        words.map(PolicyWords::into_policy).map_err(|fault| {
            let message = format!("`{field}`: {}", fault.message);
            Failure::new(Code::InvalidQuery, message)
        })
    })
    .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::{parse_json, query};
    use atoll_types::Preset;

    fn build(json: &str) -> Answer<BuildTemplate> {
        parse_json::<BuildRequest>(json.as_bytes())?.into_build(None, Resources::default())
    }

    #[test]
    fn a_template_has_one_source() {
        let debian = build(r#"{"name":"a","debian":{"packages":["git"]}}"#).unwrap();
        assert!(matches!(debian.from, BuildFrom::Debian { suite: None, packages } if packages == ["git"]));
        let image =
            build(r#"{"name":"a","image":"alpine","start":{"argv":["x"],"ready":{"port":80}}}"#).unwrap();
        assert!(matches!(image.from, BuildFrom::Image { reference, login: None } if reference == "alpine"));
        let ready = ReadyCheck::Port {
            port: 80,
            timeout_millis: READY_MILLIS,
        };
        let expected = StartCommand {
            argv: vec!["x".into()],
            ready: Some(ready),
        };
        assert_eq!(image.start, BuildStart::Command(expected));
        let own = build(r#"{"name":"a","image":"alpine","start":"image"}"#).unwrap();
        assert_eq!(own.start, BuildStart::Image);
        let nothing = build(r#"{"name":"a","image":"alpine"}"#).unwrap();
        assert_eq!(nothing.start, BuildStart::Nothing);
        for bad in [
            r#"{"name":"a"}"#,
            r#"{"image":"alpine"}"#,
            r#"{"name":"a","image":"alpine","debian":{}}"#,
            r#"{"name":"a","image":"oci:/etc"}"#,
            r#"{"name":"a","image":"alpine","start":{"argv":[]}}"#,
            r#"{"name":"a","image":"alpine","start":{"argv":["x"],"ready":{}}}"#,
            r#"{"name":"a","image":"alpine","platform":"arm64"}"#,
            r#"{"name":"a","image":"alpine","start":"everything"}"#,
        ] {
            assert!(build(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_context_is_described_in_the_query() {
        let read = |text: &str| read_context_query(query(text)?, Resources::default());
        let found = read("name=a&arg=X=1&arg=Y=&start=%7B%22argv%22:%5B%22serve%22%5D%7D").unwrap();
        assert_eq!(
            (found.name.as_str(), found.dockerfile.as_str()),
            ("a", "Dockerfile")
        );
        assert_eq!(
            found.args,
            [("X".into(), "1".into()), ("Y".into(), String::new())]
        );
        assert!(matches!(found.start, BuildStart::Command(start) if start.argv == ["serve"]));
        assert_eq!((found.target, found.no_cache), (None, false));
        assert!(!found.shared);
        let found = read("name=a&target=test&no_cache=true&shared=true&start=image").unwrap();
        assert_eq!((found.target.as_deref(), found.no_cache), (Some("test"), true));
        assert!(found.shared);
        assert_eq!(found.start, BuildStart::Image);
        let found = read(
            "name=a&network=%7B%22preset%22:%22none%22%7D&build_network=%7B%22preset%22:%22all-public%22%7D",
        )
        .unwrap();
        assert_eq!(found.network.unwrap().preset, Some(Preset::None));
        assert_eq!(found.build_network.preset, Some(Preset::AllPublic));
        let found = read("name=a&resources=%7B%22cpu_millis%22:3000%7D").unwrap();
        let expected = Resources {
            cpu_millis: 3000,
            ..Resources::default()
        };
        assert_eq!(found.resources, Some(expected));
        for bad in [
            "",
            "name=a&network=all-public",
            "name=a&resources=2",
            "name=a&resources=%7B%22cores%22:2%7D",
            "name=a&build_network=%7B%22rulez%22:1%7D",
            "name=a&name=b",
            "name=a&arg=X",
            "name=a&start=serve",
            "name=a&tag=b",
            "name=a&no_cache=perhaps",
            "name=a&shared=1",
            "name=a&target=x&target=y",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_login_is_read_and_never_shown() {
        let read = |value: &str| {
            let headers = HeaderMap::from_iter([(
                axum::http::HeaderName::from_static(REGISTRY_LOGIN),
                value.parse().unwrap(),
            )]);
            read_login(&headers)
        };
        assert!(read_login(&HeaderMap::new()).unwrap().is_none());
        // me:hush:hush
        let login = read("Basic bWU6aHVzaDpodXNo").unwrap().unwrap();
        assert_eq!(
            (login.user.as_str(), login.password.as_str()),
            ("me", "hush:hush")
        );
        assert!(!format!("{login:?}").contains("hush"));
        for bad in ["bWU6aHVzaA==", "Bearer hush", "Basic hush", "Basic aHVzaA=="] {
            let failure = read(bad).unwrap_err();
            assert!(!failure.fault().message.contains("hush"), "{bad}");
        }
    }
}
