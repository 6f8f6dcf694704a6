//! The NUMA nodes that a container's devices should come from: the kubelet's topology manager
//! (`pkg/kubelet/cm/topologymanager`) with the device manager as its hint provider.
//!
//! Each resource has *hints*: the sets of nodes that could provide the requested devices. The smallest
//! possible ones are *preferred*. A combination takes one hint per resource; the best combination is the
//! affinity. The kubelet tries all combinations; this module merges equal ones after each resource, so that
//! eight nodes and many resources cost microseconds.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{Devices, Ids, Serving, with_nodes};

/// Maximum number of NUMA nodes, the kubelet's own limit; devices near other nodes do not affect the
/// affinity.
pub const MAX_NODES: usize = 8;

/// The node's strictness (`topologyManagerPolicy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyPolicy {
    /// Prefers devices near each other within a resource; ignores locality across resources.
    #[default]
    None,
    /// Prefers all devices of a container near each other.
    BestEffort,
    /// Refuses a pod whose devices cannot be near each other.
    Restricted,
    /// Refuses a pod whose devices cannot come from one node.
    SingleNumaNode,
}

/// The unit of alignment (`topologyManagerScope`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyScope {
    /// Each container by itself.
    #[default]
    Container,
    /// All containers of a pod.
    Pod,
}

/// The devices cannot be near each other, as the policy requires.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Resources cannot be allocated with Topology locality")]
pub struct TopologyError;

/// A set of nodes, by their positions in the list of all nodes.
type Mask = u16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Hint {
    mask: Mask,
    preferred: bool,
}

impl Devices {
    /// Returns the nodes that a container of the pod being served (or the whole pod, if `container` is
    /// `None`) should get this many devices from; `None` if any node will do.
    ///
    /// # Errors
    /// The policy refuses the best affinity.
    pub(crate) fn affinity(
        &self,
        serving: &Serving,
        pod_uid: &str,
        container: Option<&str>,
        limits: &[(&str, usize)],
        policy: TopologyPolicy,
    ) -> Result<Option<BTreeSet<i64>>, TopologyError> {
        if policy == TopologyPolicy::None {
            return Ok(None);
        }
        let wanted: Vec<(&str, usize)> =
            limits.iter().copied().filter(|(resource, count)| *count > 0 && self.knows(resource)).collect();
        let nodes: Vec<i64> = {
            let places = wanted.iter().filter_map(|(resource, _)| self.inventory.places.get(*resource));
            let all: BTreeSet<i64> = places.flat_map(BTreeMap::keys).flatten().copied().collect();
            all.into_iter().take(MAX_NODES).collect()
        };
        let all: Mask = (1 << nodes.len()) - 1;
        let mut of_each = Vec::new();
        for (resource, count) in &wanted {
            match self.hints(serving, (pod_uid, container), resource, *count, &nodes) {
                // Too few devices: `select` reports that with its own error.
                Hints::TooFew => return Ok(None),
                Hints::NoPreference => {}
                Hints::These(hints) => of_each.push(hints),
            }
        }
        if of_each.is_empty() {
            return Ok(None);
        }
        let best = merge(&of_each, all, policy == TopologyPolicy::SingleNumaNode);
        if !best.preferred && policy != TopologyPolicy::BestEffort {
            return Err(TopologyError);
        }
        let chosen = nodes.iter().enumerate().filter(|(i, _)| best.mask & (1 << i) != 0);
        Ok((best.mask != all).then(|| chosen.map(|(_, node)| *node).collect()))
    }

    /// Returns the sets of NUMA nodes with `count` devices for a container, each with true if it is as small
    /// as possible, on a machine with these nodes; `None` if the resource has no preference.
    pub(crate) fn node_sets(
        &self,
        serving: &Serving,
        of: (&str, Option<&str>),
        resource: &str,
        count: usize,
        machine: &[i64],
    ) -> Option<Vec<(Vec<i64>, bool)>> {
        let places = self.inventory.places.get(resource)?;
        let near: BTreeSet<i64> = places.keys().flatten().copied().collect();
        let mut nodes: Vec<i64> = machine.iter().copied().filter(|node| near.contains(node)).collect();
        if nodes.is_empty() {
            nodes = machine.to_vec();
        }
        let set = |mask: Mask| {
            let chosen = nodes.iter().enumerate().filter(|(place, _)| mask & (1 << place) != 0);
            chosen.map(|(_, node)| *node).collect()
        };
        match self.hints(serving, of, resource, count, &nodes) {
            Hints::NoPreference => None,
            Hints::TooFew => Some(Vec::new()),
            Hints::These(hints) => {
                Some(hints.into_iter().map(|hint| (set(hint.mask), hint.preferred)).collect())
            }
        }
    }

