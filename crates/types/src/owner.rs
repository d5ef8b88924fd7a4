//! Whom a sandbox belongs to.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Code, Fault, KeyId, SandboxId};

/// Whom a sandbox belongs to. One of a workflow's run or of another sandbox ends with it; one of a workflow's run spends that
/// run's money on models. Its text form is the same in rows, in requests and in answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Whoever made it, by the key that they had. That key's end is not its end.
    Key(KeyId),
    Sandbox(SandboxId),
    Workflow(WorkflowOwner),
}

/// One run of a workflow.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WorkflowOwner {
    pub namespace: String,
    pub run: String,
    pub workflow: String,
}

/// Whom listed sandboxes belong to: one owner, or all of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnedBy {
    One(Owner),
    Kind(OwnerKind),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnerKind {
    Key,
    Sandbox,
    Workflow,
}

impl Owner {
    /// As long as the longest workflow's name with all that stands before it.
    pub const MOST_BYTES: usize = 2048;

    pub fn kind(&self) -> OwnerKind {
        match self {
            Self::Key(_) => OwnerKind::Key,
            Self::Sandbox(_) => OwnerKind::Sandbox,
            Self::Workflow(_) => OwnerKind::Workflow,
        }
    }

    pub fn workflow(&self) -> Option<&WorkflowOwner> {
        match self {
            Self::Workflow(workflow) => Some(workflow),
            Self::Key(_) | Self::Sandbox(_) => None,
        }
    }
}

impl OwnerKind {
    pub const ALL: [Self; 3] = [Self::Key, Self::Sandbox, Self::Workflow];

    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Sandbox => "sandbox",
            Self::Workflow => "workflow",
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind().name();
        match self {
            Self::Key(key) => write!(f, "{kind}:{key}"),
            Self::Sandbox(sandbox) => write!(f, "{kind}:{sandbox}"),
            // What a workflow is called may have colons in it, so it comes last.
            Self::Workflow(WorkflowOwner {
                namespace,
                run,
                workflow,
            }) => write!(f, "{kind}:{namespace}:{run}:{workflow}"),
        }
    }
}

impl FromStr for Owner {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        let invalid = || {
            Fault::new(Code::OwnerInvalid, "this names no owner")
                .hint("write `workflow:NAMESPACE:RUN:WORKFLOW`, `sandbox:sbx_…` or `key:key_…`")
        };
        if text.len() > Self::MOST_BYTES || text.chars().any(char::is_control) {
            return Err(invalid());
        }
        match text.split_once(':').ok_or_else(invalid)? {
            ("key", key) => key.parse().map(Self::Key).map_err(|_| invalid()),
            ("sandbox", sandbox) => sandbox.parse().map(Self::Sandbox).map_err(|_| invalid()),
            ("workflow", rest) => {
                let mut parts = rest.splitn(3, ':').filter(|part| !part.is_empty());
                let mut next = || parts.next().map(str::to_owned).ok_or_else(invalid);
                Ok(Self::Workflow(WorkflowOwner {
                    namespace: next()?,
                    run: next()?,
                    workflow: next()?,
                }))
            }
            _ => Err(invalid()),
        }
    }
}

impl FromStr for OwnedBy {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        match OwnerKind::ALL.into_iter().find(|kind| kind.name() == text) {
            Some(kind) => Ok(Self::Kind(kind)),
            None => text.parse().map(Self::One),
        }
    }
}

impl Serialize for Owner {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Owner {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_survives_its_text_form() {
        let key = KeyId::from_entropy([1; 20]);
        let sandbox = SandboxId::from_entropy([2; 20]);
        let workflow = WorkflowOwner {
            namespace: "default".into(),
            run: "0199".into(),
            workflow: "order:7/a b".into(),
        };
        for (owner, text) in [
            (Owner::Key(key.clone()), format!("key:{key}")),
            (Owner::Sandbox(sandbox.clone()), format!("sandbox:{sandbox}")),
            (
                Owner::Workflow(workflow),
                "workflow:default:0199:order:7/a b".to_owned(),
            ),
        ] {
            assert_eq!(owner.to_string(), text);
            assert_eq!(text.parse::<Owner>().unwrap(), owner);
            assert_eq!(text.parse::<OwnedBy>().unwrap(), OwnedBy::One(owner));
        }
        assert_eq!(
            "workflow".parse::<OwnedBy>().unwrap(),
            OwnedBy::Kind(OwnerKind::Workflow)
        );
    }

    #[test]
    fn anything_else_is_no_owner() {
        let long = format!("workflow:a:b:{}", "c".repeat(Owner::MOST_BYTES));
        for text in [
            "",
            "workflow:",
            "workflow:a:b",
            "workflow::b:c",
            "workflow:a::c",
            "workflow:a:b:",
            "workflow:a:b:c\n",
            "key:sbx_aaaaaaaaaaaaaaaaaaaa",
            "sandbox:my-name",
            "person:ada",
            long.as_str(),
        ] {
            let fault = text.parse::<Owner>().unwrap_err();
            assert_eq!(fault.code, Code::OwnerInvalid, "{text:?}");
        }
    }
}
