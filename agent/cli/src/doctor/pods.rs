//! Checks the manifest directory: rejected manifests and missing images.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use beelet_manifests::source::{Rules, preview};
use beelet_model::desired::Desired;

use beelet_client::Client;

use super::{Finding, Patient};

/// Maximum time for a running agent to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum names in one sentence.
const NAMED: usize = 5;

/// Reads the manifest directory as the agent does.
pub(super) fn desired(config: &beelet_config::Config) -> Option<Desired> {
    let path = config.static_pod_path.as_ref().filter(|path| path.exists())?;
    let rules = Rules {
        critical_static_pods: config.beelet.critical_static_pods,
        allowed_unsafe_sysctls: config.allowed_unsafe_sysctls.clone(),
        state: None,
    };
    Some(preview(path, &config.node_name, &rules, &BTreeMap::new()).0)
}

/// Returns the images that the pods name.
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
    let consequence = "the agent does not run these pods, or not as described";
    vec![Finding::degraded(
        check,
        detail,
        consequence,
        "correct them; `beelet apply --dry-run -f FILE` validates a file",
    )]
}

/// Reports force-deleted pods that still run, if an agent answers.
pub(super) fn deleted_by_force(patient: &Patient) -> Vec<Finding> {
    let socket = patient.config.socket();
    let ask = async {
        let answer = async { Client::connect(&socket).await.ok()?.pods.deleted_by_force().await.ok() };
        Ok(tokio::time::timeout(PATIENCE, answer).await.ok().flatten())
    };
    judge_deleted(&crate::block_on(ask).ok().flatten().unwrap_or_default())
}

fn judge_deleted(pods: &[String]) -> Vec<Finding> {
    let detail = match pods {
        [] => return Vec::new(),
        [one] => format!("1 force-deleted pod still runs: {one}"),
        all => {
            let named = all.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = if all.len() > NAMED { ", …" } else { "" };
            format!("{} force-deleted pods still run: {named}{more}", all.len())
        }
    };
    vec![Finding::degraded(
        "deleted pods",
        detail,
        "these pods hold their CPU, memory, ports and volumes; new pods of these names wait",
        "see `beelet events` for the runtime's errors; the agent keeps stopping them",
    )]
}

pub(super) fn images(patient: &Patient) -> Vec<Finding> {
    let check = "images";
    let (Some(desired), Some(missing)) = (&patient.desired, patient.runtime.missing_images()) else {
        return Vec::new();
    };
    if missing.is_empty() {
        return vec![Finding::ok(
            check,
            format!("all {} images of pods are present", images_of(desired).len()),
        )];
    }
    let more = missing.len().saturating_sub(NAMED);
    let mut names = missing.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    if more > 0 {
        names += &format!(" and {more} more");
    }
    vec![Finding::degraded(
        check,
        format!("missing: {names}"),
        "their pods wait until the images are pulled, forever without a registry",
        "run `beelet images pull IMAGE`, or import the images into the runtime",
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_were_deleted_by_force_and_still_run_are_named() {
        let check = |count: usize, expected: &str| {
            let names: Vec<String> = (1..=count).map(|n| format!("shop/web-{n}")).collect();
            let findings = judge_deleted(&names);
            assert_eq!(findings.first().map(|one| one.detail.as_str()).unwrap_or_default(), expected);
        };
        check(0, "");
        check(1, "1 force-deleted pod still runs: shop/web-1");
        check(2, "2 force-deleted pods still run: shop/web-1, shop/web-2");
        let six = "shop/web-1, shop/web-2, shop/web-3, shop/web-4, shop/web-5, …";
        check(6, &format!("6 force-deleted pods still run: {six}"));
    }
}
