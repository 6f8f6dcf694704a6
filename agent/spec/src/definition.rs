//! Properties of a container that cannot change while it runs: another image needs another container, and so
//! do other amounts if its resizePolicy requires a restart. The kubelet compares only the name and the image
//! (`pkg/kubelet/container/helpers.go`, `HashContainer`), and so does this module: other changes that an API
//! server allows while a pod runs do not affect its containers. The digest is the kubelet's too, so that a
//! kubelet that takes over restarts nothing.

use std::fmt::Write as _;

use beelet_model::labels::{AMOUNTS, CONTAINER_HASH, is_own};
use beelet_policy::handover;
use beelet_proto::cri;
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1::{Container, ContainerResizePolicy, Pod, ResourceRequirements};
use sha2::{Digest, Sha256};

/// Returns a digest of a container's definition, the kubelet's since Kubernetes 1.31.
pub fn digest(spec: &Container) -> String {
    handover::container_hash_of(&spec.name, spec.image.as_deref().unwrap_or_default())
}

/// Returns the digest that versions of the agent before the hand-over wrote.
fn former_digest(spec: &Container) -> String {
    let image = spec.image.as_deref().unwrap_or_default();
    let digest = Sha256::new().chain_update(&spec.name).chain_update([0]).chain_update(image).finalize();
    digest[..8].iter().fold(String::with_capacity(16), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns true if a container was created from another definition than `spec`. Containers from older
/// versions have no digest.
pub fn is_redefined(spec: &Container, made: &cri::ContainerStatus) -> bool {
    let Some(noted) = made.annotations.get(CONTAINER_HASH).filter(|noted| **noted != digest(spec)) else {
        return false;
    };
    if is_own(&made.labels) {
        return *noted != former_digest(spec);
    }
    // A kubelet before 1.31 wrote a digest of the whole container, which says nothing. A newer one wrote a
    // digest that follows from an image that the runtime reports.
    let reported = made.image.as_ref().map(|image| [&image.user_specified_image, &image.image]);
    let mut reported =
        reported.into_iter().flatten().filter(|image| !image.is_empty()).flat_map(|image| short_forms(image));
    reported.any(|image| *noted == handover::container_hash_of(&spec.name, image))
}

/// Returns true if the digest of a container says nothing about its definition: another agent wrote it, in a
/// format of its own.
pub fn is_unjudged(spec: &Container, made: &cri::ContainerStatus) -> bool {
    let noted = made.annotations.get(CONTAINER_HASH);
    !is_own(&made.labels) && noted.is_some_and(|noted| *noted != digest(spec))
}

/// Returns the texts of a spec that a runtime may report as this name of an image.
fn short_forms(image: &str) -> impl Iterator<Item = &str> {
    let hub = image.strip_prefix("docker.io/");
    let official = hub.and_then(|rest| rest.strip_prefix("library/"));
    let full = [Some(image), hub, official];
    let untagged = full.map(|name| name.and_then(|name| name.strip_suffix(":latest")));
    full.into_iter().chain(untagged).flatten()
}

/// Returns the containers whose delays after failures end with the change from `before` to `now`: the first
/// list has those with another image (the failed pull is obsolete), the second those with another image or
/// other resources (the kubelet's GetBackoffKey).
#[must_use]
pub fn renewed(before: &Pod, now: &Pod) -> (Vec<String>, Vec<String>) {
    let find = |name: &str| all(before).find(|container| container.name == name);
    let both: Vec<_> = all(now).filter_map(|now| Some((find(&now.name)?, now))).collect();
    let names = |differ: fn(&Container, &Container) -> bool| {
        let differing = both.iter().filter(|(before, now)| differ(before, now));
        differing.map(|(_, now)| now.name.clone()).collect()
    };
    let of_image = |before: &Container, now: &Container| before.image != now.image;
    let of_any =
        |before: &Container, now: &Container| before.image != now.image || before.resources != now.resources;
    (names(of_image), names(of_any))
}

fn all(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// Returns the amounts of a container that only a restart changes (`resizePolicy` with `RestartContainer`);
/// None without any.
pub fn amounts(spec: &Container) -> Option<String> {
    fixed(spec.resize_policy.as_deref().unwrap_or_default(), spec.resources.as_ref())
}

/// Returns true if a container was created with other amounts than `spec` has, of those that only a restart
/// changes.
pub fn is_resized(spec: &Container, made: &cri::ContainerStatus) -> bool {
    made.annotations.get(AMOUNTS).is_some_and(|noted| amounts(spec).is_some_and(|now| now != *noted))
}

/// Returns true if the running container of this name has other amounts in its pod's status than in its spec,
/// and a restart applies them.
pub fn awaits_restart(pod: &Pod, spec: &Container) -> bool {
    let policies = spec.resize_policy.as_deref().unwrap_or_default();
    let Some(now) = fixed(policies, spec.resources.as_ref()) else { return false };
    let statuses = pod
        .status
        .iter()
        .flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses).flatten());
    let mut of_name = statuses.filter(|status| status.name == spec.name);
    of_name.any(|status| fixed(policies, status.resources.as_ref()).is_some_and(|has| has != now))
}

/// Formats the amounts, independent of their notation.
fn fixed(policies: &[ContainerResizePolicy], resources: Option<&ResourceRequirements>) -> Option<String> {
    let amount = |list: Option<&std::collections::BTreeMap<String, _>>, name: &str| {
        let text: &k8s_openapi::apimachinery::pkg::api::resource::Quantity = list?.get(name)?;
        Quantity::parse(&text.0).ok().map(Quantity::milli_value)
    };
    let mut names: Vec<&str> = policies
        .iter()
        .filter(|policy| policy.restart_policy == "RestartContainer")
        .map(|policy| policy.resource_name.as_str())
        .collect();
    names.sort_unstable();
    let text = names.into_iter().map(|name| {
        let request = amount(resources.and_then(|r| r.requests.as_ref()), name).unwrap_or_default();
        let limit = amount(resources.and_then(|r| r.limits.as_ref()), name).unwrap_or_default();
        format!("{name}={request}/{limit}")
    });
    let text: Vec<String> = text.collect();
    (!text.is_empty()).then(|| text.join(" "))
}

#[cfg(test)]
mod tests {
    use beelet_model::labels::{MANAGED_BY, MANAGED_BY_BEELET};
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn another_image_is_another_container_and_nothing_else_is() {
        let container = |value: Value| serde_json::from_value::<Container>(value).unwrap();
        let first = container(json!({"name": "a", "image": "x:1"}));
        let annotations = [(CONTAINER_HASH.to_owned(), digest(&first))].into();
        let labels = [(MANAGED_BY.to_owned(), MANAGED_BY_BEELET.to_owned())].into();
        let made = cri::ContainerStatus { annotations, labels, ..Default::default() };
        let check = |value: Value, expected| assert_eq!(is_redefined(&container(value), &made), expected);
        check(json!({"name": "a", "image": "x:1"}), false);
        check(json!({"name": "a", "image": "x:1", "resources": {"limits": {"cpu": "1"}}}), false);
        check(json!({"name": "a", "image": "x:2"}), true);
        assert!(!is_redefined(&first, &cri::ContainerStatus::default()));
    }

    #[test]
    fn digests_of_earlier_versions_and_of_kubelets_are_recognized() {
        let container = |image: &str| -> Container {
            serde_json::from_value(json!({"name": "a", "image": image})).unwrap()
        };
        let check = |own: bool, hash: &str, reported: &str, expected: (bool, bool)| {
            let labels = own.then(|| (MANAGED_BY.to_owned(), MANAGED_BY_BEELET.to_owned()));
            let made = cri::ContainerStatus {
                annotations: [(CONTAINER_HASH.to_owned(), hash.to_owned())].into(),
                labels: labels.into_iter().collect(),
                image: Some(cri::ImageSpec { image: reported.to_owned(), ..Default::default() }),
                ..Default::default()
            };
            let spec = container("x:1");
            assert_eq!(
                (is_redefined(&spec, &made), is_unjudged(&spec, &made)),
                expected,
                "{own} {hash} {reported}"
            );
        };
        let (now, other) = (digest(&container("x:1")), digest(&container("x:2")));
        let reported = "docker.io/library/x:1";
        check(true, &now, reported, (false, false));
        check(true, &former_digest(&container("x:1")), reported, (false, false));
        check(true, &former_digest(&container("x:2")), reported, (true, false));
        check(true, &other, reported, (true, false));
        check(false, &now, reported, (false, false));
        check(false, &other, "docker.io/library/x:2", (true, true));
        // A kubelet before 1.31 digested the whole container.
        check(false, "1f3c", reported, (false, true));
        check(false, "1f3c", "docker.io/library/x:2", (false, true));
        check(false, &digest(&container("x")), "docker.io/library/x:latest", (true, true));
    }

    fn sized(cpu: &str, memory: &str) -> Container {
        serde_json::from_value(json!({
            "name": "a",
            "resources": {"requests": {"cpu": cpu, "memory": memory}},
            "resizePolicy": [
                {"resourceName": "memory", "restartPolicy": "RestartContainer"},
                {"resourceName": "cpu", "restartPolicy": "NotRequired"},
            ],
        }))
        .unwrap()
    }

    #[test]
    fn another_image_or_other_amounts_begin_without_the_delays_of_the_ones_before() {
        let pod = |image: &str, cpu: &str| -> Pod {
            let main = json!({"name": "a", "image": image, "resources": {"limits": {"cpu": cpu}}});
            let spec = json!({"containers": [main, {"name": "b"}], "initContainers": [{"name": "i", "image": image}]});
            serde_json::from_value(json!({"spec": spec})).unwrap()
        };
        let check = |now: &Pod, image: &[&str], any: &[&str]| {
            let (of_image, of_any) = renewed(&pod("x:1", "1"), now);
            assert_eq!(of_image, image);
            assert_eq!(of_any, any);
        };
        check(&pod("x:1", "1"), &[], &[]);
        check(&pod("x:2", "1"), &["i", "a"], &["i", "a"]);
        check(&pod("x:1", "2"), &[], &["a"]);
        check(&Pod::default(), &[], &[]);
    }

    #[test]
    fn an_amount_that_only_a_restart_changes_is_noted() {
        let first = sized("1", "1Gi");
        let annotations = [(AMOUNTS.to_owned(), amounts(&first).unwrap())].into();
        let made = cri::ContainerStatus { annotations, ..Default::default() };
        assert!(!is_resized(&sized("2", "1024Mi"), &made));
        assert!(is_resized(&sized("1", "2Gi"), &made));
        assert!(!is_resized(&sized("1", "2Gi"), &cri::ContainerStatus::default()));
        assert_eq!(amounts(&Container::default()), None);
    }

    #[test]
    fn a_container_awaits_its_restart_until_its_status_has_the_amounts() {
        let pod = |memory: &str| -> Pod {
            serde_json::from_value(json!({"status": {"containerStatuses": [{
                "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "resources": {"requests": {"cpu": "1", "memory": memory}},
            }]}}))
            .unwrap()
        };
        assert!(awaits_restart(&pod("1Gi"), &sized("1", "2Gi")));
        assert!(!awaits_restart(&pod("1Gi"), &sized("2", "1024Mi")));
        assert!(!awaits_restart(&Pod::default(), &sized("1", "2Gi")));
    }
}
