//! What can be asked for.

use std::fmt;

/// What somebody asks for. Every route of every API names one, once; [`Caller::may`](crate::Caller::may) decides about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// What the server is, and who one is to it.
    ReadServer,
    /// Metrics of all projects, and collecting garbage.
    RunServer,
    ReadProjects,
    ManageProjects,
    ReadKeys,
    ManageKeys,
    ListSandboxes,
    /// Makes sandboxes, out of nothing or out of another one.
    CreateSandboxes,
    /// Looks at one sandbox from outside.
    ReadSandbox,
    /// Whatever can be done in and with one sandbox.
    UseSandbox,
    /// Changes what a sandbox may reach; not for whoever is confined to it.
    SetNetwork,
    /// Artifacts, snapshots and volumes.
    ReadStorage,
    ManageStorage,
    ReadTemplates,
    /// Builds, changes and deletes templates of one's own project.
    ManageTemplates,
    /// The same with what all projects share; shares it, and takes it back.
    ShareTemplates,
    /// Names of secrets, never their values.
    ReadSecrets,
    /// Lends secrets to a sandbox.
    UseSecrets,
    ManageSecrets,
    /// What models there are, and what they have cost.
    ReadModels,
    CallModels,
    /// Providers, names, prices, budgets and keys for models.
    ManageModels,
    ReadWorkflows,
    /// Whatever can be done with workflows, but answering for people.
    RunWorkflows,
    ReadApprovals,
    AnswerApprovals,
    ReadLedger,
}

impl Action {
    pub const ALL: [Self; 27] = [
        Self::ReadServer,
        Self::RunServer,
        Self::ReadProjects,
        Self::ManageProjects,
        Self::ReadKeys,
        Self::ManageKeys,
        Self::ListSandboxes,
        Self::CreateSandboxes,
        Self::ReadSandbox,
        Self::UseSandbox,
        Self::SetNetwork,
        Self::ReadStorage,
        Self::ManageStorage,
        Self::ReadTemplates,
        Self::ManageTemplates,
        Self::ShareTemplates,
        Self::ReadSecrets,
        Self::UseSecrets,
        Self::ManageSecrets,
        Self::ReadModels,
        Self::CallModels,
        Self::ManageModels,
        Self::ReadWorkflows,
        Self::RunWorkflows,
        Self::ReadApprovals,
        Self::AnswerApprovals,
        Self::ReadLedger,
    ];

    /// As routes name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadServer => "server.read",
            Self::RunServer => "server.run",
            Self::ReadProjects => "projects.read",
            Self::ManageProjects => "projects.manage",
            Self::ReadKeys => "keys.read",
            Self::ManageKeys => "keys.manage",
            Self::ListSandboxes => "sandboxes.list",
            Self::CreateSandboxes => "sandboxes.create",
            Self::ReadSandbox => "sandbox.read",
            Self::UseSandbox => "sandbox.use",
            Self::SetNetwork => "sandbox.network",
            Self::ReadStorage => "storage.read",
            Self::ManageStorage => "storage.manage",
            Self::ReadTemplates => "templates.read",
            Self::ManageTemplates => "templates.manage",
            Self::ShareTemplates => "templates.share",
            Self::ReadSecrets => "secrets.read",
            Self::UseSecrets => "secrets.use",
            Self::ManageSecrets => "secrets.manage",
            Self::ReadModels => "models.read",
            Self::CallModels => "models.call",
            Self::ManageModels => "models.manage",
            Self::ReadWorkflows => "workflows.read",
            Self::RunWorkflows => "workflows.run",
            Self::ReadApprovals => "approvals.read",
            Self::AnswerApprovals => "approvals.answer",
            Self::ReadLedger => "ledger.read",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_action_has_a_name_of_its_own() {
        for action in Action::ALL {
            assert_eq!(Action::named(action.name()), Some(action));
        }
    }
}
