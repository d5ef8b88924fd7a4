//! The subcommands, one file per theme. Each asks the server and shows the answer; with `--json` the answer is shown as
//! the server gave it, a list as an array of all its pages, and what may have no end (`--follow`) as a line per item.

pub(crate) mod approval;
pub(crate) mod artifact;
pub(crate) mod bench;
pub(crate) mod cp;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod e2b;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod instances;
pub(crate) mod key;
pub(crate) mod ledger;
pub(crate) mod models;
pub(crate) mod net;
pub(crate) mod project;
pub(crate) mod run;
pub(crate) mod sandbox;
pub(crate) mod scripted;
pub(crate) mod secret;
pub(crate) mod snapshot;
pub(crate) mod state;
pub(crate) mod template;
pub(crate) mod update;
pub(crate) mod volume;
pub(crate) mod workflow;

use atoll_client::output::{Doing as _, Error, Output, Result};
use atoll_client::{Client, text};
use atoll_types::{SandboxId, SandboxName};
use serde_json::{Value, json};

use crate::args::{CommandArgs, Global, LimitArgs, Mount, SpecArgs};
use crate::server::Server;

/// A server to talk to: a running one, or one inside this process.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) client: Client,
    embedded: Option<Server>,
}

impl Connection {
    /// Finds the running server, else starts one inside this process.
    pub(crate) async fn open(global: &Global) -> Result<Self> {
        if let Some(client) = global.find_client()? {
            return Ok(Self {
                client,
                embedded: None,
            });
        }
        Self::embed(global).await
    }

    pub(crate) async fn embed(global: &Global) -> Result<Self> {
        crate::logging::start(None, "warn", None)?;
        let server = Server::embedded(global).await?;
        Ok(Self {
            client: server.client()?,
            embedded: Some(server),
        })
    }

    /// Whether there is no server but this command's own: whoever types it sets up the machine.
    pub(crate) fn is_embedded(&self) -> bool {
        self.embedded.is_some()
    }

    /// Without a server the machine's best wall is taken, whichever that is. For what builds or starts something behind it
    /// without showing a sandbox: says so, where it is not one between tenants.
    pub(crate) async fn note_wall(&self, output: Output) -> Result<()> {
        if self.embedded.is_none() {
            return Ok(());
        }
        let info = self.client.get("/v1/info").await?;
        let tiers = info["tiers"].as_array().into_iter().flatten();
        let best = tiers.into_iter().find(|tier| tier["available"] == json!(true));
        if let Some(tier) = best {
            note_wall(output, tier);
        }
        Ok(())
    }

    pub(crate) async fn close(self) {
        if let Some(server) = self.embedded {
            server.stop().await;
        }
    }
}

/// What `jail` is not; said wherever somebody is given one.
const NOT_A_BOUNDARY: &str = "not a tenant boundary";

/// Tells people, on stderr, that a sandbox has the weaker wall.
pub(crate) fn note_wall(output: Output, sandbox: &Value) {
    if sandbox["tenant_boundary"] == json!(false) {
        output.note(format_args!("note: isolation {}", wall(sandbox)));
    }
}

/// The tier of a sandbox, for people.
pub(crate) fn wall(sandbox: &Value) -> String {
    let tier = text(sandbox, "isolation");
    if sandbox["tenant_boundary"] == json!(false) {
        format!("{tier} ({NOT_A_BOUNDARY})")
    } else {
        tier
    }
}

