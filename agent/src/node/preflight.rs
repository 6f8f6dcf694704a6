//! Checks for obstacles to a node's start that need no changes to the machine. `beelet run` refuses to start
//! on a failed check, and `beelet doctor` reports it: both use [`FIRST`].
//!
//! Must never create, write or lock anything.

use std::{
    fs,
    os::unix::net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use beelet_base::machine_memory::meminfo;
use beelet_cgroups::Cgroups;
use beelet_config::Config;
use beelet_units::cgroup_driver::CgroupDriver;
use rustix::fs::Access;

use super::{facts, kernel_settings};

/// A check, by its setting. The second argument is true on a cluster's node.
type Check = (&'static str, fn(&Config, bool) -> Result<()>);

/// Checks before the creation of the first folder.
const FIRST: &[Check] = &[
    ("stateDir", |config, _| folder("stateDir", &config.beelet.state_dir)),
    ("runDir", |config, _| socket(config)),
    ("kubeletDir", |config, _| folder("kubeletDir", &config.beelet.kubelet_dir)),
    ("podsDir", |config, _| folder("podsDir", &config.beelet.pods_dir)),
    ("kubelet API", |config, in_cluster| beelet_kubelet_api::check(&config.server, in_cluster)),
];

/// Refuses a node that could not start.
///
/// # Errors
/// The first failed check; the message names the setting.
pub(super) fn require(config: &Config, in_cluster: bool) -> Result<()> {
    FIRST.iter().try_for_each(|(_, check)| check(config, in_cluster))
}

/// Returns the results of all checks, by setting: those of [`require`], and those that `run` makes once the
/// runtime has answered. `driver` is the runtime's, if reported.
pub(crate) fn refusals(
    config: &Config,
    driver: Option<CgroupDriver>,
    in_cluster: bool,
) -> Vec<(&'static str, Result<()>)> {
    let first = FIRST.iter().map(|(setting, check)| (*setting, check(config, in_cluster)));
    let swap_bytes = meminfo(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "SwapTotal");
    let driver = driver.or(config.cgroup_driver).unwrap_or_default();
    // Missing cgroups are a separate finding.
    let cgroups = Cgroups::discover(&config.cgroup_root, driver).ok();
    let reserved = cgroups.map_or(Ok(()), |cgroups| facts::require_reserved_cgroups(config, &cgroups));
    let later = [
        ("enforceNodeAllocatable", reserved),
        ("reserved resources", facts::check_reservations_here(config)),
        ("failSwapOn", swap(config, swap_bytes.unwrap_or(0))),
        ("protectKernelDefaults", kernel_settings::check(config.protect_kernel_defaults)),
    ];
    first.chain(later).collect()
}

/// `failSwapOn`: refuses a machine with swap.
pub(super) fn swap(config: &Config, swap_bytes: u64) -> Result<()> {
    if config.fail_swap_on && swap_bytes > 0 {
        bail!(
            "this machine has swap, but failSwapOn is true; disable swap (swapoff -a, and its line in /etc/fstab), or set \
             failSwapOn: false"
        );
    }
    Ok(())
}

/// Refuses a folder that cannot be created or written.
fn folder(setting: &str, path: &Path) -> Result<()> {
    let nearest = path.ancestors().find(|part| part.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    let failed = || format!("{setting}: cannot use the folder {}", path.display());
    if !nearest.is_dir() {
        bail!("{}: {} is not a folder; move it away, or set another {setting}", failed(), nearest.display());
    }
    rustix::fs::access(nearest, Access::WRITE_OK | Access::EXEC_OK).with_context(|| {
        format!("{}: cannot write to {}; set another {setting}", failed(), nearest.display())
    })
}

/// Refuses a folder in which the agent's socket cannot be created.
fn socket(config: &Config) -> Result<()> {
    folder("runDir", &config.beelet.run_dir)?;
    // The longest temporary name of the socket in `beelet_serve`.
    let born: PathBuf = config.beelet.run_dir.join(format!(".{}.15", u32::MAX));
    let longest = [config.socket(), born].into_iter().max_by_key(|path| path.as_os_str().len());
    let longest = longest.unwrap_or_default();
    if let Err(error) = SocketAddr::from_pathname(&longest) {
        bail!(
            "runDir: cannot create a socket in {}: {error}; set a shorter runDir",
            config.beelet.run_dir.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_could_not_start_is_refused_by_its_setting_and_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let config = |change: &dyn Fn(&mut Config)| {
            let (mut config, _) = Config::with_defaults().unwrap();
            config.beelet.state_dir = dir.path().join("state");
            config.beelet.run_dir = dir.path().join("run");
            config.beelet.kubelet_dir = dir.path().join("kubelet");
            config.beelet.pods_dir = dir.path().join("pods");
            change(&mut config);
            config
        };
        require(&config(&|_| {}), false).unwrap();
        let check = |change: &dyn Fn(&mut Config), expected: &str| {
            let config = config(change);
            let error = format!("{:#}", require(&config, false).unwrap_err());
            assert!(error.contains(expected), "{error}");
            let found = refusals(&config, None, false);
            let found: Vec<_> = found.into_iter().filter_map(|(_, refused)| refused.err()).collect();
            assert!(found.iter().any(|why| format!("{why:#}") == error), "{found:?}");
        };
        let file = dir.path().join("file");
        check(&|config| config.beelet.state_dir = file.clone(), "stateDir: cannot use the folder");
        check(&|config| config.beelet.kubelet_dir = file.join("below"), "is not a folder; move it away");
        check(&|config| config.beelet.run_dir = dir.path().join("r".repeat(100)), "set a shorter runDir");
        let webhook = |config: &mut Config| {
            config.server.port = Some(10250);
            config.server.authorization = beelet_config::Authorization::Webhook {
                allowed: std::time::Duration::ZERO,
                refused: std::time::Duration::ZERO,
            };
        };
        check(&webhook, "authorization.mode is Webhook");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
