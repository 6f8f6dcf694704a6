//! A Node's `nodeInfo`, read once: it does not change while the agent runs.
//!
//! The files are those that cAdvisor reads for the kubelet (`machine.GetMachineInfo`,
//! `pkg/kubelet/nodestatus`).

use std::{fs, path::Path};

use beelet_policy::node::status::architecture;
use k8s_openapi::api::core::v1::{NodeSwapStatus, NodeSystemInfo};
use rustix::system::uname;

use crate::node::KUBELET_VERSION;

/// Maximum length of a value, in characters.
const LONGEST: usize = 256;

/// Reads the machine's properties. Missing ones stay empty. Blocking.
#[must_use]
pub fn inspect() -> NodeSystemInfo {
    read(Path::new("/"))
}

fn read(root: &Path) -> NodeSystemInfo {
    let kernel = uname();
    let first = |paths: &[&str]| {
        let words = paths.iter().find_map(|path| fs::read_to_string(root.join(path)).ok());
        shortened(words.unwrap_or_default().trim().trim_matches('\0'))
    };
    let release = first_text(root, &["etc/os-release", "usr/lib/os-release"]);
    let memory = first_text(root, &["proc/meminfo"]);
    NodeSystemInfo {
        architecture: architecture(&kernel.machine().to_string_lossy()).to_owned(),
        boot_id: first(&["proc/sys/kernel/random/boot_id"]),
        kernel_version: kernel.release().to_string_lossy().into_owned(),
        kubelet_version: KUBELET_VERSION.to_owned(),
        machine_id: first(&["etc/machine-id", "var/lib/dbus/machine-id"]),
        operating_system: "linux".to_owned(),
        os_image: pretty_name(&release),
        swap: swap_total(&memory).map(|bytes| NodeSwapStatus { capacity: Some(bytes) }),
        system_uuid: first(&[
            "sys/class/dmi/id/product_uuid",
            "proc/device-tree/system-id",
            "proc/device-tree/vm,uuid",
            "etc/machine-id",
        ]),
        ..NodeSystemInfo::default()
    }
}

fn first_text(root: &Path, paths: &[&str]) -> String {
    paths.iter().find_map(|path| fs::read_to_string(root.join(path)).ok()).unwrap_or_default()
}

fn shortened(words: &str) -> String {
    words.chars().filter(|c| !c.is_control()).take(LONGEST).collect()
}

/// Returns the name of the operating system, by os-release(5).
fn pretty_name(release: &str) -> String {
    let value = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let value = value.map(|value| value.trim().trim_matches(['"', '\'']));
    shortened(value.filter(|value| !value.is_empty()).unwrap_or("Linux"))
}

/// Returns the total swap in bytes, and None for a machine without swap: an API server (1.36.2) refuses a
/// Node with a swap capacity of 0.
fn swap_total(meminfo: &str) -> Option<i64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("SwapTotal:"))?;
    let kib: i64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_told_by_its_files() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("etc/machine-id", "0123\n");
        put("usr/lib/os-release", "NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n");
        put("proc/meminfo", "SwapTotal:       1024 kB\n");
        put("proc/sys/kernel/random/boot_id", "b-1\n");
        let info = read(root.path());
        assert_eq!((info.machine_id.as_str(), info.system_uuid.as_str()), ("0123", "0123"));
        assert_eq!(info.os_image, "Debian GNU/Linux 12 (bookworm)");
        assert_eq!(info.swap.unwrap().capacity, Some(1 << 20));
        assert_eq!(info.boot_id, "b-1");
        put("proc/meminfo", "SwapTotal:       0 kB\n");
        assert_eq!(read(root.path()).swap, None);
        assert!(info.kubelet_version.starts_with("v1.36."));
    }

    #[test]
    fn a_machine_without_files_is_some_linux() {
        let root = tempfile::tempdir().unwrap();
        let info = read(root.path());
        assert_eq!((info.os_image.as_str(), info.machine_id.as_str()), ("Linux", ""));
    }
}
