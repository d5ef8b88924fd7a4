//! Doing what is asked for: one use case for each action, called as whoever asks.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use atoll_identity::Caller;
use atoll_memory::{Account, Memory};
use atoll_models::Models;
use atoll_sandboxes::{Obtained, Sandbox, Sandboxes, keyed_command};
use atoll_types::{CommandId, Fault, Owner, SandboxId, SandboxState, WorkflowOwner};
use atoll_workflows::{Engine, Step};
use futures_util::{FutureExt as _, stream};
use serde::Serialize;

use crate::catalogue::{Action, CreateSandbox, In};
use crate::files::{self, ReadFile, WriteFile};
use crate::outcome::{Failure, MOST, Outcome};
use crate::words::command::{Attached, Ended, ExecRequest, Run};
use crate::words::{ArtifactView, Copies, FileView, IfExists, SandboxView, SnapshotView};
use crate::{approval, model};

/// How often a sandbox that an attempt before this one has made, and that is lost, is replaced.
const REPLACED: usize = 8;
const SIGKILL: i32 = 9;

/// Whoever does what is asked for. Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct Actions {
    sandboxes: Sandboxes,
    models: Models,
    memory: Memory,
    default_timeout_millis: u64,
}

/// Who asks, and for what.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    pub caller: &'a Caller,
    /// The workflow that it is a step of: it owns what is made, pays for models, and hears what people answer.
    pub workflow: Option<Workflow<'a>>,
}

/// A step of a workflow, and the engine that it came from.
#[derive(Debug, Clone, Copy)]
pub struct Workflow<'a> {
    pub engine: &'a Engine,
    pub step: &'a Step,
}

impl<'a> Context<'a> {
    fn step(&self) -> Option<&'a Step> {
        self.workflow.map(|workflow| workflow.step)
    }

    /// By which an attempt finds what an earlier one made: the run, and the event that scheduled the step. Ids of activities
    /// come again.
    fn key(&self) -> Option<String> {
        self.step()
            .map(|step| format!("{}/{}", step.run_id, step.scheduled_id))
    }

    /// The command that goes on if nobody waits for the action any more. One that reads input or has a terminal cannot be
    /// joined half way, has no key, and ends with whoever waits for it.
    pub fn undo(&self, action: &Action) -> Option<Undo> {
        Undo::of(&self.key()?, action)
    }
}

/// What has to be ended if an action is dropped half way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undo {
    sandbox: SandboxId,
    command: CommandId,
}

impl Undo {
    fn of(key: &str, action: &Action) -> Option<Self> {
        match action {
            Action::Exec(In { sandbox, rest }) if !rest.is_fed() => Some(Self {
                command: keyed_command(sandbox, key).ok()?,
                sandbox: sandbox.clone(),
            }),
            _ => None,
        }
    }
}

impl Actions {
    /// `default_timeout_millis`: how long a sandbox lives of which nothing is said.
    pub fn new(sandboxes: Sandboxes, models: Models, memory: Memory, default_timeout_millis: u64) -> Self {
        Self {
            sandboxes,
            models,
            memory,
            default_timeout_millis,
        }
    }

    /// Who pays for what is buffered.
    pub fn account(&self, caller: &Caller) -> Account {
        self.memory.account(caller.project(), caller.sandbox())
    }

    /// Does what is asked for, if whoever asks may. Whoever drops this ends what it does, but for what [`Context::undo`] names.
    pub async fn perform(&self, context: Context<'_>, action: Action) -> Result<Outcome, Failure> {
        action.allowed_to(context.caller)?;
        unbroken(self.do_it(context, action).boxed()).await
    }

    /// Ends what goes on although its action was dropped. What is over, or gone with its sandbox, needs no end.
    pub async fn end(&self, caller: &Caller, undo: Undo) -> Result<(), Fault> {
        self.sandboxes
            .signal(caller, &undo.sandbox, &undo.command, SIGKILL)
            .await
    }

    async fn do_it(&self, context: Context<'_>, action: Action) -> Result<Outcome, Failure> {
        let (caller, sandboxes) = (context.caller, &self.sandboxes);
        match action {
            Action::CreateSandbox(input) => written(&self.create(context, input).await?),
            Action::Exec(In { sandbox, rest }) => self.exec(context, &sandbox, rest).await,
            Action::WriteFile(In { sandbox, rest }) => self.write(caller, &sandbox, rest).await,
            Action::ReadFile(In { sandbox, rest }) => self.read(caller, &sandbox, rest).await,
            Action::Pause(In { sandbox, rest }) => {
                let paused = sandboxes.pause(caller, &sandbox, rest.into_kind()).await?;
                written(&SandboxView::of(paused))
            }
            Action::Resume(In { sandbox, rest }) => {
                let timeout = rest.into_timeout()?;
                let resumed = sandboxes.resume(caller, &sandbox, timeout).await?;
                written(&SandboxView::of(resumed))
            }
            Action::Snapshot(In { sandbox, rest }) => {
                let request = rest.into_take(context.key());
                let taken = sandboxes.take_snapshot(caller, &sandbox, request).await?;
                written(&SnapshotView::of(taken))
            }
            Action::Fork(In { sandbox, rest }) => {
                let copies = sandboxes.fork(caller, &sandbox, rest.into_fork()?).await?;
                written(&Copies::of(copies))
            }
            Action::Delete(In { sandbox, .. }) => {
                let ended = sandboxes.kill(caller, &sandbox).await?;
                written(&SandboxView::of(ended))
            }
            Action::SaveArtifact(In { sandbox, rest }) => {
                let saved = sandboxes
                    .save_artifact(caller, &sandbox, rest.into_save()?)
                    .await?;
                written(&ArtifactView::of(saved))
            }
            Action::CallModel(input) => {
                let answer = model::call(&self.models, caller, context.step(), input).await?;
                Ok(Outcome::Done(answer.to_string().into_bytes()))
            }
            Action::AskApproval(input) => approval::ask(context.workflow, input).await,
        }
    }

