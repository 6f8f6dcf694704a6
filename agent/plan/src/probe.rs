//! `plan probe`: a probe's state after a row of outcomes.

use std::time::Duration;

use k8s_openapi::api::core::v1::Probe;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{Scenario, number};
use beelet_policy::probe::{
    EdgePolicy, Outcome, ProbeKind, ProbeParams, ProbeResult, ProbeState, Transition,
};
use beelet_units::field::FieldError;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct ProbeScenario {
    name: String,
    kind: ProbeKind,
    probe: Probe,
    #[serde(deserialize_with = "number::required")]
    started_at: u64,
    /// Time of the startup probe's success. Absent: no startup probe; null: it never succeeds.
    #[serde(default, deserialize_with = "present")]
    startup_succeeded_at: Option<Option<u64>>,
    #[serde(default)]
    container_restarts: Vec<Second>,
    ticks: Vec<Tick>,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Second(#[serde(deserialize_with = "number::required")] u64);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tick {
    #[serde(deserialize_with = "number::required")]
    at: u64,
    outcome: Outcome,
}

fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<u64>>, D::Error> {
    number::optional(deserializer).map(Some)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProbeOutput {
    transitions: Vec<Change>,
    restart_at: Option<u64>,
}

#[derive(Serialize)]
struct Change {
    at: u64,
    result: ProbeResult,
}

impl Scenario for ProbeScenario {
    type Output = ProbeOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<ProbeOutput, FieldError> {
        let mut output = ProbeOutput { transitions: Vec::new(), restart_at: None };
        let params =
            ProbeParams::from_probe(&self.probe, self.startup_succeeded_at.is_some(), EdgePolicy::default());
        let mut state = ProbeState::new(self.kind, &params);
        let (mut container, mut last) = (None, 0);
        for (i, tick) in self.ticks.iter().enumerate() {
            if tick.at < last {
                let message = format!("{} is before the previous tick ({last})", tick.at);
                return Err(FieldError::new(format!("ticks[{i}].at"), message));
            }
            last = tick.at;
            let now = Duration::from_secs(tick.at);
            // The probe sees a container at its first tick after the start, and misses containers that
            // started and ended in between.
            let current = self.starts().filter(|start| *start <= tick.at).max();
            let Some(start) = current else { continue };
            if container != current {
                container = current;
                output.add(state.container_started(now, Duration::from_secs(start)));
            }
            if self.startup_succeeded_at.flatten().is_some_and(|at| at <= tick.at) {
                state.gate.startup_succeeded();
            }
            output.add(state.record(now, tick.outcome));
        }
        Ok(output)
    }
}

impl ProbeScenario {
    fn starts(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.started_at).chain(self.container_restarts.iter().map(|restart| restart.0))
    }
}

impl ProbeOutput {
    fn add(&mut self, transition: Option<Transition>) {
        let Some(Transition { at, result, restart }) = transition else { return };
        self.transitions.push(Change { at: at.as_secs(), result });
        if restart {
            self.restart_at.get_or_insert(at.as_secs());
        }
    }
}
