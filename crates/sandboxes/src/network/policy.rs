//! From the words in a row to what the proxy enforces.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_broker::TrustId;
use atoll_node::{Admission, Tenant, Used, allows_nothing};
use atoll_policy::{Explanation, Grant, Name, Policy, Question, Step};
use atoll_store::{SandboxRow, SecretRow};
use atoll_types::{
    Code, Fault, NetworkPolicy, ProjectId, SandboxId, SandboxSpec, SecretRef, SecretUse, TemplateId,
};

use super::{ExplainNetwork, NetworkExplanation, PolicySource};
use crate::faults::from_store;
use crate::secrets::may_lend;
use crate::{Action, Caller, Opens, Sandboxes};

/// The most secrets that one sandbox is given.
const MOST_SECRETS: usize = 64;

impl Sandboxes {
    /// What would happen if a sandbox tried to reach something.
    pub async fn explain_network(
        &self,
        caller: &Caller,
        id: &SandboxId,
        asked: ExplainNetwork,
    ) -> Result<NetworkExplanation, Fault> {
        let row = self.row(caller, id).await?;
        let question = Question::parse(&asked.url, asked.method.as_deref())?;
        let Some(Admission { tenant, .. }) = self.admission(&row).await? else {
            return Err(self.no_way_out());
        };
        let Explanation {
            mut decision,
            mut steps,
            inspected,
            secrets,
        } = tenant.policy.explain(&question, self.now());
        if decision.is_allowed()
            && let Some(address) = question.address
            && let Some(own) = self.node().own_address(tenant.policy, address).await
        {
            steps.push(Step {
                check: "floor".into(),
                finding: own.reason.clone(),
                verdict: Some(own.verdict),
            });
            decision = own;
        }
        Ok(NetworkExplanation {
            verdict: decision.verdict,
            rule: decision.rule.as_str().to_owned(),
            reason: decision.reason,
            steps: steps
                .into_iter()
                .map(|step| format!("{}: {}", step.check, step.finding))
                .collect(),
            inspected,
            secrets: secrets.into_iter().map(|secret| secret.name).collect(),
        })
    }

    /// The policy in force for a sandbox.
    pub(crate) fn effective_policy(
        &self,
        spec: &SandboxSpec,
        template: &TemplateId,
    ) -> (NetworkPolicy, PolicySource) {
        if let Some(policy) = &spec.network {
            return (policy.clone(), PolicySource::Sandbox);
        }
        if let Some(policy) = self.template_policy(template) {
            return (policy, PolicySource::Template);
        }
        let policy = self.way_out().map(|way| way.default.clone());
        (policy.unwrap_or_default(), PolicySource::Default)
    }

    /// Read once: a template never changes.
    fn template_policy(&self, template: &TemplateId) -> Option<NetworkPolicy> {
        let known = || self.inner.template_policies.lock();
        if let Some(policy) = known().get(template) {
            return policy.clone();
        }
        let policy = self.template_of(template).ok()?.network;
        known().insert(template.clone(), policy.clone());
        policy
    }

    /// Refuses a network that makes no sense, or that there is none for; else as [`Sandboxes::admission`].
    pub(crate) async fn check_network(&self, row: &SandboxRow) -> Result<Option<Admission>, Fault> {
        let (policy, _) = self.effective_policy(&row.spec, &row.template);
        let wants_nothing = allows_nothing(&policy) && row.spec.secrets.is_empty();
        if self.way_out().is_none() && !wants_nothing {
            return Err(self.no_way_out());
        }
        check_uses(&row.spec)?;
        for used in &row.spec.secrets {
            self.secret_row(&row.project, &used.secret).await?;
        }
        self.admission(row).await
    }

