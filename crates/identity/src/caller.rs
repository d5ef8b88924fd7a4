//! On whose behalf something is done, and whether that may be.

use std::sync::Arc;

use atoll_types::{Code, Fault, KeyId, ProjectId, SandboxId, Timestamp};

use crate::Action;
use crate::rights::{self, Role, Scope};

/// Who asks: the outcome of authentication. Made in this crate alone.
#[derive(Debug, Clone)]
pub struct Caller {
    project: ProjectId,
    role: Role,
    /// None: not restricted.
    scopes: Arc<[Scope]>,
    expires_at: Option<Timestamp>,
    /// The session of a browser that was begun with the key.
    session: Option<Arc<str>>,
    means: Means,
}

/// What let it in.
#[derive(Debug, Clone)]
enum Means {
    Key(KeyId),
    /// One that opens models and nothing else.
    ModelKey(KeyId),
    /// A token, or the door of a sandbox that is open to everybody; it leads to one thing.
    Token {
        sandbox: Option<SandboxId>,
    },
    /// A workflow carries out one of its steps.
    Step,
    /// Nobody asked: the server looks after what it has promised.
    Server,
}

impl Caller {
    pub(crate) fn key_holder(
        project: ProjectId,
        role: Role,
        scopes: Arc<[Scope]>,
        expires_at: Option<Timestamp>,
        key: KeyId,
    ) -> Self {
        Self {
            project,
            role,
            scopes,
            expires_at,
            session: None,
            means: Means::Key(key),
        }
    }

    pub(crate) fn model_key_holder(project: ProjectId, key: KeyId) -> Self {
        Self::unscoped(project, Role::Member, Means::ModelKey(key))
    }

    pub(crate) fn token_holder(project: ProjectId, sandbox: Option<SandboxId>) -> Self {
        Self::unscoped(project, Role::Member, Means::Token { sandbox })
    }

    /// With what [`Caller::rights`] said of whoever started the workflow, and never with more than a member's.
    pub(crate) fn step(project: ProjectId, rights: &str) -> Result<Self, Fault> {
        let mut words = rights.split_ascii_whitespace();
        let role = match words.next() {
            None => Role::Member,
            Some(role) => role.parse()?,
        };
        let role = if role.covers(Role::Member) {
            Role::Member
        } else {
            role
        };
        let scopes = words.map(str::parse).collect::<Result<Vec<Scope>, Fault>>()?;
        Ok(Self {
            scopes: scopes.into(),
            ..Self::unscoped(project, role, Means::Step)
        })
    }

    /// Role and scopes, as a text that is kept with what acts later in the caller's place.
    pub fn rights(&self) -> String {
        let scopes = self.scopes.iter().map(Scope::to_string);
        let words: Vec<String> = std::iter::once(self.role.name().to_owned())
            .chain(scopes)
            .collect();
        words.join(" ")
    }

    pub(crate) fn server(project: ProjectId) -> Self {
        Self::unscoped(project, Role::Operator, Means::Server)
    }

    fn unscoped(project: ProjectId, role: Role, means: Means) -> Self {
        Self {
            project,
            role,
            scopes: Arc::default(),
            expires_at: None,
            session: None,
            means,
        }
    }

    /// Somebody who was never let in, for tests of what is behind the door.
    #[cfg(feature = "testing")]
    pub fn for_test(project: ProjectId) -> Self {
        Self::with_rights_for_test(project, Role::Member, Vec::new())
    }

    /// The same in a role, restricted to scopes.
    #[cfg(feature = "testing")]
    pub fn with_rights_for_test(project: ProjectId, role: Role, scopes: Vec<Scope>) -> Self {
        let key = KeyId::from_entropy([0; 20]);
        Self::key_holder(project, role, scopes.into(), None, key)
    }

    /// A step of a workflow that there is not.
    #[cfg(feature = "testing")]
    pub fn step_for_test(project: ProjectId) -> Self {
        Self::unscoped(project, Role::Member, Means::Step)
    }

    pub fn project(&self) -> &ProjectId {
        &self.project
    }

    pub fn role(&self) -> Role {
        self.role
    }

    /// Whether it may know of what is in other projects: those who run the server, unless their key is restricted to a part.
    pub fn sees_all_projects(&self) -> bool {
        self.role == Role::Operator && self.scopes.is_empty()
    }

    pub(crate) fn expires_at(&self) -> Option<Timestamp> {
        self.expires_at
    }

    /// The key that was shown; by it what is open is ended when it is revoked.
    pub fn key(&self) -> Option<&KeyId> {
        match &self.means {
            Means::Key(key) | Means::ModelKey(key) => Some(key),
            Means::Token { .. } | Means::Step | Means::Server => None,
        }
    }

    pub(crate) fn in_session(self, session: String) -> Self {
        Self {
            session: Some(session.into()),
            ..self
        }
    }

    /// The session that it came in, if it did not come with the key itself. By it what is open is ended when it ends.
    pub fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// The sandbox whose token was shown.
    pub fn sandbox(&self) -> Option<&SandboxId> {
        match &self.means {
            Means::Token { sandbox } => sandbox.as_ref(),
            Means::Key(_) | Means::ModelKey(_) | Means::Step | Means::Server => None,
        }
    }

