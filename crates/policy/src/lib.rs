//! Whether a sandbox may reach something: the one function that every listener, resolver and interceptor asks.
//!
//! ```text
//!   NetworkPolicy (words) ──┐
//!   Floor (operator, host) ─┼── compile ──> Policy ── name / connect / request / grants ──> Decision { rule, reason }
//!   Grants (secrets) ───────┘                    └── explain ──> the same steps, in words
//! ```
//!
//! What must hold:
//! - Nothing is allowed unless a rule allows it. Allows add up; a deny that matches wins over every allow; the floor
//!   comes before both, and no sandbox can widen it.
//! - Names are compared as [`Name`], which exists only validated. Anything that some program might read as an address
//!   is not a name, so it can never match a rule about names.
//! - An allow by name counts only where Atoll itself resolves and dials that name. What a guest merely claims (SNI,
//!   `Host`) can lose it a permission but never win one.
//! - What cannot be read without doubt is refused: a path that two servers may understand differently never satisfies a
//!   rule about paths.
//! - No clock, no randomness, no I/O: same question, same answer. Compiling is bounded, matching does not grow with the
//!   number of rules about other names.

mod decision;
mod error;
mod explain;
mod floor;
mod grant;
mod name;
mod path;
mod policy;
mod ports;
mod preset;
mod rule;
mod target;

pub use decision::{Decision, Flow, FlowKind, HttpRequest, RuleName};
pub use error::PolicyError;
pub use explain::{Explanation, Question, Step};
pub use floor::{Floor, FloorConfig};
pub use grant::{Grant, check_binding};
pub use name::{Name, NameError};
pub use policy::Policy;
