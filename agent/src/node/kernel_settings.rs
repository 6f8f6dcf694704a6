//! Checks the kernel settings that a kubelet sets at its start (`setupKernelTunables`, pkg/kubelet/cm). The
//! agent changes none of them, since they belong to the machine and outlive the agent. With
//! `protectKernelDefaults` the agent refuses to run if a setting differs.

use std::path::Path;

use anyhow::{Result, bail};

/// Paths below /proc/sys, with the kubelet's values.
const SETTINGS: [(&str, u64); 6] = [
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// With `protect` (`protectKernelDefaults`), refuses a machine whose kernel settings differ from the
/// kubelet's.
pub(super) fn check(protect: bool) -> Result<()> {
    let differing = differing(Path::new("/proc/sys"));
    if protect && !differing.is_empty() {
        bail!(
            "protectKernelDefaults is true, but kernel settings differ from the kubelet's; run as root: sysctl -w {}  (and \
             add a file to /etc/sysctl.d for the next boot)",
            differing.join(" ")
        );
    }
    Ok(())
}

/// Returns the differing settings as arguments of `sysctl -w`; `sys` is /proc/sys.
#[must_use]
fn differing(sys: &Path) -> Vec<String> {
    let differs = |(name, wanted): &(&str, u64)| {
        let value = std::fs::read_to_string(sys.join(name)).ok()?;
        (value.trim() != wanted.to_string()).then(|| format!("{}={wanted}", name.replace('/', ".")))
    };
    SETTINGS.iter().filter_map(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_as_a_kubelet_sets_it_is_told_as_sysctl_takes_it() {
        let dir = tempfile::tempdir().unwrap();
        for (name, value) in SETTINGS {
            let file = dir.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, format!("{value}\n")).unwrap();
        }
        assert_eq!(differing(dir.path()), Vec::<String>::new());
        std::fs::write(dir.path().join("kernel/panic"), "0\n").unwrap();
        // A setting that the kernel lacks does not count.
        std::fs::remove_file(dir.path().join("kernel/keys/root_maxkeys")).unwrap();
        assert_eq!(differing(dir.path()), ["kernel.panic=10"]);
    }
}
