//! Fields of the scenarios of `plan cpus`, `plan memory` and `plan topology`.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::api::resource::Quantity as ApiQuantity};
use serde::Deserialize;

use crate::{devices::PodOrName, number};
use beelet_units::field::FieldError;

pub(crate) type Quantities = BTreeMap<String, ApiQuantity>;

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
pub(crate) struct CpuField {
    pub(super) cpu: u32,
    pub(super) core: u32,
    pub(super) socket: u32,
    pub(super) numa: u32,
    #[serde(default)]
    pub(super) uncore: Option<u32>,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeField {
    pub(super) id: u32,
    #[serde(default, deserialize_with = "number::optional")]
    pub(super) memory: Option<u64>,
    #[serde(default)]
    pub(super) hugepages: BTreeMap<String, u64>,
    #[serde(default)]
    pub(super) distances: Option<Vec<u64>>,
}

#[derive(Deserialize, Clone, Default)]
#[serde(deny_unknown_fields)]
pub(crate) struct TopologyField {
    pub(super) policy: String,
    #[serde(default)]
    pub(super) scope: Option<String>,
    #[serde(default)]
    pub(super) options: BTreeMap<String, String>,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct CpuManagerField {
    pub(crate) policy: String,
    #[serde(default)]
    pub(crate) options: BTreeMap<String, String>,
    #[serde(default, rename = "reservedSystemCPUs")]
    pub(crate) reserved_system_cpus: Option<String>,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct ReservationField {
    pub(super) numa_node: u32,
    pub(super) limits: Quantities,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct MemoryManagerField {
    pub(crate) policy: String,
    #[serde(default)]
    pub(crate) reserved_memory: Vec<ReservationField>,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
pub(crate) struct PluginField {
    pub(super) resource: String,
    pub(super) devices: Vec<DeviceField>,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct DeviceField {
    pub(super) id: String,
    #[serde(default)]
    pub(super) numa_nodes: Vec<i64>,
}

/// Every field that some step may have; [`Step::check`] says which.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step<W> {
    pub(super) op: Op,
    #[serde(default)]
    pub(super) pod: Option<PodOrName>,
    #[serde(default)]
    pub(super) container: Option<String>,
    #[serde(default = "Option::default")]
    pub(super) with: Option<W>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub(super) enum Op {
    Admit,
    Remove,
    Start,
    Restart,
    State,
}

impl<W> Step<W> {
    /// A field that the step's op does not have is a mistake.
    pub(super) fn check(&self) -> Result<(), FieldError> {
        let with_pod = matches!(self.op, Op::Admit | Op::Remove | Op::Start);
        let fields = [
            ("pod", self.pod.is_some(), with_pod),
            ("container", self.container.is_some(), self.op == Op::Start),
            ("with", self.with.is_some(), self.op == Op::Restart),
        ];
        let wrong = fields.into_iter().find(|(_, given, allowed)| *given && !allowed);
        wrong.map_or(Ok(()), |(field, ..)| Err(FieldError::new(field, "does not belong to this op")))
    }

    pub(super) fn pod(&self) -> Result<&Pod, FieldError> {
        match &self.pod {
            Some(PodOrName::Pod(pod)) => Ok(pod),
            _ => Err(FieldError::new("pod", "must be the Pod to admit")),
        }
    }

    pub(super) fn name(&self) -> Result<&str, FieldError> {
        match &self.pod {
            Some(PodOrName::Name(name)) => Ok(name),
            _ => Err(FieldError::new("pod", "must be the namespace/name of a pod")),
        }
    }
}
