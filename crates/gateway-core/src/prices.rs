//! What tokens cost: a table with a version, and what the operator says instead.
//!
//! Prices are decimal text, in dollars per million tokens, and become whole picodollars per token; a price that does not is
//! refused. Where a table says nothing about a bucket, it costs as much as the bucket that it was split off from: cached
//! reads and writes as input, an hour's write as a short one, audio as text, reasoning as output.

use std::collections::HashMap;
use std::sync::LazyLock;

use atoll_types::{ModelUsage, Usd};

const BUILT_IN: &str = include_str!("../data/prices.tsv");
const COLUMNS: usize = 13;

/// Dollars for one token of each bucket, and for one search.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rates {
    pub input: Usd,
    pub output: Usd,
    pub cache_read: Usd,
    pub cache_write: Usd,
    pub cache_write_1h: Usd,
    pub audio_input: Usd,
    pub audio_output: Usd,
    pub search: Usd,
    /// Sound that is read, and that is written, has a price of its own. Where it has none it is counted as text, which
    /// is a guess: no budget is to rest on it.
    pub hears: bool,
    pub speaks: bool,
}

/// What a call may do at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Most {
    /// Tokens, of whatever kind.
    pub input: u64,
    pub output: u64,
    /// Some of what it reads is sound.
    pub hears: bool,
    /// Some of what it writes may be.
    pub speaks: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Price {
    /// By the number of input tokens above which they hold, the largest first; the last holds above zero.
    tiers: Vec<(u64, Rates)>,
    pub max_input: Option<u64>,
    pub max_output: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriceError {
    pub model: String,
    pub why: String,
}

impl std::fmt::Display for PriceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the price of `{}`: {}", self.model, self.why)
    }
}

impl std::error::Error for PriceError {}

/// Everything that has a price.
#[derive(Debug, Clone)]
pub struct Prices {
    version: String,
    by_model: HashMap<String, Price>,
}

impl Price {
    /// One price for every length of input.
    pub fn flat(rates: Rates) -> Self {
        Self {
            tiers: vec![(0, rates)],
            max_input: None,
            max_output: None,
        }
    }

    /// The rates for a call that reads so many tokens.
    pub fn rates(&self, total_input: u64) -> &Rates {
        let fitting = self.tiers.iter().find(|(above, _)| total_input > *above);
        &fitting.or(self.tiers.last()).expect("a price has a tier").1
    }

    pub fn cost(&self, usage: &ModelUsage) -> Usd {
        let rates = self.rates(usage.total_input());
        [
            (rates.input, usage.input),
            (rates.cache_read, usage.cache_read),
            (rates.cache_write, usage.cache_write),
            (rates.cache_write_1h, usage.cache_write_1h),
            (rates.audio_input, usage.audio_input),
            (rates.output, usage.output),
            (rates.output, usage.reasoning),
            (rates.audio_output, usage.audio_output),
            (rates.search, usage.searches),
        ]
        .into_iter()
        .map(|(rate, count)| rate.times(count))
        .sum()
    }

    /// The most that a call can cost which does no more than that; `None`: it would need a price that nobody has given.
    pub fn at_most(&self, most: &Most) -> Option<Usd> {
        let dearest = |among: &[Usd]| among.iter().copied().max().unwrap_or_default();
        if self.is_free() {
            return Some(Usd::ZERO);
        }
        let mut found = Usd::ZERO;
        // It may turn out shorter, and a shorter one is not always cheaper.
        let reachable = self
            .tiers
            .iter()
            .filter(|(above, _)| *above == 0 || most.input > *above);
        for (_, rates) in reachable {
            if (most.hears && !rates.hears) || (most.speaks && !rates.speaks) {
                return None;
            }
            let mut read = dearest(&[
                rates.input,
                rates.cache_read,
                rates.cache_write,
                rates.cache_write_1h,
            ]);
            if most.hears {
                read = read.max(rates.audio_input);
            }
            let written = if most.speaks {
                rates.output.max(rates.audio_output)
            } else {
                rates.output
            };
            found = found.max(read.times(most.input) + written.times(most.output));
        }
        Some(found)
    }

