//! `beelet config init`: a commented configuration for this machine.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use beelet_config::{Config, DEFAULT_PATH};
use beelet_cri::Runtime;
use beelet_units::cgroup_driver::CgroupDriver;
use clap::{Args, Subcommand};

use super::failed;

/// Arguments of `beelet config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Write a commented configuration for this machine's runtime, cgroup driver and size.
    Init(InitArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet config init\n  beelet config init - | less\n  \
                        beelet config init --runtime-endpoint /run/k3s/containerd/containerd.sock")]
struct InitArgs {
    /// File to write. `-` prints to standard output.
    #[arg(value_name = "FILE", default_value = DEFAULT_PATH)]
    file: PathBuf,
    /// Overwrite an existing file.
    #[arg(long)]
    force: bool,
    /// Endpoint of the container runtime, as a path or as `unix://PATH`. Default: the first well-known socket
    /// that exists.
    #[arg(long, value_name = "ENDPOINT", value_parser = socket)]
    runtime_endpoint: Option<String>,
}

/// Parses an endpoint and returns its path.
fn socket(endpoint: &str) -> Result<String, String> {
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    let is_plain = path.starts_with('/') && !path.chars().any(|c| c.is_whitespace() || c.is_control());
    is_plain.then(|| path.to_owned()).ok_or_else(|| {
        "expected the absolute path of a socket, with or without `unix://`, e.g. `unix:///run/containerd/containerd.sock`"
            .to_owned()
    })
}

/// Default sockets of the container runtimes.
const SOCKETS: &[&str] = &["/run/containerd/containerd.sock", "/run/crio/crio.sock"];
/// Maximum time for the runtime to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;

/// Properties of the machine that the file depends on.
#[derive(Debug, PartialEq, Eq)]
struct Machine {
    name: String,
    cpus: u64,
    memory: u64,
    socket: String,
    /// True if a runtime listens at the socket.
    answers: bool,
    driver: Option<CgroupDriver>,
}

/// Runs the command.
#[must_use]
pub fn run(args: &ConfigArgs) -> ExitCode {
    let What::Init(args) = &args.what;
    match init(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn init(args: &InitArgs) -> anyhow::Result<()> {
    let machine = Machine::detect(args.runtime_endpoint.as_deref())?;
    let text = machine.text();
    if args.file == Path::new("-") {
        print!("{text}");
        return Ok(());
    }
    write(&args.file, &text, args.force)?;
    let path = args.file.display();
    println!(
        "wrote {path}; check the file with `beelet run --config {path} --check`, and this machine with \
         `beelet doctor --config {path}`"
    );
    if !machine.answers {
        eprintln!(
            "no container runtime listens at {}: install one, or correct `containerRuntimeEndpoint`",
            machine.socket
        );
    }
    Ok(())
}

/// Writes the file and creates its parent directories.
fn write(path: &Path, text: &str, force: bool) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(failed)?;
    }
    let mut options = fs::OpenOptions::new();
    options.write(true).mode(0o644);
    if force {
        options.create(true).truncate(true)
    } else {
        options.create_new(true)
    };
    let mut file = match options.open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            bail!(
                "{} already exists: use `--force` to overwrite it, or `-` to print the new configuration",
                path.display()
            );
        }
        file => file.with_context(failed)?,
    };
    file.write_all(text.as_bytes()).with_context(failed)
}

impl Machine {
    fn detect(endpoint: Option<&str>) -> anyhow::Result<Self> {
        let (defaults, _) = Config::with_defaults()?;
        let usual = || *SOCKETS.iter().find(|socket| Path::new(socket).exists()).unwrap_or(&SOCKETS[0]);
        let socket = endpoint.unwrap_or_else(usual);
        let (answers, driver) = super::block_on(async {
            let Ok(runtime) = Runtime::new(&format!("unix://{socket}"), TIMEOUT) else {
                return Ok((false, None));
            };
            Ok((runtime.version().await.is_ok(), runtime.runtime_config().await.ok().flatten()))
        })?;
        let pages = rustix::system::sysinfo();
        // The field's type differs by architecture.
        #[allow(clippy::useless_conversion)]
        let total = u64::try_from(pages.totalram).unwrap_or_default();
        let memory = u64::from(pages.mem_unit).saturating_mul(total);
        let cpus = u64::try_from(beelet_base::cpus::count()).unwrap_or(1);
        Ok(Self { name: defaults.node_name, cpus, memory, socket: socket.to_owned(), answers, driver })
    }

    /// Returns a share of the memory in MiB that keeps a small machine usable: a sixteenth, within 128 MiB
    /// and 2 GiB.
    fn reserved_memory(&self) -> u64 {
        (self.memory / MIB / 16).clamp(128, 2048)
    }

    /// Returns the reserved CPU in millicores: a tenth of a CPU, plus a hundredth for each further CPU.
    fn reserved_cpu(&self) -> u64 {
        100 + 10 * self.cpus.saturating_sub(1)
    }