/// The body of a create request. What was not given is left out: of a snapshot, it is as the snapshot has it.
pub(crate) fn create_body(spec: &SpecArgs) -> Result<Value> {
    let mut body = json!({
        "template": spec.template,
        "env": pairs(&spec.env),
        "labels": pairs(&spec.label),
    });
    let life = &spec.life;
    let given = [
        ("name", spec.name.as_ref().map(|name| json!(name))),
        ("resources", resources(&spec.limits)),
        ("timeout_ms", life.timeout.map(|millis| json!(millis))),
        ("on_timeout", life.on_timeout.as_ref().map(|action| json!(action))),
        ("auto_resume", life.auto_resume.then_some(json!(true))),
        ("fallback_to_files", life.fallback_to_files.then_some(json!(true))),
        ("retention_ms", life.retention.map(|millis| json!(millis))),
        ("isolation_floor", spec.isolation.map(|tier| json!(tier.name()))),
        ("network", net::reach(&spec.reach)?),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    if let Some(after) = life.idle {
        body["idle"] = json!({"after_ms": after});
        if let Some(action) = &life.on_idle {
            body["idle"]["action"] = json!(action);
        }
    }
    if !spec.on_create.is_empty() || !spec.on_resume.is_empty() {
        body["hooks"] = json!({"on_create": hooks(&spec.on_create), "on_resume": hooks(&spec.on_resume)});
    }
    if !spec.volume.is_empty() {
        let mount =
            |mount: &Mount| json!({"volume": mount.volume, "path": mount.path, "read_only": mount.read_only});
        body["volumes"] = spec.volume.iter().map(mount).collect();
    }
    if !spec.secret.is_empty() {
        body["secrets"] = net::secrets(&spec.secret);
    }
    Ok(body)
}

/// The limits that were given; `None` if there are none.
pub(crate) fn resources(limits: &LimitArgs) -> Option<Value> {
    let mut resources = json!({});
    let fields = [
        ("cpu_millis", limits.cpu.map(|cpu| json!(cpu))),
        ("memory_bytes", limits.memory.map(|bytes| json!(bytes))),
        ("disk_bytes", limits.disk.map(|bytes| json!(bytes))),
        (
            "disk_backing",
            limits.disk_backing.as_ref().map(|backing| json!(backing)),
        ),
        ("pids", limits.pids.map(|pids| json!(pids))),
    ];
    let mut any = false;
    for (name, value) in fields {
        if let Some(value) = value {
            resources[name] = value;
            any = true;
        }
    }
    any.then_some(resources)
}

/// Lines for the shell.
fn hooks(lines: &[String]) -> Value {
    lines
        .iter()
        .map(|line| json!({"argv": ["/bin/sh", "-c", line]}))
        .collect()
}

pub(crate) fn pairs(pairs: &[(String, String)]) -> Value {
    pairs
        .iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect()
}

/// The body of an exec request.
pub(crate) fn exec_body(argv: &[String], command: &CommandArgs, env: &[(String, String)]) -> Value {
    let mut body = json!({ "argv": argv });
    if !env.is_empty() {
        body["env"] = pairs(env);
    }
    if let Some(cwd) = &command.workdir {
        body["cwd"] = json!(cwd);
    }
    if let Some(user) = &command.user {
        body["user"] = json!(user);
    }
    if let Some(timeout) = command.command_timeout {
        body["timeout_ms"] = json!(timeout);
    }
    body
}

/// The full id behind what the user wrote: itself, or the one live sandbox that has this name or whose id begins like it.
///
/// A name is asked for as it is: a key for one sandbox may use that, and not list all. Where a key may not look at sandboxes at
/// all, the server takes the name wherever it takes an id.
pub(crate) async fn resolve(client: &Client, text: &str) -> Result<String> {
    if text.parse::<SandboxId>().is_ok() {
        return Ok(text.to_owned());
    }
    if let Ok(name) = text.parse::<SandboxName>() {
        match client.get(&format!("/v1/sandboxes/{name}")).await {
            Ok(sandbox) => return Ok(atoll_client::text(&sandbox, "id")),
            Err(error) if matches!(error.code.as_deref(), Some("forbidden" | "not_allowed")) => {
                return Ok(name.to_string());
            }
            // It may be the beginning of an id.
            Err(error) if error.code.as_deref() == Some("sandbox_not_found") => {}
            Err(error) => return Err(error),
        }
    }
    let known = client.list("/v1/sandboxes", &[]).await?;
    meant(&known, text)
}

/// The same, among the sandboxes that are known.
fn meant(known: &[Value], text: &str) -> Result<String> {
    let named = known
        .iter()
        .find(|sandbox| sandbox["name"].as_str() == Some(text));
    if let Some(id) = named.and_then(|sandbox| sandbox["id"].as_str()) {
        return Ok(id.to_owned());
    }
    let prefix = text.strip_prefix("sbx_").unwrap_or(text);
    let mut found = known
        .iter()
        .filter_map(|sandbox| sandbox["id"].as_str())
        .filter(|id| {
            id.strip_prefix("sbx_")
                .is_some_and(|bare| bare.starts_with(prefix))
        });
    match (found.next(), found.next()) {
        (Some(id), None) if !prefix.is_empty() => Ok(id.to_owned()),
        (Some(_), _) => {
            Err(Error::new(format!("more than one sandbox begins with `{text}`"))
                .hint("write more of the id"))
        }
        (None, _) => Err(Error::new(format!("there is no live sandbox `{text}`")).hint(
            "`atoll ls --all` lists the sandboxes, those that have ended too; they are known by their ids",
        )),
    }
}

/// `SANDBOX:PATH`, if it is one. `./a:b` and `/a:b` are always local.
pub(crate) fn split_location(text: &str) -> Option<(&str, &str)> {
    let (sandbox, path) = text.split_once(':')?;
    (!sandbox.is_empty() && !sandbox.contains('/') && !sandbox.starts_with('.')).then_some((sandbox, path))
}

pub(crate) fn list_of(value: &Value) -> String {
    let words: Vec<&str> = value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    words.join(", ")
}

/// The time that comes so many milliseconds from now, for `--expires`.
pub(crate) fn after(millis: u64) -> Result<String> {
    let millis = i64::try_from(millis).unwrap_or(i64::MAX);
    let at = jiff::Timestamp::now().as_millisecond().saturating_add(millis);
    let at = jiff::Timestamp::from_millisecond(at).doing("--expires is too far away")?;
    Ok(at.to_string())
}

/// How long ago, or how long until, for people.
pub(crate) fn relative(value: &Value, field: &str) -> String {
    let Some(at) = value[field]
        .as_str()
        .and_then(|text| text.parse::<jiff::Timestamp>().ok())
    else {
        return "-".into();
    };
    let millis = jiff::Timestamp::now().as_millisecond() - at.as_millisecond();
    let span = atoll_client::output::duration(millis.unsigned_abs());
    if millis >= 0 {
        format!("{span} ago")
    } else {
        format!("in {span}")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn locations_are_told_from_local_paths() {
        assert_eq!(split_location("sbx_a:/tmp/x"), Some(("sbx_a", "/tmp/x")));
        assert_eq!(split_location("sbx_a:"), Some(("sbx_a", "")));
        for local in ["./a:b", "/a:b", "a", "dir/a:b", ":x"] {
            assert_eq!(split_location(local), None, "{local}");
        }
    }

    #[test]
    fn a_sandbox_is_found_by_its_name_or_by_the_beginning_of_its_id() {
        let known = [
            json!({"id": "sbx_abc1", "name": null}),
            json!({"id": "sbx_abd2", "name": "x7"}),
            json!({"id": "sbx_x7k3", "name": "build"}),
        ];
        let found = |text: &str| meant(&known, text).map_err(|error| error.message);
        assert_eq!(found("build").as_deref(), Ok("sbx_x7k3"));
        assert_eq!(found("sbx_abc").as_deref(), Ok("sbx_abc1"));
        assert_eq!(found("x7").as_deref(), Ok("sbx_abd2"), "a name comes first");
        assert_eq!(found("sbx_x7").as_deref(), Ok("sbx_x7k3"));
        assert!(found("ab").unwrap_err().contains("more than one"));
        assert!(found("other").unwrap_err().contains("no live sandbox"));
    }

    #[test]
    fn options_become_a_create_request() {
        let cli = Cli::parse_from([
            "atoll",
            "create",
            "--cpu",
            "0.5",
            "-m",
            "1G",
            "--timeout",
            "10m",
            "--idle",
            "1m",
            "-e",
            "A=b=c",
            "-l",
            "team=x",
            "--isolation",
            "gvisor",
        ]);
        let Command::Create(args) = cli.command else {
            panic!("not create")
        };
        insta::assert_snapshot!(create_body(&args.spec).unwrap(), @r#"{"env":{"A":"b=c"},"idle":{"after_ms":60000},"isolation_floor":"gvisor","labels":{"team":"x"},"resources":{"cpu_millis":500,"memory_bytes":1073741824},"template":"base","timeout_ms":600000}"#);
    }

    #[test]
    fn what_is_kept_becomes_part_of_it() {
        let cli = Cli::parse_from([
            "atoll",
            "create",
            "--template",
            "trained",
            "--on-timeout",
            "pause",
            "--idle",
            "10m",
            "--on-idle",
            "stop",
            "--auto-resume",
            "--retention",
            "7d",
            "--volume",
            "data:/data",
            "--volume",
            "in:/in:ro",
            "--on-create",
            "echo a",
            "--on-resume",
            "echo b",
        ]);
        let Command::Create(args) = cli.command else {
            panic!("not create")
        };
        let body = create_body(&args.spec).unwrap();
        assert!(
            body.get("resources").is_none(),
            "a snapshot's own limits are left alone"
        );
        insta::assert_snapshot!(body, @r#"{"auto_resume":true,"env":{},"hooks":{"on_create":[{"argv":["/bin/sh","-c","echo a"]}],"on_resume":[{"argv":["/bin/sh","-c","echo b"]}]},"idle":{"action":"stop","after_ms":600000},"labels":{},"on_timeout":"pause","retention_ms":604800000,"template":"trained","volumes":[{"path":"/data","read_only":false,"volume":"data"},{"path":"/in","read_only":true,"volume":"in"}]}"#);
    }

    #[test]
    fn what_it_may_reach_becomes_part_of_it() {
        let cli = Cli::parse_from([
            "atoll",
            "create",
            "--net",
            "package-registries",
            "--allow",
            "api.example.com:443",
            "--deny",
            "crates.io",
            "--secret",
            "github=GITHUB_TOKEN",
            "--secret",
            "other",
        ]);
        let Command::Create(args) = cli.command else {
            panic!("not create")
        };
        let body = create_body(&args.spec).unwrap();
        insta::assert_snapshot!(json!([body["network"], body["secrets"]]), @r#"[{"preset":"package-registries","rules":[{"action":"allow","ports":[443],"to":"api.example.com"},{"action":"deny","to":"crates.io"}]},[{"env":"GITHUB_TOKEN","secret":"github"},{"secret":"other"}]]"#);
        let limits = |more: &[&str]| {
            let words = [
                "atoll",
                "create",
                "--max-connections",
                "8",
                "--max-bandwidth",
                "1M",
            ];
            match Cli::parse_from(words.iter().chain(more)).command {
                Command::Create(args) => create_body(&args.spec),
                other => panic!("{other:?}"),
            }
        };
        insta::assert_snapshot!(
            limits(&["--allow", "a.example"]).unwrap()["network"],
            @r#"{"limits":{"bytes_per_second":1048576,"connections":8},"rules":[{"action":"allow","to":"a.example"}]}"#
        );
        assert!(
            limits(&[]).is_err(),
            "they must not take away what the template allows"
        );
        let both = Cli::try_parse_from(["atoll", "create", "--net", "none", "--net-policy", "policy.json"]);
        assert!(both.is_err(), "a whole policy stands alone");
    }
}
