//! Words for a refusal: which provider could not agree, and what is free on each NUMA node. The kubelet says
//! neither.

use std::fmt::Write as _;

use super::{
    Pins,
    cpus::view,
    hints::{Hint, ProviderHints},
};
use beelet_units::quantity::Quantity;

/// The most sets of nodes that are listed of one resource.
const MOST_SETS: usize = 8;

/// Explains why the hints of a container (the empty name: of a pod) did not lead to an affinity that the
/// policy accepts.
#[must_use]
pub fn disagreement(pins: &Pins, container: &str, hints: &[ProviderHints]) -> String {
    let mut text = match container {
        "" => "the containers of the pod together".to_owned(),
        name => format!("container {name}"),
    };
    let resources: Vec<(usize, &String)> = (0..)
        .zip(hints)
        .flat_map(|(place, hints): (usize, &ProviderHints)| hints.keys().map(move |name| (place, name)))
        .collect();
    // A resource without which the others agree is the one that could not.
    let agree_without = |(place, name): &&(usize, &String)| {
        let mut others = hints.to_vec();
        if let Some(own) = others.get_mut(*place) {
            own.remove(*name);
        }
        pins.topology.merge(&others).admitted
    };
    let names: Vec<&str> = resources.iter().filter(agree_without).map(|(_, name)| name.as_str()).collect();
    match names.as_slice() {
        [] => text.push_str(": no NUMA node suits its resources"),
        names if names.len() == resources.len() && names.len() > 1 => {
            let _ = write!(text, ": {} have no NUMA node in common", names.join(" and "));
        }
        names => {
            let _ = write!(text, ": {} could not be aligned", names.join(" and "));
        }
    }
    for (place, name) in resources {
        let own = hints.get(place).and_then(|hints| hints.get(name));
        let _ = write!(text, "; {name}: {}", places(own.and_then(Option::as_deref)));
    }
    let free = free(pins);
    if !free.is_empty() {
        let _ = write!(text, "; free: {free}");
    }
    text
}

/// The sets of nodes that could give a resource.
fn places(hints: Option<&[Hint]>) -> String {
    let Some(hints) = hints else { return "on any node".to_owned() };
    let preferred = hints.iter().any(|hint| hint.preferred);
    let sets = hints.iter().filter(|hint| hint.preferred == preferred);
    let mut sets: Vec<String> =
        sets.map(|hint| hint.nodes.map_or("any".to_owned(), |nodes| nodes.to_string())).collect();
    if sets.is_empty() {
        return "nowhere".to_owned();
    }
    let left = sets.len().saturating_sub(MOST_SETS);
    sets.truncate(MOST_SETS);
    let more = if left > 0 { format!(" or {left} more") } else { String::new() };
    let wider = if preferred { "" } else { " only (fewer nodes would do if more were free)" };
    format!("on node {}{more}{wider}", sets.join(" or "))
}

/// The free CPUs and the free memory of each NUMA node.
#[must_use]
pub fn free(pins: &Pins) -> String {
    let cpus = view::free_by_node(&pins.cpus);
    let mut nodes = Vec::new();
    for node in pins.topology.nodes().iter() {
        let mut amounts = Vec::new();
        if let Some(count) = cpus.get(&node) {
            amounts.push(format!("{count} CPUs"));
        }
        for (resource, table) in pins.memory.state().ledger.nodes.get(&node).iter().flat_map(|n| &n.tables) {
            let bytes = Quantity::from_units(i64::try_from(table.free).unwrap_or(i64::MAX)).binary();
            amounts.push(format!("{bytes} {resource}"));
        }
        if !amounts.is_empty() {
            nodes.push(format!("node {node} {}", amounts.join(", ")));
        }
    }
    nodes.join("; ")
}
