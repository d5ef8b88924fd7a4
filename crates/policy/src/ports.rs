//! Sets of ports.

use std::fmt;

use atoll_types::PortRange;

/// Sorted, without overlaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ports(Vec<PortRange>);

impl Ports {
    pub(crate) fn new(ranges: &[PortRange]) -> Self {
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable();
        let mut merged: Vec<PortRange> = Vec::with_capacity(sorted.len());
        for range in sorted {
            match merged.last_mut() {
                // Sorted by its first port, so it begins within the last one, right behind it, or apart.
                Some(last) if u32::from(range.first()) <= u32::from(last.last()) + 1 => {
                    if let Some(wider) = PortRange::new(last.first(), last.last().max(range.last())) {
                        *last = wider;
                    }
                }
                _ => merged.push(range),
            }
        }
        Self(merged)
    }

    pub(crate) fn all() -> Self {
        Self(vec![PortRange::ALL])
    }

    pub(crate) fn of(ports: &[u16]) -> Self {
        Self::new(
            &ports
                .iter()
                .filter_map(|port| PortRange::single(*port))
                .collect::<Vec<_>>(),
        )
    }

    pub(crate) fn union<'a>(sets: impl Iterator<Item = &'a Self>) -> Self {
        Self::new(&sets.flat_map(|set| set.0.iter().copied()).collect::<Vec<_>>())
    }

    pub(crate) fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(port))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn is_all(&self) -> bool {
        self.0 == [PortRange::ALL]
    }

    /// What of it is not in `other`.
    pub(crate) fn minus(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        for range in &self.0 {
            let mut next = u32::from(range.first());
            for cut in other.0.iter().filter(|cut| cut.last() >= range.first()) {
                if let Some(before) =
                    between(next, u32::from(cut.first().min(range.last().saturating_add(1))))
                {
                    left.push(before);
                }
                next = next.max(u32::from(cut.last()) + 1);
            }
            left.extend(between(next, u32::from(range.last()) + 1));
        }
        Self(left)
    }
}

/// From `first` up to but without `end`.
fn between(first: u32, end: u32) -> Option<PortRange> {
    PortRange::new(
        u16::try_from(first).ok()?,
        u16::try_from(end.checked_sub(1)?).ok()?,
    )
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("any");
        }
        for (at, range) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{range}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some() -> impl Strategy<Value = Vec<PortRange>> {
        // Few ports near both ends, so that ranges touch and overlap.
        let port = prop_oneof![1_u16..12, 65525_u16..=65535];
        prop::collection::vec((port.clone(), port), 0..5).prop_map(|pairs| {
            pairs
                .into_iter()
                .filter_map(|(a, b)| PortRange::new(a.min(b), a.max(b)))
                .collect()
        })
    }

    proptest! {
        #[test]
        fn sets_behave_like_sets(a in some(), b in some()) {
            let (left, right) = (Ports::new(&a), Ports::new(&b));
            let difference = left.minus(&right);
            for port in (0..20).chain(65515..=65535) {
                let in_a = a.iter().any(|range| range.contains(port));
                let in_b = b.iter().any(|range| range.contains(port));
                prop_assert_eq!(left.contains(port), in_a);
                prop_assert_eq!(difference.contains(port), in_a && !in_b, "{}", port);
            }
            prop_assert!(left.minus(&left).is_empty());
            prop_assert!(left.minus(&Ports::all()).is_empty());
            prop_assert_eq!(left.minus(&Ports(Vec::new())), left);
        }
    }

    #[test]
    fn they_are_written_for_people() {
        assert_eq!(Ports::of(&[443, 80]).to_string(), "80, 443");
        assert_eq!(Ports::of(&[80, 81, 82]).to_string(), "80-82");
        assert_eq!(Ports::all().to_string(), "any");
    }
}
