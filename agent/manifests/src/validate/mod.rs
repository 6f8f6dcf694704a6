//! Validates a completed pod by the rules of the API (`pkg/apis/core/validation`) for the fields that matter
//! to a node. Reports all broken rules, not just the first.
//!
//! Must never check for the agent's own limitations: [`super::support`] does.

mod containers;
mod lifecycle;
mod probes;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};

use beelet_policy::pod::too_much;
use beelet_units::{bounds::LONGEST_GRACE_SECONDS, quantity::Quantity};
use k8s_openapi::api::core::v1::{AppArmorProfile, Container, Pod, PodSpec, SeccompProfile, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::names;
use super::priority;
use beelet_codec::error::Problem;
use beelet_model::pod::is_address;

/// Maximum total size of all annotations, in bytes: the API's own limit.
const ANNOTATIONS_MAX: usize = 256 << 10;

/// Maximum length of an AppArmor profile's name, in bytes: that of a path, as in the API.
const LONGEST_APP_ARMOR_NAME: usize = 4095;

/// Maximum number of name servers of a pod (`validatePodDNSConfig`).
const DNS_SERVERS_MAX: usize = 3;
/// Maximum number of search domains of a pod.
const DNS_SEARCHES_MAX: usize = 32;
/// Maximum total length of all search domains of a pod, in characters.
const DNS_SEARCH_CHARACTERS_MAX: usize = 2048;

/// The problems found so far.
#[derive(Debug, Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(Problem::new(path, message));
    }

    fn extend(&mut self, problems: impl IntoIterator<Item = Problem>) {
        self.0.extend(problems);
    }

    /// Checks that a text is one of the allowed ones.
    fn one_of(&mut self, path: &str, text: Option<&str>, allowed: &[&str]) {
        if let Some(text) = text.filter(|text| !allowed.contains(text)) {
            let list = match allowed.split_last() {
                Some((last, [])) => (*last).to_owned(),
                Some((last, others)) => format!("{} or {last}", others.join(", ")),
                None => String::new(),
            };
            self.add(path, format!("must be {list}, not {}", names::quoted(text)));
        }
    }

    /// Checks that a number lies in a range.
    fn within(&mut self, path: &str, number: Option<i64>, range: std::ops::RangeInclusive<i64>) {
        if let Some(number) = number.filter(|number| !range.contains(number)) {
            let (low, high) = (range.start(), range.end());
            // Omit an upper bound that is only the type's maximum if the number is below the lower bound.
            let is_of_type = *high == i64::MAX || *high == i64::from(i32::MAX);
            let rule = if is_of_type && number < *low {
                format!("must be at least {low}")
            } else {
                format!("must be from {low} to {high}")
            };
            self.add(path, format!("{rule}, not {number}"));
        }
    }
}

/// Returns all problems of a pod.
pub(super) fn pod(pod: &Pod) -> Vec<Problem> {
    let mut problems = Problems::default();
    metadata(&pod.metadata, &mut problems);
    match &pod.spec {
        Some(spec) => pod_spec(spec, &mut problems),
        None => problems.add("spec", "must be set"),
    }
    problems.0
}

fn metadata(metadata: &ObjectMeta, problems: &mut Problems) {
    problems.extend(names::subdomain("metadata.name", metadata.name.as_deref().unwrap_or_default()));
    problems.extend(names::label("metadata.namespace", metadata.namespace.as_deref().unwrap_or_default()));
    if let Some(uid) = &metadata.uid {
        problems.extend(names::uid("metadata.uid", uid));
    }
    for (key, value) in metadata.labels.iter().flatten() {
        problems.extend(names::qualified("metadata.labels", key));
        problems.extend(names::label_value("metadata.labels", key, value));
    }
    let annotations = || metadata.annotations.iter().flatten();
    for (key, _) in annotations() {
        problems.extend(names::qualified("metadata.annotations", &key.to_lowercase()));
    }
    let size: usize = annotations().map(|(key, value)| key.len() + value.len()).sum();
    if size > ANNOTATIONS_MAX {
        problems.add("metadata.annotations", format!("have {size} bytes; {ANNOTATIONS_MAX} are allowed"));
    }
}

