//! Growth of a claim's volume on the node, and the claim's status about it: `NodeExpander` and
//! `resize_util.go` of Kubernetes 1.36, with their messages.

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimCondition},
    apimachinery::pkg::api::resource,
    apimachinery::pkg::apis::meta::v1::Time,
};
use serde_json::{Value, json};

use beelet_units::quantity::Quantity;

/// The resource of a claim that holds its size.
const STORAGE: &str = "storage";
/// The annotation of a claim whose volume needs no expansion on nodes.
const NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";
/// The conditions about sizes.
const RESIZE: [&str; 4] = ["FileSystemResizePending", "Resizing", "ControllerResizeError", "NodeResizeError"];
/// The condition for a failed expansion on a node.
const FAILED: &str = "NodeResizeError";

/// The decision about the size of a claim's volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Growth {
    /// The volume need not grow.
    Nothing,
    /// The volume should grow, but the pod may only read it.
    ReadOnly,
    /// The driver expands the volume to this size.
    Expand {
        /// Size as written on the API server.
        size: String,
        /// Rule for recording the growth in the claim's status.
        record: Record,
    },
}

/// The writer of a volume's growth in the claim's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// The node writes before and after the growth.
    Steps,
    /// The node writes after the growth: the claim's controller does not know steps.
    Size,
    /// No writer: the size is written already, and a volume of several nodes grows on each of them.
    Nobody,
}

/// A change of a claim's status, as a merge patch (RFC 7386).
#[derive(Clone, Debug, PartialEq)]
pub struct StatusPatch(pub Value);

fn quantity(of: Option<&resource::Quantity>) -> Quantity {
    of.and_then(|text| Quantity::parse(&text.0).ok()).unwrap_or(Quantity::ZERO)
}

/// Returns the volume's size in a claim's status.
#[must_use]
pub fn size_of(claim: &PersistentVolumeClaim) -> Quantity {
    let capacity = claim.status.as_ref().and_then(|status| status.capacity.as_ref());
    quantity(capacity.and_then(|capacity| capacity.get(STORAGE)))
}

/// Decides about a volume that has the size `here` on this node; `None` stands for the size in the claim's
/// status.
#[must_use]
pub fn growth(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
    read_only: bool,
    here: Option<Quantity>,
) -> Growth {
    let capacity = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get(STORAGE));
    let Some(capacity) = capacity.filter(|_| quantity(capacity) > here.unwrap_or_else(|| size_of(claim)))
    else {
        return Growth::Nothing;
    };
    if read_only {
        return Growth::ReadOnly;
    }
    let status = claim.status.as_ref();
    let step = status.and_then(|status| status.allocated_resource_statuses.as_ref()?.get(STORAGE));
    let allocated = status.and_then(|status| status.allocated_resources.as_ref());
    if step.is_none() && allocated.is_none() {
        // A controller without steps only waits for `MarkFSResizeFinished`.
        let written = size_of(claim) >= quantity(Some(capacity));
        let record = if written { Record::Nobody } else { Record::Size };
        return Growth::Expand { size: capacity.0.clone(), record };
    }
    let Some(wanted) = allocated.and_then(|allocated| allocated.get(STORAGE)) else { return Growth::Nothing };
    let size = wanted.0.clone();
    match step.map(String::as_str) {
        Some("NodeResizePending" | "NodeResizeInProgress") => Growth::Expand { size, record: Record::Steps },
        None if size_of(claim) >= quantity(Some(wanted)) && grows_on_each_node(claim) => {
            Growth::Expand { size, record: Record::Nobody }
        }
        _ => Growth::Nothing,
    }
}

fn grows_on_each_node(claim: &PersistentVolumeClaim) -> bool {
    let mut modes = claim.spec.iter().flat_map(|spec| spec.access_modes.iter().flatten());
    let annotations = claim.metadata.annotations.as_ref();
    modes.any(|mode| mode == "ReadWriteMany")
        && annotations.is_none_or(|annotations| !annotations.contains_key(NOT_REQUIRED))
}

/// Returns the status of a claim whose volume begins to grow on this node.
#[must_use]
pub fn begun() -> StatusPatch {
    StatusPatch(json!({"allocatedResourceStatuses": {STORAGE: "NodeResizeInProgress"}}))
}

/// Returns the status of a claim whose volume has grown.
#[must_use]
pub fn grown(claim: &PersistentVolumeClaim, size: &str, record: Record) -> StatusPatch {
    let others = conditions(claim).filter(|condition| !RESIZE.contains(&condition.type_.as_str()));
    let others: Vec<_> = others.collect();
    let mut status = json!({"capacity": {STORAGE: size}, "conditions": others});
    if record == Record::Steps {
        status["allocatedResourceStatuses"] = json!({STORAGE: null});
    }
    StatusPatch(status)
}

