//! Names of cgroups, in the form of cgroupfs and of systemd (`CgroupName.ToCgroupfs`, `ToSystemd` of the
//! kubelet).

use crate::resources::{cgroups::CgroupConfig, qos::QosClass};
use beelet_units::{cgroup_driver::CgroupDriver, field::FieldError};

/// Returns the folder of all pods: `/kubepods` below the configured root.
pub(crate) fn kubepods_path(config: &CgroupConfig) -> String {
    path(&components(config, None), config.driver)
}

/// Returns the folder of a QoS class; Guaranteed pods are directly below kubepods.
pub(crate) fn qos_path(class: QosClass, config: &CgroupConfig) -> String {
    path(&components(config, Some(class)), config.driver)
}

/// Returns the folder of a pod.
///
/// # Errors
/// At `metadata.uid`, if it is missing or cannot be a folder's name: it would lead outside kubepods, or would
/// be ambiguous after systemd's escaping.
pub fn pod_path(uid: Option<&str>, class: QosClass, config: &CgroupConfig) -> Result<String, FieldError> {
    let error = |message: String| Err(FieldError::new("metadata.uid", message));
    let uid = match uid {
        None | Some("") => return error("is missing; the pod's cgroup is named after it".to_owned()),
        Some(uid) => uid,
    };
    if !uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.') || uid.len() > 128 {
        return error(format!("{uid:?} cannot name a cgroup (use letters, digits, - and ., at most 128)"));
    }
    let mut components = components(config, Some(class));
    components.push(format!("pod{uid}"));
    Ok(path(&components, config.driver))
}

/// Converts a path in cgroupfs form to systemd's slices: `/kubepods/burstable` becomes
/// `/kubepods.slice/kubepods-burstable.slice`.
pub fn slice_path(path_in_cgroupfs: &str) -> String {
    path(&parts(path_in_cgroupfs), CgroupDriver::Systemd)
}

fn parts(path: &str) -> Vec<String> {
    path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

fn components(config: &CgroupConfig, class: Option<QosClass>) -> Vec<String> {
    let mut components = parts(&config.root);
    components.push("kubepods".to_owned());
    match class {
        Some(QosClass::Burstable) => components.push("burstable".to_owned()),
        Some(QosClass::BestEffort) => components.push("besteffort".to_owned()),
        Some(QosClass::Guaranteed) | None => {}
    }
    components
}

fn path(components: &[String], driver: CgroupDriver) -> String {
    let mut path = String::new();
    let mut prefix = String::new();
    for component in components {
        path.push('/');
        match driver {
            CgroupDriver::Cgroupfs => path.push_str(component),
            CgroupDriver::Systemd => {
                // A dash separates the levels of a slice's name and is escaped inside a name.
                prefix.push_str(&component.replace('-', "_"));
                path.push_str(&prefix);
                path.push_str(".slice");
                prefix.push('-');
            }
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::cgroups::{CgroupVersion, NodeAmounts};

    fn config(driver: CgroupDriver, root: &str) -> CgroupConfig {
        let node = NodeAmounts { memory_capacity: 0, allocatable_millis: 0, allocatable_memory: 0 };
        CgroupConfig { driver, root: root.to_owned(), ..CgroupConfig::new(CgroupVersion::V2, node) }
    }

    #[test]
    fn both_drivers_name_the_same_tree() {
        let check = |driver, root: &str, class, expected: &str| {
            assert_eq!(pod_path(Some("a-b"), class, &config(driver, root)).unwrap(), expected);
        };
        check(CgroupDriver::Cgroupfs, "/", QosClass::Guaranteed, "/kubepods/poda-b");
        check(CgroupDriver::Cgroupfs, "/foo/", QosClass::Burstable, "/foo/kubepods/burstable/poda-b");
        check(CgroupDriver::Systemd, "", QosClass::Guaranteed, "/kubepods.slice/kubepods-poda_b.slice");
        check(
            CgroupDriver::Systemd,
            "/foo-x",
            QosClass::BestEffort,
            "/foo_x.slice/foo_x-kubepods.slice/foo_x-kubepods-besteffort.slice/foo_x-kubepods-besteffort-poda_b.slice",
        );
    }

    #[test]
    fn a_path_becomes_slices_that_repeat_the_names_above_them() {
        assert_eq!(slice_path("/"), "");
        assert_eq!(slice_path("/kubepods"), "/kubepods.slice");
        assert_eq!(slice_path("/foo-x/kubepods"), "/foo_x.slice/foo_x-kubepods.slice");
    }

    #[test]
    fn a_uid_that_leads_elsewhere_is_refused() {
        for uid in [None, Some(""), Some("../x"), Some("a/b"), Some("a_b"), Some("a\0b"), Some("ä")] {
            let error = pod_path(uid, QosClass::Burstable, &config(CgroupDriver::Cgroupfs, "/")).unwrap_err();
            assert_eq!(error.path(), "metadata.uid");
        }
    }
}
