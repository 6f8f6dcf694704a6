//! The programs of a cluster. Kubernetes' own come from the variables that name them; this repository has no
//! way to build them.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use beelet_tests::requires::find_program;

/// Programs, by their paths.
#[derive(Debug, Clone)]
pub(super) struct Programs {
    pub(super) kubeadm: PathBuf,
    pub(super) kubectl: PathBuf,
    pub(super) apiserver: PathBuf,
    pub(super) controller_manager: PathBuf,
    pub(super) scheduler: PathBuf,
    pub(super) proxy: PathBuf,
    pub(super) etcd: PathBuf,
    pub(super) containerd: PathBuf,
    /// Optional: without it the cluster has no DNS.
    pub(super) coredns: Option<PathBuf>,
}

/// Programs of the machine that kubeadm and the network need.
const MACHINE: [&str; 10] =
    ["nsenter", "unshare", "ip", "iptables", "conntrack", "runc", "mount", "mkfs.ext4", "sysctl", "hostname"];

impl Programs {
    /// Finds the programs.
    ///
    /// # Errors
    /// Programs are missing; the error names all of them.
    pub(super) fn find() -> Result<Self> {
        let mut missing = Vec::new();
        let mut named = |variable: &str, program: &str| {
            let given = std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from);
            let found = given.or_else(|| find_program(program)).filter(|path| path.is_file());
            found.unwrap_or_else(|| {
                missing.push(format!("{program} ({variable}=FILE)"));
                PathBuf::new()
            })
        };
        let programs = Self {
            kubeadm: named("KUBEADM", "kubeadm"),
            kubectl: named("KUBECTL", "kubectl"),
            apiserver: named("KUBE_APISERVER", "kube-apiserver"),
            controller_manager: named("KUBE_CONTROLLER_MANAGER", "kube-controller-manager"),
            scheduler: named("KUBE_SCHEDULER", "kube-scheduler"),
            proxy: named("KUBE_PROXY", "kube-proxy"),
            etcd: named("ETCD", "etcd"),
            containerd: named("CONTAINERD", "containerd"),
            coredns: std::env::var_os("COREDNS").map(PathBuf::from).filter(|path| path.is_file()),
        };
        let of_machine = MACHINE.iter().filter(|name| find_program(name).is_none());
        missing.extend(of_machine.map(|name| (*name).to_owned()));
        if !missing.is_empty() {
            bail!(
                "missing: {}. Kubernetes' programs are in its release archives (docs/cluster-kubeadm.md); `cargo xtask \
                 setup --for kubeadm` installs the others",
                missing.join(", ")
            );
        }
        Ok(programs)
    }

    /// Returns the version of Kubernetes, `v1.36.2`: that of kubeadm.
    pub(super) fn version(&self) -> Result<String> {
        output(Command::new(&self.kubeadm).args(["version", "-o", "short"]))
    }

    /// Returns the names of the images that kubeadm expects.
    pub(super) fn image_names(&self, version: &str) -> Result<Vec<String>> {
        let mut command = Command::new(&self.kubeadm);
        command.args(["config", "images", "list", "--kubernetes-version", version]);
        Ok(output(&mut command)?.lines().map(str::to_owned).collect())
    }
}

/// Runs a command and returns what it wrote, without the last line break.
pub(super) fn output(command: &mut Command) -> Result<String> {
    let shown = xtask::shell::display(command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, text(&output.stderr));
    }
    Ok(text(&output.stdout))
}
