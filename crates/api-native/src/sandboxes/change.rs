//! What can be changed about a sandbox.

use std::collections::BTreeMap;

use atoll_actions::words::{ActionName, SandboxView};
use atoll_sandboxes::{ChangeIdle, ChangeSandbox};
use axum::extract::State;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use crate::error::Answer;
use crate::extract::{As, Json};
use crate::named::Named;
use crate::{App, wire};

/// Limits; what is absent stays as it is. The disk is as large as it was made.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChangeResources {
    /// Thousandths of a CPU core.
    #[schema(minimum = 1, examples(1000))]
    cpu_millis: Option<u32>,
    /// What programs inside see as the machine's memory may stay what it was at the start.
    #[schema(minimum = 1)]
    memory_bytes: Option<u64>,
    /// Processes and threads.
    #[schema(minimum = 1)]
    pids: Option<u32>,
}

/// What happens to a sandbox that nobody uses and that does not work; what is absent stays as it is.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = ChangeIdle)]
pub(crate) struct ChangeIdleWords {
    /// For how long. A sandbox without an idle time needs one.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    after_ms: Option<u64>,
    /// `kill`, where there was none.
    action: Option<ActionName>,
}

/// What is absent stays as it is.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChangeSandboxRequest {
    /// What to call it from now on; `null`: nothing.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 63, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    name: Option<Option<String>>,
    /// These labels get these values; `null` removes one. Others stay.
    #[serde(default)]
    labels: BTreeMap<String, Option<String>>,
    /// Its lifetime from now; of one that rests, from its next resume.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
    on_timeout: Option<ActionName>,
    /// `null`: however long nobody uses it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<ChangeIdleWords>)]
    idle: Option<Option<ChangeIdleWords>>,
    auto_resume: Option<bool>,
    /// `null`: it rests until somebody deletes it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    retention_ms: Option<Option<u64>>,
    #[serde(default)]
    resources: ChangeResources,
}

/// Tells `null` from absent.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

impl ChangeSandboxRequest {
    fn into_change(self) -> Answer<ChangeSandbox> {
        let millis =
            |name: &'static str, value: Option<u64>| value.map(|v| wire::duration(name, v)).transpose();
        let idle = match self.idle {
            None => None,
            Some(None) => Some(None),
            Some(Some(ChangeIdleWords { after_ms, action })) => Some(Some(ChangeIdle {
                after_millis: millis("idle.after_ms", after_ms)?,
                action: action.map(ActionName::when_idle),
            })),
        };
        let name = match self.name {
            None => None,
            Some(name) => Some(name.as_deref().map(str::parse).transpose()?),
        };
        Ok(ChangeSandbox {
            name,
            labels: self.labels,
            timeout_millis: millis("timeout_ms", self.timeout_ms)?,
            on_timeout: self.on_timeout.map(ActionName::at_timeout),
            idle,
            auto_resume: self.auto_resume,
            retention_millis: match self.retention_ms {
                None => None,
                Some(given) => Some(millis("retention_ms", given)?),
            },
            cpu_millis: self.resources.cpu_millis,
            memory_bytes: self.resources.memory_bytes,
            pids: self.resources.pids,
        })
    }
}

/// Changes the name, labels, times and limits of a sandbox that runs or rests: all that is asked for, or nothing.
#[utoipa::path(
    patch, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    security(("key" = ["sandboxes.create"])), request_body = ChangeSandboxRequest,
    responses((status = 200, description = "As it is now.", body = SandboxView))
)]
pub(crate) async fn change_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<ChangeSandboxRequest>,
) -> Answer<axum::Json<SandboxView>> {
    let change = body.into_change()?;
    let sandbox = app.sandboxes.change(&caller, &id, change).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

#[cfg(test)]
mod tests {
    use atoll_types::{IdleAction, TimeoutAction};

    use super::*;
    use crate::extract::parse_json;

    fn change(json: &str) -> ChangeSandbox {
        parse_json::<ChangeSandboxRequest>(json.as_bytes())
            .unwrap()
            .into_change()
            .unwrap()
    }

    #[test]
    fn absent_null_and_a_value_are_three_things() {
        assert_eq!(change("{}"), ChangeSandbox::default());
        assert_eq!(change(r#"{"idle":null}"#).idle, Some(None));
        assert_eq!(change(r#"{"name":null}"#).name, Some(None));
        let name = change(r#"{"name":"my-agent"}"#).name.flatten().unwrap();
        assert_eq!(name.as_str(), "my-agent");
        let idle = ChangeIdle {
            after_millis: Some(7),
            action: Some(IdleAction::Pause),
        };
        let later = change(r#"{"idle":{"after_ms":7}}"#).idle.flatten().unwrap();
        assert_eq!((later.after_millis, later.action), (Some(7), None));
        let given =
            change(r#"{"idle":{"after_ms":7,"action":"pause"},"retention_ms":null,"on_timeout":"stop"}"#);
        assert_eq!(
            (given.idle, given.retention_millis),
            (Some(Some(idle)), Some(None))
        );
        assert_eq!(given.on_timeout, Some(TimeoutAction::Stop));
        let labels = change(r#"{"labels":{"a":"b","c":null},"resources":{"memory_bytes":9}}"#);
        assert_eq!(labels.labels["a"].as_deref(), Some("b"));
        assert_eq!((&labels.labels["c"], labels.memory_bytes), (&None, Some(9)));
        assert!(parse_json::<ChangeSandboxRequest>(br#"{"template":"x"}"#).is_err());
    }
}
