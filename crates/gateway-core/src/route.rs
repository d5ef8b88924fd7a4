//! Where a call goes: names of models to providers, in the order in which they are tried.
//!
//! A name is looked up as a route of the operator's (an alias, with several targets and fallbacks); then as
//! `provider/model`; then with the providers that say that they serve such names. What a request wishes for narrows and
//! orders what there is, and adds fallbacks; it cannot open a provider that is not there.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::str::FromStr;

/// The most targets that one call may try.
const MOST_TARGETS: usize = 8;
/// The most names that are looked up for one call: each is held against every pattern of every provider.
const MOST_NAMES: usize = 32;

/// Something to call.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    pub provider: String,
    /// The name that the provider knows it by.
    pub model: String,
}

/// A name that the operator gave to models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Route {
    /// With their weights; a weight of zero is used only when the others are out.
    pub targets: Vec<(Target, u32)>,
    /// Names that are tried after them, in order.
    pub fallbacks: Vec<String>,
}

/// A name in which `*` stands for anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(String);

impl Pattern {
    pub fn matches(&self, name: &str) -> bool {
        let mut parts = self.0.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else {
            return false;
        };
        let mut parts = parts.peekable();
        if parts.peek().is_none() {
            return rest.is_empty();
        }
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.len() >= part.len() && rest.ends_with(part);
            }
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        true
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fine = |c: char| c.is_ascii_graphic() && c != '"' && c != '\\';
        if text.is_empty() || text.len() > 200 || !text.chars().all(fine) {
            return Err(
                "a name of a model has 1 to 200 printable ASCII characters; `*` stands for any of them"
                    .into(),
            );
        }
        Ok(Self(text.to_owned()))
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Provider {
    pub serves: Vec<Pattern>,
}

/// Everything that can be called.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    pub routes: BTreeMap<String, Route>,
    pub providers: BTreeMap<String, Provider>,
}

/// What a request asks for beside a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Models that will do as well, in order.
    pub fallbacks: Vec<String>,
    /// Only these providers.
    pub only: Vec<String>,
    /// Never these.
    pub ignore: Vec<String>,
    /// These first, in order.
    pub order: Vec<String>,
    pub sort: Option<Sort>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    Cost,
    Latency,
}

/// How a target fares, for choosing among equals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TargetHealth {
    /// Its breaker lets nothing through.
    pub out: bool,
    /// A running mean of the time to its first byte, where it is known.
    pub millis: Option<u64>,
    /// What a token read and a token written cost together; for [`Sort::Cost`].
    pub pico: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoRoute {
    /// Nobody knows the name.
    Unknown { model: String },
    /// There are some, and the request excludes them all.
    Excluded { model: String },
}

impl fmt::Display for NoRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { model } => write!(f, "no provider serves a model named `{model}`"),
            Self::Excluded { model } => {
                write!(f, "the request's own wishes leave no provider for `{model}`")
            }
        }
    }
}

impl Catalogue {
    /// The targets for `model`, in the order in which they are to be tried. `roll` is a random number that spreads calls
    /// over targets by their weights. Targets that are out come last: when all are, one of them is still the best guess.
    pub fn plan(
        &self,
        model: &str,
        wishes: &Wishes,
        health: impl Fn(&Target) -> TargetHealth,
        roll: u64,
    ) -> Result<Vec<Target>, NoRoute> {
        let mut seen = HashSet::new();
        let mut planned = Vec::new();
        let mut known = false;
        let mut names = vec![model.to_owned()];
        names.extend(wishes.fallbacks.iter().cloned());
        let mut at = 0;
        while at < names.len().min(MOST_NAMES) && planned.len() < MOST_TARGETS {
            let name = names[at].clone();
            at += 1;
            if !seen.insert(name.clone()) {
                continue;
            }
            let targets = match self.routes.get(&name) {
                Some(route) => {
                    // Right behind the name that they stand in for.
                    names.splice(at..at, route.fallbacks.iter().cloned());
                    route.targets.clone()
                }
                None => self.direct(&name),
            };
            known |= !targets.is_empty();
            planned.extend(arrange(targets, wishes, &health, roll));
        }
        if !known {
            return Err(NoRoute::Unknown {
                model: model.to_owned(),
            });
        }
        let mut once = HashSet::new();
        planned.retain(|target| once.insert(target.clone()));
        planned.truncate(MOST_TARGETS);
        planned.sort_by_key(|target| health(target).out);
        if planned.is_empty() {
            return Err(NoRoute::Excluded {
                model: model.to_owned(),
            });
        }
        Ok(planned)
    }