/// Returns the status of a claim whose volume failed to grow on this node. The failure is final if
/// `is_infeasible`, or if an earlier attempt failed and the claim requests another size by now: a controller
/// may then withdraw the growth.
#[must_use]
pub fn failed(
    claim: &PersistentVolumeClaim,
    size: &str,
    why: &str,
    is_infeasible: bool,
    now: Timestamp,
) -> StatusPatch {
    let before = conditions(claim).any(|one| one.type_ == FAILED && one.status == "True");
    let mut all: Vec<_> = conditions(claim)
        .filter(|condition| condition.type_ != FAILED || condition.status == "True")
        .cloned()
        .collect();
    if !before {
        all.push(PersistentVolumeClaimCondition {
            type_: FAILED.to_owned(),
            status: "True".to_owned(),
            last_transition_time: Some(Time(now)),
            message: Some(format!("failed to expand pvc with {why}")),
            ..PersistentVolumeClaimCondition::default()
        });
    }
    let asked = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref()?.get(STORAGE));
    let is_other = quantity(asked) != Quantity::parse(size).unwrap_or(Quantity::ZERO);
    let mut status = json!({ "conditions": all });
    if is_infeasible || (before && is_other) {
        status["allocatedResourceStatuses"] = json!({STORAGE: "NodeResizeInfeasible"});
    }
    StatusPatch(status)
}

fn conditions(claim: &PersistentVolumeClaim) -> impl Iterator<Item = &PersistentVolumeClaimCondition> {
    claim.status.iter().flat_map(|status| status.conditions.iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(size: &str) -> PersistentVolume {
        serde_json::from_value(json!({"metadata": {}, "spec": {"capacity": {"storage": size}}})).unwrap()
    }

    fn claim(mode: &str, status: &Value) -> PersistentVolumeClaim {
        let spec = json!({"accessModes": [mode], "resources": {"requests": {"storage": "2Gi"}}});
        serde_json::from_value(json!({"metadata": {}, "spec": spec, "status": status})).unwrap()
    }

    #[test]
    fn a_volume_grows_when_the_claims_status_requires_the_node() {
        let check = |mode: &str, status: Value, read_only: bool, here: Option<i64>, expected: Growth| {
            let here = here.map(|gib| Quantity::from_units(gib << 30));
            assert_eq!(growth(&claim(mode, &status), &volume("2Gi"), read_only, here), expected, "{status}");
        };
        let status = |now: &str, step: Option<&str>| {
            let steps = step.map(|step| json!({"storage": step}));
            json!({
                "capacity": {"storage": now}, "allocatedResources": {"storage": "2Gi"},
                "allocatedResourceStatuses": steps,
            })
        };
        let expand = |record| Growth::Expand { size: "2Gi".to_owned(), record };
        let once = "ReadWriteOnce";
        check(once, status("1Gi", Some("NodeResizePending")), false, None, expand(Record::Steps));
        check(once, status("1Gi", Some("NodeResizeInProgress")), false, None, expand(Record::Steps));
        check(once, status("1Gi", Some("NodeResizePending")), true, None, Growth::ReadOnly);
        check(once, status("1Gi", Some("ControllerResizeInProgress")), false, None, Growth::Nothing);
        check(once, status("1Gi", Some("NodeResizeInfeasible")), false, None, Growth::Nothing);
        check(once, status("1Gi", None), false, None, Growth::Nothing);
        check(once, status("2Gi", None), false, None, Growth::Nothing);
        // Another node has recorded the size.
        check(once, status("2Gi", None), false, Some(1), Growth::Nothing);
        check("ReadWriteMany", status("2Gi", None), false, Some(1), expand(Record::Nobody));
        check("ReadWriteMany", status("2Gi", None), false, Some(2), Growth::Nothing);
        // The controller does not know steps.
        let old = json!({"capacity": {"storage": "1Gi"}});
        check(once, old, false, None, expand(Record::Size));
        check(once, json!({"capacity": {"storage": "2048Mi"}}), false, None, Growth::Nothing);
    }

    #[test]
    fn a_claims_status_records_the_growth_of_its_volume() {
        let pending = json!({"type": "FileSystemResizePending", "status": "True"});
        let other = json!({"type": "Mine", "status": "True"});
        let found = claim("ReadWriteOnce", &json!({"conditions": [pending, other]}));
        let expected = json!({
            "capacity": {"storage": "2Gi"}, "conditions": [other], "allocatedResourceStatuses": {"storage": null},
        });
        assert_eq!(grown(&found, "2Gi", Record::Steps).0, expected);
        assert_eq!(grown(&found, "2Gi", Record::Size).0.get("allocatedResourceStatuses"), None);
        assert_eq!(begun().0, json!({"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}}));
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let once = failed(&found, "2Gi", "too small", false, now).0;
        let said = json!({
            "type": "NodeResizeError", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z",
            "message": "failed to expand pvc with too small",
        });
        assert_eq!(once, json!({"conditions": [pending, other, said]}));
        let infeasible = json!({"storage": "NodeResizeInfeasible"});
        assert_eq!(failed(&found, "2Gi", "too small", true, now).0["allocatedResourceStatuses"], infeasible);
        // The volume failed to grow before: the growth may be withdrawn once the claim requests another size.
        let again = claim("ReadWriteOnce", &json!({"conditions": [said]}));
        assert_eq!(failed(&again, "2Gi", "again", false, now).0, json!({"conditions": [said]}));
        assert_eq!(failed(&again, "3Gi", "again", false, now).0["allocatedResourceStatuses"], infeasible);
    }
}
