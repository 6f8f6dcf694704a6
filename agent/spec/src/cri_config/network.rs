//! A pod's network settings for the runtime: names, name resolution, host ports.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet, hash_map::Entry};
use std::net::Ipv6Addr;

use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

use crate::Error;
use beelet_model::origin::Origin;
use beelet_model::pod::NodeFacts;
use beelet_model::table::PodName;

/// Longest hostname of Linux, without its final zero.
const HOSTNAME_MAX: usize = 63;
/// Longest hostname from `setHostnameAsFQDN`.
const FQDN_MAX: usize = 64;
/// Number of name servers that the C library uses.
const SERVERS_MAX: usize = 3;
/// The kubelet's limit of domains in a search list, and of all their characters
/// (`validation.MaxDNSSearchPaths`, `MaxDNSSearchListChars`).
const SEARCHES_MAX: usize = 32;
const SEARCH_CHARACTERS_MAX: usize = 2048;
/// Longest domain of a search list: glibc 2.28 aborts at longer ones.
const SEARCH_MAX: usize = 253;

/// Hostname of a pod, and its domain, if any.
pub struct HostName {
    /// The first label.
    pub name: String,
    /// `subdomain.namespace.svc.clusterDomain`.
    pub domain: Option<String>,
}

impl HostName {
    /// Computes the name, like `GeneratePodHostNameAndDomain` in the kubelet.
    pub fn of(spec: &core::PodSpec, name: &PodName, node: &NodeFacts) -> Self {
        let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(whole) = set(&spec.hostname_override) {
            return Self { name: whole, domain: None };
        }
        let wanted = set(&spec.hostname).unwrap_or_else(|| name.name.clone());
        let short: String = wanted.chars().take(HOSTNAME_MAX).collect();
        // Without a cluster domain the name ends with a dot, as in the kubelet.
        let of_cluster = |subdomain| format!("{subdomain}.{}.svc.{}", name.namespace, node.cluster_domain);
        let domain = set(&spec.subdomain).map(of_cluster);
        Self { name: short.trim_end_matches(['-', '.']).to_owned(), domain }
    }

    /// Returns `name.domain`, if the pod has a domain.
    pub fn qualified(&self) -> Option<String> {
        self.domain.as_ref().map(|domain| format!("{}.{domain}", self.name))
    }
}

/// Returns the hostname for the kernel.
pub(super) fn hostname(spec: &core::PodSpec, name: &PodName, node: &NodeFacts) -> Result<String, Error> {
    if spec.host_network == Some(true) {
        // The pod has the machine's hostname, and no namespace to set another: runc refuses to try.
        return Ok(String::new());
    }
    let host = HostName::of(spec, name, node);
    let Some(fqdn) = host.qualified().filter(|_| spec.set_hostname_as_fqdn == Some(true)) else {
        return Ok(host.name);
    };
    if fqdn.len() > FQDN_MAX {
        return Err(Error::LongHostName { name: fqdn, most: FQDN_MAX });
    }
    Ok(fqdn)
}

/// Returns the name resolution by dnsPolicy, with dnsConfig's additions, within the limits of the C library.
pub(super) fn dns(spec: &core::PodSpec, namespace: &str, node: &NodeFacts) -> cri::DnsConfig {
    resolution(spec, namespace, node).0
}

/// Returns a pod's name resolution, from the node's last reading of its own.
pub fn name_resolution(pod: &core::Pod, node: &NodeFacts) -> cri::DnsConfig {
    let spec = pod.spec.as_ref().map_or_else(Cow::default, Cow::Borrowed);
    dns(&spec, &PodName::of(pod).namespace, node)
}

/// Returns the reasons and messages about requested but omitted name resolution, as in the kubelet.
pub fn dns_warnings(pod: &core::Pod, node: &NodeFacts) -> Vec<(&'static str, String)> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let PodName { namespace, name } = PodName::of(pod);
    let left_out = resolution(spec, &namespace, node).1.into_iter().map(|what| ("DNSConfigForming", what));
    let policy = spec.dns_policy.as_deref().unwrap_or("ClusterFirst");
    let of_cluster =
        policy == "ClusterFirstWithHostNet" || policy == "ClusterFirst" && spec.host_network != Some(true);
    // A node without a cluster needs no cluster DNS.
    let missing = of_cluster && node.cluster_dns.is_empty() && Origin::of(pod).is_api();
    let missing = missing.then(|| {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let message = format!(
            "pod: \"{name}_{namespace}({uid})\". kubelet does not have ClusterDNS IP configured and cannot create Pod using \
             \"ClusterFirst\" policy. Falling back to \"Default\" policy."
        );
        ("MissingClusterDNS", message)
    });
    left_out.chain(missing).collect()
}

