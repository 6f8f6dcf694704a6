//! AppArmor profiles (KEP-24): the profile of a container, and the node's ability to enforce it.

use beelet_model::pod::NodeFacts;
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

/// Prefix of annotations for a container's profile, from before the fields.
const ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";
/// Value of the annotation for the runtime's default profile.
const RUNTIME_DEFAULT: &str = "runtime/default";
const UNCONFINED: &str = "unconfined";
const LOCALHOST: &str = "localhost/";

/// Returns the reason why the node cannot enforce the profiles of a pod's containers; None if it can, or if
/// the pod has no profile.
#[must_use]
pub fn refusal(pod: &core::Pod, node: &NodeFacts) -> Option<String> {
    let profiles = containers(pod).filter_map(|(name, own)| profile_of(pod, name, own));
    for profile in profiles.filter(|profile| profile.type_ != "Unconfined") {
        if !node.app_armor {
            return Some("Cannot enforce AppArmor: AppArmor is not enabled on the host".to_owned());
        }
        let named = profile.localhost_profile.as_deref().is_some_and(|name| !name.trim().is_empty());
        if profile.type_ == "Localhost" && !named {
            return Some("Cannot enforce AppArmor: the profile of type Localhost has no name".to_owned());
        }
    }
    None
}

/// Returns a container's profile for the runtime.
pub(crate) fn of_container(pod: &core::Pod, container: &core::Container) -> Option<cri::SecurityProfile> {
    use cri::security_profile::ProfileType;
    let own = container.security_context.as_ref();
    let profile = profile_of(pod, &container.name, own)?;
    let (kind, localhost_ref) = match profile.type_.as_str() {
        "RuntimeDefault" => (ProfileType::RuntimeDefault, None),
        "Localhost" => (ProfileType::Localhost, profile.localhost_profile),
        _ => (ProfileType::Unconfined, None),
    };
    Some(cri::SecurityProfile { profile_type: kind.into(), localhost_ref: localhost_ref.unwrap_or_default() })
}

/// Returns the names and own settings of all containers.
fn containers(pod: &core::Pod) -> impl Iterator<Item = (&str, Option<&core::SecurityContext>)> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| {
        let all = spec.init_containers.iter().flatten().chain(&spec.containers);
        let all = all.map(|c| (c.name.as_str(), c.security_context.as_ref()));
        let added = spec.ephemeral_containers.iter().flatten();
        all.chain(added.map(|c| (c.name.as_str(), c.security_context.as_ref())))
    })
}

/// Returns the container's own profile, else its annotation's, else its pod's.
fn profile_of(
    pod: &core::Pod,
    container: &str,
    own: Option<&core::SecurityContext>,
) -> Option<core::AppArmorProfile> {
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    own.and_then(|own| own.app_armor_profile.clone())
        .or_else(|| annotated(pod, container))
        .or_else(|| of_pod.and_then(|context| context.app_armor_profile.clone()))
}

fn annotated(pod: &core::Pod, container: &str) -> Option<core::AppArmorProfile> {
    let text = pod.metadata.annotations.as_ref()?.get(&format!("{ANNOTATION}{container}"))?;
    let of = |type_: &str| core::AppArmorProfile { type_: type_.to_owned(), localhost_profile: None };
    match text.as_str() {
        RUNTIME_DEFAULT => Some(of("RuntimeDefault")),
        UNCONFINED => Some(of("Unconfined")),
        text => {
            let name = text.strip_prefix(LOCALHOST)?;
            Some(core::AppArmorProfile { localhost_profile: Some(name.to_owned()), ..of("Localhost") })
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixtures::node;

    fn pod(context: Value, own: Value, annotation: Option<&str>) -> core::Pod {
        let annotations: Value = annotation
            .map(|text| json!({"container.apparmor.security.beta.kubernetes.io/c": text}))
            .unwrap_or_default();
        serde_json::from_value(json!({
            "metadata": {"name": "web", "annotations": annotations},
            "spec": {"securityContext": context, "containers": [{"name": "c", "securityContext": own}]},
        }))
        .unwrap()
    }

    fn local(name: &str) -> Value {
        json!({"appArmorProfile": {"type": "Localhost", "localhostProfile": name}})
    }

    fn typed(name: &str) -> Value {
        json!({"appArmorProfile": {"type": name}})
    }

    #[test]
    fn a_containers_profile_goes_before_its_annotation_and_that_before_its_pods() {
        use cri::security_profile::ProfileType::{Localhost, RuntimeDefault};
        let check = |context: Value, own: Value, annotation: Option<&str>, expected: Option<_>| {
            let pod = pod(context, own, annotation);
            let made = of_container(&pod, &pod.spec.as_ref().unwrap().containers[0]);
            let shown = made.as_ref().map(|profile| (profile.profile_type(), profile.localhost_ref.as_str()));
            assert_eq!(shown, expected);
        };
        check(json!({}), json!({}), None, None);
        check(typed("RuntimeDefault"), json!({}), None, Some((RuntimeDefault, "")));
        check(typed("RuntimeDefault"), json!({}), Some("localhost/strict"), Some((Localhost, "strict")));
        check(typed("RuntimeDefault"), local("web"), Some("unconfined"), Some((Localhost, "web")));
        check(typed("RuntimeDefault"), json!({}), Some("nonsense"), Some((RuntimeDefault, "")));
    }

    #[test]
    fn a_node_without_app_armor_refuses_what_it_can_not_enforce() {
        let check = |context: Value, annotation: Option<&str>, enabled: bool, expected: Option<&str>| {
            let node = NodeFacts { app_armor: enabled, ..node() };
            let refused = refusal(&pod(context, json!({}), annotation), &node);
            match (refused, expected) {
                (None, None) => {}
                (Some(said), Some(part)) => assert!(said.contains(part), "{said}"),
                (refused, _) => panic!("{refused:?}"),
            }
        };
        let off = Some("not enabled on the host");
        check(json!({}), None, false, None);
        check(typed("Unconfined"), None, false, None);
        check(typed("RuntimeDefault"), None, false, off);
        check(json!({}), Some("runtime/default"), false, off);
        check(typed("RuntimeDefault"), None, true, None);
        check(local(" "), None, true, Some("has no name"));
        check(local("web"), None, true, None);
    }
}
