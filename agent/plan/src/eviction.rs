//! `plan eviction`: pressure of the node, and the pod to evict.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use beelet_codec::data;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{Scenario, number, pod_name};
use beelet_policy::{
    eviction::{
        Candidate, DiskLayout, FileCache, MemoryReading, MemorySignal, NeededCache, NodeCondition,
        Observation, PodUsage, Reclaim, Signal, Threshold, ThresholdValue, Tracker, ValueError,
        derive_container_fs, rank, reclaim, victim,
    },
    resources::{PodDemand, critical},
};
use beelet_units::{field::FieldError, moment::Moment, quantity::Quantity};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct EvictionScenario {
    name: String,
    now: Timestamp,
    thresholds: Vec<GivenThreshold>,
    #[serde(default)]
    previously_met: Vec<Signal>,
    observations: BTreeMap<Signal, Observation>,
    /// Readings from which `memory.available` follows, in place of an observation.
    #[serde(default)]
    memory: Option<GivenMemory>,
    #[serde(default)]
    dedicated_image_fs: bool,
    pods: Vec<GivenPod>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct GivenThreshold {
    signal: Signal,
    #[serde(deserialize_with = "value")]
    value: String,
    #[serde(default, deserialize_with = "number::duration")]
    grace_period: Option<Duration>,
    #[serde(default, deserialize_with = "optional_value")]
    min_reclaim: Option<String>,
    #[serde(default)]
    first_observed_at: Option<Timestamp>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct GivenMemory {
    #[serde(default)]
    signal: MemorySignal,
    capacity: Quantity,
    /// Oldest first; the last one decides.
    readings: Vec<GivenReading>,
}

/// A reading of memory. Amounts that are missing count as 0.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct GivenReading {
    at: Timestamp,
    #[serde(deserialize_with = "number::optional")]
    working_set_bytes: Option<u64>,
    #[serde(default, deserialize_with = "number::optional")]
    active_file_bytes: Option<u64>,
    #[serde(default, deserialize_with = "number::optional")]
    unwritten_bytes: Option<u64>,
    /// Bytes read again since the counter began.
    #[serde(default, deserialize_with = "number::optional")]
    refaulted_bytes: Option<u64>,
    /// `MemAvailable`.
    #[serde(default, deserialize_with = "number::optional")]
    kernels_estimate_bytes: Option<u64>,
}

impl GivenMemory {
    /// Returns the available memory at the last reading; `None` without a reading.
    fn observation(&self) -> Result<Option<Observation>, FieldError> {
        let capacity = u64::try_from(self.capacity.value()).unwrap_or(0);
        let (mut needed, mut available, mut before) = (NeededCache::default(), None, None);
        for (i, given) in self.readings.iter().enumerate() {
            if before.is_some_and(|before| given.at < before) {
                let message = "is before the previous reading";
                return Err(FieldError::new(format!("memory.readings[{i}].at"), message.to_owned()));
            }
            before = Some(given.at);
            let reading = MemoryReading {
                available: capacity.saturating_sub(given.working_set_bytes.unwrap_or(0)),
                cache: FileCache {
                    active: given.active_file_bytes.unwrap_or(0),
                    unwritten: given.unwritten_bytes.unwrap_or(0),
                    refaulted: given.refaulted_bytes,
                },
                kernels_estimate: given.kernels_estimate_bytes,
            };
            available = Some(match self.signal {
                MemorySignal::WorkingSet => reading.available,
                MemorySignal::Reclaimable => needed.available(Moment::of_scenario(given.at), &reading),
            });
        }
        let bytes = |bytes: u64| Quantity::from_units(i64::try_from(bytes.min(capacity)).unwrap_or(i64::MAX));
        Ok(available.map(|available| Observation { available: bytes(available), capacity: self.capacity }))
    }
}

/// A quantity or a percentage; a quantity may be a JSON number.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a quantity or a percentage (e.g. 100Mi or 10%)")]
enum Value {
    Text(String),
    Number(serde_json::Number),
}

impl From<Value> for String {
    fn from(value: Value) -> Self {
        match value {
            Value::Text(text) => text,
            Value::Number(number) => number.to_string(),
        }
    }
}

fn value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Value::deserialize(deserializer).map(String::from)
}