    fn direct(&self, name: &str) -> Vec<(Target, u32)> {
        if let Some((provider, model)) = name.split_once('/')
            && self.providers.contains_key(provider)
        {
            return vec![(
                Target {
                    provider: provider.to_owned(),
                    model: model.to_owned(),
                },
                1,
            )];
        }
        let serving = self
            .providers
            .iter()
            .filter(|(_, provider)| provider.serves.iter().any(|p| p.matches(name)));
        serving
            .map(|(provider, _)| {
                (
                    Target {
                        provider: provider.clone(),
                        model: name.to_owned(),
                    },
                    1,
                )
            })
            .collect()
    }
}

/// Those of one name: what the request allows, what it wants first, then by chance.
fn arrange(
    mut targets: Vec<(Target, u32)>,
    wishes: &Wishes,
    health: &impl Fn(&Target) -> TargetHealth,
    roll: u64,
) -> Vec<Target> {
    targets.retain(|(target, _)| {
        let provider = &target.provider;
        (wishes.only.is_empty() || wishes.only.contains(provider)) && !wishes.ignore.contains(provider)
    });
    let mut arranged = Vec::with_capacity(targets.len());
    let mut roll = roll;
    while !targets.is_empty() {
        let chances: Vec<u64> = targets
            .iter()
            .map(|(target, weight)| chance(*weight, health(target)))
            .collect();
        let all: u64 = chances.iter().sum();
        let mut left = if all == 0 { 0 } else { roll % all };
        let chosen = chances
            .iter()
            .position(|chance| {
                let here = left < *chance;
                left = left.saturating_sub(*chance);
                here
            })
            .unwrap_or(0);
        arranged.push(targets.remove(chosen).0);
        // Another number for the next place; the constant is that of Knuth's MMIX generator.
        roll = roll
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407)
            >> 1;
    }
    match wishes.sort {
        Some(Sort::Latency) => arranged.sort_by_key(|target| health(target).millis.unwrap_or(u64::MAX)),
        Some(Sort::Cost) => arranged.sort_by_key(|target| health(target).pico.unwrap_or(i64::MAX)),
        None => {}
    }
    arranged.sort_by_key(|target| {
        wishes
            .order
            .iter()
            .position(|provider| *provider == target.provider)
            .unwrap_or(usize::MAX)
    });
    arranged
}

