//! What can be done by name, for whoever acts through tools rather than through an API: steps of workflows today.
//!
//! ```text
//!   name, JSON ──> Action::read ──> Actions::perform ──> sandboxes, models, workflows
//!                  typed input      as a Caller          use cases, called directly
//!                  Action::ALL: names, descriptions, schemas
//! ```
//!
//! What must hold:
//! - Inputs are typed and refuse fields that they do not know; what an action takes is what its schema says.
//! - The words of requests and answers are those of Atoll's own API ([`words`]), which takes them from here.
//! - Nothing is done that the caller may not do: each action names its right once, and it is asked for before anything else.
//! - Nobody here knows HTTP, a route or a status; a failure has a stable name, and says whether another attempt may help.
//! - What is buffered is paid for by the caller's project, as in front of an API.

mod approval;
mod catalogue;
mod files;
mod model;
mod outcome;
mod perform;
pub mod spelling;
pub mod words;

pub use catalogue::{Action, Described, In};
pub use outcome::{Failure, MOST, Outcome};
pub use perform::{Actions, Context, Undo, Workflow};
