//! What a new sandbox is asked to be.

use std::collections::BTreeMap;

use atoll_sandboxes::CreateSandbox;
use atoll_types::{Fault, IdlePolicy, ResourcesAsked, SandboxSpec};
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use super::life::{ActionName, BackingName, HooksWords, Idle, IfExists, IsolationName, VolumeMountWords};
use super::network::{PolicyWords, SecretUseWords};
use crate::spelling;

/// Hard limits; what is absent is the template's, or else the server's default.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResourcesRequest {
    /// Thousandths of a CPU core.
    #[schema(minimum = 1, examples(2000))]
    cpu_millis: Option<u32>,
    #[schema(minimum = 1, examples(1_073_741_824))]
    memory_bytes: Option<u64>,
    /// Room for files; it is taken from the server's disk as it is used. In memory it is at most three quarters of the memory.
    #[schema(minimum = 1, examples(10_737_418_240_u64))]
    disk_bytes: Option<u64>,
    /// Where files that it writes are kept: in memory they count as memory.
    disk_backing: Option<BackingName>,
    /// Processes and threads.
    #[schema(minimum = 1)]
    pids: Option<u32>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSandboxRequest {
    /// What to call it: a DNS label that no other living sandbox of the project has. Wherever its id is asked for, its name will
    /// do.
    #[schema(
        examples("my-agent"),
        min_length = 1,
        max_length = 63,
        pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
    )]
    name: Option<String>,
    /// What to do if a living sandbox of the project has the name. `return` answers with that one as it is, with status 200;
    /// of the request nothing else counts then. It is resumed first if it rests and has `auto_resume`; one that is being
    /// deleted is waited for. Of all who ask at once one makes it, and all get the same. Only with a `name`.
    #[serde(default)]
    if_exists: IfExists,
    /// Name or id of a template or of a snapshot; `base` if absent.
    #[schema(examples("base"), min_length = 1, max_length = 255)]
    template: Option<String>,
    /// Absent: the template's, or else the server's defaults; of a snapshot, those of the sandbox that it was taken of.
    resources: Option<ResourcesRequest>,
    /// Lifetime from now. Absent: the server's default. `null`: none, where the operator allows that.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<Option<u64>>,
    /// What happens when it is over.
    #[serde(default)]
    on_timeout: ActionName,
    idle: Option<Idle>,
    /// Whether a use of it while it is paused or stopped resumes it, rather than being refused.
    #[serde(default)]
    auto_resume: bool,
    /// Whether a pause also keeps its files apart from its memory, so that it can come back on them, with its processes
    /// started anew, where its memory cannot be used: by another runtime version, on another CPU. Pauses take longer.
    #[serde(default)]
    fallback_to_files: bool,
    /// How long it may rest, paused or stopped, before it is deleted. Absent: until somebody deletes it.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    retention_ms: Option<u64>,
    /// Whom it belongs to: `workflow:NAMESPACE:RUN:WORKFLOW`, with whose run it ends and in whose name it calls models, or
    /// `sandbox:ID`, with which it ends. Absent: the key that it is made with.
    #[schema(max_length = 2048)]
    owner: Option<String>,
    /// Environment of every command.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Your own names for it, to find it again.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// The weakest isolation that you accept; the server refuses rather than go below it.
    isolation_floor: Option<IsolationName>,
    hooks: Option<HooksWords>,
    #[serde(default)]
    volumes: Vec<VolumeMountWords>,
    /// What it may reach. Absent: what its template says, or else the operator's default.
    network: Option<PolicyWords>,
    /// The secrets that it may use without ever holding them.
    #[serde(default)]
    secrets: Vec<SecretUseWords>,
}

impl ResourcesRequest {
    pub fn into_asked(self) -> ResourcesAsked {
        ResourcesAsked {
            cpu_millis: self.cpu_millis,
            memory_bytes: self.memory_bytes,
            disk_bytes: self.disk_bytes,
            disk_backing: self.disk_backing.map(BackingName::into_backing),
            pids: self.pids,
        }
    }
}

