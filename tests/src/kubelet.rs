//! A kubelet on a private containerd, standalone: the peer beside which tests look and benches measure. Which
//! one is said by `KUBELET`; none is brought along.

use crate::containerd::{Containerd, write_pid};
use crate::guards::Process;
use crate::requires::{Missing, missing};
use crate::workdir;
use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The name of its node.
pub const NODE: &str = "observed";

/// The program that `KUBELET` names.
///
/// # Errors
/// It names none.
pub fn given() -> Result<PathBuf, Missing> {
    let named = std::env::var_os("KUBELET").filter(|path| !path.is_empty()).map(PathBuf::from);
    named.ok_or_else(|| missing("no kubelet is given", "give the path of a kubelet in KUBELET"))
}

/// A kubelet's place in a cluster, and its server, which lets everybody on loopback do everything.
#[derive(Debug)]
pub struct Member {
    /// How it reaches the API server.
    pub kubeconfig: PathBuf,
    /// Where its server listens.
    pub port: u16,
    /// The server's certificate and its key.
    pub keys: (PathBuf, PathBuf),
}

/// A running kubelet. Dropped, it is killed; its pods go with the containerd they are on.
#[derive(Debug)]
pub struct Kubelet {
    process: Process,
    manifests: PathBuf,
    log: PathBuf,
}

impl Kubelet {
    /// Starts it with a folder of static pods, without an API server, in a mount namespace of its own, where
    /// /var/lib/kubelet is empty.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(binary: &Path, containerd: &Containerd) -> Result<Kubelet> {
        Kubelet::spawn(binary, containerd, None)
    }

    /// The same as the node `observed` of a cluster.
    ///
    /// # Errors
    /// It can't be started.
    pub fn join(binary: &Path, containerd: &Containerd, member: &Member) -> Result<Kubelet> {
        Kubelet::spawn(binary, containerd, Some(member))
    }

    fn spawn(binary: &Path, containerd: &Containerd, member: Option<&Member>) -> Result<Kubelet> {
        let dir = containerd.dir().join("kubelet");
        let (manifests, log) = (dir.join("manifests"), dir.join("kubelet.log"));
        std::fs::create_dir_all(&manifests)?;
        // It takes the name of a slice without its ending, and adds that itself.
        let root = containerd.cgroup().path().trim_end_matches(".slice");
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "staticPodPath": manifests, "cgroupRoot": root, "cgroupDriver": containerd.cgroup().driver(),
            "failSwapOn": false, "enableServer": false, "healthzPort": 0, "volumePluginDir": dir.join("plugins"),
            "evictionHard": {"memory.available": "1Mi"}, "authentication": {"webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"}, "maxPods": 1100,
            // On a full disk it would remove the image of sandboxes, which no registry can give back.
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
        let minor = minor.with_context(|| format!("{version:?} is no kubelet's version"))?;
        // Older ones don't know the word, newer ones refuse to run on version 1 without it.
        if minor >= 31 {
            config["failCgroupV1"] = false.into();
        }
        workdir::write(&dir.join("config.yaml"), config.to_string())?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c"]);
        command.arg("mkdir -p /var/lib/kubelet && mount -t tmpfs none /var/lib/kubelet && exec \"$@\"");
        command.arg("sh").arg(binary).arg("--config").arg(dir.join("config.yaml"));
        command.arg(format!("--container-runtime-endpoint={}", containerd.endpoint()));
        command.arg(format!("--root-dir={}", dir.join("root").display()));
        command.arg(format!("--hostname-override={NODE}"));
        if let Some(member) = member {
            command.arg(format!("--kubeconfig={}", member.kubeconfig.display()));
        }
        if minor < 24 {
            command.arg("--container-runtime=remote");
        }
        let output = std::fs::File::create(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let process = Process(command.spawn().context("could not start the kubelet")?);
        // One that ended at once has nothing to be written down.
        let _ = write_pid(containerd.dir(), "kubelet", process.0.id());
        Ok(Kubelet { process, manifests, log })
    }

    /// The process's id: each program before it became the next.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.process.0.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Everything that it has printed so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Puts a pod's manifest into the folder.
    ///
    /// # Errors
    /// It can't be written.
    pub fn apply(&self, manifest: &Value) -> Result<()> {
        self.apply_text(manifest["metadata"]["name"].as_str().unwrap_or_default(), &manifest.to_string())
    }

    /// Puts the text of a pod's manifest into the folder.
    ///
    /// # Errors
    /// It can't be written.
    pub fn apply_text(&self, name: &str, manifest: &str) -> Result<()> {
        workdir::write(&self.manifest(name), manifest)
    }

    /// Takes a pod's manifest out of the folder.
    ///
    /// # Errors
    /// It isn't there.
    pub fn remove(&self, name: &str) -> Result<()> {
        std::fs::remove_file(self.manifest(name)).with_context(|| format!("could not remove {name}"))
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.manifests.join(format!("{name}.yaml"))
    }
}

/// The version that it prints: `Kubernetes v1.36.2`.
///
/// # Errors
/// It can't be run.
pub fn version(binary: &Path) -> Result<String> {
    let said = Command::new(binary).arg("--version").output();
    let said = said.with_context(|| format!("could not run {}", binary.display()))?;
    Ok(String::from_utf8_lossy(&said.stdout).trim().to_owned())
}
