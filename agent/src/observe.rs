//! `beelet observe`: the arguments; it has no configuration file.

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
    /// The container runtime.
    #[arg(
        long,
        value_name = "ENDPOINT",
        env = "CONTAINER_RUNTIME_ENDPOINT",
        default_value = "unix:///run/containerd/containerd.sock"
    )]
    runtime_endpoint: String,
    /// The node's name, as others know it; default: the hostname.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
    /// The cgroup below which pods are looked for.
    #[arg(long, value_name = "PATH", default_value = "/")]
    cgroup_root: String,
    /// The socket for `beelet top`, `beelet get` and other programs.
    #[arg(long, value_name = "PATH", env = "BEELET_SOCKET", default_value = "/run/beelet/beelet.sock")]
    socket: PathBuf,
    /// Where /metrics and its like are served; `off`: nowhere. Elsewhere than on a loopback address only
    /// numbers are.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:10270", value_parser = listen)]
    listen: Listen,
    /// Whether kernel programs measure.
    #[arg(long, value_enum, default_value_t = Bpf::Auto)]
    bpf: Bpf,
    /// Where a BPF file system is.
    #[arg(long, value_name = "PATH", default_value = "/sys/fs/bpf")]
    bpffs: PathBuf,
    /// The folder for our pins in it.
    #[arg(long, value_name = "NAME", default_value = "beelet-observe")]
    pin_name: String,
    /// Leave programs and maps running at the end: the next start counts on.
    #[arg(long)]
    keep_pins: bool,
    /// The time between two readings while somebody looks: 100ms to 10s.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// The counters of more containers are not read.
    #[arg(long, value_name = "NUMBER", default_value_t = 2048)]
    max_containers: usize,
    /// Put the pod's UID into the metrics of containers: new series for every pod that is made anew.
    #[arg(long)]
    pod_uid: bool,
    /// What it may change on the node. Without this it changes nothing.
    #[arg(long, value_name = "WHAT", value_enum, value_delimiter = ',')]
    allow: Vec<Allow>,
    /// With --allow tune: how far the tuner goes.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Tune::Enforce)]
    tuner: Tune,
    /// With --allow tune: on which kernels CPU use is capped.
    #[arg(long, value_name = "WHERE", value_enum, default_value_t = Caps::Auto)]
    tuner_cpu_caps: Caps,
    /// What --allow must remember (since when images are unused, how to undo what was tuned) is kept here;
    /// nothing is written otherwise.
    #[arg(long, value_name = "PATH", default_value = "/var/lib/beelet-observe")]
    state_dir: PathBuf,
    /// Say more: -v what is done, -vv why. RUST_LOG, where set, decides alone.
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// How log lines look.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Bpf {
    /// As far as this kernel and these privileges allow.
    Auto,
    /// Not at all: files and /proc.
    Off,
}

/// Something that acts on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Allow {
    /// Tuning of pods' cgroups: CPU caps and memory.high of BestEffort pods, then of Burstable ones above
    /// their request. What somebody else overwrites is left to them, and all is given back at the end.
    Tune,
    /// Removal of images that no container uses, with the kubelet's thresholds and ages.
    ImageGc,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Tune {
    /// It says what it would set (`beelet tune history`).
    Advise,
    /// It does it.
    Enforce,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Caps {
    /// Where a cap harms nobody else (Linux 6.18 and newer).
    Auto,
    /// On all.
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
    text.parse()
        .map(Listen::At)
        .map_err(|error| format!("{error}: write 127.0.0.1:10270, for example, or off"))
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration::parse(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(100)..=Duration::from_secs(10)).contains(&interval) {
        return Ok(interval);
    }
    Err("it must be 100ms to 10s".to_owned())
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

    /// The tuner's own defaults, but for what the command line says.
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
        Ok(beelet_tuner::Settings { mode, interval, back_off, law: Law { cpu_caps, ..defaults.law } })
    }
}

/// Observes until it is told to stop.
#[must_use]
pub(crate) fn run(args: &ObserveArgs) -> ExitCode {
    let _logging = start_logging(args.log_format, args.verbose, None);
    // One thread waits for everything; readings have their own.
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
