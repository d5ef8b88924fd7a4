//! Durable workflows, for people.

use clap::{Args, Subcommand};

/// See, signal and end durable workflows
#[derive(Debug, Subcommand)]
pub(crate) enum WorkflowCommand {
    /// List workflows, newest first
    #[command(after_help = "\
Examples:
  atoll workflow list --query \"ExecutionStatus = 'Running' AND WorkflowType = 'Order'\"")]
    List {
        /// Which ones, in Temporal's language of lists
        #[arg(long, value_name = "QUERY")]
        query: Option<String>,
        #[command(flatten)]
        namespace: NamespaceArgs,
    },
    /// Show one workflow and what it waits for
    Show {
        #[command(flatten)]
        which: WhichArgs,
    },
    /// Show what happened in a workflow, event by event
    History {
        #[command(flatten)]
        which: WhichArgs,
    },
    /// Send a signal to a workflow
    Signal {
        #[command(flatten)]
        which: WhichArgs,
        /// Name of the signal
        signal: String,
        /// What goes with it, as JSON; text that is not JSON goes as a string
        input: Option<String>,
    },
    /// Ask a workflow to end; it may clean up first
    Cancel {
        #[command(flatten)]
        which: WhichArgs,
        /// Why, for the history
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// End a workflow at once; it cleans up nothing
    Terminate {
        #[command(flatten)]
        which: WhichArgs,
        /// Why, for the history
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// Go back to an earlier point and go on from there, as a new run
    Reset {
        #[command(flatten)]
        which: WhichArgs,
        /// The id of the event to go back to: one that ends a workflow task, such as WorkflowTaskCompleted
        #[arg(long, value_name = "ID")]
        event: i64,
        /// Why, for the history
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct NamespaceArgs {
    /// Namespace
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) namespace: String,
}

#[derive(Debug, Args)]
pub(crate) struct WhichArgs {
    /// Id of the workflow
    pub(crate) workflow: String,
    /// Which run of it [default: the latest]
    #[arg(long, value_name = "RUN")]
    pub(crate) run: Option<String>,
    #[command(flatten)]
    pub(crate) namespace: NamespaceArgs,
}

/// Answer what workflows ask people
#[derive(Debug, Subcommand)]
pub(crate) enum ApprovalCommand {
    /// List what waits for an answer
    List {
        /// Also what was answered
        #[arg(long)]
        all: bool,
    },
    /// Show one question with its action
    Show {
        approval: String,
    },
    Grant(DecideArgs),
    Deny(DecideArgs),
}

/// Answer a question, once and for all
#[derive(Debug, Args)]
pub(crate) struct DecideArgs {
    /// Id of the approval
    pub(crate) approval: String,
    /// Digest of the action that was looked at; if the question is about another one, the answer is refused [default: of the
    /// action that is shown now]
    #[arg(long, value_name = "DIGEST")]
    pub(crate) digest: Option<String>,
    /// Who decides, as the workflow is told [default: your user name]
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
    /// Why, for the workflow
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) note: String,
}
