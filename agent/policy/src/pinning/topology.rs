//! The topology manager: the policies that accept or reject merged hints (`pkg/kubelet/cm/topologymanager`).

use std::collections::BTreeMap;

use super::{
    error::PinningError,
    hints::{self, Distances, Hint, ProviderHints},
    nodes::{MOST_NODES, NODE_NUMBERS, NodeSet},
};
use crate::devices::topology::{TopologyPolicy, TopologyScope};

const PREFER_CLOSEST: &str = "prefer-closest-numa-nodes";
const MAX_ALLOWABLE: &str = "max-allowable-numa-nodes";
/// `defaultMaxAllowableNUMANodes`
const MAX_ALLOWABLE_NODES: i64 = 8;

/// A NUMA node of the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// Distances to all nodes; None if the machine reports none.
    pub distances: Option<Vec<u64>>,
}

/// The settings, in the words of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopologySettings {
    /// `topologyManagerPolicy`
    pub policy: String,
    /// `topologyManagerScope`
    pub scope: String,
    /// `topologyManagerPolicyOptions`
    pub options: BTreeMap<String, String>,
}

impl Default for TopologySettings {
    fn default() -> Self {
        Self { policy: "none".into(), scope: "container".into(), options: BTreeMap::new() }
    }
}

/// The topology manager.
#[derive(Debug, Clone)]
pub struct TopologyManager {
    policy: TopologyPolicy,
    scope: TopologyScope,
    all: NodeSet,
    /// Distances between the nodes, if close nodes are preferred.
    distances: Option<Distances>,
}

/// The result of merging the providers' hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merged {
    /// The best hint.
    pub hint: Hint,
    /// True if the policy accepts the hint.
    pub admitted: bool,
}

impl TopologyManager {
    /// Creates the manager for a machine with these nodes (`NewManager`).
    ///
    /// # Errors
    /// The policy does not allow a setting, or not this number of nodes.
    pub fn new(settings: &TopologySettings, nodes: &[Node]) -> Result<Self, PinningError> {
        let all: NodeSet = nodes.iter().map(|node| node.id).collect();
        // Without a policy, the kubelet reads neither scope nor options.
        if settings.policy == "none" {
            let (policy, scope) = (TopologyPolicy::None, TopologyScope::Container);
            return Ok(Self { policy, scope, all, distances: None });
        }
        let options = Options::read(&settings.options)?;
        let distances = options.prefer_closest.then(|| distances(nodes)).transpose()?;
        if let Some(node) = nodes.iter().find(|node| node.id >= NODE_NUMBERS) {
            return Err(PinningError::new(format!(
                "NUMA node {}: 63 is the highest that fits into a mask",
                node.id
            )));
        }
        if i64::try_from(nodes.len()).is_ok_and(|count| count > options.max_allowable) {
            let message =
                format!("unsupported on machines with more than {} NUMA Nodes", options.max_allowable);
            return Err(PinningError::new(message));
        }
        if nodes.len() > MOST_NODES {
            return Err(PinningError::new(format!(
                "unsupported on machines with more than {MOST_NODES} NUMA Nodes"
            )));
        }
        let policy = match settings.policy.as_str() {
            "best-effort" => TopologyPolicy::BestEffort,
            "restricted" => TopologyPolicy::Restricted,
            "single-numa-node" => TopologyPolicy::SingleNumaNode,
            other => return Err(PinningError::new(format!("unknown policy: {other:?}"))),
        };
        let scope = match settings.scope.as_str() {
            "container" => TopologyScope::Container,
            "pod" => TopologyScope::Pod,
            other => return Err(PinningError::new(format!("unknown scope: {other:?}"))),
        };
        Ok(Self { policy, scope, all, distances })
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> TopologyPolicy {
        self.policy
    }

    /// Returns the unit of alignment.
    #[must_use]
    pub fn scope(&self) -> TopologyScope {
        self.scope
    }

    /// Returns all nodes of the machine.
    #[must_use]
    pub fn nodes(&self) -> NodeSet {
        self.all
    }

    /// Merges the providers' hints (`Policy.Merge`).
    #[must_use]
    pub fn merge(&self, providers: &[ProviderHints]) -> Merged {
        let mut lists = hints::lists(providers);
        match self.policy {
            TopologyPolicy::None => {
                return Merged { hint: Hint { nodes: None, preferred: false }, admitted: true };
            }
            TopologyPolicy::SingleNumaNode => {
                let single = |hint: &Hint| hint.preferred && hint.nodes.is_none_or(|nodes| nodes.len() == 1);
                lists.iter_mut().for_each(|list| list.retain(single));
            }
            TopologyPolicy::BestEffort | TopologyPolicy::Restricted => {}
        }
        let single = self.policy == TopologyPolicy::SingleNumaNode;
        let distances = self.distances.as_ref().filter(|_| !single);
        let mut hint = hints::merge(&lists, self.all, distances);
        if single && hint.nodes == Some(self.all) {
            hint.nodes = None;
        }
        Merged { hint, admitted: hint.preferred || self.policy == TopologyPolicy::BestEffort }
    }
}

/// Returns the distances of all nodes (`NewNUMAInfo`).
fn distances(nodes: &[Node]) -> Result<Distances, PinningError> {
    let row = |node: &Node| Some((node.id, node.distances.clone()?));
    let rows: Option<Distances> = nodes.iter().map(row).collect();
    let unknown = "cannot discover NUMA topology: error getting NUMA distances from the machine";
    rows.ok_or_else(|| PinningError::new(unknown))
}

struct Options {
    prefer_closest: bool,
    max_allowable: i64,
}

impl Options {
    fn read(options: &BTreeMap<String, String>) -> Result<Self, PinningError> {
        let mut read = Self { prefer_closest: false, max_allowable: MAX_ALLOWABLE_NODES };
        for (name, value) in options {
            match name.as_str() {
                PREFER_CLOSEST => read.prefer_closest = flag(name, value)?,
                MAX_ALLOWABLE => {
                    let number: Option<i64> = value.parse().ok();
                    read.max_allowable = number.filter(|n| *n >= MAX_ALLOWABLE_NODES).ok_or_else(|| {
                        let expected = format!("a number, {MAX_ALLOWABLE_NODES} at least");
                        PinningError::new(format!("bad value {value:?} for option {name:?}: {expected}"))
                    })?;
                }
                _ => {
                    return Err(PinningError::new(format!(
                        "unknown Topology Manager Policy option: {name:?}"
                    )));
                }
            }
        }
        Ok(read)
    }
}

/// Parses a boolean option, in Go's spellings (`strconv.ParseBool`).
pub(crate) fn flag(name: &str, value: &str) -> Result<bool, PinningError> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(PinningError::new(format!("bad value {value:?} for option {name:?}: true or false"))),
    }
}