/// Returns the name resolution, and its omitted parts.
fn resolution(spec: &core::PodSpec, namespace: &str, node: &NodeFacts) -> (cri::DnsConfig, Vec<String>) {
    let on_host_network = spec.host_network == Some(true);
    let mut dns = match spec.dns_policy.as_deref().unwrap_or("ClusterFirst") {
        "None" => cri::DnsConfig::default(),
        "ClusterFirst" if !on_host_network => cluster_dns(namespace, node),
        "ClusterFirstWithHostNet" => cluster_dns(namespace, node),
        _ => node.host_dns.last(),
    };
    if !on_host_network {
        dns.servers.retain(|server| !is_of_a_link(server));
    }
    if let Some(extra) = &spec.dns_config {
        dns.servers.extend(extra.nameservers.iter().flatten().cloned());
        dns.searches.extend(extra.searches.iter().flatten().cloned());
        dns.options = options(dns.options, extra.options.as_deref().unwrap_or_default());
    }
    dns.servers = once_each(std::mem::take(&mut dns.servers));
    dns.searches = once_each(std::mem::take(&mut dns.searches));
    let left_out = limit(&mut dns);
    (dns, left_out)
}

/// Returns true for a name server on a link of the machine, such as `fe80::1%3`: in a network namespace of
/// its own a pod lacks that link, and its resolver fails at the address (kubernetes #140844; the kubelet of
/// 1.38).
fn is_of_a_link(server: &str) -> bool {
    let address = server.split_once('%').and_then(|(address, _)| address.parse::<Ipv6Addr>().ok());
    address.is_some_and(|address| address.segments()[0] & 0xffc0 == 0xfe80)
}

/// Adds `more` options; one of the same name (`ndots:5`, `ndots:2`) is replaced in its place. The API does
/// not limit their number.
fn options(own: Vec<String>, more: &[core::PodDNSConfigOption]) -> Vec<String> {
    let name_of = |option: &str| option.split(':').next().unwrap_or_default().to_owned();
    let mut places = HashMap::new();
    let mut all: Vec<String> = Vec::new();
    let more = more.iter().filter_map(|option| {
        let (name, value) = (option.name.as_ref()?, option.value.as_ref());
        Some((name.clone(), value.map_or_else(|| name.clone(), |value| format!("{name}:{value}"))))
    });
    let own = own.into_iter().map(|option| (name_of(&option), option));
    for (name, option) in own.chain(more) {
        match places.entry(name) {
            Entry::Occupied(place) => all[*place.get()] = option,
            Entry::Vacant(new) => {
                new.insert(all.len());
                all.push(option);
            }
        }
    }
    all
}

fn once_each(list: Vec<String>) -> Vec<String> {
    let mut known = HashSet::new();
    list.into_iter().filter(|item| known.insert(item.clone())).collect()
}

/// Omits entries that C libraries ignore or crash on, and returns messages about them
/// (`formDNSConfigFitsLimits`).
fn limit(dns: &mut cri::DnsConfig) -> Vec<String> {
    let mut said = Vec::new();
    if dns.servers.len() > SERVERS_MAX {
        dns.servers.truncate(SERVERS_MAX);
        said.push(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            dns.servers.join(" ")
        ));
    }
    let before = dns.searches.len();
    dns.searches.truncate(SEARCHES_MAX);
    dns.searches.retain(|domain| domain.len() <= SEARCH_MAX);
    let mut length = 0;
    let fits = |domain: &&String| {
        length += domain.len() + 1;
        // No space follows the last domain.
        length <= SEARCH_CHARACTERS_MAX + 1
    };
    let searches = dns.searches.iter().take_while(fits).count();
    dns.searches.truncate(searches);
    if dns.searches.len() < before {
        said.push(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            dns.searches.join(" ")
        ));
    }
    said
}

