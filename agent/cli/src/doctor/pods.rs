//! What the manifests' folder asks for: files that become no pod, and images that are not here.

use std::collections::{BTreeMap, BTreeSet};

use beelet_manifests::source::{Rules, preview};
use beelet_model::desired::Desired;

use super::{Finding, Patient};

/// Most names in one sentence.
const NAMED: usize = 5;

/// What the folder adds up to, read as the agent reads it.
pub(super) fn desired(config: &beelet_config::Config) -> Option<Desired> {
    let path = config.static_pod_path.as_ref().filter(|path| path.exists())?;
    let rules = Rules {
        critical_static_pods: config.beelet.critical_static_pods,
        allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
        state: None,
    };
    Some(preview(path, &config.node_name, &rules, &BTreeMap::new()).0)
}

/// The images that its pods name.
pub(super) fn images_of(desired: &Desired) -> BTreeSet<String> {
    let specs = desired.pods.values().filter_map(|pod| pod.spec.as_ref());
    let containers = specs.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    containers.filter_map(|container| container.image.clone()).collect()
}

pub(super) fn rejected(patient: &Patient) -> Vec<Finding> {
    let check = "rejected manifests";
    let Some(desired) = &patient.desired else { return Vec::new() };
    if desired.rejected.is_empty() {
        return vec![Finding::ok(check, format!("none; {} pods", desired.pods.len()))];
    }
    let messages: Vec<&str> = desired.rejected.iter().flat_map(|one| one.message.lines()).collect();
    let more = messages.len().saturating_sub(NAMED);
    let mut detail = messages.iter().take(NAMED).copied().collect::<Vec<_>>().join("\n");
    if more > 0 {
        detail += &format!("\nand {more} more");
    }
    let consequence = "what they describe does not run, or not as they say";
    vec![Finding::degraded(
        check,
        detail,
        consequence,
        "correct them; `beelet apply --dry-run -f FILE` says what is wrong",
    )]
}

pub(super) fn images(patient: &Patient) -> Vec<Finding> {
    let check = "images";
    let (Some(desired), Some(missing)) = (&patient.desired, patient.runtime.missing_images()) else {
        return Vec::new();
    };
    if missing.is_empty() {
        return vec![Finding::ok(check, format!("all {} that pods need are here", images_of(desired).len()))];
    }
    let more = missing.len().saturating_sub(NAMED);
    let mut names = missing.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    if more > 0 {
        names += &format!(" and {more} more");
    }
    vec![Finding::degraded(
        check,
        format!("not here: {names}"),
        "their pods wait until they are pulled; without a registry, for ever",
        "`beelet images pull IMAGE`, or import them into the runtime",
    )]
}
