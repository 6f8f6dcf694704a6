//! Maps a cgroup's name to its directory. Pure.
//!
//! Throughout the agent a cgroup's name has the cgroupfs form with any driver (the kubelet's `CgroupName`):
//! `/kubepods/burstable/pod<uid>`, and below a pod the runtime's names of its containers' cgroups. With the
//! systemd driver each component down to the pod is a slice. A name that begins with a unit
//! (`/system.slice/x.service`) stands for itself.

use beelet_policy::resources::cgroups::slice_path;
use beelet_units::cgroup_driver::CgroupDriver;

/// Mapping of names to paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Names {
    driver: CgroupDriver,
    /// Configured root in cgroupfs form, without a trailing slash; empty for the hierarchies' own root.
    root: String,
}

impl Names {
    /// Returns the mapping for a checked `root`. A slice is converted to its cgroupfs name
    /// (`ParseSystemdToCgroupName` of the kubelet).
    pub(super) fn new(driver: CgroupDriver, root: &str) -> Self {
        let slice = root.rsplit('/').next().and_then(|name| name.strip_suffix(".slice"));
        let root = match (driver, slice) {
            (CgroupDriver::Systemd, Some(slice)) => slice.split('-').map(|part| format!("/{part}")).collect(),
            _ => root.to_owned(),
        };
        Self { driver, root }
    }

    pub(super) fn driver(&self) -> CgroupDriver {
        self.driver
    }

    /// Returns the configured root.
    pub(super) fn root(&self) -> &str {
        &self.root
    }

    /// Returns the path of the root, from the hierarchies' own root; empty if they are the same.
    pub(super) fn root_path(&self) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => self.root.clone(),
            CgroupDriver::Systemd => slice_path(&self.root),
        }
    }

    /// Returns the path of the cgroup `name`, from the hierarchies' root.
    pub(super) fn path(&self, name: &str) -> String {
        if self.driver == CgroupDriver::Cgroupfs || starts_with_unit(name) {
            return format!("{}{name}", self.root_path());
        }
        let (ours, runtimes) = name.split_at(end_of_pod(name));
        format!("{}{runtimes}", slice_path(&format!("{}{ours}", self.root)))
    }

    /// Returns the UID of the pod whose cgroup is the directory `child` of `parent` (a name).
    pub(super) fn pod_uid(&self, parent: &str, child: &str) -> Option<String> {
        let uid = match self.driver {
            CgroupDriver::Cgroupfs => child.strip_prefix("pod")?.to_owned(),
            CgroupDriver::Systemd => {
                let path = self.path(parent);
                let stem = path.rsplit('/').next()?.strip_suffix(".slice")?;
                let escaped = child.strip_prefix(stem)?.strip_prefix("-pod")?.strip_suffix(".slice")?;
                if escaped.contains('-') {
                    return None;
                }
                // UIDs have no underscores (`beelet_policy::resources::cgroups::pod_path`).
                escaped.replace('_', "-")
            }
        };
        (!uid.is_empty()).then_some(uid)
    }
}

/// Returns true if a directory of this name belongs to a unit.
pub(super) fn is_unit(name: &str) -> bool {
    [".slice", ".scope", ".service"].iter().any(|kind| name.ends_with(kind))
}

fn starts_with_unit(name: &str) -> bool {
    name.split('/').nth(1).is_some_and(is_unit)
}

/// Returns the end of the part of a name that the agent makes: up to the pod, if the name contains one.
fn end_of_pod(name: &str) -> usize {
    let mut end = 0;
    for (depth, part) in name.split('/').skip(1).enumerate() {
        end += 1 + part.len();
        let is_ours = match depth {
            0 => part == "kubepods",
            1 => matches!(part, "burstable" | "besteffort"),
            _ => false,
        };
        if !is_ours {
            return if depth > 0 && part.starts_with("pod") { end } else { name.len() };
        }
    }
    name.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(driver: CgroupDriver, root: &str, name: &str, expected: &str) {
        assert_eq!(Names::new(driver, root).path(name), expected, "{name} below {root:?}");
    }

    #[test]
    fn cgroupfs_takes_names_as_they_are() {
        check(CgroupDriver::Cgroupfs, "", "/kubepods/burstable/poda-b/c", "/kubepods/burstable/poda-b/c");
        check(CgroupDriver::Cgroupfs, "/x", "/kubepods", "/x/kubepods");
        check(CgroupDriver::Cgroupfs, "/x", "", "/x");
    }

    #[test]
    fn systemd_has_slices_down_to_the_pod() {
        for (root, name, expected) in [
            ("", "/kubepods", "/kubepods.slice"),
            ("", "/kubepods/besteffort", "/kubepods.slice/kubepods-besteffort.slice"),
            ("", "/kubepods/poda-b", "/kubepods.slice/kubepods-poda_b.slice"),
            (
                "",
                "/kubepods/burstable/pod1-2/cri-containerd-a-b.scope",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-a-b.scope",
            ),
            ("", "/kubepods/podx/c/d-e", "/kubepods.slice/kubepods-podx.slice/c/d-e"),
            ("/foo-x", "/kubepods", "/foo_x.slice/foo_x-kubepods.slice"),
            ("/foo.slice/foo-bar.slice", "/kubepods", "/foo.slice/foo-bar.slice/foo-bar-kubepods.slice"),
            ("/foo", "/foo-kubepods.slice/x", "/foo.slice/foo-kubepods.slice/x"),
            ("", "/system.slice", "/system.slice"),
            ("", "/system.slice/containerd.service", "/system.slice/containerd.service"),
            ("", "/system", "/system.slice"),
            ("", "", ""),
            ("/foo", "", "/foo.slice"),
        ] {
            check(CgroupDriver::Systemd, root, name, expected);
        }
    }

    #[test]
    fn a_pods_directory_has_its_uid() {
        let check = |driver, parent: &str, child: &str, expected: Option<&str>| {
            assert_eq!(Names::new(driver, "").pod_uid(parent, child).as_deref(), expected, "{child}");
        };
        check(CgroupDriver::Cgroupfs, "/kubepods", "poda-b", Some("a-b"));
        check(CgroupDriver::Cgroupfs, "/kubepods", "pod", None);
        check(CgroupDriver::Cgroupfs, "/kubepods", "burstable", None);
        check(CgroupDriver::Systemd, "/kubepods", "kubepods-poda_b.slice", Some("a-b"));
        check(CgroupDriver::Systemd, "/kubepods/burstable", "kubepods-burstable-pod1.slice", Some("1"));
        check(CgroupDriver::Systemd, "/kubepods/burstable", "kubepods-pod1.slice", None);
        check(CgroupDriver::Systemd, "/kubepods", "kubepods-besteffort.slice", None);
        check(CgroupDriver::Systemd, "/kubepods", "kubepods-podx-y.slice", None);
        check(CgroupDriver::Systemd, "/kubepods", "poda", None);
    }
}