    async fn create(&self, context: Context<'_>, input: CreateSandbox) -> Result<SandboxView, Failure> {
        let if_exists = input.request.if_exists();
        let mut request = input.request.into_create(self.default_timeout_millis, None)?;
        if let Some(step) = context.step().filter(|_| !input.keep) {
            // With its workflow it goes (`steps`), and what programs in it pay models is the workflow's.
            request.spec.owner = Some(Owner::Workflow(WorkflowOwner {
                namespace: step.namespace.clone(),
                run: step.run_id.clone(),
                workflow: step.workflow_id.clone(),
            }));
        }
        let made = make(context.key(), |key| {
            let mut request = request.clone();
            request.idempotency_key = key;
            async move {
                match if_exists {
                    IfExists::Fail => self.sandboxes.create(context.caller, request).await,
                    // One that is found stays whose it is.
                    IfExists::Return => match self.sandboxes.find_or_create(context.caller, request).await? {
                        Obtained::Made(sandbox) | Obtained::Found(sandbox) => Ok(sandbox),
                    },
                }
            }
        });
        Ok(SandboxView::of(made.await?))
    }

    async fn exec(
        &self,
        context: Context<'_>,
        sandbox: &SandboxId,
        request: ExecRequest,
    ) -> Result<Outcome, Failure> {
        let began = Instant::now();
        let account = self.account(context.caller);
        let is_fed = request.is_fed();
        let Run { mut spec, stdin } = request.into_run()?;
        spec.idempotency_key = context.key().filter(|_| !is_fed);
        // It may be read long after this is answered.
        let stdin = stdin.map(|stdin| {
            let mut permit = account.open();
            permit.grow(stdin.len() as u64)?;
            Ok::<_, Fault>(permit.over(stdin))
        });
        let stdin = stdin.transpose()?;
        let is_background = spec.background;
        let execution = self.sandboxes.exec(context.caller, sandbox, spec).await?;
        let attached = Attached::to(execution, stdin, began).await?;
        if is_background {
            return written(&attached.into_background());
        }
        let Ended { result, held, .. } = attached.into_result([account.open(), account.open()]).await?;
        let done = written(&result);
        drop(held);
        done
    }

    async fn write(&self, caller: &Caller, sandbox: &SandboxId, file: WriteFile) -> Result<Outcome, Failure> {
        let (spec, content) = file.into_write()?;
        let content = Box::pin(stream::iter([Ok(content)]));
        let stat = self.sandboxes.write_file(caller, sandbox, spec, content).await?;
        written(&FileView::of(&stat))
    }

    async fn read(&self, caller: &Caller, sandbox: &SandboxId, file: ReadFile) -> Result<Outcome, Failure> {
        let at = file.into_path()?;
        let found = self.sandboxes.read_file(caller, sandbox, at, 0, None).await?;
        let content = files::content(found.body, self.account(caller).open()).await?;
        Ok(Outcome::Done(content.to_string().into_bytes()))
    }
}

/// A result as text, if that is not too much.
fn written(result: &impl Serialize) -> Result<Outcome, Failure> {
    let text = serde_json::to_vec(result).map_err(|error| Fault::internal(error.to_string()))?;
    match text.len() <= MOST {
        true => Ok(Outcome::Done(text)),
        false => Err(Failure::too_large()),
    }
}

/// Makes a sandbox, or finds the one that was made with the same key. If that one is lost, another takes its place, under the
/// next key, where a later attempt finds it.
async fn make<F: Future<Output = Result<Sandbox, Fault>>>(
    key: Option<String>,
    create: impl Fn(Option<String>) -> F,
) -> Result<Sandbox, Failure> {
    let Some(key) = key else {
        return Ok(create(None).await?);
    };
    let mut number = 1;
    loop {
        let key = match number {
            1 => key.clone(),
            _ => format!("{key}/{number}"),
        };
        let made = create(Some(key)).await?;
        let is_lost = matches!(
            made.state,
            SandboxState::Failed | SandboxState::Deleting | SandboxState::Deleted
        );
        if !is_lost {
            return Ok(made);
        }
        if number == REPLACED {
            let message = format!("the sandbox {} is {}: it cannot be used", made.id, made.state);
            return Err(Failure {
                again: true,
                ..Failure::new("SandboxLost", message)
            });
        }
        number += 1;
    }
}

