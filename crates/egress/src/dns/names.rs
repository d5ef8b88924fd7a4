//! Synthetic addresses: what a guest is told instead of a name's real ones.
//!
//! ```text
//!   198.18.0.0/16            without .0.0 and .0.1 (the resolver that guests are configured with)
//!   fd61:746f:6c6c:1::/64    the same number at the end
//! ```
//! What must hold: within a sandbox an address stands for one name at a time. Which one it is follows from the name
//! wherever it is free, so that a guest which kept an address over a restart of the server, or was forked, most often
//! still has the right one; where it has a wrong one, the name that it then shows does not match and it is refused.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use atoll_policy::Name;

/// Names that a sandbox may use at a time; beyond it the one that was not used for the longest time is forgotten.
const MOST: usize = 4096;
const NETWORK4: [u8; 2] = [198, 18];
const NETWORK6: [u16; 4] = [0xfd61, 0x746f, 0x6c6c, 1];
/// The first number that stands for a name.
const FIRST: u16 = 2;

/// Where a guest wants to go, as far as the address tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// An address that stands for this name.
    Name(Name),
    /// One that may have stood for a name.
    Forgotten,
    /// A real one.
    Address(IpAddr),
}

/// The names of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Names {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    numbers: HashMap<Name, u16>,
    entries: HashMap<u16, Entry>,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    name: Name,
    used: u64,
}

impl Names {
    /// The addresses that stand for `name`.
    pub(crate) fn addresses_of(&self, name: &Name) -> (Ipv4Addr, Ipv6Addr) {
        let mut table = self.table.lock();
        let number = table.number_of(name);
        (address4(number), address6(number))
    }

    /// What `address` stands for.
    pub(crate) fn target(&self, address: IpAddr) -> Target {
        let address = address.to_canonical();
        let Some(number) = number_in(address) else {
            return Target::Address(address);
        };
        let mut table = self.table.lock();
        let now = table.tick();
        match table.entries.get_mut(&number) {
            Some(entry) => {
                entry.used = now;
                Target::Name(entry.name.clone())
            }
            None => Target::Forgotten,
        }
    }
}

impl Table {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn number_of(&mut self, name: &Name) -> u16 {
        let used = self.tick();
        if let Some(number) = self.numbers.get(name).copied() {
            if let Some(entry) = self.entries.get_mut(&number) {
                entry.used = used;
            }
            return number;
        }
        if self.entries.len() >= MOST {
            self.forget_oldest();
        }
        let mut number = preferred(name);
        // Ends: far fewer are taken than there are.
        while self.entries.contains_key(&number) {
            number = number.checked_add(1).unwrap_or(FIRST);
        }
        self.numbers.insert(name.clone(), number);
        self.entries.insert(
            number,
            Entry {
                name: name.clone(),
                used,
            },
        );
        number
    }

    /// Forgets a sixteenth at once, so that looking for the oldest is paid for by many names.
    fn forget_oldest(&mut self) {
        let mut ages: Vec<_> = self.entries.values().map(|entry| entry.used).collect();
        let (_, limit, _) = ages.select_nth_unstable(MOST / 16);
        let limit = *limit;
        self.entries.retain(|_, entry| entry.used > limit);
        let entries = &self.entries;
        self.numbers.retain(|_, number| entries.contains_key(number));
    }
}

/// The same for the same name in every process: `DefaultHasher::new` has fixed keys. A guest gains nothing from finding
/// names that collide, since the table is its own.
fn preferred(name: &Name) -> u16 {
    let mut hasher = DefaultHasher::new();
    name.as_str().hash(&mut hasher);
    let span = u64::from(u16::MAX - FIRST) + 1;
    FIRST + u16::try_from(hasher.finish() % span).unwrap_or_default()
}

fn address4(number: u16) -> Ipv4Addr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(NETWORK4[0], NETWORK4[1], high, low)
}

fn address6(number: u16) -> Ipv6Addr {
    let [a, b, c, d] = NETWORK6;
    Ipv6Addr::new(a, b, c, d, 0, 0, 0, number)
}

/// The number in a synthetic address, also in one that stands for nothing; `None` for all others.
fn number_in(address: IpAddr) -> Option<u16> {
    match address {
        IpAddr::V4(address) => {
            let [a, b, high, low] = address.octets();
            ([a, b] == NETWORK4).then(|| u16::from_be_bytes([high, low]))
        }
        IpAddr::V6(address) => {
            let [a, b, c, d, rest @ .., number] = address.segments();
            ([a, b, c, d] == NETWORK6).then_some(if rest == [0; 3] { number } else { 0 })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    #[test]
    fn both_addresses_stand_for_the_name_and_stay() {
        let names = Names::default();
        let (four, six) = names.addresses_of(&name("pypi.org"));
        assert_eq!(names.target(four.into()), Target::Name(name("pypi.org")));
        assert_eq!(names.target(six.into()), Target::Name(name("pypi.org")));
        assert_eq!(
            names.target(four.to_ipv6_mapped().into()),
            Target::Name(name("pypi.org"))
        );
        assert_eq!(names.addresses_of(&name("pypi.org")), (four, six));
        // Another table, as after a restart or in a fork, agrees.
        assert_eq!(Names::default().addresses_of(&name("pypi.org")), (four, six));
    }

    #[test]
    fn an_address_that_stands_for_nothing_is_not_a_real_one() {
        let names = Names::default();
        for address in [
            "198.18.0.0",
            "198.18.0.1",
            "198.18.77.3",
            "fd61:746f:6c6c:1::9",
            "fd61:746f:6c6c:1:5::9",
        ] {
            assert_eq!(
                names.target(address.parse().unwrap()),
                Target::Forgotten,
                "{address}"
            );
        }
        let real: IpAddr = "198.19.0.1".parse().unwrap();
        assert_eq!(names.target(real), Target::Address(real));
    }

    #[test]
    fn the_table_is_bounded_and_what_is_used_stays() {
        let names = Names::default();
        let (kept, _) = names.addresses_of(&name("kept.example"));
        for n in 0..3 * MOST {
            let other = name(&format!("n{n}.example"));
            let (four, _) = names.addresses_of(&other);
            assert_eq!(names.target(four.into()), Target::Name(other));
            assert_eq!(names.target(kept.into()), Target::Name(name("kept.example")));
        }
        let table = names.table.lock();
        assert!(table.entries.len() <= MOST);
        assert_eq!(table.entries.len(), table.numbers.len());
        assert!(table.entries.keys().all(|number| *number >= FIRST));
    }
}