/// Twice as slow is half as likely; one that nobody has tried counts as quick, so that it is tried.
fn chance(weight: u32, health: TargetHealth) -> u64 {
    let millis = health.millis.unwrap_or(100).clamp(10, 100_000);
    u64::from(weight) * 1_000_000 / millis
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target(text: &str) -> Target {
        let (provider, model) = text.split_once('/').unwrap();
        Target {
            provider: provider.into(),
            model: model.into(),
        }
    }

    fn catalogue() -> Catalogue {
        let provider = |serves: &[&str]| Provider {
            serves: serves.iter().map(|s| s.parse().unwrap()).collect(),
        };
        Catalogue {
            providers: [
                ("openai".to_owned(), provider(&["gpt-*", "o?"])),
                ("azure".to_owned(), provider(&["gpt-*"])),
                ("anthropic".to_owned(), provider(&["claude-*"])),
                ("local".to_owned(), provider(&[])),
            ]
            .into(),
            routes: [
                (
                    "smart".to_owned(),
                    Route {
                        targets: vec![
                            (target("anthropic/claude-opus-5"), 3),
                            (target("openai/gpt-5"), 1),
                        ],
                        fallbacks: vec!["cheap".into()],
                    },
                ),
                (
                    "cheap".to_owned(),
                    Route {
                        targets: vec![(target("local/llama"), 1)],
                        fallbacks: vec!["smart".into()],
                    },
                ),
            ]
            .into(),
        }
    }

    fn plan(model: &str, wishes: &Wishes, roll: u64) -> Result<Vec<String>, NoRoute> {
        let planned = catalogue().plan(model, wishes, |_| TargetHealth::default(), roll)?;
        Ok(planned
            .into_iter()
            .map(|t| format!("{}/{}", t.provider, t.model))
            .collect())
    }

    #[test]
    fn names_lead_to_targets() {
        let none = Wishes::default();
        assert_eq!(plan("local/any/thing", &none, 0).unwrap(), ["local/any/thing"]);
        assert_eq!(
            plan("claude-sonnet-5", &none, 0).unwrap(),
            ["anthropic/claude-sonnet-5"]
        );
        assert_eq!(plan("gpt-5", &none, 0).unwrap().len(), 2);
        assert_eq!(plan("smart", &none, 0).unwrap().last().unwrap(), "local/llama");
        assert_eq!(
            plan("nothing", &none, 0),
            Err(NoRoute::Unknown {
                model: "nothing".into()
            })
        );
    }

    #[test]
    fn wishes_narrow_order_and_extend() {
        let only = Wishes {
            only: vec!["azure".into()],
            ..Wishes::default()
        };
        assert_eq!(plan("gpt-5", &only, 0).unwrap(), ["azure/gpt-5"]);
        assert_eq!(
            plan("claude-x", &only, 0),
            Err(NoRoute::Excluded {
                model: "claude-x".into()
            })
        );
        let order = Wishes {
            order: vec!["openai".into()],
            ..Wishes::default()
        };
        for roll in 0..20 {
            assert_eq!(plan("gpt-5", &order, roll).unwrap()[0], "openai/gpt-5");
        }
        let more = Wishes {
            fallbacks: vec!["claude-x".into(), "local/y".into()],
            ..Wishes::default()
        };
        assert_eq!(
            plan("openai/gpt-5", &more, 0).unwrap(),
            ["openai/gpt-5", "anthropic/claude-x", "local/y"]
        );
    }

    #[test]
    fn weights_share_the_calls_and_what_is_out_comes_last() {
        let first = (0..4000_u64)
            .filter(|roll| {
                let roll = roll.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                plan("smart", &Wishes::default(), roll).unwrap()[0] == "anthropic/claude-opus-5"
            })
            .count();
        assert!((2800..3200).contains(&first), "{first} of 4000");
        let out = |target: &Target| TargetHealth {
            out: target.provider == "anthropic",
            ..TargetHealth::default()
        };
        let planned = catalogue().plan("smart", &Wishes::default(), out, 0).unwrap();
        assert_eq!(planned.last().unwrap().provider, "anthropic");
    }

    /// However many names stand for each other, a call looks at few of them.
    #[test]
    fn a_plan_looks_up_so_many_names_and_no_more() {
        let mut catalogue = catalogue();
        for n in 0..100 {
            let route = Route {
                targets: Vec::new(),
                fallbacks: vec![format!("r{}", n + 1)],
            };
            catalogue.routes.insert(format!("r{n}"), route);
        }
        catalogue
            .routes
            .insert("r100".into(), catalogue.routes["cheap"].clone());
        let plan = |model: &str| catalogue.plan(model, &Wishes::default(), |_| TargetHealth::default(), 0);
        assert!(plan("r90").is_ok());
        assert_eq!(plan("r50"), Err(NoRoute::Unknown { model: "r50".into() }));
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, right) in [
            ("gpt-*", "gpt-5", true),
            ("gpt-*", "xgpt-5", false),
            ("*", "", true),
            ("a*b*c", "a-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("ab*ab", "ab", false),
            ("exact", "exact", true),
            ("exact", "exactly", false),
        ] {
            assert_eq!(
                pattern.parse::<Pattern>().unwrap().matches(name),
                right,
                "{pattern} {name}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_plan_names_each_target_once(roll in any::<u64>()) {
            let planned = plan("smart", &Wishes { fallbacks: vec!["cheap".into(), "gpt-5".into()], ..Wishes::default() }, roll).unwrap();
            let distinct: HashSet<_> = planned.iter().collect();
            prop_assert_eq!(distinct.len(), planned.len());
            prop_assert_eq!(planned.len(), 4);
        }
    }
}