    /// Nothing that a call does costs anything.
    pub fn is_free(&self) -> bool {
        self.tiers.iter().all(|(_, rates)| {
            let Rates {
                input,
                output,
                cache_read,
                cache_write,
                cache_write_1h,
                audio_input,
                audio_output,
                search,
                hears: _,
                speaks: _,
            } = *rates;
            [
                input,
                output,
                cache_read,
                cache_write,
                cache_write_1h,
                audio_input,
                audio_output,
                search,
            ]
            .iter()
            .all(|rate| *rate == Usd::ZERO)
        })
    }

    /// Whether what a call writes costs anything.
    pub fn charges_output(&self) -> bool {
        self.tiers
            .iter()
            .any(|(_, rates)| rates.output > Usd::ZERO || rates.audio_output > Usd::ZERO)
    }
}

impl Prices {
    /// The table that came with this program.
    pub fn built_in() -> &'static Self {
        static TABLE: LazyLock<Prices> = LazyLock::new(|| {
            Prices::parse(BUILT_IN).expect("the table in the program is right, a test reads it")
        });
        &TABLE
    }

    /// The same with prices of the operator's own, which win; `edition` tells their state apart from others.
    #[must_use]
    pub fn with(&self, own: impl IntoIterator<Item = (String, Price)>, edition: &str) -> Self {
        let mut prices = self.clone();
        let before = prices.by_model.len();
        let mut changed = 0;
        for (model, mut price) in own {
            // A price of one's own says nothing about how much the model reads and writes.
            if let Some(known) = self.of("", &model) {
                price.max_input = price.max_input.or(known.max_input);
                price.max_output = price.max_output.or(known.max_output);
            }
            prices.by_model.insert(model, price);
            changed += 1;
        }
        if changed > 0 || prices.by_model.len() != before {
            prices.version = format!("{}+{edition}", prices.version);
        }
        prices
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    pub fn is_empty(&self) -> bool {
        self.by_model.is_empty()
    }

    pub fn len(&self) -> usize {
        self.by_model.len()
    }

    /// The names that have a price, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_model.keys().map(String::as_str)
    }

    /// The price of a model by the name that its provider knows, or by that name without who makes it or its date.
    pub fn of(&self, provider: &str, model: &str) -> Option<&Price> {
        let plain = model.rsplit('/').next().unwrap_or(model);
        let undated = without_date(plain);
        // The operator may price one provider's model apart from another's.
        self.by_model.get(&format!("{provider}/{model}")).or_else(|| {
            [model, plain, undated]
                .into_iter()
                .find_map(|name| self.by_model.get(name))
        })
    }

    fn parse(text: &str) -> Result<Self, PriceError> {
        let mut prices = Self {
            version: String::new(),
            by_model: HashMap::new(),
        };
        for line in text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty())
        {
            if let Some(version) = line.strip_prefix("version\t") {
                version.clone_into(&mut prices.version);
                continue;
            }
            let cells: Vec<&str> = line.split('\t').collect();
            let bad = |why: &str| PriceError {
                model: cells[0].to_owned(),
                why: why.to_owned(),
            };
            let Ok(cells): Result<[&str; COLUMNS], _> = cells.clone().try_into() else {
                return Err(bad("a line has thirteen columns"));
            };
            let [model, _vendor, above, rates @ .., max_input, max_output] = cells;
            let above = above.parse().map_err(|_| bad("the third column is a number"))?;
            let rates = Rates::parse(rates.map(|cell| (!cell.is_empty()).then_some(cell)))
                .map_err(|why| bad(&why))?;
            let price = prices.by_model.entry(model.to_owned()).or_insert_with(|| Price {
                tiers: Vec::new(),
                max_input: max_input.parse().ok(),
                max_output: max_output.parse().ok(),
            });
            price.tiers.push((above, rates));
            price.tiers.sort_by_key(|(above, _)| std::cmp::Reverse(*above));
        }
        Ok(prices)
    }
}