fn pod_spec(spec: &PodSpec, problems: &mut Problems) {
    if let Err(error) = too_much::check(spec) {
        // Stop here: checking each of very many items would give very many messages.
        return problems.add(error.path(), error.message());
    }
    let policies = ["Always", "OnFailure", "Never"];
    problems.one_of("spec.restartPolicy", spec.restart_policy.as_deref(), &policies);
    problems.within(
        "spec.terminationGracePeriodSeconds",
        spec.termination_grace_period_seconds,
        0..=LONGEST_GRACE_SECONDS,
    );
    problems.within("spec.activeDeadlineSeconds", spec.active_deadline_seconds, 1..=i32::MAX.into());
    problems.extend(priority::preemption_policy("spec.preemptionPolicy", spec.preemption_policy.as_deref()));
    if let Some(class) = spec.priority_class_name.as_deref().filter(|name| !name.is_empty()) {
        problems.extend(names::subdomain("spec.priorityClassName", class));
    }
    if let Some(hostname) = spec.hostname.as_deref().filter(|name| !name.is_empty()) {
        problems.extend(names::label("spec.hostname", hostname));
    }
    hostnames(spec, problems);
    if let Some(class) = spec.runtime_class_name.as_deref().filter(|name| !name.is_empty()) {
        problems.extend(names::subdomain("spec.runtimeClassName", class));
    }
    amounts("spec.overhead", spec.overhead.as_ref(), problems);
    if let Some(os) = &spec.os {
        problems.one_of("spec.os.name", Some(&os.name), &["linux"]);
    }
    dns(spec, problems);
    namespaces(spec, problems);
    for (i, toleration) in spec.tolerations.iter().flatten().enumerate() {
        tolerations(&format!("spec.tolerations[{i}]"), toleration, problems);
    }
    let volumes = volumes::all(spec, problems);
    all_containers(spec, &volumes, problems);
}

fn hostnames(spec: &PodSpec, problems: &mut Problems) {
    if let Some(subdomain) = spec.subdomain.as_deref().filter(|name| !name.is_empty()) {
        problems.extend(names::label("spec.subdomain", subdomain));
    }
    if let Some(whole) = spec.hostname_override.as_deref().filter(|name| !name.is_empty()) {
        problems.extend(names::subdomain("spec.hostnameOverride", whole));
        if whole.len() > 64 {
            problems.add("spec.hostnameOverride", "must have at most 64 characters");
        }
        if spec.host_network == Some(true) {
            problems.add("spec.hostnameOverride", "can't be set together with hostNetwork");
        }
        if spec.set_hostname_as_fqdn == Some(true) {
            problems.add("spec.hostnameOverride", "can't be set together with setHostnameAsFQDN");
        }
    }
    for (i, alias) in spec.host_aliases.iter().flatten().enumerate() {
        let path = format!("spec.hostAliases[{i}]");
        if !is_address(&alias.ip) {
            problems.add(format!("{path}.ip"), format!("{} is not an IP address", names::quoted(&alias.ip)));
        }
        for (j, name) in alias.hostnames.iter().flatten().enumerate() {
            problems.extend(names::subdomain(&format!("{path}.hostnames[{j}]"), name));
        }
    }
}

/// Checks that quantities are valid and not negative.
fn amounts(path: &str, list: Option<&BTreeMap<String, Amount>>, problems: &mut Problems) {
    for (name, amount) in list.into_iter().flatten() {
        match Quantity::parse(&amount.0) {
            Ok(amount) if amount < Quantity::ZERO => {
                problems.add(beelet_codec::field(path, name), "is negative");
            }
            Ok(_) => {}
            Err(error) => problems.add(beelet_codec::field(path, name), error.to_string()),
        }
    }
}

