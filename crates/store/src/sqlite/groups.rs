//! Sums by group, made row by row: `GROUP BY` would keep every row that it looks at in memory, or sort it on the disk, and
//! how many there are is up to callers.
//!
//! What must hold: names of groups are callers' too, so there are at most [`MOST`] of them and one for the rest.

use std::collections::HashMap;

/// The most groups that are told apart.
const MOST: usize = 10_000;
/// All others.
const OTHER: &str = "other";

#[derive(Debug)]
pub(crate) struct Groups<T> {
    sums: HashMap<String, T>,
    most: usize,
}

impl<T> Default for Groups<T> {
    fn default() -> Self {
        Self {
            sums: HashMap::new(),
            most: MOST,
        }
    }
}

impl<T: Default> Groups<T> {
    /// The sum that a row of this group is added to.
    pub(crate) fn of(&mut self, group: &str) -> &mut T {
        let is_full = self.sums.len() >= self.most;
        let group = if is_full && !self.sums.contains_key(group) {
            OTHER
        } else {
            group
        };
        self.sums.entry(group.to_owned()).or_default()
    }

    /// In no order.
    pub(crate) fn into_sums(self) -> impl Iterator<Item = (String, T)> {
        self.sums.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_so_many_groups_the_rest_is_one() {
        let mut groups = Groups::<u32> {
            most: 2,
            ..Groups::default()
        };
        for group in ["a", "b", "c", "a", "d", "b", "e"] {
            *groups.of(group) += 1;
        }
        let mut sums: Vec<_> = groups.into_sums().collect();
        sums.sort();
        let expected = [("a", 2), ("b", 2), (OTHER, 3)];
        assert_eq!(sums, expected.map(|(group, sum)| (group.to_owned(), sum)));
    }
}
