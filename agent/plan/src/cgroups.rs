//! `plan cgroups`: the cgroup files of a whole node.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};

use crate::{Scenario, each_pod, number, pod_name};
use beelet_policy::resources::{
    CPU, MEMORY,
    cgroups::{
        self as policy, CgroupConfig, CgroupValues, CgroupVersion, CpuWeightFormula, MemoryQos,
        MemoryReservationPolicy, NodeAmounts,
    },
    qos::{QosClass, qos_class},
};
use beelet_units::{cgroup_driver::CgroupDriver, field::FieldError, quantity::Quantity};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct CgroupsScenario {
    name: String,
    cgroup_version: Version,
    node: Node,
    #[serde(default)]
    config: Option<Config>,
    pods: Vec<Pod>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum Version {
    V1,
    V2,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Node {
    cpus: Quantity,
    memory: Quantity,
    #[serde(default)]
    kube_reserved: Option<BTreeMap<String, Quantity>>,
    #[serde(default)]
    system_reserved: Option<BTreeMap<String, Quantity>>,
    /// Signals and thresholds. They change no cgroup: only the reservations limit kubepods.
    #[serde(default)]
    eviction_hard: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Config {
    cgroup_driver: Option<CgroupDriver>,
    cgroup_root: Option<String>,
    #[serde(rename = "cpuCFSQuota")]
    cpu_cfs_quota: Option<bool>,
    #[serde(rename = "cpuCFSQuotaPeriod", deserialize_with = "number::duration")]
    cpu_cfs_quota_period: Option<Duration>,
    qos_reserved: Option<BTreeMap<String, String>>,
    #[serde(rename = "memoryQoS")]
    memory_qos: Option<bool>,
    #[serde(deserialize_with = "number::optional")]
    memory_throttling_factor: Option<f64>,
    memory_reservation_policy: Option<MemoryReservationPolicy>,
    cpu_weight_formula: Option<CpuWeightFormula>,
}

#[derive(Serialize)]
pub(crate) struct CgroupsOutput {
    qos: BTreeMap<String, QosClass>,
    cgroups: BTreeMap<String, BTreeMap<String, String>>,
}

impl Scenario for CgroupsScenario {
    type Output = CgroupsOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<CgroupsOutput, FieldError> {
        let config = self.config()?;
        let mut output = CgroupsOutput { qos: BTreeMap::new(), cgroups: BTreeMap::new() };
        each_pod("pods", &self.pods, |pod| output.add_pod(pod, &config))?;
        for values in policy::node_cgroups(&self.pods, &config).map_err(|error| error.under("pods"))? {
            output.add(values);
        }
        Ok(output)
    }
}

impl CgroupsOutput {
    fn add_pod(&mut self, pod: &Pod, config: &CgroupConfig) -> Result<(), FieldError> {
        self.qos.insert(pod_name(pod)?, qos_class(pod)?);
        self.add(policy::pod_cgroup(pod, config)?);
        for container in containers(pod) {
            self.add(policy::container_cgroup(pod, container, config)?);
        }
        Ok(())
    }

    fn add(&mut self, values: CgroupValues) {
        self.cgroups.insert(values.path, values.files);
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

impl CgroupsScenario {
    fn config(&self) -> Result<CgroupConfig, FieldError> {
        let version = match self.cgroup_version {
            Version::V1 => CgroupVersion::V1,
            Version::V2 => CgroupVersion::V2,
        };
        let mut config = CgroupConfig::new(version, self.node.amounts()?);
        if let Some(given) = &self.config {
            given.apply(&mut config).map_err(|error| error.under("config"))?;
        }
        Ok(config)
    }
}

impl Node {
    fn amounts(&self) -> Result<NodeAmounts, FieldError> {
        for (signal, threshold) in self.eviction_hard.iter().flatten() {
            if Quantity::parse(threshold).is_err() && parse_percent(threshold).is_none() {
                let message =
                    format!("{threshold:?} is neither a quantity nor a percentage (use e.g. 100Mi or 5%)");
                return Err(FieldError::new(signal.as_str(), message).under("node.evictionHard"));
            }
        }
        let reserved = |name: &str| {
            let reserves = [&self.kube_reserved, &self.system_reserved];
            reserves.into_iter().flatten().filter_map(|reserve| reserve.get(name).copied()).sum()
        };
        Ok(NodeAmounts::new(self.cpus, self.memory, reserved(CPU), reserved(MEMORY)))
    }
}

impl Config {
    fn apply(&self, config: &mut CgroupConfig) -> Result<(), FieldError> {
        config.driver = self.cgroup_driver.unwrap_or_default();
        if let Some(root) = &self.cgroup_root {
            config.root.clone_from(root);
        }
        if let Some(enforced) = self.cpu_cfs_quota {
            config.cpu_cfs_quota = enforced;
        }
        if let Some(period) = self.cpu_cfs_quota_period {
            config.cpu_cfs_quota_period_us = cfs_period(period)?;
        }
        config.cpu_weight_formula = self.cpu_weight_formula.unwrap_or_default();
        config.qos_reserved_memory_percent = self.qos_reserved_memory()?;
        config.memory_qos = self.memory_qos()?;
        Ok(())
    }

    fn qos_reserved_memory(&self) -> Result<Option<u8>, FieldError> {
        let mut percent = None;
        for (resource, text) in self.qos_reserved.iter().flatten() {
            let error = |message: String| FieldError::new(resource.as_str(), message).under("qosReserved");
            if resource != MEMORY {
                return Err(error("can't be reserved for a QoS class; only memory can".to_owned()));
            }
            let value = parse_percent(text).filter(|percent| percent.fract() == 0.0 && *percent <= 100.0);
            let value =
                value.ok_or_else(|| error(format!("{text:?} is not a whole percentage (use 0% to 100%)")))?;
            percent = Some(value as u8); // whole and within 0..=100
        }
        Ok(percent)
    }

    fn memory_qos(&self) -> Result<Option<MemoryQos>, FieldError> {
        let throttling_factor = self.memory_throttling_factor.unwrap_or(0.9);
        if !(throttling_factor > 0.0 && throttling_factor <= 1.0) {
            return Err(FieldError::new(
                "memoryThrottlingFactor",
                format!("{throttling_factor} must be above 0 and at most 1"),
            ));
        }
        let reservation = self.memory_reservation_policy.unwrap_or_default();
        Ok((self.memory_qos == Some(true))
            .then_some(MemoryQos { throttling_factor: Some(throttling_factor), reservation }))
    }
}

/// Checks the kernel's range of 1 ms to 1 s.
fn cfs_period(period: Duration) -> Result<u64, FieldError> {
    match u64::try_from(period.as_micros()) {
        Ok(us @ 1_000..=1_000_000) => Ok(us),
        _ => Err(FieldError::new("cpuCFSQuotaPeriod", "must be between 1ms and 1s")),
    }
}

fn parse_percent(text: &str) -> Option<f64> {
    text.strip_suffix('%')?.parse().ok().filter(|percent: &f64| percent.is_finite() && *percent >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_policy::resources::cgroups::container_resources;
    use serde_json::{Value, json};

    /// Compares CRI requests with the kubelet's, from the golden data.
    #[test]
    fn what_cri_is_asked_for_is_what_the_kubelet_asked_for() {
        let mut compared = 0;
        for data in [
            include_str!("../tests/data/cgroups.jsonl"),
            include_str!("../tests/data/cgroups-podlevel.jsonl"),
        ] {
            for case in data.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
                let scenario: CgroupsScenario = serde_json::from_value(case["input"].clone()).unwrap();
                let config = scenario.config().unwrap();
                for (pod, container) in
                    scenario.pods.iter().flat_map(|pod| containers(pod).map(move |c| (pod, c)))
                {
                    let path = policy::container_cgroup(pod, container, &config).unwrap().path;
                    let resources = container_resources(pod, container, &config).unwrap();
                    let mut got = json!({
                        "cpuPeriod": resources.cpu_period,
                        "cpuQuota": resources.cpu_quota,
                        "cpuShares": resources.cpu_shares,
                        "memoryLimitInBytes": resources.memory_limit_bytes,
                        "unified": resources.unified,
                    });
                    // protobuf omits zero and empty values
                    got.as_object_mut().unwrap().retain(|_, value| *value != json!(0) && *value != json!({}));
                    assert_eq!(got, case["expect"]["cri"][&path], "{} {path}", scenario.name);
                    compared += 1;
                }
            }
        }
        assert!(compared > 100);
    }
}
