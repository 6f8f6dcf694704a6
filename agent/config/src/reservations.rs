//! The part of the node that pods do not get: amounts kept for daemons, and the cgroups that hold these to
//! them.

use std::collections::BTreeMap;

use beelet_units::{cpu_list, quantity::Quantity};

use super::error::Problem;
use super::kubelet::KubeletWire;
use super::values::Amounts;
use super::{Config, ReservedCgroup};

/// Names that enforceNodeAllocatable may have.
const ENFORCEABLE: [&str; 5] = [
    "pods",
    "system-reserved",
    "kube-reserved",
    "system-reserved-compressible",
    "kube-reserved-compressible",
];
/// The warning where nothing is to be enforced.
const ALWAYS_ENFORCED: &str =
    "\"none\" has no effect: the cgroup of all pods always has what the node does not reserve as its limit";
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

/// `systemReserved` and `kubeReserved`. `reservedSystemCPUs` names all reserved CPUs, by their numbers.
pub(super) fn amounts(wire: &mut KubeletWire) -> Result<[BTreeMap<String, Quantity>; 2], Problem> {
    let mut system = reserved("systemReserved", &wire.system_reserved)?;
    let mut kube = reserved("kubeReserved", &wire.kube_reserved)?;
    wire.reserved_system_cpus.take_if(|list| list.is_empty());
    if let Some(list) = wire.reserved_system_cpus.as_deref() {
        let cpus = cpu_list::parse(list).ok_or_else(|| {
            Problem::new("reservedSystemCPUs", format!("{list:?} is no list of CPUs, such as 0-3,8"))
        })?;
        let count = i64::try_from(cpus.len()).unwrap_or(i64::MAX);
        system.insert("cpu".to_owned(), Quantity::from_units(count));
        kube.remove("cpu");
    }
    let text = |(name, amount): (&String, &Quantity)| (name.clone(), amount.to_string());
    wire.system_reserved = Some(Amounts(system.iter().map(text).collect()));
    wire.kube_reserved = Some(Amounts(kube.iter().map(text).collect()));
    Ok([system, kube])
}

/// Pods always live in cgroups by QoS class, and together have what is not reserved.
pub(super) fn check_enforcement(wire: &mut KubeletWire, partly: &mut Vec<Problem>) -> Result<(), Problem> {
    if wire.cgroups_per_qos.replace(true) == Some(false) {
        let message = "false has no effect: pods always live in cgroups by QoS class";
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
            other => format!("{other:?} can't be enforced; {} can", ENFORCEABLE.join(", ")),
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

/// The cgroup of the `system` or `kube` daemons that is held to the amount reserved for them, if that is
/// enforced. The kubelet takes a name with or without slashes around it (`ParseCgroupfsToCgroupName`), and
/// ignores a name that no setting uses.
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

/// The names of all that is held to its amounts.
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

/// The path with one slash before each part; None for the root, and for a path that leads upwards.
fn cgroup_path(path: &str) -> Option<String> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let is_below = !parts.is_empty() && parts.iter().all(|part| !matches!(*part, "." | ".."));
    is_below.then(|| format!("/{}", parts.join("/")))
}
