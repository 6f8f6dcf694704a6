//! Who has to go when strangers fill a server's room.
//!
//! Strangers are told apart by where they come from. The one that takes the most room loses its oldest place:
//! a client that opens a thousand connections throws out its own, and one that opens a single connection
//! keeps it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
};

/// Where a client comes from, as far as clients count as one: an address of IPv4, a network of 64 bits of
/// IPv6, of which any machine has as many addresses as it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source(IpAddr);

impl Source {
    /// The source of a client of this address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                Self(IpAddr::V6(Ipv6Addr::from(network)))
            }
            address @ IpAddr::V4(_) => Self(address),
        }
    }
}

/// The place that is taken away when all are taken: the oldest of the source that has the most, of equals the
/// one whose oldest is oldest. `places` are in the order in which they were taken.
#[must_use]
pub fn victim<K: Copy>(places: impl IntoIterator<Item = (K, Source)>) -> Option<K> {
    let mut of_source: BTreeMap<Source, (usize, usize, K)> = BTreeMap::new();
    for (order, (key, source)) in places.into_iter().enumerate() {
        of_source.entry(source).or_insert((0, order, key)).0 += 1;
    }
    let most = of_source.into_values().max_by_key(|(count, oldest, _)| (*count, std::cmp::Reverse(*oldest)));
    most.map(|(_, _, key)| key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(address: &str) -> Source {
        Source::of(address.parse().unwrap())
    }

    #[test]
    fn a_network_of_ipv6_and_an_address_of_ipv4_are_one_source() {
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:1"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
    }

    #[test]
    fn the_oldest_place_of_whoever_has_most_goes() {
        let check = |addresses: &[&str], expected: Option<usize>| {
            let places = addresses.iter().enumerate().map(|(n, address)| (n, source(address)));
            assert_eq!(victim(places), expected, "{addresses:?}");
        };
        check(&[], None);
        check(&["10.0.0.1"], Some(0));
        check(&["10.0.0.1", "10.0.0.2", "10.0.0.2"], Some(1));
        check(&["10.0.0.1", "10.0.0.2", "10.0.0.3"], Some(0));
        check(&["10.0.0.3", "10.0.0.2", "10.0.0.3", "10.0.0.2"], Some(0));
    }
}