    /// Decides whether this may be done; `sandbox` is the one that it is about, if it is about one.
    ///
    /// What must hold: what acts in a sandbox, a step or a workflow is what people are asked about, and never answers. So
    /// nobody answers but the holder of a key that was made for it (an approver's, or an operator's); a member's, which is what
    /// workers and agents are given, neither answers nor makes a key that could.
    pub fn may(&self, action: Action, sandbox: Option<&SandboxId>) -> Result<(), Fault> {
        if !self.role.allows(action) {
            return Err(self.refused_by_role(action));
        }
        if !rights::within(&self.scopes, action, sandbox) {
            return Err(self.refused_by_scope(action));
        }
        if !self.means.lead_to(action, sandbox) {
            return Err(Fault::new(
                Code::NotAllowed,
                format!(
                    "{} is for people and programs with an API key that allows it",
                    described(action)
                ),
            )
            .hint("use an API key outside of sandboxes and workflows"));
        }
        Ok(())
    }

    fn refused_by_role(&self, action: Action) -> Fault {
        let what = described(action);
        if action == Action::AnswerApprovals {
            return Fault::new(
                Code::NotAllowed,
                format!("{what} takes a key with the role approver; this one is a {}'s", self.role),
            )
            .hint("whoever runs this server makes one: `atoll key create NAME --role approver --project PROJECT`");
        }
        if !Role::Member.allows(action) {
            return Fault::new(
                Code::OperatorsOnly,
                format!("{what} takes a key of the project `default` with the role operator"),
            )
            .hint("ask whoever runs this server");
        }
        let fault = Fault::new(
            Code::NotAllowed,
            format!("{what} is more than a key with the role {} may do", self.role),
        );
        fault.hint("use a key with the role member; `atoll key create --role member` makes one")
    }

    fn refused_by_scope(&self, action: Action) -> Fault {
        let scopes: Vec<String> = self.scopes.iter().map(Scope::to_string).collect();
        Fault::new(
            Code::NotAllowed,
            format!(
                "this key is restricted to {}, which {} is not part of",
                scopes.join(", "),
                described(action)
            ),
        )
        .hint("use a key with a scope for it; `atoll key create --scope` makes one")
    }
}

impl Means {
    /// Keys lead to whatever their rights are; what programs of the server's own hold leads to what they are there for.
    fn lead_to(&self, action: Action, sandbox: Option<&SandboxId>) -> bool {
        use Action as A;
        match self {
            Self::Key(_) => true,
            Self::ModelKey(_) => action == A::CallModels,
            Self::Token { sandbox: own } => match action {
                A::CallModels => own.is_some(),
                A::ReadSandbox | A::UseSandbox => own.is_some() && own.as_ref() == sandbox,
                _ => false,
            },
            Self::Step => matches!(
                action,
                A::ListSandboxes
                    | A::CreateSandboxes
                    | A::ReadSandbox
                    | A::UseSandbox
                    | A::ReadStorage
                    | A::ManageStorage
                    | A::ReadTemplates
                    | A::UseSecrets
                    | A::CallModels
            ),
            Self::Server => action != A::AnswerApprovals,
        }
    }
}

/// An action in words for a refusal.
fn described(action: Action) -> String {
    format!("`{action}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn project() -> ProjectId {
        ProjectId::from_entropy([1; 20])
    }

    #[test]
    fn what_acts_in_a_sandbox_a_step_or_a_workflow_never_answers_for_people() {
        let sandbox = SandboxId::from_entropy([2; 20]);
        let key = KeyId::from_entropy([3; 20]);
        for caller in [
            Caller::token_holder(project(), Some(sandbox.clone())),
            Caller::token_holder(project(), None),
            Caller::model_key_holder(project(), key.clone()),
            Caller::step(project(), "").unwrap(),
            Caller::server(project()),
        ] {
            let refused = caller.may(Action::AnswerApprovals, Some(&sandbox)).unwrap_err();
            assert_eq!(refused.code, Code::NotAllowed, "{caller:?}");
        }
        for caller in [
            Caller::token_holder(project(), Some(sandbox)),
            Caller::model_key_holder(project(), key.clone()),
            Caller::step(project(), "").unwrap(),
        ] {
            // Nor do they make a key that could.
            assert!(caller.may(Action::ManageKeys, None).is_err(), "{caller:?}");
        }
        // What workers and agents are given: members' keys, whatever their scopes, and operators' for workflows alone.
        for (role, scopes) in [
            (Role::Member, vec![]),
            (Role::Member, vec![Scope::Workflows]),
            (Role::Member, vec![Scope::Workflows, Scope::Approvals]),
            (Role::Operator, vec![Scope::Workflows]),
        ] {
            let worker = Caller::key_holder(project(), role, scopes.into(), None, key.clone());
            worker.may(Action::RunWorkflows, None).unwrap();
            let refused = worker.may(Action::AnswerApprovals, None).unwrap_err();
            assert_eq!(refused.code, Code::NotAllowed, "{worker:?}");
            assert!(!worker.role().covers(Role::Approver) || role == Role::Operator);
        }
        for role in [Role::Operator, Role::Approver] {
            let person = Caller::key_holder(project(), role, Arc::default(), None, key.clone());
            person.may(Action::AnswerApprovals, None).unwrap();
        }
    }

    #[test]
    fn a_token_leads_to_its_own_sandbox_alone() {
        let (own, other) = (SandboxId::from_entropy([1; 20]), SandboxId::from_entropy([2; 20]));
        let caller = Caller::token_holder(project(), Some(own.clone()));
        caller.may(Action::UseSandbox, Some(&own)).unwrap();
        assert!(caller.may(Action::UseSandbox, Some(&other)).is_err());
        assert!(caller.may(Action::UseSandbox, None).is_err());
    }
}