fn dns(spec: &PodSpec, problems: &mut Problems) {
    let policies = ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"];
    problems.one_of("spec.dnsPolicy", spec.dns_policy.as_deref(), &policies);
    let servers = spec.dns_config.iter().flat_map(|config| config.nameservers.iter().flatten());
    for (i, server) in servers.clone().enumerate() {
        if server.parse::<std::net::IpAddr>().is_err() {
            let path = format!("spec.dnsConfig.nameservers[{i}]");
            problems.add(path, format!("{} is not an IP address", names::quoted(server)));
        }
    }
    let count = servers.count();
    if count == 0 && spec.dns_policy.as_deref() == Some("None") {
        problems.add("spec.dnsPolicy", "None needs at least one of spec.dnsConfig.nameservers");
    }
    if count > DNS_SERVERS_MAX {
        let message = format!("has {count} servers; {DNS_SERVERS_MAX} are allowed");
        problems.add("spec.dnsConfig.nameservers", message);
    }
    dns_searches(spec, problems);
}

fn dns_searches(spec: &PodSpec, problems: &mut Problems) {
    let Some(config) = &spec.dns_config else { return };
    let (path, searches) = ("spec.dnsConfig.searches", config.searches.as_deref().unwrap_or_default());
    if searches.len() > DNS_SEARCHES_MAX {
        problems.add(path, format!("has {} domains; {DNS_SEARCHES_MAX} are allowed", searches.len()));
    }
    let characters = searches.iter().map(|search| search.len() + 1).sum::<usize>().saturating_sub(1);
    if characters > DNS_SEARCH_CHARACTERS_MAX {
        let rule = format!("has {characters} characters in total; {DNS_SEARCH_CHARACTERS_MAX} are allowed");
        problems.add(path, rule);
    }
    for (i, search) in searches.iter().enumerate().filter(|(_, search)| *search != ".") {
        // Names of services may contain underscores.
        let name = search.strip_suffix('.').unwrap_or(search).replace('_', "-");
        problems.extend(names::subdomain(&format!("{path}[{i}]"), name.trim_matches('-')));
    }
    for (i, option) in config.options.iter().flatten().enumerate() {
        if option.name.as_deref().unwrap_or_default().is_empty() {
            problems.add(format!("spec.dnsConfig.options[{i}].name"), "must be set");
        }
    }
}