/// Returns the cluster's name servers and search list, or the node's own without a cluster.
fn cluster_dns(namespace: &str, node: &NodeFacts) -> cri::DnsConfig {
    if node.cluster_dns.is_empty() {
        return node.host_dns.last();
    }
    let domain = &node.cluster_domain;
    let mut searches = Vec::new();
    if !domain.is_empty() {
        searches.extend([format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.clone()]);
    }
    searches.extend(node.host_dns.last().searches.into_iter().filter(|domain| domain != "."));
    cri::DnsConfig {
        servers: node.cluster_dns.iter().map(ToString::to_string).collect(),
        searches,
        options: vec!["ndots:5".to_owned()],
    }
}

/// Returns the ports that the network plugin forwards to the pod.
pub(super) fn port_mappings(spec: &core::PodSpec) -> Vec<cri::PortMapping> {
    if spec.host_network == Some(true) {
        return Vec::new();
    }
    let ports = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .flat_map(|c| c.ports.iter().flatten());
    ports
        .filter(|p| p.host_port.unwrap_or(0) > 0)
        .map(|p| cri::PortMapping {
            protocol: match p.protocol.as_deref() {
                Some("UDP") => cri::Protocol::Udp,
                Some("SCTP") => cri::Protocol::Sctp,
                _ => cri::Protocol::Tcp,
            }
            .into(),
            container_port: p.container_port,
            host_port: p.host_port.unwrap_or(0),
            host_ip: p.host_ip.clone().unwrap_or_default(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use beelet_model::pod::HostDns;

    use super::*;
    use crate::fixtures::node;

    fn spec(value: Value) -> core::PodSpec {
        let mut value = value;
        value["containers"] = json!([]);
        serde_json::from_value(value).unwrap()
    }

    fn name() -> PodName {
        PodName { namespace: "shop".to_owned(), name: "web-n1".to_owned() }
    }

    #[test]
    fn hostnames() {
        let check = |value: Value, expected: Result<&str, &str>| {
            let shown = hostname(&spec(value.clone()), &name(), &node());
            match (&shown, expected) {
                (Ok(shown), Ok(expected)) => assert_eq!(shown, expected, "{value}"),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                _ => panic!("{value}: {shown:?}"),
            }
        };
        check(json!({}), Ok("web-n1"));
        check(json!({"hostname": "www"}), Ok("www"));
        check(json!({"hostname": "www", "subdomain": "front"}), Ok("www"));
        check(
            json!({"hostname": "www", "subdomain": "front", "setHostnameAsFQDN": true}),
            Ok("www.front.shop.svc.cluster.test"),
        );
        check(json!({"setHostnameAsFQDN": true}), Ok("web-n1"));
        check(
            json!({"hostname": "w".repeat(40), "subdomain": "front", "setHostnameAsFQDN": true}),
            Err("is too long (64 characters is the max, 68 characters requested)"),
        );
        check(json!({"hostNetwork": true, "hostname": "www"}), Ok(""));
        check(json!({"hostnameOverride": "a.b.c", "subdomain": "x"}), Ok("a.b.c"));
        check(json!({"hostname": format!("{}-.", "a".repeat(62))}), Ok(&"a".repeat(62)));
    }

    #[test]
    fn a_name_server_on_a_link_of_the_machine_is_for_pods_on_its_network_alone() {
        let mut node = node();
        let servers = ["fe80::29c:2ff:fea9:fdd0%3", "febf::1%eth0", "2001:db8::53", "fe80::1", "192.0.2.53"];
        let host_dns = cri::DnsConfig {
            servers: servers.iter().map(ToString::to_string).collect(),
            ..cri::DnsConfig::default()
        };
        node.host_dns = HostDns::fixed(host_dns);
        node.cluster_dns = Vec::new();
        let check = |value: Value, expected: &[&str]| {
            assert_eq!(dns(&spec(value.clone()), "shop", &node).servers, expected, "{value}");
        };
        let elsewhere = &["2001:db8::53", "fe80::1", "192.0.2.53"];
        check(json!({"dnsPolicy": "Default"}), elsewhere);
        // Without the cluster's own servers they are the machine's as well.
        check(json!({}), elsewhere);
        check(json!({"dnsPolicy": "Default", "hostNetwork": true}), &servers[..3]);
        // A server in the pod's own spec is kept.
        let own = json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["fe80::1%eth0"]}});
        check(own, &["fe80::1%eth0"]);
    }

    #[test]
    fn name_resolution_follows_the_policy() {
        let own = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let check = |value: Value, servers: &[&str], searches: &[&str], options: &[&str]| {
            let dns = dns(&spec(value.clone()), "shop", &node());
            assert_eq!(
                (dns.servers, dns.searches, dns.options),
                (own(servers), own(searches), own(options)),
                "{value}"
            );
        };
        let cluster = ["shop.svc.cluster.test", "svc.cluster.test", "cluster.test", "host.test"];
        check(json!({}), &["10.96.0.10"], &cluster, &["ndots:5"]);
        check(json!({"hostNetwork": true}), &["192.0.2.53"], &["host.test"], &["rotate"]);
        check(
            json!({"hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"}),
            &["10.96.0.10"],
            &cluster,
            &["ndots:5"],
        );
        check(json!({"dnsPolicy": "Default"}), &["192.0.2.53"], &["host.test"], &["rotate"]);
        let config = json!({"nameservers": ["1.1.1.1", "1.1.1.1", "2.2.2.2"], "searches": ["x"],
            "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]});
        check(
            json!({"dnsPolicy": "None", "dnsConfig": config}),
            &["1.1.1.1", "2.2.2.2"],
            &["x"],
            &["ndots:2", "edns0"],
        );
        let mut searches = cluster.to_vec();
        searches.push("x");
        check(
            json!({"dnsConfig": config}),
            &["10.96.0.10", "1.1.1.1", "2.2.2.2"],
            &searches,
            &["ndots:2", "edns0"],
        );
    }

    #[test]
    fn no_more_is_handed_on_than_the_c_library_reads() {
        let many: Vec<String> = (0..40).map(|i| format!("d{i}")).collect();
        let config = json!({"nameservers": ["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4"], "searches": many});
        let dns = dns(&spec(json!({"dnsPolicy": "None", "dnsConfig": config})), "shop", &node());
        assert_eq!((dns.servers.len(), dns.searches.len()), (3, 32));
        let pod: core::Pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "annotations": {"kubernetes.io/config.source": "api"}},
            "spec": {"containers": [], "dnsConfig": config},
        }))
        .unwrap();
        let said = dns_warnings(&pod, &node());
        assert_eq!(said.iter().map(|(reason, _)| *reason).collect::<Vec<_>>(), ["DNSConfigForming"; 2]);
        assert!(
            said[0].1.ends_with("the applied nameserver line is: 10.96.0.10 1.1.1.1 2.2.2.2"),
            "{said:?}"
        );
        let without = NodeFacts { cluster_dns: Vec::new(), ..node() };
        assert!(dns_warnings(&pod, &without).iter().any(|(reason, _)| *reason == "MissingClusterDNS"));
        let long = json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["1.1.1.1"], "searches": ["x".repeat(254), "y"]}});
        assert_eq!(super::dns(&spec(long), "shop", &node()).searches, ["y"]);
    }

    #[test]
    fn very_many_options_and_domains_are_looked_at_once() {
        // A quadratic algorithm would need 10^10 comparisons.
        let option = |n: usize| json!({"name": format!("o{}", n % 100_000), "value": n.to_string()});
        let options: Vec<Value> = (0..200_000).map(option).collect();
        let searches: Vec<String> = (0..200_000).map(|n| format!("d{n}")).collect();
        let spec =
            spec(json!({"dnsPolicy": "None", "dnsConfig": {"options": options, "searches": searches}}));
        let (dns, left_out) = resolution(&spec, "shop", &node());
        assert_eq!((dns.options.len(), dns.searches.len(), left_out.len()), (100_000, SEARCHES_MAX, 1));
        assert_eq!((dns.options[0].as_str(), dns.options[99_999].as_str()), ("o0:100000", "o99999:199999"));
    }

    #[test]
    fn host_ports_are_forwarded_unless_the_network_is_the_hosts() {
        let ports = json!([{"containerPort": 80, "hostPort": 8080, "hostIP": "127.0.0.1"}, {"containerPort": 53, "hostPort": 53, "protocol": "UDP"}, {"containerPort": 1}]);
        let mut spec: core::PodSpec =
            serde_json::from_value(json!({"containers": [{"name": "c", "ports": ports}]})).unwrap();
        let mapped = port_mappings(&spec);
        let shown: Vec<_> = mapped
            .iter()
            .map(|p| (p.host_port, p.container_port, p.host_ip.as_str(), p.protocol()))
            .collect();
        assert_eq!(shown, [(8080, 80, "127.0.0.1", cri::Protocol::Tcp), (53, 53, "", cri::Protocol::Udp)]);
        spec.host_network = Some(true);
        assert!(port_mappings(&spec).is_empty());
    }
}