    /// Whether a caller may have a sandbox as it would be, wherever its policy and its secrets come from: a copy of one that
    /// calls models or is lent secrets does the same for whoever made the copy.
    pub(crate) fn may_have(
        &self,
        caller: &Caller,
        row: &SandboxRow,
        admission: Option<&Admission>,
    ) -> Result<(), Fault> {
        may_lend(caller, &row.spec.secrets)?;
        let models = self.way_out().and_then(|way| way.models.as_ref());
        match models.zip(admission) {
            Some((host, admission)) if admission.tenant.policy.name(host).is_allowed() => {
                caller.may(Action::CallModels, None)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn no_way_out(&self) -> Fault {
        let why = match &self.node().offer().network {
            Ok(_) => "sandboxes have no network here",
            Err(why) => why,
        };
        Fault::new(
            Code::NetworkUnavailable,
            format!("nothing can leave a sandbox on this machine: {why}"),
        )
        .hint("leave out `network` and `secrets`, or see what `atoll doctor` says about the network")
    }

    /// What the proxy is to know of a sandbox; `None` where there is no proxy. A secret that was deleted meanwhile is left
    /// out: a sandbox that rests must be able to come back without it.
    pub(crate) async fn admission(&self, row: &SandboxRow) -> Result<Option<Admission>, Fault> {
        let Some(way) = self.way_out() else {
            return Ok(None);
        };
        let trust = TrustId::new(row.spec.lineage.as_ref().unwrap_or(&row.id).as_str());
        let (policy, _) = self.effective_policy(&row.spec, &row.template);
        let found = self.secrets_of(&row.project, &row.spec.secrets).await?;
        let mut grants = Vec::with_capacity(found.len());
        let mut placeholders = Vec::with_capacity(found.len());
        let mut env = Vec::new();
        for (used, secret) in found {
            let reference = SecretRef {
                id: secret.id.clone(),
                name: secret.name,
            };
            if let Some(placeholder) = self.inner.broker.placeholder(&trust, &secret.id) {
                if let Some(variable) = &used.env {
                    env.push((variable.clone(), placeholder.clone()));
                }
                placeholders.push((reference.clone(), placeholder));
            }
            grants.push(Grant {
                secret: reference,
                binding: secret.binding,
                expires: secret.expires_at,
                env: used.env.clone(),
            });
        }
        let compiled = Policy::compile(&policy, &way.floor, &grants)?;
        // Allowed only where a rule says its name: one that allows every name does not mean the gateway, which costs money.
        if let Some(host) = &way.models
            && compiled.name(host).is_allowed()
        {
            env.extend(self.model_variables(row, host));
        }
        let limits = policy.limits;
        let used = if limits.total_bytes.is_some() || limits.total_connections.is_some() {
            self.network_used(&row.id).await?
        } else {
            Used::default()
        };
        let tenant = Tenant {
            sandbox: row.id.clone(),
            project: row.project.clone(),
            policy: Arc::new(compiled),
            used,
            placeholders,
            trust,
        };
        Ok(Some(Admission { tenant, env }))
    }

    /// What clients of models look for in their environment: where to go, and a token that is this sandbox's alone. What
    /// the sandbox was created with wins.
    fn model_variables(&self, row: &SandboxRow, host: &Name) -> Vec<(String, String)> {
        let token = self.identity().token(&Opens::Models { sandbox: &row.id });
        let variables = [
            ("OPENAI_BASE_URL", format!("http://{host}/v1")),
            ("OPENAI_API_KEY", token.clone()),
            ("ANTHROPIC_BASE_URL", format!("http://{host}")),
            ("ANTHROPIC_API_KEY", token),
        ];
        let given = |name: &str| {
            row.spec.env.contains_key(name)
                || row
                    .spec
                    .secrets
                    .iter()
                    .any(|used| used.env.as_deref() == Some(name))
        };
        variables
            .into_iter()
            .filter(|(name, _)| !given(name))
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    async fn network_used(&self, id: &SandboxId) -> Result<Used, Fault> {
        let stored = self
            .store()
            .sandboxes
            .network_usage(id)
            .await
            .map_err(|e| from_store(&e))?;
        let pending = self.node().network_pending(id).await;
        Ok(Used {
            bytes: [
                stored.bytes_up,
                stored.bytes_down,
                pending.bytes_up,
                pending.bytes_down,
            ]
            .into_iter()
            .fold(0, u64::saturating_add),
            connections: stored.connections.saturating_add(pending.connections),
        })
    }

    async fn secrets_of<'a>(
        &self,
        project: &ProjectId,
        uses: &'a [SecretUse],
    ) -> Result<Vec<(&'a SecretUse, SecretRow)>, Fault> {
        let mut found = Vec::with_capacity(uses.len());
        for used in uses {
            let row = self.store().sandboxes.secret_by_name(project, &used.secret).await;
            if let Some(row) = row.map_err(|e| from_store(&e))? {
                found.push((used, row));
            }
        }
        Ok(found)
    }
}

fn check_uses(spec: &SandboxSpec) -> Result<(), Fault> {
    let bad = |why: String| Err(Fault::new(Code::SecretsInvalid, why));
    if spec.secrets.len() > MOST_SECRETS {
        return bad(format!("a sandbox is given at most {MOST_SECRETS} secrets"));
    }
    let mut names = BTreeSet::new();
    let mut variables = BTreeSet::new();
    for used in &spec.secrets {
        if !names.insert(&used.secret) {
            return bad(format!("the secret `{}` is named twice", used.secret));
        }
        let Some(variable) = &used.env else { continue };
        if !is_variable(variable) {
            return bad(format!(
                "`{}` cannot be an environment variable: use letters, digits and `_`",
                variable.escape_default()
            ));
        }
        if !variables.insert(variable) || spec.env.contains_key(variable) {
            return bad(format!("the environment variable {variable} is set twice"));
        }
    }
    Ok(())
}

fn is_variable(name: &str) -> bool {
    let mut bytes = name.bytes();
    name.len() <= 128
        && bytes
            .next()
            .is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}
