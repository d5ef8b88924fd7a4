//! Names that people give to sandboxes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

use crate::{Code, Fault, SandboxId};

/// A sandbox's name: a DNS label, so that it can stand in a host name, and never to be mistaken for an id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct SandboxName(Box<str>);

impl SandboxName {
    /// As long as a DNS label may be.
    pub const MOST: usize = 63;

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SandboxName {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        let fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let is_label = (1..=Self::MOST).contains(&text.len())
            && text.bytes().all(fine)
            && !text.starts_with('-')
            && !text.ends_with('-');
        if !is_label {
            return Err(Fault::new(
                Code::NameInvalid,
                format!(
                    "a sandbox's name has 1 to {} lowercase letters, digits and dashes, and no dash at either end",
                    Self::MOST
                ),
            ));
        }
        if SandboxId::from_bare(text).is_ok() {
            return Err(Fault::new(
                Code::NameInvalid,
                format!("`{text}` looks like the id of a sandbox, and is no name"),
            )
            .hint("make it shorter or longer, or put a dash in it"));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for SandboxName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for SandboxName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_dns_label() {
        let longest = "a".repeat(SandboxName::MOST);
        for name in ["a", "7", "my-agent-1", "xn--caf-dma", longest.as_str()] {
            assert_eq!(name.parse::<SandboxName>().unwrap().as_str(), name);
        }
        let too_long = "a".repeat(SandboxName::MOST + 1);
        for name in [
            "",
            "-a",
            "a-",
            "A",
            "a_b",
            "a.b",
            "a b",
            "a/b",
            "é",
            too_long.as_str(),
        ] {
            let fault = name.parse::<SandboxName>().unwrap_err();
            assert_eq!(fault.code, Code::NameInvalid, "{name:?}");
        }
    }

    #[test]
    fn what_looks_like_an_id_is_no_name() {
        let id = SandboxId::from_entropy([7; 20]);
        for name in [id.as_str(), id.bare()] {
            assert!(name.parse::<SandboxName>().is_err(), "{name}");
        }
        // One more letter, or a dash in it, and nobody takes it for one.
        assert!(format!("{}a", id.bare()).parse::<SandboxName>().is_ok());
        assert!("abcdefghi-klmnopqrst".parse::<SandboxName>().is_ok());
    }
}