impl Rates {
    /// From dollars per million tokens, in the order of the table; the last is dollars for one search.
    pub fn parse(columns: [Option<&str>; 8]) -> Result<Self, String> {
        let dollars = |cell: &str| -> Result<Usd, String> {
            let dollars: Usd = cell
                .parse()
                .map_err(|error: atoll_types::UsdError| error.to_string())?;
            if dollars < Usd::ZERO {
                return Err(format!("`{cell}` is negative"));
            }
            Ok(dollars)
        };
        let per_token = |cell: &str| -> Result<Usd, String> {
            dollars(cell)?
                .millionth()
                .ok_or_else(|| format!("`{cell}` has more than six decimals"))
        };
        let read = |cell: Option<&str>, otherwise: Usd| cell.map_or(Ok(otherwise), per_token);
        let [
            input,
            output,
            cache_read,
            cache_write,
            cache_write_1h,
            audio_input,
            audio_output,
            search,
        ] = columns;
        let input = read(input, Usd::ZERO)?;
        let output = read(output, Usd::ZERO)?;
        let cache_write = read(cache_write, input)?;
        Ok(Self {
            input,
            output,
            cache_read: read(cache_read, input)?,
            cache_write,
            cache_write_1h: read(cache_write_1h, cache_write)?,
            hears: audio_input.is_some(),
            speaks: audio_output.is_some(),
            audio_input: read(audio_input, input)?,
            audio_output: read(audio_output, output)?,
            search: search.map_or(Ok(Usd::ZERO), dollars)?,
        })
    }
}

