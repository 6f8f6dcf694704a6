//! Resources that pods don't get: reservations for daemons, and the cgroups that limit the daemons to them.

use std::collections::BTreeMap;

use beelet_units::{cpu_list, quantity::Quantity};

use super::error::Problem;
use super::kubelet::KubeletWire;
use super::values::Amounts;
use super::{Config, ReservedCgroup};

/// Valid items of enforceNodeAllocatable.
const ENFORCEABLE: [&str; 5] = [
    "pods",
    "system-reserved",
    "kube-reserved",
    "system-reserved-compressible",
    "kube-reserved-compressible",
];
/// Warning for disabled enforcement.
const ALWAYS_ENFORCED: &str =
    "\"none\" has no effect: the node's unreserved resources always limit the cgroup of all pods";
const RESERVABLE: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];

fn quantity(field: String, text: &str) -> Result<Quantity, Problem> {
    match Quantity::parse(text) {
        Ok(quantity) if quantity >= Quantity::default() => Ok(quantity),
        Ok(_) => Err(Problem::new(field, format!("{text:?} is below zero"))),
        Err(error) => Err(Problem::new(field, error.to_string())),
    }
}

fn reserved(field: &str, wire: &Option<Amounts>) -> Result<BTreeMap<String, Quantity>, Problem> {
    let mut amounts = BTreeMap::new();
    for (name, amount) in wire.iter().flat_map(|wire| &wire.0) {
        if !RESERVABLE.contains(&name.as_str()) {
            let message = format!("cannot be reserved; {} can", RESERVABLE.join(", "));
            return Err(Problem::new(format!("{field}.{name}"), message));
        }
        amounts.insert(name.clone(), quantity(format!("{field}.{name}"), amount)?);
    }
    Ok(amounts)
}

/// Returns `systemReserved` and `kubeReserved`. `reservedSystemCPUs`, if set, replaces both `cpu` amounts.
pub(super) fn amounts(wire: &mut KubeletWire) -> Result<[BTreeMap<String, Quantity>; 2], Problem> {
    let mut system = reserved("systemReserved", &wire.system_reserved)?;
    let mut kube = reserved("kubeReserved", &wire.kube_reserved)?;
    wire.reserved_system_cpus.take_if(|list| list.is_empty());
    if let Some(list) = wire.reserved_system_cpus.as_deref() {
        let cpus = cpu_list::parse(list).ok_or_else(|| {
            Problem::new("reservedSystemCPUs", format!("{list:?} is not a list of CPUs, e.g. 0-3,8"))
        })?;
        let count = i64::try_from(cpus.len()).unwrap_or(i64::MAX);
        system.insert("cpu".to_owned(), Quantity::from_units(count));
        kube.remove("cpu");
        let written = &mut wire.system_reserved.get_or_insert_default().0;
        written.insert("cpu".to_owned(), count.to_string());
        wire.kube_reserved.get_or_insert_default().0.remove("cpu");
    }
    // The effective document has the amounts as written, as a kubelet's: programs compare the texts.
    wire.system_reserved.get_or_insert_default();
    wire.kube_reserved.get_or_insert_default();
    Ok([system, kube])
}

/// Checks the settings of enforcement. Cgroups by QoS class and the limit of all pods can't be turned off.
pub(super) fn check_enforcement(wire: &mut KubeletWire, partly: &mut Vec<Problem>) -> Result<(), Problem> {
    if wire.cgroups_per_qos.replace(true) == Some(false) {
        let message = "false has no effect: pods always run in cgroups by QoS class";
        partly.push(Problem::new("cgroupsPerQOS", message));
    }
    let enforced = wire.enforce_node_allocatable.as_deref().unwrap_or_default();
    if wire.enforce_node_allocatable.as_ref().is_some_and(Vec::is_empty) {
        partly.push(Problem::new("enforceNodeAllocatable", ALWAYS_ENFORCED));
    }
    for (index, item) in enforced.iter().enumerate() {
        let message = match item.as_str() {
            item if ENFORCEABLE.contains(&item) => continue,
            "none" => {
                partly.push(Problem::new(format!("enforceNodeAllocatable[{index}]"), ALWAYS_ENFORCED));
                continue;
            }
            other => format!("{other:?} is not one of {}", ENFORCEABLE.join(", ")),
        };
        return Err(Problem::new(format!("enforceNodeAllocatable[{index}]"), message));
    }
    let both = |name: &str| {
        enforced.iter().any(|item| item == name)
            && enforced.iter().any(|item| *item == format!("{name}-compressible"))
    };
    if let Some(name) = ["system-reserved", "kube-reserved"].into_iter().find(|name| both(name)) {
        let message = format!("{name} and {name}-compressible exclude each other; keep one");
        return Err(Problem::new("enforceNodeAllocatable", message));
    }
    Ok(())
}

/// Returns the cgroup of the `system` or `kube` daemons, if their reservation is enforced. Like the kubelet,
/// accepts a name with or without surrounding slashes (`ParseCgroupfsToCgroupName`) and ignores an unused
/// name.
pub(super) fn cgroup(
    wire: &mut KubeletWire,
    daemons: &str,
    partly: &mut Vec<Problem>,
) -> Result<Option<ReservedCgroup>, Problem> {
    let name =
        if daemons == "kube" { &mut wire.kube_reserved_cgroup } else { &mut wire.system_reserved_cgroup };
    let field = format!("{daemons}ReservedCgroup");
    let given = name.take().filter(|path| !path.is_empty());
    let path = given.as_deref().and_then(cgroup_path);
    let wrong = given
        .as_ref()
        .filter(|_| path.is_none())
        .map(|given| format!("{given:?} must be a path below the cgroup root, like /{daemons}.slice"));
    let mut enforced = wire.enforce_node_allocatable.iter().flatten();
    let Some(item) = enforced
        .find(|item| item.strip_suffix("-compressible").unwrap_or(item) == format!("{daemons}-reserved"))
    else {
        // No setting uses the name.
        partly.extend(wrong.map(|message| Problem::new(field, message)));
        return Ok(None);
    };
    if let Some(message) = wrong {
        return Err(Problem::new(field, message));
    }
    let Some(path) = path else {
        let message = format!("must be set, because enforceNodeAllocatable has {item}");
        return Err(Problem::new(field, message));
    };
    *name = Some(path.clone());
    Ok(Some(ReservedCgroup { path, compressible_only: item.ends_with("-compressible") }))
}

/// Returns the effective items of enforceNodeAllocatable.
pub(super) fn enforced(config: &Config) -> Vec<String> {
    let daemons = [
        ("system-reserved", &config.system_reserved_cgroup),
        ("kube-reserved", &config.kube_reserved_cgroup),
    ];
    let named = daemons.into_iter().filter_map(|(name, cgroup)| {
        let suffix = if cgroup.as_ref()?.compressible_only { "-compressible" } else { "" };
        Some(format!("{name}{suffix}"))
    });
    std::iter::once("pods".to_owned()).chain(named).collect()
}

/// Returns the normalized path; None for the root, and for a path with `.` or `..`.
fn cgroup_path(path: &str) -> Option<String> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let is_below = !parts.is_empty() && parts.iter().all(|part| !matches!(*part, "." | ".."));
    is_below.then(|| format!("/{}", parts.join("/")))
}