    fn text(&self) -> String {
        let driver = match self.driver {
            Some(CgroupDriver::Systemd) => {
                "cgroupDriver: systemd              # reported by the runtime".to_owned()
            }
            Some(CgroupDriver::Cgroupfs) => {
                "cgroupDriver: cgroupfs             # reported by the runtime".to_owned()
            }
            None => "# cgroupDriver: systemd            # if the runtime has SystemdCgroup = true".to_owned(),
        };
        let (name, socket) = (serde_json::Value::from(self.name.as_str()), &self.socket);
        let (cpu, memory) = (self.reserved_cpu(), self.reserved_memory());
        let (cpus, all) = (self.cpus, self.memory / MIB);
        format!(
            "# The configuration of beelet on this machine ({cpus} CPUs, {all} MiB of memory).\n\
             # Commented-out fields show the defaults. docs/configuration.md describes all fields.\n\
             apiVersion: kubelet.config.k8s.io/v1beta1\n\
             kind: KubeletConfiguration\n\n\
             # Pods come from the manifests in this directory; `beelet apply` writes to it.\n\
             staticPodPath: /etc/beelet/manifests\n\
             containerRuntimeEndpoint: unix://{socket}\n\
             {driver}\n\n\
             # Reserved for the system and the agent; pods get the rest.\n\
             systemReserved: {{cpu: {cpu}m, memory: {memory}Mi}}\n\
             # Thresholds below which pods are evicted; see docs/node-pressure.md.\n\
             # evictionHard: {{memory.available: 100Mi, nodefs.available: 10%, nodefs.inodesFree: 5%, imagefs.available: 15%, imagefs.inodesFree: 5%}}\n\
             # maxPods: 110\n\
             # Disk usage in percent that starts image removal, and the usage that ends it.\n\
             # imageGCHighThresholdPercent: 85\n\
             # imageGCLowThresholdPercent: 80\n\
             # containerLogMaxSize: 10Mi\n\
             # containerLogMaxFiles: 5\n\
             # Port of /healthz and /metrics, on loopback only.\n\
             # healthzPort: 10248\n\
             ---\n\
             apiVersion: beelet.dev/v1alpha1\n\
             kind: BeeletConfiguration\n\
             # Suffix of every pod's name.\n\
             nodeName: {name}\n\
             # stateDir: /var/lib/beelet\n\
             # runDir: /run/beelet\n\
             # TCP probes ask the kernel, or connect (`connect`) as the kubelet does.\n\
             # tcpProbes: kernel\n\
             # Stop all pods when the agent exits. By default pods keep running and the next start adopts them.\n\
             # stopPodsOnExit: false\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(driver: Option<CgroupDriver>) -> Machine {
        Machine {
            name: "edge-1".to_owned(),
            cpus: 4,
            memory: 8192 * MIB,
            socket: SOCKETS[0].to_owned(),
            answers: true,
            driver,
        }
    }

    /// Loads the text as a configuration.
    fn load(text: &str) -> Config {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/beelet.yaml");
        write(&path, text, false).unwrap();
        let loaded = Config::load(&path).unwrap();
        assert!(write(&path, text, false).unwrap_err().to_string().contains("--force"));
        write(&path, text, true).unwrap();
        assert!(loaded.1.is_empty(), "{:?}", loaded.1);
        loaded.0
    }

    #[test]
    fn the_file_is_a_configuration_of_this_machine() {
        let config = load(&machine(Some(CgroupDriver::Systemd)).text());
        assert_eq!(config.cgroup_driver, Some(CgroupDriver::Systemd));
        assert_eq!(
            (config.node_name.as_str(), config.runtime_endpoint.as_str()),
            ("edge-1", "unix:///run/containerd/containerd.sock")
        );
        assert_eq!(config.reserved("memory").binary(), "512Mi");
        assert_eq!(config.reserved("cpu").to_string(), "130m");
    }

    #[test]
    fn an_endpoint_is_a_path_with_or_without_its_scheme() {
        let check = |endpoint: &str, expected: Option<&str>| {
            let found = socket(endpoint).ok();
            assert_eq!(found.as_deref(), expected, "{endpoint}");
            if let Some(socket) = found {
                let config = load(&Machine { socket, ..machine(None) }.text());
                assert_eq!(config.runtime_endpoint, format!("unix://{}", expected.unwrap()));
            }
        };
        check("/run/k3s/containerd/containerd.sock", Some("/run/k3s/containerd/containerd.sock"));
        check("unix:///run/c.sock", Some("/run/c.sock"));
        check("tcp://127.0.0.1:1", None);
        check("run/c.sock", None);
        check("", None);
        check("/run/c.sock\n# x", None);
        check("/run/a b", None);
    }

    #[test]
    fn what_it_shows_as_defaults_are_the_defaults() {
        let plain = load(&machine(None).text());
        // Matches every commented-out field.
        let is_field = |line: &str| {
            line.strip_prefix("# ").is_some_and(|rest| {
                let name = rest.split(':').next().unwrap_or_default();
                rest.contains(": ") && name.chars().all(|c| c.is_ascii_alphanumeric())
            })
        };
        let uncommented = machine(None)
            .text()
            .lines()
            .map(|line| {
                let shown = is_field(line) && !line.contains("cgroupDriver");
                if shown { line.trim_start_matches("# ").to_owned() } else { line.to_owned() }
            })
            .collect::<Vec<_>>()
            .join("\n");
        assert!(uncommented.contains("\nmaxPods: 110\n"), "{uncommented}");
        assert_eq!(load(&uncommented).effective(), plain.effective());
    }
}
