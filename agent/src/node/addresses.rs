//! The node's own addresses: the configured ones, or the source address of the default route. The route is
//! queried repeatedly: a machine may boot before its network, and be renumbered.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use beelet_model::pod::HostIps;
use beelet_policy::node::addresses::{configured, destinations, is_ipv6_first, is_reachable};
use tracing::{error, info};

/// Cache time of the address, which every status needs.
const FRESH: Duration = Duration::from_secs(5);

/// Returns the addresses of a node with these `--node-ip`s.
pub(super) fn of(all: &[IpAddr]) -> HostIps {
    let (named, v6_first) = (configured(all), is_ipv6_first(all));
    if !named.is_empty() {
        return HostIps::fixed(named);
    }
    let found = Mutex::new(Found::default());
    HostIps::new(v6_first, move || {
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        found.at(Instant::now(), || {
            destinations(v6_first).into_iter().find_map(|to| routed(to).ok().flatten())
        })
    })
}

/// The cached address.
#[derive(Default)]
struct Found {
    address: Option<IpAddr>,
    asked: Option<Instant>,
}

impl Found {
    fn at(&mut self, now: Instant, ask: impl FnOnce() -> Option<IpAddr>) -> Vec<IpAddr> {
        if self.asked.is_none_or(|asked| now.saturating_duration_since(asked) >= FRESH) {
            let before = std::mem::replace(&mut self.address, ask());
            self.report(before);
            self.asked = Some(now);
        }
        self.address.into_iter().collect()
    }

    /// Logs a change of the address.
    fn report(&self, before: Option<IpAddr>) {
        match (before, self.address) {
            (_, None) if before.is_some() || self.asked.is_none() => error!(
                "this machine has no reachable address because it has no default route; its Node and the pods on its \
                 network have no address until then: set up the network, or set --node-ip"
            ),
            (None, Some(address)) if self.asked.is_some() => {
                info!(%address, "this machine has an address now");
            }
            (Some(before), Some(address)) if before != address => {
                info!(%before, %address, "this machine's address has changed");
            }
            _ => {}
        }
    }
}

/// Returns the source address of packets to `to`. Connecting a UDP socket queries the routing table and sends
/// nothing.
fn routed(to: IpAddr) -> io::Result<Option<IpAddr>> {
    let any: IpAddr = if to.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((to, 9))?;
    Ok(Some(socket.local_addr()?.ip()).filter(|ip| is_reachable(*ip)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_comes_late_or_changes_is_found_and_one_that_is_fresh_is_not_asked_for() {
        let mut found = Found::default();
        let began = Instant::now();
        let (one, two) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let mut check = |after: u64, routed: Option<IpAddr>, expected: Option<IpAddr>| {
            let now = began + Duration::from_secs(after);
            assert_eq!(found.at(now, || routed), expected.into_iter().collect::<Vec<_>>(), "after {after} s");
        };
        check(0, None, None);
        check(1, Some(one), None);
        check(5, Some(one), Some(one));
        check(10, Some(two), Some(two));
        check(15, None, None);
    }

    #[test]
    fn configured_addresses_are_taken_as_they_are() {
        let both: Vec<IpAddr> = vec!["fd00::1".parse().unwrap(), "10.0.0.1".parse().unwrap()];
        let host = of(&both);
        assert_eq!(host.now(), both);
        assert!(host.is_ipv6_first);
        assert!(of(&["::".parse().unwrap()]).is_ipv6_first);
    }

    #[test]
    fn the_loopback_interface_is_no_way_out() {
        assert_eq!(routed([127, 0, 0, 1].into()).unwrap(), None);
    }
}
