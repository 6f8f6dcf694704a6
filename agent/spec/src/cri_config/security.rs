//! Security settings of a pod's processes for the runtime: users, groups, capabilities, namespaces, system
//! call filters. A container's own setting has precedence over its pod's.

use std::path::{Component, Path, PathBuf};

use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

use super::ContainerFacts;
use crate::Error;
use beelet_model::pod::{ImageUser, NodeFacts};

/// Paths that Docker's default profile hides from a container, as in the kubelet.
pub const MASKED_PATHS: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
/// Paths that Docker's default profile makes read-only.
pub const READONLY_PATHS: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Returns the namespaces of a pod and its containers.
pub(super) fn namespaces(spec: &core::PodSpec) -> cri::NamespaceOption {
    let mode = |host: Option<bool>, own: cri::NamespaceMode| {
        if host == Some(true) { cri::NamespaceMode::Node } else { own }
    };
    let own_pid = if spec.share_process_namespace == Some(true) {
        cri::NamespaceMode::Pod
    } else {
        cri::NamespaceMode::Container
    };
    cri::NamespaceOption {
        network: mode(spec.host_network, cri::NamespaceMode::Pod).into(),
        pid: mode(spec.host_pid, own_pid).into(),
        ipc: mode(spec.host_ipc, cri::NamespaceMode::Pod).into(),
        ..Default::default()
    }
}

/// Returns the namespaces of a container: its pod's, except for one that shares the processes of another
/// container. In a pod with one process namespace they are shared already.
fn namespaces_of_container(spec: &core::PodSpec, facts: &ContainerFacts) -> cri::NamespaceOption {
    let mut options = namespaces(spec);
    if let Some(target) = &facts.process_target
        && options.pid() == cri::NamespaceMode::Container
    {
        options.set_pid(cri::NamespaceMode::Target);
        options.target_id.clone_from(target);
    }
    options
}

/// Returns the sandbox's security settings.
pub(super) fn of_sandbox(spec: &core::PodSpec) -> cri::LinuxSandboxSecurityContext {
    let context = spec.security_context.clone().unwrap_or_default();
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| &c.security_context);
    let usual = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut contexts = usual.map(|c| &c.security_context).chain(ephemeral);
    cri::LinuxSandboxSecurityContext {
        namespace_options: Some(namespaces(spec)),
        // As in the kubelet, a sandbox is privileged if one of its containers is.
        privileged: contexts.any(|own| own.as_ref().and_then(|own| own.privileged) == Some(true)),
        run_as_user: context.run_as_user.map(|value| cri::Int64Value { value }),
        // Runtimes ignore a group without a user; the sandbox's image has a user of its own.
        run_as_group: context
            .run_as_group
            .filter(|_| context.run_as_user.is_some())
            .map(|value| cri::Int64Value { value }),
        supplemental_groups: supplemental_groups(&context),
        selinux_options: context.se_linux_options.as_ref().map(selinux),
        // The process that holds the namespaces needs no call that the runtime's own filter forbids.
        seccomp: Some(profile(cri::security_profile::ProfileType::RuntimeDefault, String::new())),
        ..Default::default()
    }
}

fn supplemental_groups(context: &core::PodSecurityContext) -> Vec<i64> {
    context.fs_group.into_iter().chain(context.supplemental_groups.iter().flatten().copied()).collect()
}

fn profile(kind: cri::security_profile::ProfileType, localhost_ref: String) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: kind.into(), localhost_ref }
}

fn selinux(options: &core::SELinuxOptions) -> cri::SeLinuxOption {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    cri::SeLinuxOption {
        user: text(&options.user),
        role: text(&options.role),
        r#type: text(&options.type_),
        level: text(&options.level),
    }
}