/// Tells `null` from absent.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl CreateSandboxRequest {
    pub fn if_exists(&self) -> IfExists {
        self.if_exists
    }

    pub fn into_create(
        self,
        default_timeout_millis: u64,
        idempotency_key: Option<String>,
    ) -> Result<CreateSandbox, Fault> {
        Ok(CreateSandbox {
            idempotency_key,
            resources: self.resources.unwrap_or_default().into_asked(),
            spec: self.into_spec(default_timeout_millis)?,
        })
    }

    fn into_spec(self, default_timeout_millis: u64) -> Result<SandboxSpec, Fault> {
        let template = self.template.unwrap_or_else(|| "base".into());
        let timeout_millis = match self.timeout_ms {
            None => Some(default_timeout_millis),
            Some(asked) => asked
                .map(|millis| spelling::duration("timeout_ms", millis))
                .transpose()?,
        };
        let idle = match self.idle {
            None => None,
            Some(Idle { after_ms, action }) => Some(IdlePolicy {
                after_millis: spelling::duration("idle.after_ms", after_ms)?,
                action: action.when_idle(),
            }),
        };
        Ok(SandboxSpec {
            name: self.name.as_deref().map(str::parse).transpose()?,
            template: spelling::name("template", template)?,
            timeout_millis,
            on_timeout: self.on_timeout.at_timeout(),
            idle,
            auto_resume: self.auto_resume,
            fallback_to_files: self.fallback_to_files,
            retention_millis: self
                .retention_ms
                .map(|millis| spelling::duration("retention_ms", millis))
                .transpose()?,
            owner: self.owner.as_deref().map(str::parse).transpose()?,
            env: self.env,
            labels: spelling::labels(self.labels)?,
            isolation_floor: self.isolation_floor.map(IsolationName::into_isolation),
            hooks: self.hooks.unwrap_or_default().into_hooks()?,
            volumes: self
                .volumes
                .into_iter()
                .map(VolumeMountWords::into_mount)
                .collect(),
            network: self.network.map(PolicyWords::into_policy),
            secrets: SecretUseWords::into_uses(self.secrets),
            // Its size and its lineage are decided where it is made.
            ..SandboxSpec::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use atoll_types::{
        Code, DiskBacking, Hook, IdleAction, Isolation, NetworkPolicy, NetworkRule, Preset, Resources,
        RuleAction, SecretUse, TimeoutAction, VolumeMount,
    };

    use super::*;
    use atoll_front::extract::parse_json;

    fn spec(json: &str) -> SandboxSpec {
        parse_json::<CreateSandboxRequest>(json.as_bytes())
            .unwrap()
            .into_spec(300_000)
            .unwrap()
    }

    fn asked(json: &str) -> ResourcesAsked {
        let request = parse_json::<CreateSandboxRequest>(json.as_bytes()).unwrap();
        request.into_create(300_000, None).unwrap().resources
    }

    #[test]
    fn an_empty_request_means_the_defaults() {
        let spec = spec("{}");
        assert_eq!(spec.template, "base");
        assert_eq!(asked("{}"), ResourcesAsked::default());
        assert_eq!(spec.timeout_millis, Some(300_000));
        assert_eq!(spec.isolation_floor, None);
        assert_eq!(spec.on_timeout, TimeoutAction::Kill);
        assert_eq!((spec.auto_resume, spec.retention_millis), (false, None));
        assert!(spec.hooks.is_empty() && spec.volumes.is_empty());
    }

    #[test]
    fn null_asks_for_no_timeout() {
        assert_eq!(spec(r#"{"timeout_ms":null}"#).timeout_millis, None);
        assert_eq!(spec(r#"{"timeout_ms":7}"#).timeout_millis, Some(7));
    }

    #[test]
    fn every_field_arrives() {
        let json = r#"{"template":"py","resources":{"cpu_millis":500,"memory_bytes":1,"disk_bytes":2,"disk_backing":"disk",
                "pids":3},"idle":{"after_ms":4},"env":{"A":"b"},"labels":{"c":"d"},"isolation_floor":"gvisor"}"#;
        let spec = spec(json);
        assert_eq!(spec.template, "py");
        let all = Resources {
            cpu_millis: 500,
            memory_bytes: 1,
            disk_bytes: 2,
            disk_backing: DiskBacking::Disk,
            pids: 3,
        };
        assert_eq!(asked(json), all.into());
        assert_eq!(
            spec.idle,
            Some(IdlePolicy {
                after_millis: 4,
                action: IdleAction::Kill
            })
        );
        assert_eq!(spec.env["A"], "b");
        assert_eq!(spec.labels["c"], "d");
        assert_eq!(spec.isolation_floor, Some(Isolation::Gvisor));
    }

    #[test]
    fn what_is_kept_arrives_too() {
        let spec = spec(
            r#"{"on_timeout":"pause","idle":{"after_ms":4,"action":"stop"},"auto_resume":true,"retention_ms":5,
                "hooks":{"on_create":[{"argv":["a","b"],"timeout_ms":6}],"on_resume":[{"argv":["c"]}]},
                "volumes":[{"volume":"data","path":"/data","read_only":true},{"volume":"x","path":"/x"}]}"#,
        );
        assert_eq!(spec.on_timeout, TimeoutAction::Pause);
        assert_eq!(spec.idle.map(|idle| idle.action), Some(IdleAction::Stop));
        assert_eq!((spec.auto_resume, spec.retention_millis), (true, Some(5)));
        let hook = |argv: &[&str], timeout_millis| Hook {
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            timeout_millis,
        };
        assert_eq!(spec.hooks.on_create, [hook(&["a", "b"], 6)]);
        assert_eq!(spec.hooks.on_resume, [hook(&["c"], 60_000)]);
        let mount = |volume: &str, path: &str, read_only| VolumeMount {
            volume: volume.into(),
            path: path.into(),
            read_only,
        };
        assert_eq!(
            spec.volumes,
            [mount("data", "/data", true), mount("x", "/x", false)]
        );
    }

    #[test]
    fn what_it_may_reach_arrives_too() {
        let nothing = spec("{}");
        assert_eq!((nothing.network, nothing.secrets.len()), (None, 0));
        let spec = spec(
            r#"{"network":{"preset":"none","rules":[{"action":"allow","to":"pypi.org"}]},
                "secrets":[{"secret":"github","env":"TOKEN"},{"secret":"other"}]}"#,
        );
        let network = NetworkPolicy {
            preset: Some(Preset::None),
            rules: vec![NetworkRule::new(RuleAction::Allow, "pypi.org")],
            ..NetworkPolicy::default()
        };
        assert_eq!(spec.network, Some(network));
        let used = |secret: &str, env: Option<&str>| SecretUse {
            secret: secret.into(),
            env: env.map(str::to_owned),
        };
        assert_eq!(spec.secrets, [used("github", Some("TOKEN")), used("other", None)]);
    }

    #[test]
    fn labels_of_the_servers_own_are_refused() {
        let body = br#"{"labels":{"atoll.e2b":"{\"open\":true}"}}"#;
        let request = parse_json::<CreateSandboxRequest>(body).unwrap();
        assert_eq!(request.into_spec(1000).unwrap_err().code, Code::LabelInvalid);
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        for (json, named) in [
            (r#"{"network":{"allow":[]}}"#, "allow"),
            (r#"{"secrets":[{"secret":"a","value":"b"}]}"#, "value"),
            (r#"{"memory":1}"#, "memory"),
            (r#"{"resources":{"gpus":1}}"#, "gpus"),
            (
                r#"{"resources":{"memory_bytes":"512M"}}"#,
                "resources.memory_bytes",
            ),
            (r#"{"isolation_floor":"docker"}"#, "docker"),
            (r#"{"on_timeout":"sleep"}"#, "sleep"),
            (r#"{"hooks":{"on_stop":[]}}"#, "on_stop"),
            (r#"{"volumes":[{"volume":"a","path":"/a","size":1}]}"#, "size"),
        ] {
            let fault = parse_json::<CreateSandboxRequest>(json.as_bytes()).unwrap_err();
            assert!(fault.message.contains(named), "{fault}");
        }
    }
}