    /// Computes hints as `generateDeviceTopologyHints` does.
    fn hints(
        &self,
        serving: &Serving,
        (pod_uid, container): (&str, Option<&str>),
        resource: &str,
        count: usize,
        nodes: &[i64],
    ) -> Hints {
        let (Some(near), Some(places)) =
            (self.inventory.nodes.get(resource), self.inventory.places.get(resource))
        else {
            return Hints::NoPreference;
        };
        if places.keys().all(Vec::is_empty) {
            return Hints::NoPreference;
        }
        let held = container.and_then(|name| self.holders.pods.get(pod_uid)?.get(name)?.get(resource));
        let held = held.map(|held| held.ids()).filter(|ids| ids.len() == count);
        let reusable: Ids = match &held {
            Some(_) => Ids::new(),
            None => serving.left(resource).cloned().collect(),
        };
        let none = Ids::new();
        let available: Vec<&String> = match &held {
            Some(ids) => ids.iter().collect(),
            None => {
                let healthy = self.inventory.healthy.get(resource).map_or(&none, |ids| &**ids);
                let taken = self.holders.taken.get(resource).unwrap_or(&none);
                let lent = serving
                    .lent(resource)
                    .filter(|id| healthy.contains(*id) && taken.contains(*id) && !reusable.contains(*id));
                healthy.difference(taken).chain(lent).collect()
            }
        };
        if available.len() + reusable.len() < count {
            return Hints::TooFew;
        }
        let place = |node: &i64| nodes.iter().position(|other| other == node);
        let mask_of =
            |near: &[i64]| -> Mask { near.iter().filter_map(place).fold(0, |mask, place| mask | 1 << place) };
        // Number of devices by the set of nodes near them.
        let mut everyone: BTreeMap<Mask, usize> = BTreeMap::new();
        places.iter().for_each(|(near, count)| *everyone.entry(mask_of(near)).or_default() += count);
        let mut free: BTreeMap<Mask, usize> = BTreeMap::new();
        let free_ones = with_nodes(available, near);
        free_ones.for_each(|(_, near)| *free.entry(mask_of(near)).or_default() += 1);
        let reused = with_nodes(&reusable, near).map(|(_, near)| mask_of(near));
        let reused: Vec<Mask> = reused.filter(|mask| *mask != 0).collect();
        let within = |groups: &BTreeMap<Mask, usize>, mask: Mask| -> usize {
            groups.iter().filter(|(group, _)| **group & mask != 0).map(|(_, count)| *count).sum()
        };
        let masks = 1..=((1_u32 << nodes.len()) - 1) as Mask;
        let smallest =
            masks.clone().filter(|mask| within(&everyone, *mask) >= count).map(Mask::count_ones).min();
        let possible = masks.filter(|mask| reused.iter().all(|own| own & mask != 0));
        let possible = possible.filter(|mask| within(&free, *mask) + reused.len() >= count);
        Hints::These(
            possible.map(|mask| Hint { mask, preferred: Some(mask.count_ones()) == smallest }).collect(),
        )
    }
}

enum Hints {
    /// The resource's devices are near no node.
    NoPreference,
    /// Fewer devices than requested exist.
    TooFew,
    These(Vec<Hint>),
}

