//! The addresses of the node and of its pods: at most one of each family, the primary one first.
//!
//! Follows `nodestatus.NodeAddress` (`pkg/kubelet/nodestatus/setters.go`), `sortPodIPs` and
//! `generateAPIPodStatus` (`pkg/kubelet/kubelet_pods.go`) of Kubernetes 1.36.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use k8s_openapi::api::core::v1::PodStatus;

/// Returns true if the first configured address is IPv6, `::` included: that address decides which family
/// comes first.
#[must_use]
pub fn is_ipv6_first(configured: &[IpAddr]) -> bool {
    configured.first().is_some_and(IpAddr::is_ipv6)
}

/// Returns the configured addresses; empty if the routing table must yield them.
#[must_use]
pub fn configured(all: &[IpAddr]) -> Vec<IpAddr> {
    let mut named: Vec<IpAddr> = all.iter().copied().filter(|ip| !ip.is_unspecified()).collect();
    named.truncate(2);
    named
}

/// Destinations for routing lookups, in this order: addresses for documentation (RFC 5737, RFC 3849), never
/// the node's own.
#[must_use]
pub fn destinations(is_ipv6_first: bool) -> [IpAddr; 2] {
    let v4 = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
    let v6 = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));
    if is_ipv6_first { [v6, v4] } else { [v4, v6] }
}

/// Returns true if other machines may reach the node at the address.
#[must_use]
pub fn is_reachable(address: IpAddr) -> bool {
    let is_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast() || is_local)
}

/// Returns a pod's addresses among all that the runtime reported: the first of each family, the node's family
/// first.
#[must_use]
pub fn sort_pod_ips(reported: &[String], is_ipv6_first: bool) -> Vec<String> {
    let parsed: Vec<IpAddr> = reported.iter().filter_map(|text| text.parse().ok()).collect();
    let first = |v6: bool| parsed.iter().find(|ip| ip.is_ipv6() == v6).map(ToString::to_string);
    [first(is_ipv6_first), first(!is_ipv6_first)].into_iter().flatten().collect()
}

/// Returns the addresses of a pod on the node's network. They stay the same even if the node's change; the
/// second one may be added later.
#[must_use]
pub fn host_network_ips(node: &[IpAddr], before: Option<&PodStatus>) -> Vec<String> {
    let before = before.iter().flat_map(|status| status.pod_ips.iter().flatten());
    let mut ips: Vec<String> = before.map(|address| address.ip.clone()).collect();
    if ips.is_empty() {
        return node.iter().map(ToString::to_string).collect();
    }
    if let ([only], [_, second]) = (ips.as_slice(), node)
        && only.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6() != second.is_ipv6())
    {
        ips.push(second.to_string());
    }
    ips
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PodIP;

    use super::*;

    fn ips(text: &str) -> Vec<IpAddr> {
        text.split_whitespace().map(|ip| ip.parse().unwrap()).collect()
    }

    #[test]
    fn configured_addresses_count_unless_they_only_name_a_family() {
        let check = |all: &str, named: &str, v6_first: bool| {
            let all = ips(all);
            assert_eq!((configured(&all), is_ipv6_first(&all)), (ips(named), v6_first), "{all:?}");
            assert_eq!(destinations(v6_first)[0].is_ipv6(), v6_first);
        };
        check("", "", false);
        check("0.0.0.0", "", false);
        check("::", "", true);
        check("10.0.0.1", "10.0.0.1", false);
        check("fd00::1 10.0.0.1", "fd00::1 10.0.0.1", true);
    }

    #[test]
    fn loopback_and_similar_addresses_are_not_the_nodes() {
        let check = |ip: &str, expected| assert_eq!(is_reachable(ip.parse().unwrap()), expected, "{ip}");
        check("10.0.0.1", true);
        check("fd00::1", true);
        for ip in ["127.0.0.1", "::1", "0.0.0.0", "::", "169.254.1.1", "fe80::1", "224.0.0.1"] {
            check(ip, false);
        }
    }

    #[test]
    fn a_pod_has_one_address_of_each_family_the_nodes_first() {
        let check = |told: &str, v6_first: bool, expected: &str| {
            let told: Vec<String> = told.split_whitespace().map(str::to_owned).collect();
            let sorted = sort_pod_ips(&told, v6_first).join(" ");
            assert_eq!(sorted, expected, "{told:?}");
        };
        check("fd00::7 10.0.0.7", false, "10.0.0.7 fd00::7");
        check("10.0.0.7 fd00::7", true, "fd00::7 10.0.0.7");
        check("10.0.0.7 10.0.0.8 fd00::7 fd00::8", false, "10.0.0.7 fd00::7");
        check("FD00:0::7", false, "fd00::7");
        check("10.0.0.7", true, "10.0.0.7");
        check("nonsense", false, "");
    }

    #[test]
    fn a_pod_on_the_nodes_network_keeps_its_address_and_may_get_a_second() {
        let check = |node: &str, before: &str, expected: &str| {
            let pod_ips = before.split_whitespace().map(|ip| PodIP { ip: ip.to_owned() }).collect();
            let status = PodStatus { pod_ips: Some(pod_ips), ..PodStatus::default() };
            assert_eq!(host_network_ips(&ips(node), Some(&status)).join(" "), expected, "{node}, {before}");
        };
        check("10.0.0.1 fd00::1", "", "10.0.0.1 fd00::1");
        check("10.0.0.1 fd00::1", "10.0.0.1", "10.0.0.1 fd00::1");
        check("10.0.0.2", "10.0.0.1", "10.0.0.1");
        check("fd00::1 10.0.0.1", "10.0.0.1", "10.0.0.1");
        check("", "10.0.0.1", "10.0.0.1");
        check("", "", "");
    }
}
