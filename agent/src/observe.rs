//! Arguments of `beelet observe`, which has no configuration file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use beelet_units::{bpf_settings::BpfMode, duration};
use clap::{Args, ValueEnum};

use crate::node::observe::{self, Collecting, Options};
use crate::run::{LogFormat, start_logging};
use beelet_cli::failed;
use beelet_config::Config;
use beelet_policy::tuner::{CpuCaps, Law, TunerMode};

/// Arguments of `beelet observe`.
#[derive(Debug, Args)]
pub(crate) struct ObserveArgs {
    /// Endpoint of the container runtime.
    #[arg(
        long,
        value_name = "ENDPOINT",
        env = "CONTAINER_RUNTIME_ENDPOINT",
        default_value = "unix:///run/containerd/containerd.sock"
    )]
    runtime_endpoint: String,
    /// Name of the node. Default: the hostname.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
    /// Root cgroup of the pods.
    #[arg(long, value_name = "PATH", default_value = "/")]
    cgroup_root: String,
    /// Socket for `beelet top`, `beelet get` and other clients.
    #[arg(long, value_name = "PATH", env = "BEELET_SOCKET", default_value = "/run/beelet/beelet.sock")]
    socket: PathBuf,
    /// Address of /metrics and the other HTTP pages, or `off`. A non-loopback address serves only metrics.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:10270", value_parser = listen)]
    listen: Listen,
    /// Use of BPF programs for measurements.
    #[arg(long, value_enum, default_value_t = Bpf::Auto)]
    bpf: Bpf,
    /// BPF file system.
    #[arg(long, value_name = "PATH", default_value = "/sys/fs/bpf")]
    bpffs: PathBuf,
    /// Directory of the agent's pins in the BPF file system.
    #[arg(long, value_name = "NAME", default_value = "beelet-observe")]
    pin_name: String,
    /// Keep BPF programs and maps pinned on exit so that counters survive a restart.
    #[arg(long)]
    keep_pins: bool,
    /// Time between two readings while a client is connected: 100ms to 10s.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Maximum number of containers to measure.
    #[arg(long, value_name = "NUMBER", default_value_t = 2048)]
    max_containers: usize,
    /// Add the pod's UID to container metrics, which creates new series for every recreated pod.
    #[arg(long)]
    pod_uid: bool,
    /// Changes that the agent may make on the node. Default: none.
    #[arg(long, value_name = "WHAT", value_enum, value_delimiter = ',')]
    allow: Vec<Allow>,
    /// Mode of the tuner; with --allow tune.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Tune::Enforce)]
    tuner: Tune,
    /// Kernels on which the tuner caps CPU use; with --allow tune.
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = Caps::Auto)]
    tuner_cpu_caps: Caps,
    /// Directory for the state of --allow: ages of unused images and original cgroup settings. Unused without
    /// --allow.
    #[arg(long, value_name = "PATH", default_value = "/var/lib/beelet-observe")]
    state_dir: PathBuf,
    /// Increase verbosity (-v actions, -vv reasons). RUST_LOG overrides it.
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Format of log lines.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Bpf {
    /// Use BPF as far as the kernel and the privileges allow.
    Auto,
    /// Read only files and /proc.
    Off,
}

/// An acting part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Allow {
    /// Tune pods' cgroups: CPU caps and memory.high of BestEffort pods, then of Burstable pods above their
    /// requests. The tuner leaves settings alone that another process overwrites, and restores all settings
    /// on exit.
    Tune,
    /// Remove images that no container uses, with the kubelet's thresholds and ages.
    ImageGc,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Tune {
    /// Report the intended settings without applying them (`beelet tune history`).
    Advise,
    /// Apply the settings.
    Enforce,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Caps {
    /// Cap where a cap cannot harm other cgroups (Linux 6.18 and newer).
    Auto,
    /// Cap on all kernels.
    Always,
}

#[derive(Debug, Clone, Copy)]
enum Listen {
    At(SocketAddr),
    Off,
}

fn listen(text: &str) -> Result<Listen, String> {
    if text == "off" {
        return Ok(Listen::Off);
    }
    text.parse().map(Listen::At).map_err(|error| format!("{error}: use e.g. `127.0.0.1:10270`, or `off`"))
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration::parse(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(100)..=Duration::from_secs(10)).contains(&interval) {
        return Ok(interval);
    }
    Err("must be from 100ms to 10s".to_owned())
}

impl ObserveArgs {
    fn options(&self) -> anyhow::Result<Options> {
        let hostname = || rustix::system::uname().nodename().to_string_lossy().to_lowercase();
        Ok(Options {
            runtime_endpoint: self.runtime_endpoint.clone(),
            node_name: self.node_name.clone().filter(|name| !name.is_empty()).unwrap_or_else(hostname),
            cgroup_root: self.cgroup_root.clone(),
            socket: self.socket.clone(),
            listen: match self.listen {
                Listen::At(address) => Some(address),
                Listen::Off => None,
            },
            bpf: match self.bpf {
                Bpf::Auto => BpfMode::Auto,
                Bpf::Off => BpfMode::Off,
            },
            bpffs: self.bpffs.clone(),
            pin_name: self.pin_name.clone(),
            keep_pins: self.keep_pins,
            interval: self.interval,
            most: self.max_containers,
            pod_uid: self.pod_uid,
            state_dir: self.state_dir.clone(),
            image_gc: self.allow.contains(&Allow::ImageGc).then(Collecting::by_default).transpose()?,
            tune: self.allow.contains(&Allow::Tune).then(|| self.tuning()).transpose()?,
        })
    }

    /// Returns the tuner's defaults with the changes of the command line.
    fn tuning(&self) -> anyhow::Result<beelet_tuner::Settings> {
        let (defaults, _) = Config::with_defaults()?;
        let defaults = defaults.beelet.tuner;
        let mode = match self.tuner {
            Tune::Advise => TunerMode::Advise,
            Tune::Enforce => TunerMode::Enforce,
        };
        let cpu_caps = match self.tuner_cpu_caps {
            Caps::Auto => CpuCaps::Auto,
            Caps::Always => CpuCaps::Always,
        };
        let (interval, back_off) = (defaults.interval, defaults.back_off);
        Ok(beelet_tuner::Settings {
            mode,
            interval,
            back_off,
            law: Law { cpu_caps, ..defaults.law },
            cold: beelet_tuner::ColdSettings::default(),
        })
    }
}

/// Observes until the program is stopped.
#[must_use]
pub(crate) fn run(args: &ObserveArgs) -> ExitCode {
    let _logging = start_logging(args.log_format, args.verbose, None);
    // A single thread suffices: readings have their own threads.
    let done = args.options().and_then(|options| crate::threads::run(1, observe::run(options)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: ObserveArgs,
    }

    #[test]
    fn the_tuner_keeps_to_its_defaults_but_for_what_the_command_line_says() {
        let tuning = |line: &[&str]| {
            let args = Line::try_parse_from(["observe"].iter().chain(line)).unwrap().args;
            args.options().unwrap().tune.map(|settings| (settings.mode, settings.law))
        };
        let defaults = Law::default();
        assert_eq!(tuning(&[]), None);
        assert_eq!(tuning(&["--allow", "tune"]), Some((TunerMode::Enforce, defaults)));
        let said = ["--allow=tune", "--tuner=advise", "--tuner-cpu-caps=always"];
        let always = Law { cpu_caps: CpuCaps::Always, ..defaults };
        assert_eq!(tuning(&said), Some((TunerMode::Advise, always)));
    }
}
