//! Devices as a provider of hints; the [`Devices`] ledger decides.

use std::collections::BTreeSet;

use super::{
    error::Refusal,
    hints::{Hint, ProviderHints},
    nodes::NodeSet,
};
use crate::devices::{
    ContainerKind, ContainerRequest, Devices, Request, Selection, Serving, admission::limits_of_pod,
};

/// A provider in addition to CPUs and memory, called before them.
pub trait DeviceProvider {
    /// Returns the hints for a container, or (`None`) for all containers of the pod together.
    fn hints(&mut self, container: Option<&str>) -> ProviderHints;

    /// Assigns devices to a container, as far as possible from these nodes.
    ///
    /// # Errors
    /// The devices cannot be assigned to the container.
    fn allocate(&mut self, container: &str, nodes: Option<NodeSet>) -> Result<(), Refusal>;

    /// Assigns devices to all containers of a pod with pod-level resources. The kubelet's device manager
    /// assigns none (`ManagerImpl.AllocatePod`).
    ///
    /// # Errors
    /// The devices cannot be assigned to a container.
    fn allocate_pod(&mut self, _: Option<NodeSet>) -> Result<(), Refusal> {
        Ok(())
    }
}

/// A provider without devices.
impl DeviceProvider for () {
    fn hints(&mut self, _: Option<&str>) -> ProviderHints {
        ProviderHints::new()
    }

    fn allocate(&mut self, _: &str, _: Option<NodeSet>) -> Result<(), Refusal> {
        Ok(())
    }
}

/// The devices of a pod, from plugins that have no preference and allocate immediately.
#[derive(Debug)]
pub struct PodDevices<'a> {
    devices: &'a mut Devices,
    uid: &'a str,
    wishes: Vec<ContainerRequest<'a>>,
    machine: Vec<i64>,
    serving: Serving,
}

impl<'a> PodDevices<'a> {
    /// Creates the provider for a pod with these wishes, on a machine with these nodes.
    #[must_use]
    pub fn new(
        devices: &'a mut Devices,
        uid: &'a str,
        wishes: Vec<ContainerRequest<'a>>,
        machine: NodeSet,
    ) -> Self {
        let machine = machine.iter().map(i64::from).collect();
        Self { devices, uid, wishes, machine, serving: Serving::default() }
    }

    /// Moves to the next container; returns its kind and its limits.
    fn serve(&mut self, container: &str) -> Option<(ContainerKind, Vec<(&'a str, usize)>)> {
        let at = self.wishes.iter().position(|wish| wish.container == container)?;
        let (kind, limits) = self.wishes.get(at).map(|wish| (wish.kind, wish.limits.clone()))?;
        let after = self.wishes.iter().skip(at.saturating_add(1)).map(|wish| wish.container);
        self.serving.begin(self.devices, self.uid, kind, after, |_| false);
        Some((kind, limits))
    }

    fn select(&mut self, request: &Request<'_>) -> Result<(), Refusal> {
        let ids = match self.devices.select(request, &self.serving).map_err(Refusal::unexpected)? {
            Selection::Nothing => return Ok(()),
            Selection::Chosen(ids) => ids,
            Selection::Ask(question) => question.answer::<&str>(&[]),
        };
        self.devices.commit(request, &ids, Vec::new());
        Ok(())
    }
}

impl DeviceProvider for PodDevices<'_> {
    fn hints(&mut self, container: Option<&str>) -> ProviderHints {
        let limits = match container {
            Some(container) => self.serve(container).map(|(_, limits)| limits).unwrap_or_default(),
            None => limits_of_pod(&self.wishes),
        };
        let wanted =
            limits.into_iter().filter(|(resource, count)| *count > 0 && self.devices.knows(resource));
        wanted
            .map(|(resource, count)| {
                let of = (self.uid, container);
                let sets = self.devices.node_sets(&self.serving, of, resource, count, &self.machine);
                let hint = |(nodes, preferred): (Vec<i64>, bool)| {
                    let nodes = nodes.into_iter().filter_map(|node| u32::try_from(node).ok()).collect();
                    Hint { nodes: Some(nodes), preferred }
                };
                (resource.to_owned(), sets.map(|sets| sets.into_iter().map(hint).collect()))
            })
            .collect()
    }

    fn allocate(&mut self, container: &str, nodes: Option<NodeSet>) -> Result<(), Refusal> {
        let Some((kind, limits)) = self.serve(container) else { return Ok(()) };
        self.serving.align(nodes.map(|nodes| nodes.iter().map(i64::from).collect::<BTreeSet<i64>>()));
        for (resource, count) in limits {
            if self.devices.knows(resource) {
                let pod_uid = self.uid;
                self.select(&Request { pod_uid, container, resource, count, already_running: false })?;
            }
        }
        self.serving.finish(self.devices, self.uid, container, kind);
        Ok(())
    }
}
