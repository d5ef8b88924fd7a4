//! A clock that is turned by hand, and a worker that does as it is told.

use atoll_workflow_core::{
    Completion, CompletionReply, Effect, Limits, Refusal, Run, Start, StartedTask, State, Turn, validate,
};
use prost::Message as _;
use temporalio_protos::temporal::api::command::v1 as command;
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::common::v1 as common;

pub(crate) const SECOND: i64 = 1_000_000_000;
pub(crate) const BEGIN: i64 = 1_700_000_000 * SECOND;

pub(crate) struct World {
    pub(crate) run: Run,
    pub(crate) now: i64,
    pub(crate) limits: Limits,
    fresh: u64,
}

impl World {
    pub(crate) fn start() -> Self {
        Self::start_with(Start::default())
    }

    pub(crate) fn start_with(start: Start) -> Self {
        let limits = Limits::default();
        let start = Start {
            namespace: "default".to_owned(),
            workflow_id: "wf".to_owned(),
            workflow_type: "Type".to_owned(),
            task_queue: "queue".to_owned(),
            ..start
        };
        let turn = Turn {
            now: BEGIN,
            fresh_run_id: "unused",
            limits: &limits,
        };
        let run = Run::start(start, "run-0", turn).expect("a valid start");
        Self {
            run,
            now: BEGIN,
            limits,
            fresh: 0,
        }
    }

    /// Lets the run decide, and checks what must always hold afterwards.
    pub(crate) fn decide<T>(&mut self, decide: impl FnOnce(&mut Run, Turn<'_>) -> T) -> T {
        self.fresh += 1;
        let fresh = format!("run-{}", self.fresh);
        let turn = Turn {
            now: self.now,
            fresh_run_id: &fresh,
            limits: &self.limits,
        };
        let result = decide(&mut self.run, turn);
        if let Err(text) = validate::check(&self.run.events) {
            panic!("{text}\n{}", self.types().join("\n"));
        }
        result
    }

    pub(crate) fn wait(&mut self, length: i64) {
        self.now += length;
        self.decide(|run, turn| run.tick(turn));
    }

    /// The next workflow task, taken by a worker.
    pub(crate) fn poll(&mut self) -> Option<StartedTask> {
        let stamp = self
            .run
            .state
            .task
            .as_ref()
            .filter(|task| task.started_id == 0)?
            .stamp;
        self.decide(|run, turn| run.start_task(stamp, "worker", "", turn).ok())
    }

    pub(crate) fn complete(
        &mut self,
        task: &StartedTask,
        commands: Vec<command::Command>,
    ) -> Result<CompletionReply, Refusal> {
        let completion = Completion {
            commands,
            identity: "worker".to_owned(),
            ..Default::default()
        };
        self.complete_with(task, completion)
    }

    pub(crate) fn complete_with(
        &mut self,
        task: &StartedTask,
        completion: Completion,
    ) -> Result<CompletionReply, Refusal> {
        self.decide(|run, turn| run.complete_task(&task.token, completion, turn))
    }

    /// One workflow task, from poll to completion.
    pub(crate) fn step(&mut self, commands: Vec<command::Command>) -> CompletionReply {
        let task = self.poll().expect("a workflow task");
        self.complete(&task, commands).expect("a valid completion")
    }

    /// The server is killed and started again.
    pub(crate) fn crash(&mut self) {
        let state = State::decode(self.run.state.encode_to_vec().as_slice()).expect("a state");
        let events = self.run.events.clone();
        self.run = Run::restore(state, events);
    }

    pub(crate) fn types(&self) -> Vec<String> {
        types(&self.run)
    }

    pub(crate) fn effects(&mut self) -> Vec<Effect> {
        self.run.take_effects()
    }
}

pub(crate) fn types(run: &Run) -> Vec<String> {
    run.events
        .iter()
        .map(|event| {
            format!(
                "{:?}",
                event.attributes.as_ref().expect("attributes").event_type()
            )
        })
        .collect()
}

pub(crate) fn command(attributes: Attributes) -> command::Command {
    command::Command {
        attributes: Some(attributes),
        ..Default::default()
    }
}

pub(crate) fn timer(id: &str, length: i64) -> command::Command {
    command(Attributes::StartTimerCommandAttributes(
        command::StartTimerCommandAttributes {
            timer_id: id.to_owned(),
            start_to_fire_timeout: Some(atoll_workflow_core::duration(length)),
        },
    ))
}

pub(crate) fn cancel_timer(id: &str) -> command::Command {
    command(Attributes::CancelTimerCommandAttributes(
        command::CancelTimerCommandAttributes {
            timer_id: id.to_owned(),
        },
    ))
}

pub(crate) fn activity(id: &str) -> command::Command {
    activity_with(id, |_| {})
}

pub(crate) fn activity_with(
    id: &str,
    change: impl FnOnce(&mut command::ScheduleActivityTaskCommandAttributes),
) -> command::Command {
    let mut attributes = command::ScheduleActivityTaskCommandAttributes {
        activity_id: id.to_owned(),
        activity_type: Some(common::ActivityType {
            name: "activity".to_owned(),
        }),
        start_to_close_timeout: Some(atoll_workflow_core::duration(10 * SECOND)),
        ..Default::default()
    };
    change(&mut attributes);
    command(Attributes::ScheduleActivityTaskCommandAttributes(attributes))
}

pub(crate) fn finish() -> command::Command {
    command(Attributes::CompleteWorkflowExecutionCommandAttributes(
        command::CompleteWorkflowExecutionCommandAttributes::default(),
    ))
}

pub(crate) fn again() -> command::Command {
    command(Attributes::ContinueAsNewWorkflowExecutionCommandAttributes(
        command::ContinueAsNewWorkflowExecutionCommandAttributes::default(),
    ))
}

pub(crate) fn child(id: &str) -> command::Command {
    command(Attributes::StartChildWorkflowExecutionCommandAttributes(
        command::StartChildWorkflowExecutionCommandAttributes {
            workflow_id: id.to_owned(),
            workflow_type: Some(common::WorkflowType {
                name: "Child".to_owned(),
            }),
            ..Default::default()
        },
    ))
}