/// Returns the system call filter: the container's, the pod's, or the node's default.
fn seccomp(
    profile_of: Option<&core::SeccompProfile>,
    privileged: bool,
    node: &NodeFacts,
) -> cri::SecurityProfile {
    use cri::security_profile::ProfileType;
    match profile_of.map(|p| p.type_.as_str()) {
        _ if privileged => profile(ProfileType::Unconfined, String::new()),
        Some("RuntimeDefault") => profile(ProfileType::RuntimeDefault, String::new()),
        Some("Localhost") => {
            let name = profile_of.and_then(|p| p.localhost_profile.as_deref()).unwrap_or_default();
            let path = below(&node.seccomp_root, Path::new(name));
            profile(ProfileType::Localhost, path.to_string_lossy().into_owned())
        }
        Some(_) => profile(ProfileType::Unconfined, String::new()),
        None if node.seccomp_default => profile(ProfileType::RuntimeDefault, String::new()),
        None => profile(ProfileType::Unconfined, String::new()),
    }
}

/// Joins a path to a folder without leaving it: strips the root of an absolute path, like Go's
/// `filepath.Join`, and removes parts that lead up.
fn below(folder: &Path, path: &Path) -> PathBuf {
    let parts = path.components().filter(|part| matches!(part, Component::Normal(_)));
    parts.fold(folder.to_owned(), |below, part| below.join(part))
}

/// Returns a container's security settings. Fails if the runtime lacks a requested feature, or a container
/// that must not run as root would.
pub(super) fn of_container(
    pod_spec: &core::PodSpec,
    spec: &core::Container,
    facts: &ContainerFacts,
    node: &NodeFacts,
) -> Result<cri::LinuxContainerSecurityContext, Error> {
    let of_pod = pod_spec.security_context.clone().unwrap_or_default();
    let own = spec.security_context.clone().unwrap_or_default();
    let privileged = own.privileged == Some(true);
    let unmasked = privileged || own.proc_mount.as_deref() == Some("Unmasked");
    let paths =
        |list: &[&str]| if unmasked { Vec::new() } else { list.iter().map(|p| (*p).to_owned()).collect() };
    let mut masked = paths(MASKED_PATHS);
    if !unmasked {
        masked.extend_from_slice(&node.masked);
    }
    let seccomp_profile = own.seccomp_profile.as_ref().or(of_pod.seccomp_profile.as_ref());
    let user = own.run_as_user.or(of_pod.run_as_user);
    if own.run_as_non_root.or(of_pod.run_as_non_root) == Some(true) {
        refuse_root(user, &facts.image_user)?;
    }
    // Either a number or a name, as in the kubelet. An image without a user runs as root (getImageUser):
    // without a user the runtime would ignore the group.
    let (uid, username) = match (user.or(facts.image_user.uid), facts.image_user.name.as_str()) {
        (None, "") => (Some(0), String::new()),
        (None, name) => (None, name.to_owned()),
        (uid, _) => (uid, String::new()),
    };
    let capabilities = own.capabilities.unwrap_or_default();
    Ok(cri::LinuxContainerSecurityContext {
        capabilities: Some(cri::Capability {
            add_capabilities: capabilities.add.unwrap_or_default(),
            drop_capabilities: capabilities.drop.unwrap_or_default(),
            ..Default::default()
        }),
        privileged,
        namespace_options: Some(namespaces_of_container(pod_spec, facts)),
        run_as_user: uid.map(|value| cri::Int64Value { value }),
        run_as_username: username,
        run_as_group: own.run_as_group.or(of_pod.run_as_group).map(|value| cri::Int64Value { value }),
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        supplemental_groups: supplemental_groups(&of_pod),
        supplemental_groups_policy: groups_policy(&of_pod, facts)?.into(),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        // A container's label replaces its pod's as a whole, not part by part.
        selinux_options: own.se_linux_options.as_ref().or(of_pod.se_linux_options.as_ref()).map(selinux),
        masked_paths: masked,
        readonly_paths: paths(READONLY_PATHS),
        seccomp: Some(seccomp(seccomp_profile, privileged, node)),
        ..Default::default()
    })
}

/// Refuses a container that would run as root although its pod forbids it (`verifyRunAsNonRoot`).
fn refuse_root(user: Option<i64>, image: &ImageUser) -> Result<(), Error> {
    match (user, image.uid, image.name.as_str()) {
        (Some(0), ..) => Err(Error::Contradiction),
        (Some(_), ..) => Ok(()),
        (None, Some(0), _) | (None, None, "") => Err(Error::RootImage),
        (None, Some(_), _) => Ok(()),
        (None, None, name) => Err(Error::NamedUser(name.to_owned())),
    }
}

