//! Standalone kubelet on a private containerd, as a peer for tests and benches. `KUBELET` must name one.

use crate::containerd::{Containerd, write_pid};
use crate::guards::{self, Process};
use crate::requires::{Missing, missing};
use crate::workdir;
use anyhow::{Context as _, Result};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Makes its first argument /var/lib/kubelet in a mount namespace, and executes the others. Kubelets have
/// only this path for the sockets of device plugins.
const NAMESPACE: &str = "mkdir -p /var/lib/kubelet \
    && mount --make-private \"$(findmnt --noheadings --output TARGET --target /var/lib/kubelet)\" \
    && mount --bind \"$0\" /var/lib/kubelet && exec \"$@\"";

/// Name of the kubelet's node.
pub const NODE: &str = "observed";

/// Returns the program that `KUBELET` names.
///
/// # Errors
/// `KUBELET` is not set.
pub fn given() -> Result<PathBuf, Missing> {
    let named = std::env::var_os("KUBELET").filter(|path| !path.is_empty()).map(PathBuf::from);
    named.ok_or_else(|| missing("KUBELET is not set", "give the path of a kubelet in KUBELET"))
}

/// Cluster membership of a kubelet, and its server, which grants every client on loopback full access.
#[derive(Debug)]
pub struct Member {
    /// Kubeconfig for the API server.
    pub kubeconfig: PathBuf,
    /// Port of the kubelet's server.
    pub port: u16,
    /// Certificate and key of the server.
    pub keys: (PathBuf, PathBuf),
}

/// Running kubelet, killed on drop; the pods are removed with their containerd.
#[derive(Debug)]
pub struct Kubelet {
    process: Process,
    words: Vec<String>,
    manifests: PathBuf,
    log: PathBuf,
}

impl Kubelet {
    /// Starts a kubelet with a folder of static pods, without an API server. In its own mount namespace,
    /// /var/lib/kubelet is its root folder `kubelet/root` of the instance, whose mounts the runtime sees too.
    ///
    /// # Errors
    /// The kubelet cannot be started.
    pub fn start(binary: &Path, containerd: &Containerd) -> Result<Kubelet> {
        Kubelet::spawn(binary, containerd, None)
    }

    /// Like [`Kubelet::start`], as the node `observed` of a cluster.
    ///
    /// # Errors
    /// The kubelet cannot be started.
    pub fn join(binary: &Path, containerd: &Containerd, member: &Member) -> Result<Kubelet> {
        Kubelet::spawn(binary, containerd, Some(member))
    }

    fn spawn(binary: &Path, containerd: &Containerd, member: Option<&Member>) -> Result<Kubelet> {
        let dir = containerd.dir().join("kubelet");
        let (manifests, log) = (dir.join("manifests"), dir.join("kubelet.log"));
        std::fs::create_dir_all(&manifests)?;
        // The kubelet expects the name of a slice without its suffix, which it adds itself.
        let root = containerd.cgroup().path().trim_end_matches(".slice");
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "staticPodPath": manifests, "cgroupRoot": root, "cgroupDriver": containerd.cgroup().driver(),
            "failSwapOn": false, "enableServer": false, "healthzPort": 0, "volumePluginDir": dir.join("plugins"),
            "evictionHard": {"memory.available": "1Mi"}, "authentication": {"webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"}, "maxPods": 1100,
            // On a full disk the kubelet would remove the sandbox image, which no registry could provide
            // again.
            "imageGCHighThresholdPercent": 100,
        });
        if let Some(Member { port, keys: (certificate, key), .. }) = member {
            config["enableServer"] = true.into();
            config["address"] = "127.0.0.1".into();
            config["port"] = (*port).into();
            config["tlsCertFile"] = certificate.display().to_string().into();
            config["tlsPrivateKeyFile"] = key.display().to_string().into();
            config["authentication"]["anonymous"] = json!({ "enabled": true });
        }
        let version = version(binary)?;
        let minor = version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
        let minor = minor.with_context(|| format!("cannot parse the kubelet's version {version:?}"))?;
        // Unknown to older kubelets; newer ones need it to run on cgroup v1.
        if minor >= 31 {
            config["failCgroupV1"] = false.into();
        }
        workdir::write(&dir.join("config.yaml"), config.to_string())?;
        let root_dir = share_root(containerd)?;
        let path = |path: &Path| path.display().to_string();
        let mut words: Vec<String> =
            ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", NAMESPACE]
                .map(str::to_owned)
                .into();
        words.extend([path(&root_dir), path(binary), "--config".to_owned(), path(&dir.join("config.yaml"))]);
        words.push(format!("--container-runtime-endpoint={}", containerd.endpoint()));
        words.push(format!("--root-dir={}", root_dir.display()));
        words.push(format!("--hostname-override={NODE}"));
        words.extend(member.map(|member| format!("--kubeconfig={}", member.kubeconfig.display())));
        if minor < 24 {
            words.push("--container-runtime=remote".to_owned());
        }
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        let output = std::fs::File::create(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let process = Process(command.spawn().context("cannot start the kubelet")?);
        // A process that ended at once needs no record.
        let _ = write_pid(containerd.dir(), "kubelet", process.0.id());
        Ok(Kubelet { process, words, manifests, log })
    }

    /// Returns the process id: each wrapper executes the next program in its place.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// Returns the command line that starts this kubelet.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// Returns true if the kubelet has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.process.0.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Returns the kubelet's output so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Writes a pod's manifest into the folder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn apply(&self, manifest: &Value) -> Result<()> {
        self.apply_text(manifest["metadata"]["name"].as_str().unwrap_or_default(), &manifest.to_string())
    }

    /// Writes the text of a pod's manifest into the folder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn apply_text(&self, name: &str, manifest: &str) -> Result<()> {
        workdir::write(&self.manifest(name), manifest)
    }

    /// Removes a pod's manifest from the folder.
    ///
    /// # Errors
    /// The file does not exist.
    pub fn remove(&self, name: &str) -> Result<()> {
        std::fs::remove_file(self.manifest(name)).with_context(|| format!("cannot remove {name}"))
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.manifests.join(format!("{name}.yaml"))
    }
}

/// Mounts the root folder of a kubelet on itself, so that its mounts reach all mount namespaces. Needed again
/// after a reboot. Returns the folder.
///
/// # Errors
/// The folder cannot be mounted.
pub fn share_root(containerd: &Containerd) -> Result<PathBuf> {
    let dir = containerd.dir().join("kubelet/root");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    if !guards::mounts()?.iter().any(|mount| mount.path == dir) {
        mount_bind(&dir, &dir).with_context(|| format!("cannot mount {}", dir.display()))?;
        mount_change(&dir, MountPropagationFlags::SHARED)
            .with_context(|| format!("cannot share {}", dir.display()))?;
    }
    Ok(dir)
}

/// Returns the version that the kubelet prints: `Kubernetes v1.36.2`.
///
/// # Errors
/// The kubelet cannot be run.
pub fn version(binary: &Path) -> Result<String> {
    let output = Command::new(binary).arg("--version").output();
    let output = output.with_context(|| format!("cannot run {}", binary.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
