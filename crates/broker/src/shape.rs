//! Placeholders that look like the value: same well-known prefix, length, separators and alphabet.
//!
//! Many clients check the shape of a key before they use it. What must hold: a placeholder tells nothing of the value
//! beyond that, cannot be guessed by another sandbox, is never so short that it occurs by chance, and needs no encoding in
//! a header, in a URL or in a shell.

use atoll_types::SecretId;

use crate::{BrokerError, MasterKey, Secret, TrustId};

/// Beginnings by which people and programs recognize keys. They say whose key it is, not which.
const PREFIXES: [&str; 48] = [
    "AIza",
    "AKIA",
    "ASIA",
    "EAACEdEose0cBA",
    "SG.",
    "dckr_pat_",
    "dop_v1_",
    "fc-",
    "fw_",
    "ghp_",
    "gho_",
    "ghr_",
    "ghs_",
    "ghu_",
    "github_pat_",
    "glpat-",
    "gsk_",
    "hf_",
    "key-",
    "lin_api_",
    "lsv2_pt_",
    "npm_",
    "ntn_",
    "pk_live_",
    "pk_test_",
    "pplx-",
    "pypi-",
    "r8_",
    "rk_live_",
    "rk_test_",
    "sbp_",
    "secret_",
    "shpat_",
    "sk-",
    "sk-ant-",
    "sk-ant-api03-",
    "sk-or-v1-",
    "sk-proj-",
    "sk-svcacct-",
    "sk_live_",
    "sk_test_",
    "tvly-",
    "xai-",
    "xapp-",
    "xoxa-",
    "xoxb-",
    "xoxp-",
    "ya29.",
];

/// Random characters that a placeholder has at least; fewer would occur by chance, or be guessed.
const MIN_RANDOM: usize = 20;
const MAX_LEN: usize = 1024;
/// Stands for a random character in a pattern.
const RANDOM: u8 = b'?';

/// What a placeholder keeps of its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    alphabet: Alphabet,
    /// Characters as they are, and `?` for a random one of the alphabet.
    pattern: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    Digits,
    HexLower,
    HexUpper,
    Lower,
    Upper,
    Mixed,
}

impl Alphabet {
    const ALL: [Self; 6] = [
        Self::Digits,
        Self::HexLower,
        Self::HexUpper,
        Self::Lower,
        Self::Upper,
        Self::Mixed,
    ];

    fn characters(self) -> &'static [u8] {
        match self {
            Self::Digits => b"0123456789",
            Self::HexLower => b"0123456789abcdef",
            Self::HexUpper => b"0123456789ABCDEF",
            Self::Lower => b"0123456789abcdefghijklmnopqrstuvwxyz",
            Self::Upper => b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
            Self::Mixed => b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
        }
    }

    fn code(self) -> char {
        match self {
            Self::Digits => 'd',
            Self::HexLower => 'h',
            Self::HexUpper => 'H',
            Self::Lower => 'l',
            Self::Upper => 'u',
            Self::Mixed => 'a',
        }
    }

    /// The smallest that holds all letters and digits of `text`.
    fn of(text: &[u8]) -> Self {
        Self::ALL
            .into_iter()
            .find(|alphabet| {
                text.iter()
                    .filter(|byte| byte.is_ascii_alphanumeric())
                    .all(|byte| alphabet.characters().contains(byte))
            })
            .unwrap_or(Self::Mixed)
    }
}

impl Shape {
    pub(crate) fn of(value: &Secret) -> Self {
        let value = value.expose();
        let prefix = PREFIXES
            .into_iter()
            .filter(|prefix| value.starts_with(prefix.as_bytes()))
            .max_by_key(|prefix| prefix.len())
            .unwrap_or_default();
        let rest = &value[prefix.len()..value.len().min(MAX_LEN)];
        let padding = rest.iter().rev().take_while(|byte| **byte == b'=').count();
        let mut pattern = prefix.to_owned();
        pattern.extend(rest.iter().enumerate().map(|(at, byte)| match byte {
            b'-' | b'.' | b'_' => char::from(*byte),
            b'=' if at >= rest.len() - padding => '=',
            _ => char::from(RANDOM),
        }));
        if pattern.bytes().filter(|byte| *byte == RANDOM).count() < MIN_RANDOM {
            let prefix = if prefix.is_empty() { "atoll_" } else { prefix };
            return Self {
                alphabet: Alphabet::Mixed,
                pattern: format!("{prefix}{}", "?".repeat(MIN_RANDOM + 6)),
            };
        }
        Self {
            alphabet: Alphabet::of(rest),
            pattern,
        }
    }

