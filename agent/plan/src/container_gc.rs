//! `plan container-gc`: the dead containers to remove.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{Scenario, number};
use beelet_policy::images::containers::{
    ContainerGcPolicy, ContainerRecord, ContainerState, PodState, removable_containers,
};
use beelet_units::field::FieldError;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct ContainerGcScenario {
    name: String,
    now: Timestamp,
    policy: Policy,
    #[serde(default)]
    evict_terminated: bool,
    containers: Vec<Container>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Policy {
    #[serde(default, deserialize_with = "number::duration")]
    min_age: Option<Duration>,
    #[serde(deserialize_with = "number::required")]
    max_per_pod_container: i64,
    #[serde(deserialize_with = "number::required")]
    max_containers: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Container {
    id: String,
    pod_uid: String,
    name: String,
    created_at: Timestamp,
    state: ContainerState,
    pod_state: PodState,
}

#[derive(Serialize)]
pub(crate) struct ContainerGcOutput {
    removed: Vec<String>,
}

impl Scenario for ContainerGcScenario {
    type Output = ContainerGcOutput;

    fn name(&self) -> &str {
        &self.name
    }

    fn decide(&self) -> Result<ContainerGcOutput, FieldError> {
        let policy = ContainerGcPolicy {
            min_age: self.policy.min_age.unwrap_or_default(),
            max_per_pod_container: self.policy.max_per_pod_container,
            max_containers: self.policy.max_containers,
        };
        let containers: Vec<ContainerRecord<'_>> = self.containers.iter().map(Container::record).collect();
        let removed = removable_containers(&policy, self.now, self.evict_terminated, &containers);
        Ok(ContainerGcOutput { removed: removed.into_iter().map(str::to_owned).collect() })
    }
}

impl Container {
    fn record(&self) -> ContainerRecord<'_> {
        ContainerRecord {
            id: &self.id,
            pod_uid: &self.pod_uid,
            name: &self.name,
            attempt: 0,
            created_at: self.created_at,
            state: self.state,
            pod_state: self.pod_state,
        }
    }
}
