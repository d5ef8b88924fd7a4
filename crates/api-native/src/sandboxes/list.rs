//! Which sandboxes a list shows: labels and states, a page at a time.

use atoll_actions::words::{SandboxView, StateName};
use atoll_sandboxes::ListSandboxes;
use atoll_types::Code;
use serde::Serialize;
use utoipa::{IntoParams, ToSchema};

use crate::error::{Answer, Failure};
use crate::wire;

/// Only documents the query; `label` and `state` repeat, which no struct can say to the decoder.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "read by the OpenAPI generator only")]
pub(crate) struct ListQuery {
    /// `NAME=VALUE`; repeat it to require several.
    #[param(style = Form, explode)]
    label: Option<Vec<String>>,
    /// Only of this owner, as a sandbox shows it, or of all of a kind: `workflow`, `sandbox`, `key`.
    owner: Option<String>,
    /// Repeat it to accept several; absent: every live state.
    #[param(style = Form, explode)]
    state: Option<Vec<StateName>>,
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

pub(crate) fn read_list(pairs: Vec<(String, String)>) -> Answer<ListSandboxes> {
    let mut list = ListSandboxes {
        limit: 50,
        ..ListSandboxes::default()
    };
    let mut limit = None;
    for (name, value) in pairs {
        match name.as_str() {
            "label" => {
                let (label, value) = wire::pair("label", &value)?;
                if list.labels.insert(label.clone(), value).is_some() {
                    let message = format!("`label` names `{label}` twice");
                    return Err(Failure::new(Code::InvalidQuery, message));
                }
            }
            "state" => {
                let state = value
                    .parse()
                    .map_err(|message: String| Failure::new(Code::InvalidQuery, message))?;
                if !list.states.contains(&state) {
                    list.states.push(state);
                }
            }
            "owner" if list.owner.is_none() => list.owner = Some(value.parse()?),
            "cursor" if list.cursor.is_none() => list.cursor = Some(value),
            "limit" if limit.is_none() => {
                let number = value.parse().map_err(|_| {
                    Failure::new(Code::InvalidQuery, format!("`limit` is `{value}`, not a number"))
                })?;
                let number = wire::within("limit", number, 1..=100)?;
                limit = usize::try_from(number).ok();
            }
            "cursor" | "limit" => {
                let message = format!("`{name}` is given twice");
                return Err(Failure::new(Code::InvalidQuery, message));
            }
            _ => {
                let message = format!(
                    "unknown query parameter `{name}`, expected one of `label`, `state`, `cursor`, `limit`"
                );
                return Err(Failure::new(Code::InvalidQuery, message));
            }
        }
    }
    list.limit = limit.unwrap_or(list.limit);
    Ok(list)
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SandboxPage {
    pub(crate) items: Vec<SandboxView>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<String>,
}

#[cfg(test)]
mod tests {
    use atoll_types::SandboxState;

    use super::*;

    #[test]
    fn list_filters_repeat() {
        let read = |text: &str| read_list(crate::extract::query(text)?);
        let list = read("label=a=1&label=b=x=y&state=running&state=failed&limit=7&cursor=c").unwrap();
        assert_eq!(list.labels["a"], "1");
        assert_eq!(list.labels["b"], "x=y");
        assert_eq!(list.states, [SandboxState::Running, SandboxState::Failed]);
        assert_eq!((list.limit, list.cursor.as_deref()), (7, Some("c")));
        assert_eq!(read("").unwrap().limit, 50);
        for bad in [
            "label=a",
            "label=a=1&label=a=2",
            "state=asleep",
            "limit=0",
            "limit=101",
            "limit=1&limit=2",
            "page=2",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