fn groups_policy(
    of_pod: &core::PodSecurityContext,
    facts: &ContainerFacts,
) -> Result<cri::SupplementalGroupsPolicy, Error> {
    match of_pod.supplemental_groups_policy.as_deref() {
        Some("Strict") if !facts.features.supplemental_groups_policy => Err(Error::StrictGroups),
        Some("Strict") => Ok(cri::SupplementalGroupsPolicy::Strict),
        _ => Ok(cri::SupplementalGroupsPolicy::Merge),
    }
}

/// Returns the kernel settings of the pod's namespaces.
pub(super) fn sysctls(spec: &core::PodSpec) -> std::collections::HashMap<String, String> {
    let listed = spec.security_context.as_ref().and_then(|c| c.sysctls.as_ref());
    // The API accepts both notations (`net/ipv4/…`), the runtime one.
    listed.into_iter().flatten().map(|s| (with_dots(&s.name), s.value.clone())).collect()
}

/// Writes a sysctl's name with dots between its parts: if the first separator is a slash, slashes separate
/// and dots belong to a name (sysctl(8)).
pub(crate) fn with_dots(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(at) if name.as_bytes()[at] == b'/' => name
            .chars()
            .map(|c| match c {
                '/' => '.',
                '.' => '/',
                c => c,
            })
            .collect(),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixtures::{facts, node};

    fn context(
        pod: Value,
        own: Value,
        image: ImageUser,
    ) -> Result<cri::LinuxContainerSecurityContext, Error> {
        let spec = json!({"securityContext": pod, "containers": [{"name": "c", "securityContext": own}]});
        let spec: core::PodSpec = serde_json::from_value(spec).unwrap();
        let facts = ContainerFacts { image_user: image, ..facts() };
        of_container(&spec, &spec.containers[0], &facts, &node())
    }

    fn root() -> ImageUser {
        ImageUser { uid: Some(0), name: String::new() }
    }

    #[test]
    fn a_containers_own_settings_go_before_its_pods() {
        let check = |pod: Value, own: Value, expected: (Option<i64>, Option<i64>, bool, &[i64])| {
            let made = context(pod.clone(), own.clone(), root()).unwrap();
            let shown = (
                made.run_as_user.map(|id| id.value),
                made.run_as_group.map(|id| id.value),
                made.no_new_privs,
                made.supplemental_groups.as_slice(),
            );
            assert_eq!(shown, expected, "{pod} {own}");
        };
        check(json!({}), json!({}), (Some(0), None, false, &[]));
        check(json!({"runAsUser": 5, "runAsGroup": 6}), json!({}), (Some(5), Some(6), false, &[]));
        check(
            json!({"runAsUser": 5}),
            json!({"runAsUser": 7, "runAsGroup": 8}),
            (Some(7), Some(8), false, &[]),
        );
        // A group alone applies to the image's user, or to root if the image has none.
        check(json!({"runAsGroup": 6}), json!({}), (Some(0), Some(6), false, &[]));
        let nobodys = context(json!({"runAsGroup": 6}), json!({}), ImageUser::default()).unwrap();
        let ids = (nobodys.run_as_user.map(|id| id.value), nobodys.run_as_group.map(|id| id.value));
        assert_eq!(ids, (Some(0), Some(6)));
        check(
            json!({"fsGroup": 9, "supplementalGroups": [1, 2]}),
            json!({}),
            (Some(0), None, false, &[9, 1, 2]),
        );
        check(json!({}), json!({"allowPrivilegeEscalation": false}), (Some(0), None, true, &[]));
    }

    #[test]
    fn who_must_not_be_root_is_not() {
        let name = |name: &str| ImageUser { uid: None, name: name.to_owned() };
        let check = |own: Value, image: ImageUser, expected: Result<(), &str>| {
            let made = context(json!({"runAsNonRoot": true}), own.clone(), image);
            match (made, expected) {
                (Ok(_), Ok(())) => {}
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (made, _) => panic!("{own}: {made:?}"),
            }
        };
        check(json!({}), root(), Err("the image runs as root"));
        check(json!({}), name(""), Err("the image runs as root"));
        check(json!({}), name("www"), Err("the image's user \"www\" has no number"));
        check(json!({}), ImageUser { uid: Some(7), name: String::new() }, Ok(()));
        check(json!({"runAsUser": 7}), root(), Ok(()));
        check(
            json!({"runAsUser": 0}),
            ImageUser { uid: Some(7), name: String::new() },
            Err("runAsUser is 0"),
        );
        check(json!({"runAsNonRoot": false}), root(), Ok(()));
    }

    #[test]
    fn the_filter_of_system_calls() {
        use cri::security_profile::ProfileType;
        let check = |pod: Value, own: Value, kind: ProfileType, path: &str| {
            let made = context(pod.clone(), own.clone(), root()).unwrap().seccomp.unwrap();
            assert_eq!((made.profile_type(), made.localhost_ref.as_str()), (kind, path), "{pod} {own}");
        };
        let default = json!({"seccompProfile": {"type": "RuntimeDefault"}});
        let local = json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "web/a.json"}});
        check(json!({}), json!({}), ProfileType::Unconfined, "");
        check(default.clone(), json!({}), ProfileType::RuntimeDefault, "");
        check(default.clone(), local.clone(), ProfileType::Localhost, "/seccomp/web/a.json");
        // The profile stays below its folder: for static pods no API server validates it.
        let leads = |name: &str| json!({"seccompProfile": {"type": "Localhost", "localhostProfile": name}});
        check(default.clone(), leads("/etc/a.json"), ProfileType::Localhost, "/seccomp/etc/a.json");
        check(default.clone(), leads("../../etc/./a.json"), ProfileType::Localhost, "/seccomp/etc/a.json");
        check(local, json!({"seccompProfile": {"type": "Unconfined"}}), ProfileType::Unconfined, "");
        check(default, json!({"privileged": true}), ProfileType::Unconfined, "");
    }

    #[test]
    fn a_containers_selinux_label_goes_before_its_pods_as_a_whole() {
        let check = |pod: Value, own: Value, expected: Option<(&str, &str)>| {
            let made = context(pod.clone(), own.clone(), root()).unwrap().selinux_options;
            let shown = made.as_ref().map(|label| (label.r#type.as_str(), label.level.as_str()));
            assert_eq!(shown, expected, "{pod} {own}");
        };
        let label = |parts: Value| json!({"seLinuxOptions": parts});
        check(json!({}), json!({}), None);
        check(label(json!({"type": "t", "level": "s0"})), json!({}), Some(("t", "s0")));
        check(label(json!({"type": "t"})), label(json!({"level": "s0:c1"})), Some(("", "s0:c1")));
    }

    #[test]
    fn strict_groups_need_a_runtime_that_has_them() {
        let made = context(json!({"supplementalGroupsPolicy": "Strict"}), json!({}), root());
        assert!(made.unwrap_err().to_string().contains("containerd 2.0"));
        assert!(context(json!({"supplementalGroupsPolicy": "Merge"}), json!({}), root()).is_ok());
    }

    #[test]
    fn proc_is_masked_unless_that_is_asked_for() {
        let masked = |own: Value| !context(json!({}), own, root()).unwrap().masked_paths.is_empty();
        let all = context(json!({}), json!({}), root()).unwrap().masked_paths;
        assert!(["/proc/kcore", "/sys/of/this/machine"].iter().all(|path| all.iter().any(|one| one == path)));
        assert!(!masked(json!({"procMount": "Unmasked"})));
        assert!(!masked(json!({"privileged": true})));
    }

    #[test]
    fn sysctls_are_written_with_dots() {
        let check = |name: &str, expected: &str| assert_eq!(with_dots(name), expected);
        check("net.ipv4.tcp_syncookies", "net.ipv4.tcp_syncookies");
        check("net/ipv4/conf/eth0.1/x", "net.ipv4.conf.eth0/1.x");
        check("kernel.shm_rmid_forced", "kernel.shm_rmid_forced");
    }
}
