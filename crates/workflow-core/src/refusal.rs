//! Why an input was refused, told apart by what the caller can do about it.

use crate::words::failure::Failure;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("{0}")]
    NotFound(String),
    #[error("Namespace {0} is not found.")]
    NamespaceNotFound(String),
    /// It is on its way out: soon it is not found, unless it cannot be deleted yet.
    #[error("Namespace {0} is being deleted.")]
    NamespaceDeleting(String),
    #[error("Namespace already exists.")]
    NamespaceExists(String),
    #[error("{0}")]
    InvalidArgument(String),
    #[error("{message}")]
    AlreadyStarted {
        message: String,
        request_id: String,
        run_id: String,
        first_run_id: String,
    },
    #[error("{0}")]
    AlreadyExists(String),
    #[error("cancellation already requested for workflow execution")]
    CancelAlreadyRequested,
    #[error("{0}")]
    FailedPrecondition(String),
    #[error("{0}")]
    NotReady(String),
    #[error("{message}")]
    QueryFailed {
        message: String,
        failure: Option<Box<Failure>>,
    },
    #[error("{0}")]
    ResourceExhausted(String),
    #[error("{0}")]
    PermissionDenied(String),
    #[error("{0}")]
    DeadlineExceeded(String),
    #[error("{0}")]
    Aborted(String),
    /// Nothing is wrong with the request; it may be sent again.
    #[error("{0}")]
    Unavailable(String),
    #[error("{0}")]
    Unimplemented(String),
    /// What a worker had sent of its answer is not there any more; it is to send all of it again.
    #[error("buffered pages of the workflow task completion were lost")]
    PagesLost,
    #[error("Update-with-Start could not be executed.")]
    MultiOperation {
        start: Option<Box<Self>>,
        update: Option<Box<Self>>,
    },
    #[error("{0}")]
    Internal(String),
}

impl Refusal {
    /// What to do about it, where the refusal itself does not say. The same whether or not another project has a namespace
    /// of that name.
    pub fn hint(&self) -> Option<String> {
        let register = "register one of your own: `temporal operator namespace create`, or `register_namespace` of an SDK";
        match self {
            Self::NamespaceNotFound(name) if name == "default" => Some(format!(
                "the namespace `default` belongs to the project `default`; {register}"
            )),
            Self::NamespaceNotFound(_) => {
                Some(format!("this project has no namespace of that name; {register}"))
            }
            Self::NamespaceExists(_) => {
                Some("all projects share the names of namespaces: choose another one".to_owned())
            }
            _ => None,
        }
    }

    pub(crate) fn completed() -> Self {
        Self::NotFound("workflow execution already completed".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_depends_on_the_name_and_on_nothing_else() {
        let of = |name: &str| Refusal::NamespaceNotFound(name.to_owned());
        let default = of("default").hint().unwrap();
        assert!(
            default.contains("belongs to the project `default`") && default.contains("namespace create"),
            "{default}"
        );
        assert_eq!(of("theirs").hint(), of("nobody's").hint());
        assert_eq!(
            of("default").to_string(),
            "Namespace default is not found.",
            "as clients know it"
        );
        assert_eq!(Refusal::completed().hint(), None);
    }
}
