//! What E2B's wire knows of a sandbox and our own words have no place for: who may enter, and what it was asked for.
//! It is kept in one label, which is hidden from E2B's metadata.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The label. A sandbox without it was not made through this wire: its ports need our own token.
pub(crate) const LABEL: &str = "atoll.e2b";

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Extras {
    /// Processes and files need no token (`secure: false`).
    #[serde(skip_serializing_if = "is_false")]
    pub(crate) open: bool,
    /// Ports need the traffic token (`allowPublicTraffic: false`).
    #[serde(skip_serializing_if = "is_false")]
    pub(crate) private_ports: bool,
    /// The `Host` that servers in the sandbox see; `${PORT}` stands for the port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mask_host: Option<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Extras {
    /// Of a sandbox's labels; `None`: it was made otherwise.
    pub(crate) fn of(labels: &BTreeMap<String, String>) -> Option<Self> {
        serde_json::from_str(labels.get(LABEL)?).ok()
    }

    pub(crate) fn to_label(&self) -> String {
        serde_json::json!(self).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_says_what_was_asked_for() {
        let extras = Extras {
            private_ports: true,
            mask_host: Some("localhost:${PORT}".into()),
            ..Extras::default()
        };
        let labels = BTreeMap::from([(LABEL.to_owned(), extras.to_label())]);
        assert_eq!(Extras::of(&labels), Some(extras));
        assert_eq!(Extras::of(&BTreeMap::new()), None);
        assert_eq!(Extras::default().to_label(), "{}");
    }
}