/// `gpt-5-2025-08-07` and `claude-opus-4-20250514` without their dates.
fn without_date(model: &str) -> &str {
    let digits = |text: &str, count| text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some((name, last)) = model.rsplit_once('-') {
        if digits(last, 8) {
            return name;
        }
        if digits(last, 2)
            && let Some((name, month)) = name.rsplit_once('-')
            && digits(month, 2)
            && let Some((name, year)) = name.rsplit_once('-')
            && digits(year, 4)
        {
            return name;
        }
    }
    model
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn usd(text: &str) -> Usd {
        text.parse().unwrap()
    }

    #[test]
    fn the_built_in_table_is_right() {
        let prices = Prices::built_in();
        assert!(prices.len() > 200, "{}", prices.len());
        assert!(prices.version().starts_with("20"));
        for (model, price) in &prices.by_model {
            let (last, _) = price.tiers.last().unwrap();
            assert_eq!(*last, 0, "{model} has no price for short input");
            assert!(price.tiers.is_sorted_by(|a, b| a.0 > b.0), "{model}");
        }
    }

    #[test]
    fn each_bucket_is_paid_once() {
        let price = Prices::built_in().of("anthropic", "claude-sonnet-4-5").unwrap();
        let usage = ModelUsage {
            input: 1_000_000 - 900_000,
            cache_read: 50_000,
            cache_write: 20_000,
            cache_write_1h: 10_000,
            output: 1000,
            reasoning: 2000,
            searches: 3,
            ..ModelUsage::default()
        };
        // 0.1 * 3 + 0.05 * 0.3 + 0.02 * 3.75 + 0.01 * 6 + 0.003 * 15 + 3 * 0.01
        assert_eq!(price.cost(&usage), usd("0.525"));
    }

    #[test]
    fn long_input_has_another_price() {
        let price = Prices::built_in().of("gemini", "gemini-2.5-pro").unwrap();
        let of = |input| {
            price.cost(&ModelUsage {
                input,
                ..ModelUsage::default()
            })
        };
        assert_eq!(of(200_000), usd("0.25"));
        assert_eq!(of(200_001), usd("0.5000025"));
    }

    #[test]
    fn names_are_found_with_their_maker_and_their_date() {
        let prices = Prices::built_in();
        let plain = prices.of("openai", "gpt-5").unwrap();
        for name in [
            "openai/gpt-5",
            "gpt-5-2025-08-07",
            "gpt-5-2031-01-01",
            "x/y/gpt-5",
        ] {
            assert_eq!(prices.of("some", name), Some(plain), "{name}");
        }
        assert_eq!(prices.of("some", "gpt-5-unheard-of"), None);
    }

    /// Dated names that cost more than what their undated name stands for today.
    #[test]
    fn an_older_one_has_its_own_price() {
        let prices = Prices::built_in();
        let audio = |name: &str| prices.of("openai", name).unwrap().rates(0).audio_output;
        assert_eq!(audio("gpt-4o-audio-preview-2024-10-01"), usd("0.0002"));
        assert_eq!(audio("gpt-4o-audio-preview-2024-12-17"), usd("0.00008"));
        let old = prices.of("openai", "gpt-4o-2024-05-13").unwrap();
        assert_eq!(old.rates(0).output, usd("0.000015"));
    }

    #[test]
    fn the_operators_prices_win_and_show_in_the_version() {
        let rates = Rates::parse([Some("2"), Some("4"), None, None, None, None, None, None]).unwrap();
        let own = [
            ("mine/gpt-5".to_owned(), Price::flat(rates)),
            ("llama".to_owned(), Price::flat(rates)),
        ];
        let prices = Prices::built_in().with(own, "7");
        assert_eq!(prices.version(), format!("{}+7", Prices::built_in().version()));
        let known = Prices::built_in().of("openai", "gpt-5").unwrap();
        let mine = prices.of("mine", "gpt-5").unwrap();
        assert_eq!((mine.rates(0), mine.max_output), (&rates, known.max_output));
        assert!(known.max_output.is_some());
        assert_ne!(prices.of("openai", "gpt-5"), Some(&Price::flat(rates)));
        assert!(prices.of("any", "llama").is_some());
    }

    #[test]
    fn sound_without_a_price_is_not_sold() {
        let hears = Most {
            input: 1,
            hears: true,
            ..Most::default()
        };
        let prices = Prices::built_in();
        assert_eq!(prices.of("openai", "gpt-4o").unwrap().at_most(&hears), None);
        assert!(
            prices
                .of("openai", "gpt-audio")
                .unwrap()
                .at_most(&hears)
                .is_some()
        );
    }

    #[test]
    fn an_hour_of_memory_at_anthropic_costs_twice_the_input() {
        for (model, price) in &Prices::built_in().by_model {
            for (_, rates) in price.tiers.iter().filter(|_| model.starts_with("claude-")) {
                assert!(rates.cache_write_1h >= rates.input.times(2), "{model}");
            }
        }
    }

    #[test]
    fn a_price_that_cannot_be_exact_is_refused() {
        assert!(Rates::parse([Some("0.0000001"), None, None, None, None, None, None, None]).is_err());
        for at in 0..8 {
            let mut columns = [None; 8];
            columns[at] = Some("-1");
            assert!(Rates::parse(columns).is_err(), "{at}");
            columns[at] = Some("0.5");
            assert!(Rates::parse(columns).is_ok(), "{at}");
        }
    }

    proptest! {
        /// What is reserved covers whatever mix of buckets the same number of tokens turns out to be.
        #[test]
        fn the_reservation_covers_the_cost(
            buckets in prop::array::uniform4(0_u64..100_000), output in 0_u64..50_000, reasoning in 0_u64..50_000,
            at in 0_usize..1000, extra in 0_u64..1_000_000,
        ) {
            let prices = Prices::built_in();
            let price = prices.by_model.values().nth(at % prices.len()).unwrap();
            let [input, cache_read, cache_write, cache_write_1h] = buckets;
            let usage = ModelUsage {
                input, cache_read, cache_write, cache_write_1h, output, reasoning, ..ModelUsage::default()
            };
            let most = Most { input: usage.total_input(), output: output + reasoning, ..Most::default() };
            prop_assert!(price.cost(&usage) <= price.at_most(&most).unwrap());
            // Also if it turns out shorter than was thought.
            let more = Most { input: most.input + extra, ..most };
            prop_assert!(price.cost(&usage) <= price.at_most(&more).unwrap());
            let heard = ModelUsage { audio_input: input, input: 0, audio_output: output, output: 0, ..usage };
            if let Some(amount) = price.at_most(&Most { hears: true, speaks: true, ..more }) {
                prop_assert!(price.cost(&heard) <= amount);
            }
        }
    }
}
