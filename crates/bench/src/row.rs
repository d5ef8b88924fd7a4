//! What a bench prints: rows of our figure beside a peer's, with the bar that ours must reach.

use serde::Serialize;

/// One line of the result. The first eight fields are the form that every bench of Atoll has.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// Our figure: the median where there are many.
    pub(crate) ours: Option<f64>,
    pub(crate) peer: Option<f64>,
    pub(crate) peer_name: String,
    pub(crate) unit: String,
    /// Ours divided by the peer's.
    pub(crate) ratio: Option<f64>,
    pub(crate) bar: String,
    pub(crate) met: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ours_p99: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_p99: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

/// What a row's figure is held against.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bar {
    /// Ours is at most this.
    AtMost(f64),
    /// Ours is at least this.
    AtLeast(f64),
    /// Ours is at most so many times the peer's.
    RatioAtMost(f64),
    /// Ours is at least so many times the peer's.
    RatioAtLeast(f64),
    /// Ours is at most so many times the peer's, and at most so much.
    RatioAndAtMost(f64, f64),
    /// Only shown.
    Shown,
}

impl Bar {
    fn text(self, unit: &str) -> String {
        match self {
            Self::AtMost(limit) => format!("at most {} {unit}", number(limit)),
            Self::AtLeast(limit) => format!("at least {} {unit}", number(limit)),
            Self::RatioAtMost(ratio) => format!("at most {ratio} x peer"),
            Self::RatioAtLeast(ratio) => format!("at least {ratio} x peer"),
            Self::RatioAndAtMost(ratio, limit) => {
                format!("at most {ratio} x peer and {} {unit}", number(limit))
            }
            Self::Shown => "only shown".into(),
        }
    }

    /// A bar against a peer that is not here cannot be met.
    fn met(self, ours: f64, peer: Option<f64>) -> bool {
        let ratio = peer.map(|peer| ours / peer);
        match self {
            Self::AtMost(limit) => ours <= limit,
            Self::AtLeast(limit) => ours >= limit,
            Self::RatioAtMost(most) => ratio.is_some_and(|ratio| ratio <= most),
            Self::RatioAtLeast(least) => ratio.is_some_and(|ratio| ratio >= least),
            Self::RatioAndAtMost(most, limit) => ours <= limit && ratio.is_some_and(|ratio| ratio <= most),
            Self::Shown => true,
        }
    }
}

impl Row {
    /// From samples of both sides; an empty peer means that there is none here.
    pub(crate) fn compare(
        name: &str,
        unit: &str,
        ours: &Samples,
        peer_name: &str,
        peer: &Samples,
        bar: Bar,
    ) -> Self {
        let mut row = Self::single(name, unit, ours.median(), bar);
        row.ours_p99 = ours.p99();
        row.peer_p99 = peer.p99();
        row.samples = Some(ours.0.len());
        row.against(peer_name, peer.median(), bar)
    }

    /// From one figure without a peer.
    pub(crate) fn single(name: &str, unit: &str, ours: Option<f64>, bar: Bar) -> Self {
        Self {
            name: name.into(),
            ours,
            peer: None,
            peer_name: "none".into(),
            unit: unit.into(),
            ratio: None,
            bar: bar.text(unit),
            met: ours.is_some_and(|ours| bar.met(ours, None)),
            ours_p99: None,
            peer_p99: None,
            samples: None,
            note: None,
        }
    }

    /// Adds the peer's figure.
    #[must_use]
    pub(crate) fn against(mut self, peer_name: &str, peer: Option<f64>, bar: Bar) -> Self {
        self.peer_name = match peer {
            Some(_) => peer_name.into(),
            None => format!("{peer_name}: peer not present"),
        };
        self.peer = peer;
        self.ratio = self.ours.zip(peer).map(|(ours, peer)| ours / peer);
        self.met = self.ours.is_some_and(|ours| bar.met(ours, peer));
        self
    }

    #[must_use]
    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// For what could not be measured at all.
    pub(crate) fn failed(name: &str, why: impl Into<String>) -> Self {
        let mut row = Self::single(name, "", None, Bar::AtMost(0.0));
        row.bar = "not measured".into();
        row.note(why)
    }

    /// For the table: name, ours, peer, ratio, bar, verdict.
    pub(crate) fn cells(&self) -> [String; 7] {
        let figure = |value: Option<f64>, p99: Option<f64>| match (value, p99) {
            (Some(value), Some(p99)) => format!("{} ({}) {}", number(value), number(p99), self.unit),
            (Some(value), None) => format!("{} {}", number(value), self.unit),
            (None, _) => "-".into(),
        };
        [
            self.name.clone(),
            figure(self.ours, self.ours_p99),
            figure(self.peer, self.peer_p99),
            self.peer_name.clone(),
            self.ratio
                .map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
            self.bar.clone(),
            if self.met { "met" } else { "MISSED" }.into(),
        ]
    }
}

/// Three significant digits, no more.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Measurements of one thing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(pub(crate) Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(crate) fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    pub(crate) fn p99(&self) -> Option<f64> {
        self.quantile(0.99)
    }

    /// Nearest rank: always a value that was really measured.
    fn quantile(&self, q: f64) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (q * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measured_values() {
        let samples = Samples((1..=100).map(f64::from).rev().collect());
        assert_eq!(samples.median(), Some(50.0));
        assert_eq!(samples.p99(), Some(99.0));
        assert_eq!(Samples::default().median(), None);
    }

    #[test]
    fn bars_are_kept() {
        let one = |value| Samples(vec![value]);
        let row = |ours, peer, bar| Row::compare("x", "ms", &one(ours), "runsc", &peer, bar).met;
        assert!(row(10.0, one(8.0), Bar::RatioAtMost(1.25)));
        assert!(!row(10.1, one(8.0), Bar::RatioAtMost(1.25)));
        assert!(!row(30.0, one(20.0), Bar::RatioAndAtMost(2.0, 25.0)));
        assert!(
            !row(1.0, Samples::default(), Bar::RatioAtMost(1.25)),
            "no peer, no verdict"
        );
        assert!(row(9.0, Samples::default(), Bar::AtMost(10.0)));
    }

    #[test]
    fn an_absent_peer_is_named() {
        let row = Row::compare(
            "x",
            "ms",
            &Samples(vec![1.0]),
            "bwrap",
            &Samples::default(),
            Bar::AtMost(2.0),
        );
        insta::assert_snapshot!(serde_json::to_string(&row).unwrap(), @r#"{"name":"x","ours":1.0,"peer":null,"peer_name":"bwrap: peer not present","unit":"ms","ratio":null,"bar":"at most 2.00 ms","met":true,"ours_p99":1.0,"samples":1}"#);
    }
}
