//! The answer to a workflow task in pieces, where one message cannot hold it.
//!
//! Commands that have come are kept in memory beside the run until the last piece brings the rest. If they are lost, because
//! the server was started again or the run has left the memory, the worker is told so and sends all of it again.

use std::collections::BTreeMap;

use atoll_workflow_core::{Refusal, TaskToken};
use prost::Message as _;
use temporalio_protos::temporal::api::command::v1::Command;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::cells::Key;

/// How many pieces an answer may have, and how many commands: the smallest take no bytes on the wire, and many in memory.
const MOST_PIECES: i32 = 1_000;
const MOST_COMMANDS: usize = 51_200;

/// What has come of one answer.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    token: Vec<u8>,
    /// With what they hold.
    commands: BTreeMap<i32, (usize, Vec<Command>)>,
}

impl Pages {
    fn keep(&mut self, token: &[u8], page: i32, commands: Vec<Command>, limit: usize) -> Result<(), Refusal> {
        if self.token != token {
            *self = Self {
                token: token.to_vec(),
                ..Self::default()
            };
        }
        let bytes = commands.iter().map(Command::encoded_len).sum();
        self.commands.insert(page, (bytes, commands));
        let pieces = self.commands.values();
        let (bytes, count) = pieces.fold((0, 0), |(bytes, count), (more, commands)| {
            (bytes + more, count + commands.len())
        });
        if bytes > limit || count > MOST_COMMANDS || !(0..MOST_PIECES).contains(&page) {
            *self = Self::default();
            return Err(Refusal::InvalidArgument(
                "RequestTooLarge: workflow task completion exceeds size limit.".to_owned(),
            ));
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.commands.values().map(|(bytes, _)| bytes).sum()
    }

    /// All commands in their order, if none of the pieces before the last is missing.
    fn take(&mut self, token: &[u8], count: i32, last: Vec<Command>) -> Result<Vec<Command>, Refusal> {
        let pages = std::mem::take(self);
        if pages.token != token || !pages.commands.keys().copied().eq(0..count) {
            return Err(Refusal::PagesLost);
        }
        let pieces = pages.commands.into_values();
        Ok(pieces.flat_map(|(_, commands)| commands).chain(last).collect())
    }
}

impl Engine {
    /// Keeps a piece that is not the last.
    pub(crate) async fn keep_page(
        &self,
        token: &TaskToken,
        request: service::RespondWorkflowTaskCompletedRequest,
    ) -> Result<(), Refusal> {
        let limit = self.inner.options.limits.completion_bytes;
        let mut locked = self.lock(&Key::new(&token.namespace, &token.workflow_id)).await?;
        let run_id = locked.resolve(&token.run_id).await?;
        let slot = locked.slot(&run_id)?;
        slot.run.check_holder(token)?;
        slot.pages
            .keep(&request.task_token, request.page_number, request.commands, limit)
    }

    /// What the worker asks for, in all pieces of its answer.
    pub(crate) async fn all_commands(
        &self,
        token: &TaskToken,
        request: &mut service::RespondWorkflowTaskCompletedRequest,
    ) -> Result<Vec<Command>, Refusal> {
        let last = std::mem::take(&mut request.commands);
        if request.page_number == 0 {
            return Ok(last);
        }
        let mut locked = self.lock(&Key::new(&token.namespace, &token.workflow_id)).await?;
        let run_id = locked.resolve(&token.run_id).await?;
        let slot = locked.slot(&run_id)?;
        slot.run.check_holder(token)?;
        slot.pages.take(&request.task_token, request.page_number, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(number: i32) -> Vec<Command> {
        vec![Command {
            command_type: number,
            ..Default::default()
        }]
    }

    #[test]
    fn pieces_are_put_together_in_their_order() {
        let mut pages = Pages::default();
        pages.keep(b"task", 1, command(2), 100).unwrap();
        pages.keep(b"task", 0, command(1), 100).unwrap();
        let all = pages.take(b"task", 2, command(3)).unwrap();
        assert_eq!(
            all.iter().map(|found| found.command_type).collect::<Vec<_>>(),
            [1, 2, 3]
        );
    }

    #[test]
    fn a_piece_that_is_missing_or_of_another_task_is_missed() {
        let mut pages = Pages::default();
        pages.keep(b"task", 1, command(2), 100).unwrap();
        assert_eq!(pages.take(b"task", 2, Vec::new()), Err(Refusal::PagesLost));
        pages.keep(b"task", 0, command(1), 100).unwrap();
        assert_eq!(pages.take(b"other", 1, Vec::new()), Err(Refusal::PagesLost));
        pages.keep(b"task", 0, command(1), 100).unwrap();
        pages.keep(b"other", 1, command(2), 100).unwrap();
        assert_eq!(pages.take(b"other", 2, Vec::new()), Err(Refusal::PagesLost));
    }

    #[test]
    fn pieces_do_not_pile_up() {
        let mut pages = Pages::default();
        assert!(pages.keep(b"task", 0, command(1), 1).is_err());
        assert!(pages.commands.is_empty());
        // Nor those that hold nothing.
        let nothing = || vec![Command::default(); MOST_COMMANDS / 2 + 1];
        pages.keep(b"task", 0, nothing(), 1).unwrap();
        assert!(pages.keep(b"task", 1, nothing(), 1).is_err());
        assert!(pages.keep(b"task", MOST_PIECES, Vec::new(), 1).is_err());
        assert!(pages.keep(b"task", -1, Vec::new(), 1).is_err());
    }
}
