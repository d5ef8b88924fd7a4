//! Why a policy, a floor or a binding cannot be used as it is written.

use atoll_types::{Code, Fault};

/// What is wrong, where, and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}; {remedy}")]
pub struct PolicyError {
    /// `rules[2]`, `rules[2] "name"`, `limits`, `hosts[0]` and so on.
    pub place: String,
    pub problem: String,
    pub remedy: String,
}

impl PolicyError {
    pub(crate) fn new(
        place: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            place: place.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}

impl From<PolicyError> for Fault {
    fn from(error: PolicyError) -> Self {
        Self::new(
            Code::InvalidNetworkPolicy,
            format!("{}: {}", error.place, error.problem),
        )
        .hint(error.remedy)
    }
}

/// A problem without its place, which the caller knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    pub problem: String,
    pub remedy: String,
}

impl Problem {
    pub(crate) fn new(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    pub(crate) fn at(self, place: impl Into<String>) -> PolicyError {
        PolicyError::new(place, self.problem, self.remedy)
    }
}
