//! Places for links, and the addresses that follow from them.
//!
//! Everything is arithmetic on the slot's number: the guest's two addresses, and the name and index of the gateway's end of
//! its link. So the source check needs no table, and nothing has to be remembered over a restart.
//!
//! The networks are ones that nobody has a host in: 198.18.0.0/15 is set aside for measuring equipment (RFC 2544), and the
//! random part of the private `fd61:746f:6c6c::/48` is the word "atoll".

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The next hop of every guest. Whichever address it asks, the gateway answers; this one belongs into `resolv.conf`.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd61, 0x746f, 0x6c6c, 0x18, 0, 0, 0, 1);
/// The same at the ends of every link: a link has just these two.
pub const GATEWAY_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// Large, as no packet of a link ever leaves the machine; the best of those tried for gVisor. An Ethernet header on top
/// still fits into 16 bits.
pub const MTU: u32 = 65520;

/// Guests' addresses begin here; slot 0 is not used.
pub(crate) const FIRST_V4: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 0);
pub(crate) const FIRST_V6: Ipv6Addr = Ipv6Addr::new(0xfd61, 0x746f, 0x6c6c, 0x19, 0, 0, 0, 0);
/// The index of the gateway's end of slot 0; the gateway has no other interfaces than these and `lo`.
pub(crate) const FIRST_INDEX: u32 = 1000;

/// One of the places for a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u16);

impl Slot {
    /// How many there are.
    pub const COUNT: u16 = 16384;
    pub(crate) const FIRST: Self = Self(1);

    fn new(number: u32) -> Option<Self> {
        let number = u16::try_from(number).ok()?;
        (1..=Self::COUNT).contains(&number).then_some(Self(number))
    }

    /// Whose guest this is. Only for packets that came out of the gateway, where the source was checked.
    pub fn of_source(address: IpAddr) -> Option<Self> {
        match address {
            IpAddr::V4(address) => Self::new(address.to_bits().checked_sub(FIRST_V4.to_bits())?),
            IpAddr::V6(address) => {
                let number = address.to_bits().checked_sub(FIRST_V6.to_bits())?;
                Self::new(u32::try_from(number).ok()?)
            }
        }
    }

    pub(crate) fn of_index(index: u32) -> Option<Self> {
        Self::new(index.checked_sub(FIRST_INDEX)?)
    }

    /// The one behind this; after the last comes the first.
    pub(crate) fn next(self) -> Self {
        Self(self.0 % Self::COUNT + 1)
    }

    pub fn v4(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(FIRST_V4.to_bits() + u32::from(self.0))
    }

    pub fn v6(self) -> Ipv6Addr {
        Ipv6Addr::from_bits(FIRST_V6.to_bits() + u128::from(self.0))
    }

    pub(crate) fn index(self) -> u32 {
        FIRST_INDEX + u32::from(self.0)
    }

    /// What the gateway's end is called.
    pub(crate) fn name(self) -> String {
        format!("s{}", self.0)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_back_to_their_slot_and_others_to_none() {
        let mut slot = Slot::FIRST;
        for _ in 0..Slot::COUNT {
            assert_eq!(Slot::of_source(slot.v4().into()), Some(slot));
            assert_eq!(Slot::of_source(slot.v6().into()), Some(slot));
            assert_eq!(Slot::of_index(slot.index()), Some(slot));
            slot = slot.next();
        }
        assert_eq!(slot, Slot::FIRST);
        assert_eq!(Slot::FIRST.v4().to_string(), "198.19.0.1");
        assert_eq!(Slot::FIRST.v6().to_string(), "fd61:746f:6c6c:19::1");
        for stranger in [
            "198.19.0.0",
            "198.19.64.1",
            "198.18.0.1",
            "127.0.0.1",
            "fd61:746f:6c6c:19::",
            "fd61:746f:6c6c:19::4001",
            "fd61:746f:6c6c:19:1::1",
            "fd61:746f:6c6c:18::1",
            "::1",
            "::ffff:198.19.0.1",
        ] {
            assert_eq!(Slot::of_source(stranger.parse().unwrap()), None, "{stranger}");
        }
        assert_eq!(Slot::of_index(1), None);
        assert_eq!(Slot::of_index(FIRST_INDEX), None);
    }
}
