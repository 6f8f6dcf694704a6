//! Selects the connection to drop when strangers have all places of a server.
//!
//! Strangers are distinguished by their source. The source with the most places loses one to a source with
//! fewer: a client that opens a thousand connections drops its own, and a client that opens a single
//! connection keeps it.
//!
//! Of the candidates, the oldest is dropped if it has had time for a handshake and a request. If strangers
//! come so fast that even the oldest has not had that time, the older half keeps its places until it has, and
//! the candidate in the middle is dropped: each newcomer keeps its place while half as many others come,
//! enough for a client that sends its request at once, and some newcomers keep theirs for the whole time.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
};

/// Source of a client: an IPv4 address, or a 64-bit network of IPv6, in which any machine can have any number
/// of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source(IpAddr);

impl Source {
    /// Returns the source of a client of this address.
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

/// A place held by a stranger.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held<K> {
    pub key: K,
    pub source: Source,
    /// True if the stranger has had time for a handshake and a request.
    pub has_settled: bool,
}

/// Returns the place that a newcomer gets when all are taken: one of its own source if that has its share of
/// them, otherwise one of the sources with the most. `places` are in the order of assignment.
pub(super) fn victim<K: Copy>(places: impl Iterator<Item = Held<K>> + Clone, newcomer: Source) -> Option<K> {
    let mut counts: BTreeMap<Source, usize> = BTreeMap::new();
    for held in places.clone() {
        *counts.entry(held.source).or_default() += 1;
    }
    let most = counts.values().copied().max()?;
    let has_its_share = counts.get(&newcomer).is_some_and(|own| own.saturating_add(1) >= most);
    let may_go: Vec<Held<K>> = places
        .filter(|held| match has_its_share {
            true => held.source == newcomer,
            false => counts.get(&held.source) == Some(&most),
        })
        .collect();
    let oldest = may_go.first().filter(|oldest| oldest.has_settled);
    oldest.or_else(|| may_go.get(may_go.len() / 2)).map(|held| held.key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn source(address: &str) -> Source {
        Source::of(address.parse().unwrap())
    }

    fn numbered(last: u8) -> Source {
        Source::of([10, 0, 0, last].into())
    }

    #[test]
    fn a_network_of_ipv6_and_an_address_of_ipv4_are_one_source() {
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:1"));
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
    }

    /// Returns the chosen index when `sources` hold the places and the first `settled` of them have settled.
    fn chosen(sources: &[u8], settled: usize, newcomer: u8) -> Option<usize> {
        let held = sources.iter().enumerate().map(|(key, last)| Held {
            key,
            source: numbered(*last),
            has_settled: key < settled,
        });
        victim(held, numbered(newcomer))
    }

    #[test]
    fn the_oldest_that_has_settled_goes_and_without_one_the_middle() {
        for (sources, settled, newcomer, expected) in [
            (&[][..], 0, 1, None),
            (&[1], 1, 1, Some(0)),
            (&[1], 0, 2, Some(0)),
            // A place of the source with the most.
            (&[1, 2, 2], 3, 3, Some(1)),
            (&[1, 2, 2, 2], 4, 1, Some(1)),
            (&[1, 2, 2, 2, 2], 1, 3, Some(3)),
            // A place of the newcomer's own source, which has its share.
            (&[1, 1, 2, 2], 4, 2, Some(2)),
            (&[1, 1, 2, 2, 1], 5, 2, Some(2)),
            (&[1, 1, 2, 2], 2, 2, Some(3)),
            // All sources have the same number.
            (&[1, 2, 3], 1, 4, Some(0)),
            (&[1, 2, 3], 0, 4, Some(1)),
            (&[2, 1, 2, 1], 4, 3, Some(0)),
            // All places are of one source.
            (&[1, 1, 1, 1], 0, 1, Some(2)),
            (&[1, 1, 1, 1], 1, 1, Some(0)),
        ] {
            assert_eq!(chosen(sources, settled, newcomer), expected, "{sources:?} {settled} {newcomer}");
        }
    }

    proptest! {
        #[test]
        fn a_source_loses_to_another_only_what_is_above_its_share(
            sources in prop::collection::vec(0..8_u8, 1..64), settled in 0..64_usize, newcomer in 0..9_u8,
        ) {
            let loser = sources[chosen(&sources, settled, newcomer).unwrap()];
            let of = |wanted: u8| sources.iter().filter(|last| **last == wanted).count();
            let all: std::collections::BTreeSet<u8> = sources.iter().copied().chain([newcomer]).collect();
            prop_assert!(loser == newcomer || of(loser) >= (sources.len() / all.len()).max(1));
            prop_assert!(loser == newcomer || of(loser) > of(newcomer));
        }

        /// A client keeps the only connection of its source while the sources are fewer than the places.
        #[test]
        fn a_single_connection_stays(
            flood in prop::collection::vec(1..6_u8, 64..400), settles in 0..40_usize, at in 0..64_usize,
        ) {
            let mut places: Vec<u8> = Vec::new();
            for (turn, newcomer) in flood.into_iter().enumerate() {
                for newcomer in (turn == at).then_some(0).into_iter().chain([newcomer]) {
                    if places.len() == 16 {
                        places.remove(chosen(&places, settles % 17, newcomer).unwrap());
                    }
                    places.push(newcomer);
                }
                prop_assert!(turn < at || places.contains(&0));
            }
        }

        /// A connection keeps its place while half as many others of its source come as there are places, at
        /// any speed; and the older half stays until it has settled.
        #[test]
        fn of_one_source_each_has_its_place_for_a_while_and_some_until_they_settle(most in 2..64_usize) {
            let mut places: Vec<usize> = (0..most).collect();
            for newcomer in most..most * 4 {
                let gone = chosen(&vec![1; most], 0, 1).unwrap();
                prop_assert!(gone >= most / 2);
                prop_assert!(newcomer - places.remove(gone) >= most - most / 2);
                places.push(newcomer);
            }
        }
    }
}
