//! What a key may do: its role, and within that its scopes.
//!
//! ```text
//!   may = the role allows the action  and  (there are no scopes, or one of them covers the action)
//! ```

use std::fmt;
use std::str::FromStr;

use atoll_types::{Code, Fault, SandboxId};

use crate::Action;

/// What a caller may do at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Runs the server: all projects, and what they share.
    Operator,
    /// Does whatever can be done in its own project, but answering for people: it is what workers and agents hold.
    Member,
    /// Looks, and changes nothing.
    Viewer,
    /// Answers what workflows ask people, and looks at those workflows.
    Approver,
}

impl Role {
    pub const ALL: [Self; 4] = [Self::Operator, Self::Member, Self::Viewer, Self::Approver];

    pub fn name(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Member => "member",
            Self::Viewer => "viewer",
            Self::Approver => "approver",
        }
    }

    pub(crate) fn allows(self, action: Action) -> bool {
        use Action as A;
        match self {
            Self::Operator => true,
            Self::Member => !matches!(
                action,
                A::RunServer | A::ManageProjects | A::ShareTemplates | A::AnswerApprovals
            ),
            Self::Viewer => matches!(
                action,
                A::ReadServer
                    | A::ReadProjects
                    | A::ReadKeys
                    | A::ListSandboxes
                    | A::ReadSandbox
                    | A::ReadStorage
                    | A::ReadTemplates
                    | A::ReadSecrets
                    | A::ReadModels
                    | A::ReadWorkflows
                    | A::ReadApprovals
                    | A::ReadLedger
            ),
            Self::Approver => matches!(
                action,
                A::ReadServer | A::ReadProjects | A::ReadWorkflows | A::ReadApprovals | A::AnswerApprovals
            ),
        }
    }

    /// Whether whoever has this role could do whatever the other one may.
    pub(crate) fn covers(self, other: Self) -> bool {
        let mut actions = Action::ALL.into_iter();
        actions.all(|action| self.allows(action) || !other.allows(action))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| {
            Fault::new(
                Code::RoleInvalid,
                format!(
                    "`{}` is no role; there are operator, member, viewer and approver",
                    shown(text)
                ),
            )
        })
    }
}

/// A part of a project that a key is restricted to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All sandboxes, and what is saved of them.
    Sandboxes,
    /// This one, as it is: neither what it may reach, nor anything that others could see.
    Sandbox(SandboxId),
    Templates,
    UseSecrets,
    ManageSecrets,
    /// Calls of models, and what they cost; none of what limits them.
    Models,
    /// The same, and providers, prices, budgets, guards and keys for models: whoever has it sets their own limits.
    ManageModels,
    Workflows,
    Approvals,
    Ledger,
}

/// The most that a key may have.
pub(crate) const MOST_SCOPES: usize = 32;

impl Scope {
    fn covers(&self, action: Action, sandbox: Option<&SandboxId>) -> bool {
        use Action as A;
        match self {
            Self::Sandboxes => matches!(
                action,
                A::ListSandboxes
                    | A::CreateSandboxes
                    | A::ReadSandbox
                    | A::UseSandbox
                    | A::SetNetwork
                    | A::ReadStorage
                    | A::ManageStorage
                    | A::ReadTemplates
            ),
            Self::Sandbox(own) => matches!(action, A::ReadSandbox | A::UseSandbox) && sandbox == Some(own),
            Self::Templates => {
                matches!(action, A::ReadTemplates | A::ManageTemplates | A::ShareTemplates)
            }
            Self::UseSecrets => matches!(action, A::ReadSecrets | A::UseSecrets),
            Self::ManageSecrets => {
                matches!(action, A::ReadSecrets | A::UseSecrets | A::ManageSecrets)
            }
            Self::Models => matches!(action, A::ReadModels | A::CallModels),
            Self::ManageModels => {
                matches!(action, A::ReadModels | A::CallModels | A::ManageModels)
            }
            Self::Workflows => matches!(action, A::ReadWorkflows | A::RunWorkflows),
            Self::Approvals => matches!(action, A::ReadApprovals | A::AnswerApprovals),
            Self::Ledger => action == A::ReadLedger,
        }
    }
}

