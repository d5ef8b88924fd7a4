//! What workflows own: sandboxes with labels that name their workflow, which go when it is over. Anybody may put the labels on;
//! actions that a workflow asks for do.
//!
//! ```text
//! atoll.owner     workflow
//! atoll.workflow  NAMESPACE:RUN:WORKFLOW
//! ```

use std::collections::BTreeMap;

use atoll_workflows::Step;

/// The label, and its value, of all that a workflow owns.
pub const OWNED_BY_WORKFLOW: (&str, &str) = ("atoll.owner", "workflow");
const WORKFLOW: &str = "atoll.workflow";

pub(crate) fn label(step: &Step, labels: &mut BTreeMap<String, String>) {
    let workflow = format!("{}:{}:{}", step.namespace, step.run_id, step.workflow_id);
    let (owner, kind) = OWNED_BY_WORKFLOW;
    labels.insert(owner.to_owned(), kind.to_owned());
    labels.insert(WORKFLOW.to_owned(), workflow);
    // What programs in it pay models is the workflow's.
    for (name, value) in [("workflow", &step.workflow_id), ("run", &step.run_id)] {
        labels.entry(name.to_owned()).or_insert_with(|| value.clone());
    }
}

/// The namespace, the run and the workflow that labels name as the owner.
pub fn owning_workflow(labels: &BTreeMap<String, String>) -> Option<(&str, &str, &str)> {
    let (namespace, rest) = labels.get(WORKFLOW)?.split_once(':')?;
    let (run, workflow) = rest.split_once(':')?;
    Some((namespace, run, workflow))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_name_a_workflow_whatever_it_is_called() {
        let labels = |value: &str| BTreeMap::from([(WORKFLOW.to_owned(), value.to_owned())]);
        assert_eq!(
            owning_workflow(&labels("default:0199:a:b/c")),
            Some(("default", "0199", "a:b/c"))
        );
        assert_eq!(owning_workflow(&labels("default")), None);
        assert_eq!(owning_workflow(&BTreeMap::new()), None);
    }

    #[test]
    fn what_a_workflow_makes_is_its_own() {
        let step = Step {
            namespace: "default".to_owned(),
            workflow_id: "order 7".to_owned(),
            run_id: "0199".to_owned(),
            ..Step::default()
        };
        let mut labels = BTreeMap::from([
            ("a".to_owned(), "b".to_owned()),
            ("run".to_owned(), "mine".to_owned()),
            ("atoll.workflow".to_owned(), "default:0200:another".to_owned()),
        ]);
        label(&step, &mut labels);
        let labels: Vec<_> = labels.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(
            labels,
            [
                ("a", "b"),
                ("atoll.owner", "workflow"),
                ("atoll.workflow", "default:0199:order 7"),
                ("run", "mine"),
                ("workflow", "order 7"),
            ]
        );
    }
}