/// Returns the best combination of one hint of each resource: preferred first, then the narrowest, then the
/// lowest nodes. If no hints fit together, returns all nodes, not preferred.
fn merge(of_each: &[Vec<Hint>], all: Mask, single: bool) -> Hint {
    let mut combined = vec![Hint { mask: all, preferred: true }];
    for hints in of_each {
        let fits = |hint: &&Hint| !single || (hint.preferred && hint.mask.count_ones() == 1);
        let hints: Vec<Hint> = hints.iter().filter(fits).copied().collect();
        // Every possible result, indexed by mask and preference.
        let mut next = [[false; 2]; 1 << MAX_NODES];
        for so_far in &combined {
            for hint in &hints {
                next[usize::from(so_far.mask & hint.mask)][usize::from(so_far.preferred && hint.preferred)] =
                    true;
            }
        }
        let of_mask = |mask: Mask| [false, true].map(|preferred| Hint { mask, preferred });
        let there = |hint: &Hint| next[usize::from(hint.mask)][usize::from(hint.preferred)];
        combined = (1..=all).flat_map(of_mask).filter(there).collect();
    }
    let best = combined.into_iter().min_by_key(|hint| (!hint.preferred, hint.mask.count_ones(), hint.mask));
    best.unwrap_or(Hint { mask: all, preferred: false })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::{Device, Health, PluginOptions, Request, Selection};

    const GPU: &str = "example.com/gpu";
    const NIC: &str = "example.com/nic";

    /// Builds a ledger of healthy devices `id@node`, or `id`; those marked `*` are taken.
    fn ledger(gpus: &str, nics: &str) -> Devices {
        let mut devices = Devices::default();
        for (resource, text) in [(GPU, gpus), (NIC, nics)] {
            devices.inventory.register(resource, PluginOptions::default());
            let device = |word: &str| {
                let (id, node) = word.trim_start_matches('*').split_once('@').unwrap_or((word, ""));
                let numa_nodes = node.split('+').filter_map(|node| node.parse().ok()).collect();
                Device { id: id.to_owned(), health: Health::Healthy, numa_nodes }
            };
            devices.inventory.list(resource, text.split_whitespace().map(device).collect::<Vec<_>>());
            let taken =
                text.split_whitespace().filter(|word| word.starts_with('*')).map(|word| device(word).id);
            let request =
                Request { pod_uid: "other", container: resource, resource, count: 1, already_running: false };
            devices.commit(&request, &taken.collect(), Vec::new());
        }
        devices
    }

    /// Expects the affinity's nodes under each policy: `-` for none, `refused`.
    fn check(devices: &Devices, limits: &[(&str, usize)], expected: [&str; 3]) {
        let policies =
            [TopologyPolicy::BestEffort, TopologyPolicy::Restricted, TopologyPolicy::SingleNumaNode];
        for (policy, expected) in policies.into_iter().zip(expected) {
            let got = match devices.affinity(&Serving::default(), "p", Some("c"), limits, policy) {
                Err(TopologyError) => "refused".to_owned(),
                Ok(None) => "-".to_owned(),
                Ok(Some(nodes)) => nodes.iter().map(i64::to_string).collect::<Vec<_>>().join(" "),
            };
            assert_eq!(got, expected, "{policy:?} {limits:?}");
        }
    }

    #[test]
    fn one_node_is_enough_or_it_is_not() {
        let devices = ledger("a@0 b@1 c@1", "");
        check(&devices, &[(GPU, 1)], ["0", "0", "0"]);
        check(&devices, &[(GPU, 2)], ["1", "1", "1"]);
        // Every single node lacks three devices: two nodes are the nearest set.
        check(&devices, &[(GPU, 3)], ["-", "-", "refused"]);
        // Node 1 has enough devices, but another container holds one.
        check(&ledger("a@0 b@1 *c@1", ""), &[(GPU, 2)], ["-", "refused", "refused"]);
    }

    #[test]
    fn resources_are_aligned_with_each_other() {
        let devices = ledger("a@0 b@1", "x@1 y@2");
        check(&devices, &[(GPU, 1), (NIC, 1)], ["1", "1", "1"]);
        let apart = ledger("a@0", "x@1");
        check(&apart, &[(GPU, 1), (NIC, 1)], ["0", "refused", "refused"]);
    }

    #[test]
    fn devices_near_no_node_do_not_affect_the_affinity() {
        let devices = ledger("a b", "x@1 y@2");
        check(&devices, &[(GPU, 2)], ["-", "-", "-"]);
        check(&devices, &[(GPU, 2), (NIC, 1)], ["1", "1", "1"]);
    }

    #[test]
    fn a_lack_of_devices_is_not_a_topology_error() {
        check(&ledger("a@0 *b@1", ""), &[(GPU, 2)], ["-", "-", "-"]);
    }

    #[test]
    fn a_device_near_several_nodes_fits_each() {
        check(&ledger("a@0+1 b@1", "x@1 y@2"), &[(GPU, 2), (NIC, 1)], ["1", "1", "1"]);
    }

    #[test]
    fn the_affinity_decides_what_is_taken() {
        let mut devices = ledger("a@0 b@0 c@1 d@1", "");
        let request =
            Request { pod_uid: "p", container: "c", resource: GPU, count: 1, already_running: false };
        let mut serving = Serving::default();
        serving.align(Some(BTreeSet::from([1])));
        assert_eq!(
            devices.select(&request, &serving),
            Ok(Selection::Chosen(BTreeSet::from(["c".to_owned()])))
        );
        let three = Request { count: 3, ..request };
        let Ok(Selection::Chosen(ids)) = devices.select(&three, &serving) else { panic!("no devices") };
        assert!(ids.contains("c") && ids.contains("d") && ids.len() == 3, "{ids:?}");
    }
}