fn optional_value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Option::<Value>::deserialize(deserializer).map(|value| value.map(String::from))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenPod {
    pod: Pod,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Usage {
    #[serde(deserialize_with = "number::optional")]
    memory_working_set_bytes: Option<u64>,
    #[serde(deserialize_with = "number::optional")]
    rootfs_bytes: Option<u64>,
    #[serde(deserialize_with = "number::optional")]
    logs_bytes: Option<u64>,
    #[serde(deserialize_with = "number::optional")]
    volumes_bytes: Option<u64>,
    #[serde(deserialize_with = "number::optional")]
    files_bytes: Option<u64>,
    #[serde(deserialize_with = "number::optional")]
    inodes: Option<u64>,
    #[serde(deserialize_with = "number::optional")]
    pids: Option<u64>,
    #[serde(deserialize_with = "number::optional")]
    swap_bytes: Option<u64>,
}

impl From<&Usage> for PodUsage {
    fn from(usage: &Usage) -> Self {
        Self {
            memory_working_set_bytes: usage.memory_working_set_bytes.unwrap_or(0),
            swap_bytes: usage.swap_bytes.unwrap_or(0),
            rootfs_bytes: usage.rootfs_bytes.unwrap_or(0),
            logs_bytes: usage.logs_bytes.unwrap_or(0),
            volumes_bytes: usage.volumes_bytes.unwrap_or(0),
            files_bytes: usage.files_bytes.unwrap_or(0),
            inodes: usage.inodes.unwrap_or(0),
            pids: usage.pids.unwrap_or(0),
            hides_disk: false,
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct EvictionOutput {
    met: Vec<Signal>,
    actionable: Vec<Signal>,
    node_conditions: Vec<NodeCondition>,
    reclaim: &'static [Reclaim],
    ranked: Vec<String>,
    evict: Option<String>,
    /// The number that follows from the readings of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_available: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    why: Vec<String>,
}

impl Scenario for EvictionScenario {
    type Output = EvictionOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<EvictionOutput, FieldError> {
        let layout = if self.dedicated_image_fs { DiskLayout::DedicatedImageFs } else { DiskLayout::Single };
        let mut thresholds = self.thresholds()?;
        let mut why = Vec::new();
        for dropped in derive_container_fs(&mut thresholds, layout) {
            let name = data::to_value(&dropped.signal).unwrap_or_default();
            why.push(format!(
                "the threshold for {name} is ignored: that filesystem follows the one that it is part of"
            ));
        }
        let candidates = self.candidates()?;
        let names = self.names()?;
        let mut observations = self.observations.clone();
        let memory = self.memory.as_ref().map(GivenMemory::observation).transpose()?.flatten();
        observations.extend(memory.map(|memory| (Signal::MemoryAvailable, memory)));
        let assessment =
            self.tracker(&thresholds).assess(Moment::of_scenario(self.now), &thresholds, &observations);
        let signals = |indices: &[usize]| {
            let mut seen = BTreeSet::new();
            let signals = indices.iter().filter_map(|i| thresholds.get(*i)).map(|threshold| threshold.signal);
            signals.filter(|signal| seen.insert(*signal)).collect::<Vec<_>>()
        };
        let mut output = EvictionOutput {
            met: signals(&assessment.met),
            actionable: signals(&assessment.actionable),
            node_conditions: assessment.conditions,
            reclaim: &[],
            ranked: Vec::new(),
            evict: None,
            memory_available: memory.map(|memory| memory.available.binary()),
            why,
        };
        if let Some(signal) = output.actionable.first().copied() {
            let ranked = rank(signal, layout, &candidates);
            output.reclaim = reclaim(signal, layout);
            output.evict = victim(&ranked, &candidates).and_then(|i| names.get(i).cloned());
            output.ranked = ranked.iter().filter_map(|i| names.get(*i).cloned()).collect();
        }
        Ok(output)
    }
}

impl EvictionScenario {
    fn thresholds(&self) -> Result<Vec<Threshold>, FieldError> {
        let mut thresholds = Vec::new();
        for (i, given) in self.thresholds.iter().enumerate() {
            let wrong = |field: &str, error: &ValueError| {
                FieldError::new(format!("thresholds[{i}].{field}"), error.to_string())
            };
            let min_reclaim = given.min_reclaim.as_deref().map(ThresholdValue::min_reclaim).transpose();
            let min_reclaim = min_reclaim.map_err(|error| wrong("minReclaim", &error))?;
            if let Some(value) =
                ThresholdValue::threshold(&given.value).map_err(|error| wrong("value", &error))?
            {
                let grace = given.grace_period.unwrap_or_default();
                thresholds.push(Threshold { signal: given.signal, value, grace, min_reclaim });
            }
        }
        Ok(thresholds)
    }

    /// Builds the memory of earlier decisions.
    fn tracker(&self, thresholds: &[Threshold]) -> Tracker {
        let mut tracker = Tracker::default();
        for (i, threshold) in thresholds.iter().enumerate() {
            if self.previously_met.contains(&threshold.signal) {
                tracker.actionable.insert(i);
            }
            let same = |given: &&GivenThreshold| {
                given.signal == threshold.signal && given.grace_period.unwrap_or_default() == threshold.grace
            };
            if let Some(at) = self.thresholds.iter().find(same).and_then(|given| given.first_observed_at) {
                tracker.first_observed.insert(i, Moment::of_scenario(at));
            }
        }
        tracker
    }

    fn candidates(&self) -> Result<Vec<Candidate<'_>>, FieldError> {
        let mut candidates = Vec::with_capacity(self.pods.len());
        for (i, given) in self.pods.iter().enumerate() {
            candidates.push(Candidate {
                demand: PodDemand::read(&given.pod)
                    .map_err(|error| error.under(&format!("pods[{i}].pod")))?,
                priority: critical::priority(&given.pod),
                critical: critical::is_critical(&given.pod),
                leaving: false,
                usage: given.usage.as_ref().map(PodUsage::from),
            });
        }
        Ok(candidates)
    }

    fn names(&self) -> Result<Vec<String>, FieldError> {
        let name = |(i, given): (usize, &GivenPod)| {
            pod_name(&given.pod).map_err(|error| error.under(&format!("pods[{i}].pod")))
        };
        self.pods.iter().enumerate().map(name).collect()
    }
}