/// Whether scopes let an action through. What the server is, and whose one is, everybody may know.
pub(crate) fn within(scopes: &[Scope], action: Action, sandbox: Option<&SandboxId>) -> bool {
    scopes.is_empty()
        || matches!(action, Action::ReadServer | Action::ReadProjects)
        || scopes.iter().any(|scope| scope.covers(action, sandbox))
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sandboxes => "sandboxes",
            Self::Sandbox(id) => return write!(f, "sandbox:{id}"),
            Self::Templates => "templates",
            Self::UseSecrets => "secrets:use",
            Self::ManageSecrets => "secrets:manage",
            Self::Models => "models",
            Self::ManageModels => "models:manage",
            Self::Workflows => "workflows",
            Self::Approvals => "approvals",
            Self::Ledger => "ledger",
        })
    }
}

impl FromStr for Scope {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        Ok(match text {
            "sandboxes" => Self::Sandboxes,
            "templates" => Self::Templates,
            "secrets:use" => Self::UseSecrets,
            "secrets:manage" => Self::ManageSecrets,
            "models" => Self::Models,
            "models:manage" => Self::ManageModels,
            "workflows" => Self::Workflows,
            "approvals" => Self::Approvals,
            "ledger" => Self::Ledger,
            _ => {
                let sandbox = text.strip_prefix("sandbox:").and_then(|id| id.parse().ok());
                return sandbox.map(Self::Sandbox).ok_or_else(|| {
                    Fault::new(
                        Code::ScopeInvalid,
                        format!(
                            "`{}` is no scope; there are sandboxes, sandbox:ID, templates, secrets:use, \
                             secrets:manage, models, models:manage, workflows, approvals and ledger",
                            shown(text)
                        ),
                    )
                });
            }
        })
    }
}

/// What somebody sent, for a message.
fn shown(text: &str) -> String {
    text.chars().take(100).filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_and_scopes_are_read_as_they_are_written() {
        for role in Role::ALL {
            assert_eq!(role.name().parse::<Role>().unwrap(), role);
        }
        let sandbox = Scope::Sandbox(SandboxId::from_entropy([1; 20]));
        for scope in [
            Scope::Sandboxes,
            sandbox,
            Scope::Templates,
            Scope::UseSecrets,
            Scope::ManageSecrets,
            Scope::Models,
            Scope::ManageModels,
            Scope::Workflows,
            Scope::Approvals,
            Scope::Ledger,
        ] {
            assert_eq!(scope.to_string().parse::<Scope>().unwrap(), scope);
        }
        for bad in ["", "sandbox", "sandbox:", "secrets", "all", "Models"] {
            assert_eq!(
                bad.parse::<Scope>().unwrap_err().code,
                Code::ScopeInvalid,
                "{bad}"
            );
        }
    }

    #[test]
    fn nobody_covers_more_than_they_may() {
        use Role::{Approver, Member, Operator, Viewer};
        for (role, covered) in [
            (Operator, &[Operator, Member, Viewer, Approver][..]),
            (Member, &[Member, Viewer]),
            (Viewer, &[Viewer]),
            (Approver, &[Approver]),
        ] {
            for other in Role::ALL {
                assert_eq!(role.covers(other), covered.contains(&other), "{role} {other}");
            }
        }
    }

    /// What agents are given lets them call models, and not lift what limits their calls.
    #[test]
    fn a_key_that_calls_models_does_not_set_its_own_limits() {
        for action in [Action::ReadModels, Action::CallModels] {
            assert!(within(&[Scope::Models], action, None), "{action}");
            assert!(within(&[Scope::ManageModels], action, None), "{action}");
        }
        assert!(!within(&[Scope::Models], Action::ManageModels, None));
        assert!(within(&[Scope::ManageModels], Action::ManageModels, None));
    }

    #[test]
    fn a_key_for_one_sandbox_opens_no_other_and_makes_none() {
        let (own, other) = (SandboxId::from_entropy([1; 20]), SandboxId::from_entropy([2; 20]));
        let scopes = [Scope::Sandbox(own.clone())];
        for action in Action::ALL {
            let everybody = matches!(action, Action::ReadServer | Action::ReadProjects);
            let inside = matches!(action, Action::ReadSandbox | Action::UseSandbox);
            assert_eq!(
                within(&scopes, action, Some(&own)),
                inside || everybody,
                "{action}"
            );
            assert_eq!(within(&scopes, action, Some(&other)), everybody, "{action}");
            assert_eq!(within(&scopes, action, None), everybody, "{action}");
        }
    }
}