fn namespaces(spec: &PodSpec, problems: &mut Problems) {
    if spec.share_process_namespace == Some(true) && spec.host_pid == Some(true) {
        problems.add("spec.shareProcessNamespace", "can't be true together with spec.hostPID");
    }
    let shared = [("hostNetwork", spec.host_network), ("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)];
    for (field, _) in
        shared.iter().filter(|(_, shared)| spec.host_users == Some(false) && *shared == Some(true))
    {
        problems.add(format!("spec.{field}"), "can't be true if spec.hostUsers is false");
    }
    let context = spec.security_context.as_ref();
    for (i, sysctl) in context.and_then(|c| c.sysctls.as_ref()).into_iter().flatten().enumerate() {
        let allowed =
            |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_' | b'.' | b'/');
        if sysctl.name.is_empty() || sysctl.name.len() > 253 || !sysctl.name.bytes().all(allowed) {
            let path = format!("spec.securityContext.sysctls[{i}].name");
            problems.add(path, format!("{} is not a sysctl's name", names::quoted(&sysctl.name)));
        }
    }
    let ids = [
        ("runAsUser", context.and_then(|c| c.run_as_user)),
        ("runAsGroup", context.and_then(|c| c.run_as_group)),
        ("fsGroup", context.and_then(|c| c.fs_group)),
    ];
    for (field, id) in ids {
        problems.within(&format!("spec.securityContext.{field}"), id, 0..=i32::MAX.into());
    }
    let Some(context) = context else { return };
    for (i, group) in context.supplemental_groups.iter().flatten().enumerate() {
        let path = format!("spec.securityContext.supplementalGroups[{i}]");
        problems.within(&path, Some(*group), 0..=i32::MAX.into());
    }
    let path = |field: &str| format!("spec.securityContext.{field}");
    let policies = ["OnRootMismatch", "Always"];
    problems.one_of(&path("fsGroupChangePolicy"), context.fs_group_change_policy.as_deref(), &policies);
    let policies = ["MountOption", "Recursive"];
    problems.one_of(&path("seLinuxChangePolicy"), context.se_linux_change_policy.as_deref(), &policies);
    let policies = ["Merge", "Strict"];
    let policy = context.supplemental_groups_policy.as_deref();
    problems.one_of(&path("supplementalGroupsPolicy"), policy, &policies);
    seccomp(&path("seccompProfile"), context.seccomp_profile.as_ref(), problems);
    app_armor(&path("appArmorProfile"), context.app_armor_profile.as_ref(), problems);
}

/// Checks an AppArmor profile; a Localhost profile has the kernel's name.
fn app_armor(path: &str, profile: Option<&AppArmorProfile>, problems: &mut Problems) {
    let Some(profile) = profile else { return };
    let kinds = ["RuntimeDefault", "Unconfined", "Localhost"];
    problems.one_of(&format!("{path}.type"), Some(&profile.type_), &kinds);
    let name = profile.localhost_profile.as_deref().unwrap_or_default();
    let path = format!("{path}.localhostProfile");
    match (profile.type_.as_str(), name.trim()) {
        ("Localhost", "") => problems.add(path, "must be set to the profile's name"),
        ("Localhost", trimmed) if trimmed != name => problems.add(path, "must not begin or end with a space"),
        ("Localhost", _) if name.len() > LONGEST_APP_ARMOR_NAME => {
            problems.add(path, format!("must not be longer than {LONGEST_APP_ARMOR_NAME}"));
        }
        ("Localhost", _) | (_, "") => {}
        (_, _) => problems.add(path, "is for the type Localhost only"),
    }
}

/// Checks a seccomp profile; a Localhost profile is a file in the profile folder.
fn seccomp(path: &str, profile: Option<&SeccompProfile>, problems: &mut Problems) {
    let Some(profile) = profile else { return };
    let kinds = ["RuntimeDefault", "Unconfined", "Localhost"];
    problems.one_of(&format!("{path}.type"), Some(&profile.type_), &kinds);
    let file = profile.localhost_profile.as_deref().unwrap_or_default();
    let path = format!("{path}.localhostProfile");
    match (profile.type_.as_str(), file) {
        ("Localhost", "") => problems.add(path, "must be set to the profile's file"),
        ("Localhost", file) => problems.extend(names::inner_path(&path, file)),
        (_, "") => {}
        (_, _) => problems.add(path, "is for the type Localhost only"),
    }
}

fn tolerations(path: &str, toleration: &Toleration, problems: &mut Problems) {
    let operators = ["", "Exists", "Equal", "Lt", "Gt"];
    problems.one_of(&format!("{path}.operator"), toleration.operator.as_deref(), &operators);
    let effects = ["", "NoSchedule", "PreferNoSchedule", "NoExecute"];
    problems.one_of(&format!("{path}.effect"), toleration.effect.as_deref(), &effects);
}

fn all_containers(spec: &PodSpec, volumes: &BTreeSet<&str>, problems: &mut Problems) {
    if spec.containers.is_empty() {
        problems.add("spec.containers", "must have at least one container");
    }
    let listed = |list: &'static str, init: bool, containers: &'_ [Container]| {
        let place = move |i: usize| containers::Place { path: format!("spec.{list}[{i}]"), init };
        (0..containers.len()).map(place).collect::<Vec<_>>()
    };
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let places =
        listed("initContainers", true, init).into_iter().chain(listed("containers", false, &spec.containers));
    containers::pod_resources(spec, problems);
    let mut seen = containers::Seen::default();
    for (place, container) in places.zip(init.iter().chain(&spec.containers)) {
        containers::container(&place, container, spec, volumes, &mut seen, problems);
    }
}