/// What panics is our mistake, and an answer all the same: whoever waits for one would wait for ever.
async fn unbroken(doing: impl Future<Output = Result<Outcome, Failure>>) -> Result<Outcome, Failure> {
    AssertUnwindSafe(doing)
        .catch_unwind()
        .await
        .unwrap_or_else(|panic| {
            let message = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            tracing::error!(message, "an action panicked");
            Err(Fault::internal("the server made a mistake; its log says more").into())
        })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::ready;

    use atoll_types::{Code, Isolation, ProjectId, SandboxSpec, TemplateId, Timestamp};
    use serde_json::{Value, json};

    use super::*;

    fn sandbox(state: SandboxState) -> Sandbox {
        Sandbox {
            id: SandboxId::from_entropy([1; 20]),
            project: ProjectId::from_entropy([2; 20]),
            spec: SandboxSpec::default(),
            template: TemplateId::from_entropy([3; 20]),
            isolation: Isolation::Gvisor,
            state,
            instance: None,
            created_at: Timestamp(0),
            started_at: None,
            ended_at: None,
            deadline: None,
            saved: None,
            end: None,
        }
    }

    /// The keys that were asked with until there was an answer, where these sandboxes are in these states.
    async fn keys(states: &[SandboxState]) -> (Vec<String>, Result<Sandbox, Failure>) {
        let asked = RefCell::new(Vec::new());
        let made = make(Some("0199/3".to_owned()), |key| {
            let mut asked = asked.borrow_mut();
            let state = states.get(asked.len()).copied();
            asked.extend(key);
            ready(Ok(sandbox(state.unwrap_or(SandboxState::Running))))
        })
        .await;
        (asked.into_inner(), made)
    }

    #[tokio::test]
    async fn a_sandbox_that_is_lost_is_replaced_and_never_an_answer() {
        use SandboxState::{Deleted, Deleting, Failed, Paused};
        assert_eq!(keys(&[]).await.0, ["0199/3"]);
        assert_eq!(keys(&[Paused]).await.0, ["0199/3"]);
        assert_eq!(keys(&[Failed]).await.0, ["0199/3", "0199/3/2"]);
        // The one that took its place was lost in turn.
        let (asked, made) = keys(&[Deleting, Deleted]).await;
        assert_eq!(asked, ["0199/3", "0199/3/2", "0199/3/3"]);
        assert!(made.is_ok());
        let (asked, made) = keys(&[Failed; 9]).await;
        let failure = made.unwrap_err();
        assert_eq!(
            (asked.len(), &*failure.kind, failure.again),
            (8, "SandboxLost", true)
        );
    }

    /// Whoever has no key asks once, and takes what there is.
    #[tokio::test]
    async fn without_a_key_nothing_is_found_again() {
        let made = make(None, |key| {
            assert_eq!(key, None);
            ready(Err(Fault::new(Code::TooManySandboxes, "no")))
        });
        assert_eq!(made.await.unwrap_err().kind, Code::TooManySandboxes.text());
    }

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        let failure = unbroken(async { panic!("mistaken") }).await.unwrap_err();
        assert_eq!((&*failure.kind, failure.again), (Code::Internal.text(), true));
    }

    #[test]
    fn a_command_that_can_be_found_again_is_ended_by_its_name() {
        let id = SandboxId::from_entropy([1; 20]);
        let undo = |name: &str, mut input: Value| {
            input["sandbox"] = json!(id.as_str());
            let fields = input.as_object().cloned().unwrap_or_default();
            Undo::of("0199/3", &Action::read(name, fields).unwrap())
        };
        let ended = undo("sandbox.exec", json!({"cmd": "ls"})).unwrap();
        assert_eq!(ended.sandbox, id);
        assert_eq!(ended.command, keyed_command(&id, "0199/3").unwrap());
        for fed in [
            json!({"cmd": "cat", "stdin": "a"}),
            json!({"cmd": "cat", "stdin_base64": "YQ=="}),
            json!({"cmd": "sh", "pty": {"rows": 2, "cols": 3}}),
        ] {
            assert_eq!(undo("sandbox.exec", fed.clone()), None, "{fed}");
        }
        assert_eq!(undo("sandbox.pause", json!({})), None);
    }

    #[test]
    fn what_is_too_large_is_not_a_result() {
        assert_eq!(written(&"a"), Ok(Outcome::Done(b"\"a\"".to_vec())));
        assert!(written(&"x".repeat(MOST - 2)).is_ok());
        assert_eq!(written(&"x".repeat(MOST - 1)).unwrap_err().kind, "TooLarge");
    }
}
