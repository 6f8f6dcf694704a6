//! Engine of `beelet plan`: decides scenarios with the functions of `policy`.
//!
//! Each kind of decision (WHAT) has a file with the types of its scenario (unknown fields are errors) and of
//! its answer, which calls the functions of `policy` that the daemon calls. To add a kind: write the file,
//! implement [`Scenario`], add a row to [`WHATS`], and add golden data to `tests/data/`. The command line
//! reads files and streams; this crate gets one scenario at a time. This crate must never decide anything
//! itself.
// Sums in this crate are of numbers from outside.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
#![forbid(unsafe_code)]

mod admission;
mod cgroups;
mod container_gc;
mod cpus;
mod devices;
mod eviction;
mod image_gc;
mod memory;
pub(crate) mod number;
mod pinning;
mod preemption;
mod probe;
mod topology;

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use beelet_codec::data;

use beelet_units::field::FieldError;

/// A kind of scenario, whose fields are the type's, with `#[serde(deny_unknown_fields, rename_all =
/// "camelCase")]`.
pub trait Scenario: DeserializeOwned {
    /// Decision without the name, which the framework adds.
    type Output: Serialize;

    /// Returns the scenario's name.
    fn name(&self) -> &str;

    /// Decides. A negative decision is an output, not an error.
    ///
    /// # Errors
    /// Fails with the path of a value that is well-formed JSON but invalid.
    fn decide(&self) -> Result<Self::Output, FieldError>;
}

/// A kind of decision that `beelet plan` makes.
#[derive(Debug)]
pub struct What {
    /// Name on the command line.
    pub name: &'static str,
    /// One-line description.
    pub about: &'static str,
    run: fn(Input<'_>) -> Result<String, PlanError>,
}

impl What {
    const fn of<S: Scenario>(name: &'static str, about: &'static str) -> Self {
        Self { name, about, run: run::<S> }
    }

    /// Reads one scenario and answers with one line of JSON, without a newline.
    ///
    /// # Errors
    /// Fails for an unreadable scenario, with its name, the field and the reason.
    pub fn answer(&self, input: Input<'_>) -> Result<String, PlanError> {
        (self.run)(input)
    }
}

/// All kinds of decision, in the order of the help.
pub const WHATS: &[What] = &[
    What::of::<preemption::PreemptionScenario>("preemption", "the pods that make room for a critical one"),
    What::of::<admission::AdmissionScenario>(
        "admission",
        "whether a pod fits, and which pods it preempts if critical",
    ),
    What::of::<cgroups::CgroupsScenario>(
        "cgroups",
        "the contents of the cgroup files of a node and its pods",
    ),
    What::of::<image_gc::ImageGcScenario>("image-gc", "the images that garbage collection removes"),
    What::of::<container_gc::ContainerGcScenario>(
        "container-gc",
        "the dead containers that garbage collection removes",
    ),
    What::of::<eviction::EvictionScenario>(
        "eviction",
        "whether the node is under pressure, and the pod to evict",
    ),
    What::of::<devices::DevicesScenario>("devices", "the devices of pods, over a sequence of events"),
    What::of::<cpus::CpusScenario>("cpus", "the exclusive CPUs of containers, over a sequence of events"),
    What::of::<memory::MemoryScenario>(
        "memory",
        "the NUMA nodes of containers' memory, over a sequence of events",
    ),
    What::of::<topology::TopologyScenario>("topology", "the NUMA nodes that align devices, CPUs and memory"),
    What::of::<probe::ProbeScenario>("probe", "a container's state after a sequence of probe outcomes"),
];

/// Returns the kind of this name.
pub fn what(name: &str) -> Option<&'static What> {
    WHATS.iter().find(|what| what.name == name)
}

/// A scenario in its input form.
#[derive(Debug)]
pub enum Input<'a> {
    /// Text of one JSON value.
    Json(&'a [u8]),
    /// Parsed tree (from YAML).
    Tree(Value),
}

/// Error of a scenario without a decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanError {
    /// Name of the scenario, if readable.
    pub scenario: Option<String>,
    /// Wrong field, with the reason.
    pub field: FieldError,
    /// Place at which the text stops being JSON (it may be YAML): line and column, from 1.
    pub not_json: Option<(u64, u64)>,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.scenario {
            Some(name) => write!(f, "scenario {name:?}: {}", self.field),
            None => write!(f, "{}", self.field),
        }
    }
}

impl std::error::Error for PlanError {}

#[derive(Serialize)]
struct Named<'a, O> {
    name: &'a str,
    #[serde(flatten)]
    output: O,
}

fn run<S: Scenario>(input: Input<'_>) -> Result<String, PlanError> {
    let tree = match input {
        Input::Json(text) => data::parse(text).map_err(|error| not_json(&error))?,
        Input::Tree(tree) => tree,
    };
    let scenario: S = data::read(&tree).map_err(|problem| PlanError {
        scenario: tree.get("name").and_then(Value::as_str).map(str::to_owned),
        field: FieldError::new(problem.path, problem.message),
        not_json: None,
    })?;
    let failed =
        |field: FieldError| PlanError { scenario: Some(scenario.name().to_owned()), field, not_json: None };
    if scenario.name().is_empty() {
        return Err(PlanError {
            scenario: None,
            ..failed(FieldError::new("name", "is empty; every scenario needs a name"))
        });
    }
    let output = scenario.decide().map_err(failed)?;
    let answer = data::to_value(&Named { name: scenario.name(), output });
    answer.map(|answer| answer.to_string()).map_err(|error| failed(FieldError::new("", error.to_string())))
}

fn not_json(error: &serde_json::Error) -> PlanError {
    let text = error.to_string();
    // The place is reported separately from the sentence.
    let place = format!(" at line {} column {}", error.line(), error.column());
    let sentence = text.strip_suffix(&place).map(str::to_owned).unwrap_or(text);
    PlanError {
        scenario: None,
        field: FieldError::new("", sentence),
        not_json: Some((error.line() as u64, error.column() as u64)),
    }
}

/// Returns `namespace/name`, the name of a pod in every output.
///
/// # Errors
/// Fails at `metadata.name` if the pod has none.
pub(crate) fn pod_name(pod: &Pod) -> Result<String, FieldError> {
    match pod.metadata.name.as_deref() {
        None | Some("") => Err(FieldError::new("metadata.name", "is missing; every pod needs a name")),
        Some(name) => {
            let namespace = pod.metadata.namespace.as_deref().filter(|namespace| !namespace.is_empty());
            Ok(format!("{}/{name}", namespace.unwrap_or("default")))
        }
    }
}

/// Calls a function for each pod of a list, and prepends the list's path to every error.
pub(crate) fn each_pod<'p, T>(
    field: &str,
    pods: &'p [Pod],
    mut read: impl FnMut(&'p Pod) -> Result<T, FieldError>,
) -> Result<Vec<T>, FieldError> {
    pods.iter()
        .enumerate()
        .map(|(index, pod)| read(pod).map_err(|error| error.under(&format!("{field}[{index}]"))))
        .collect()
}
