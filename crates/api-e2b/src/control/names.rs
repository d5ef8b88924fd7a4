//! Names of templates. E2B has `name`, `name:tag` and `team/name:tag`; ours have no tags, so a tag other than the default
//! one becomes part of the name, behind a dot, which their names cannot have.

use crate::error::{Answer, Refusal};

pub(crate) const DEFAULT_TAG: &str = "default";

/// A name as a client writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) name: String,
    pub(crate) tag: Option<String>,
}

impl Name {
    /// An id of ours is a name without a tag.
    pub(crate) fn parse(text: &str) -> Answer<Self> {
        let bare = text.rsplit_once('/').map_or(text, |(_, bare)| bare);
        let (name, tag) = match bare.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (bare, None),
        };
        let fine = |text: &str, more: &str| {
            !text.is_empty()
                && text
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || more.contains(c))
        };
        if !fine(name, "-_") || !tag.is_none_or(|tag| fine(tag, "-_.")) {
            return Err(Refusal::invalid(format!(
                "`{text}` is not the name of a template: lower-case letters, digits, `-` and `_`, and a tag behind `:`"
            )));
        }
        Ok(Self {
            name: name.to_owned(),
            tag: tag.filter(|tag| *tag != DEFAULT_TAG).map(str::to_owned),
        })
    }

    /// What it is called in our store.
    pub(crate) fn stored(&self) -> String {
        match &self.tag {
            Some(tag) => format!("{}.{tag}", self.name),
            None => self.name.clone(),
        }
    }

    /// The name behind one in our store.
    pub(crate) fn of_stored(stored: &str) -> Self {
        match stored.split_once('.') {
            Some((name, tag)) => Self {
                name: name.to_owned(),
                tag: Some(tag.to_owned()),
            },
            None => Self {
                name: stored.to_owned(),
                tag: None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_kept_in_the_name() {
        for (text, stored) in [
            ("base", "base"),
            ("base:default", "base"),
            ("team/app:v1.2", "app.v1.2"),
            ("tpl_abcdefghijkmnpqrstuv", "tpl_abcdefghijkmnpqrstuv"),
        ] {
            let name = Name::parse(text).unwrap();
            assert_eq!(name.stored(), stored);
            assert_eq!(Name::of_stored(stored).stored(), stored);
        }
        for wrong in ["", "Base", "a b", "a:", "a.b"] {
            assert!(Name::parse(wrong).is_err(), "{wrong}");
        }
    }
}
