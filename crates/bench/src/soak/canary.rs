//! Words that one project plants in everything that it says, and that no other project may ever be answered.
//!
//! Answers carry bytes as they are or in base64, so both are looked for.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use memchr::memmem::Finder;

use super::random::Random;

/// What one project plants, and how it is found again.
#[derive(Debug)]
struct Canary {
    word: String,
    /// As it is, and in base64 at each of the three places that it can begin at.
    finders: Vec<Finder<'static>>,
}

/// One for each project.
#[derive(Debug)]
pub(super) struct Canaries(Vec<Canary>);

impl Canaries {
    pub(super) fn plant(seed: u64, projects: usize) -> Self {
        let mut random = Random::of(seed, "canaries");
        let canaries = (0..projects).map(|_| {
            let word = format!("soak{:016x}{:08x}", random.next(), random.next() >> 32);
            let mut finders = vec![Finder::new(word.as_bytes()).into_owned()];
            for offset in 0..3 {
                finders.push(Finder::new(&encoded(&word, offset)).into_owned());
            }
            Canary { word, finders }
        });
        Self(canaries.collect())
    }

    /// What a project plants: letters and digits, so that it may stand in names.
    pub(super) fn of(&self, project: usize) -> &str {
        self.0.get(project).map_or("", |canary| &canary.word)
    }

    /// Whose word stands in what this project was answered, if it is not its own.
    pub(super) fn strange(&self, project: usize, answer: &[u8]) -> Option<usize> {
        let others = self.0.iter().enumerate().filter(|(owner, _)| *owner != project);
        let mut found =
            others.filter(|(_, canary)| canary.finders.iter().any(|finder| finder.find(answer).is_some()));
        found.next().map(|(owner, _)| owner)
    }
}

/// The characters of base64 that the word alone decides, if `offset` bytes stand before it in its group of three.
fn encoded(word: &str, offset: usize) -> Vec<u8> {
    let mut bytes = vec![0; offset];
    bytes.extend_from_slice(word.as_bytes());
    let whole = bytes.len() / 3 * 3;
    let text = STANDARD_NO_PAD.encode(&bytes[..whole]).into_bytes();
    let skipped = if offset == 0 { 0 } else { 4 };
    text[skipped..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strange_words_are_found_plain_and_in_base64() {
        let canaries = Canaries::plant(3, 3);
        for before in ["", "x", "xy", "xyz"] {
            let text = format!("{before}{}, said somebody", canaries.of(1));
            let packed = STANDARD_NO_PAD.encode(&text);
            assert_eq!(canaries.strange(0, text.as_bytes()), Some(1));
            assert_eq!(canaries.strange(0, packed.as_bytes()), Some(1), "{before:?}");
            assert_eq!(canaries.strange(1, text.as_bytes()), None, "its own");
            assert_eq!(canaries.strange(1, packed.as_bytes()), None, "its own");
        }
        assert_eq!(canaries.strange(0, b"nothing"), None);
    }
}
