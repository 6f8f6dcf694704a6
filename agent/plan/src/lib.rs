//! `beelet plan`: a scenario in, the decision out, for every decision of `policy`.
//!
//! One file per WHAT holds the type of its scenario (unknown fields are errors) and of its answer, and calls
//! the same functions of `policy` that the daemon calls. To add one: write the file, implement [`Scenario`],
//! add a row to [`WHATS`], and put its golden data into `tests/data/`. The command line reads files and
//! streams; this crate gets one scenario at a time. It must never decide anything itself.
// What this adds up comes from outside.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]
#![forbid(unsafe_code)]

mod admission;
mod cgroups;
mod container_gc;
mod devices;
mod eviction;
mod image_gc;
pub(crate) mod number;
mod preemption;
mod probe;

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use beelet_codec::data;

use beelet_units::field::FieldError;

/// One kind of scenario: its fields are the type's, with `#[serde(deny_unknown_fields, rename_all =
/// "camelCase")]`.
pub trait Scenario: DeserializeOwned {
    /// What is decided, without the name: the framework puts that in front.
    type Output: Serialize;

    /// The scenario's name.
    fn name(&self) -> &str;

    /// Decides. A negative decision is an output, not an error.
    ///
    /// # Errors
    /// A value that was well-formed JSON but makes no sense, by its path in the scenario.
    fn decide(&self) -> Result<Self::Output, FieldError>;
}

/// A kind of decision that `beelet plan` makes.
#[derive(Debug)]
pub struct What {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line on what it decides.
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
    /// If the scenario can't be read: which one, which field and why.
    pub fn answer(&self, input: Input<'_>) -> Result<String, PlanError> {
        (self.run)(input)
    }
}

/// Every WHAT, in the order in which help shows them.
pub const WHATS: &[What] = &[
    What::of::<preemption::PreemptionScenario>("preemption", "which pods make room for a critical one"),
    What::of::<admission::AdmissionScenario>(
        "admission",
        "whether a pod fits on the node, and who goes if it must",
    ),
    What::of::<cgroups::CgroupsScenario>("cgroups", "what the cgroup files of a node and its pods must hold"),
    What::of::<image_gc::ImageGcScenario>("image-gc", "which images garbage collection removes"),
    What::of::<container_gc::ContainerGcScenario>(
        "container-gc",
        "which dead containers garbage collection removes",
    ),
    What::of::<eviction::EvictionScenario>(
        "eviction",
        "whether the node is under pressure, and which pod goes first",
    ),
    What::of::<devices::DevicesScenario>(
        "devices",
        "which devices of device plugins pods get, over a row of events",
    ),
    What::of::<probe::ProbeScenario>("probe", "what a row of probe outcomes makes of a container's state"),
];

/// The WHAT of this name.
pub fn what(name: &str) -> Option<&'static What> {
    WHATS.iter().find(|what| what.name == name)
}

/// One scenario, as it came.
#[derive(Debug)]
pub enum Input<'a> {
    /// The text of one JSON value.
    Json(&'a [u8]),
    /// A tree that something else has parsed (YAML).
    Tree(Value),
}

/// Why a scenario got no decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanError {
    /// The scenario's name, as far as that could be read.
    pub scenario: Option<String>,
    /// Which field, and why.
    pub field: FieldError,
    /// The place where the text stops being JSON (it might be YAML): line and column, from 1.
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
    // The place is beside the sentence.
    let place = format!(" at line {} column {}", error.line(), error.column());
    let sentence = text.strip_suffix(&place).map(str::to_owned).unwrap_or(text);
    PlanError {
        scenario: None,
        field: FieldError::new("", sentence),
        not_json: Some((error.line() as u64, error.column() as u64)),
    }
}

/// `namespace/name`, as every output names a pod.
///
/// # Errors
/// At `metadata.name` if the pod has none.
pub(crate) fn pod_name(pod: &Pod) -> Result<String, FieldError> {
    match pod.metadata.name.as_deref() {
        None | Some("") => Err(FieldError::new("metadata.name", "is missing; every pod needs a name")),
        Some(name) => {
            let namespace = pod.metadata.namespace.as_deref().filter(|namespace| !namespace.is_empty());
            Ok(format!("{}/{name}", namespace.unwrap_or("default")))
        }
    }
}

/// Does something for each pod of a list, with the list's path in front of every error.
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
