//! On whose behalf something is done.

use atoll_types::{Fault, FaultKind, KeyId, ProjectId, SandboxId};

/// Who asks: the outcome of authentication. Made in this crate alone.
#[derive(Debug, Clone)]
pub struct Caller {
    project: ProjectId,
    role: Role,
    means: Means,
}

/// What a caller may do at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Runs the server: all projects, and what they share.
    Operator,
    /// Does whatever can be done in its own project.
    Member,
}

/// What let it in.
#[derive(Debug, Clone)]
enum Means {
    Key(KeyId),
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
    pub(crate) fn key_holder(project: ProjectId, role: Role, key: KeyId) -> Self {
        Self {
            project,
            role,
            means: Means::Key(key),
        }
    }

    pub(crate) fn token_holder(project: ProjectId, sandbox: Option<SandboxId>) -> Self {
        Self {
            project,
            role: Role::Member,
            means: Means::Token { sandbox },
        }
    }

    pub(crate) fn step(project: ProjectId) -> Self {
        Self {
            project,
            role: Role::Member,
            means: Means::Step,
        }
    }

    pub(crate) fn server(project: ProjectId) -> Self {
        Self {
            project,
            role: Role::Operator,
            means: Means::Server,
        }
    }

    /// Somebody who was never let in, for tests of what is behind the door.
    #[cfg(feature = "testing")]
    pub fn for_test(project: ProjectId) -> Self {
        Self::key_holder(project, Role::Member, KeyId::from_entropy([0; 20]))
    }

    pub fn project(&self) -> &ProjectId {
        &self.project
    }

    pub fn role(&self) -> Role {
        self.role
    }

    /// The key that was shown; by it what is open is ended when it is revoked.
    pub fn key(&self) -> Option<&KeyId> {
        match &self.means {
            Means::Key(key) => Some(key),
            Means::Token { .. } | Means::Step | Means::Server => None,
        }
    }

    /// The sandbox whose token was shown.
    pub fn sandbox(&self) -> Option<&SandboxId> {
        match &self.means {
            Means::Token { sandbox } => sandbox.as_ref(),
            Means::Key(_) | Means::Step | Means::Server => None,
        }
    }

    /// Refuses whoever does not run the server.
    pub fn operators_only(&self, what: &str) -> Result<(), Fault> {
        if self.role == Role::Operator {
            return Ok(());
        }
        Err(Fault::new(
            FaultKind::Forbidden,
            "operators_only",
            format!("only a key of the project `default` may {what}"),
        )
        .hint("ask whoever runs this server"))
    }
}