    pub(crate) fn encode(&self) -> String {
        format!("{}{}", self.alphabet.code(), self.pattern)
    }

    pub(crate) fn decode(text: &str) -> Option<Self> {
        let code = text.chars().next()?;
        let pattern = &text[code.len_utf8()..];
        let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-._=?".contains(&byte);
        Some(Self {
            alphabet: Alphabet::ALL.into_iter().find(|it| it.code() == code)?,
            pattern: pattern.bytes().all(fine).then(|| pattern.to_owned())?,
        })
    }

    /// The same for the same lineage and secret, as long as the key is the same.
    pub(crate) fn placeholder(
        &self,
        key: &MasterKey,
        trust: &TrustId,
        id: &SecretId,
    ) -> Result<String, BrokerError> {
        let parts = [trust.as_str(), id.as_str()];
        let random = key.derive::<{ 2 * MAX_LEN }>("placeholder", &parts)?;
        let alphabet = self.alphabet.characters();
        let mut random = random.chunks_exact(2);
        let characters = self.pattern.bytes().map(|byte| match (byte, random.next()) {
            // Two bytes for one of at most 62: the bias is less than one in a thousand.
            (RANDOM, Some(pair)) => {
                let number = usize::from(pair[0]) << 8 | usize::from(pair[1]);
                char::from(alphabet[number % alphabet.len()])
            }
            _ => char::from(byte),
        });
        Ok(characters.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(value: &str) -> Shape {
        Shape::of(&Secret::new(value.as_bytes().to_vec()).unwrap())
    }

    #[test]
    fn the_shape_is_kept_and_nothing_else() {
        for (value, encoded) in [
            (
                "ghp_0123456789abcdefABCDEF0123456789ab",
                "aghp_??????????????????????????????????",
            ),
            (
                "sk-proj-0123456789abcdefghij-klmno_pq",
                "lsk-proj-????????????????????-?????_??",
            ),
            (
                "123e4567-e89b-12d3-a456-426614174000",
                "h????????-????-????-????-????????????",
            ),
            (
                "c29tZSBzZWNyZXQgYnl0ZXMgaGVyZQ==",
                "a??????????????????????????????==",
            ),
            ("ab/cd+ef:gh%ij kl\nmnopqrstuv", "l????????????????????????????"),
            ("31415926535897932384", "d????????????????????"),
            ("short", "aatoll_??????????????????????????"),
            ("xoxb-short", "axoxb-??????????????????????????"),
        ] {
            let shape = shape(value);
            assert_eq!(shape.encode(), encoded, "{value}");
            assert_eq!(Shape::decode(encoded), Some(shape));
        }
        for bad in ["", "z???", "a?? ?", "aé"] {
            assert_eq!(Shape::decode(bad), None, "{bad:?}");
        }
        assert!(shape(&"x".repeat(9000)).pattern.len() <= MAX_LEN);
    }

    #[test]
    fn a_placeholder_belongs_to_one_lineage_and_one_secret() {
        let (key, other) = (MasterKey::new([1; 32]), MasterKey::new([2; 32]));
        let shape = shape("ghp_0123456789abcdefABCDEF0123456789ab");
        let (t1, t2) = (TrustId::new("t1"), TrustId::new("t2"));
        let (s1, s2) = (SecretId::from_entropy([1; 20]), SecretId::from_entropy([2; 20]));
        let first = shape.placeholder(&key, &t1, &s1).unwrap();
        assert_eq!(first, shape.placeholder(&key, &t1, &s1).unwrap());
        assert!(
            first.starts_with("ghp_") && first.len() == 38 && !first.contains('?'),
            "{first}"
        );
        for different in [
            shape.placeholder(&key, &t2, &s1),
            shape.placeholder(&key, &t1, &s2),
            shape.placeholder(&other, &t1, &s1),
        ] {
            assert_ne!(first, different.unwrap());
        }
    }
}
