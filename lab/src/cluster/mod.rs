//! `cargo xtask cluster`: a cluster of several nodes on this machine, by stock kubeadm, with beelet in the
//! kubelet's place on every node, the control plane's too (docs/cluster-kubeadm.md).
//!
//! Each node is a machine of namespaces with its own containerd. Images are made from the named programs, so
//! no registry is needed. `cluster test` runs through a cluster's whole life and prints the duration of each
//! step.

mod clock;
mod disk;
mod failures;
mod images;
mod kubeadm;
mod life;
mod machine;
mod network;
mod plane;
mod power;
mod programs;
mod steps;
mod subjects;
pub(crate) mod unit;

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use beelet_tests::agent;
use clap::Subcommand;

use self::machine::Machine;
use self::programs::Programs;
use xtask::progress::Step;

/// Builds clusters of several nodes on this machine, with kubeadm and beelet
#[derive(clap::Args)]
#[command(after_help = "\
Environment: files of Kubernetes' programs, unless PATH has them
  KUBEADM KUBECTL KUBE_APISERVER KUBE_CONTROLLER_MANAGER KUBE_SCHEDULER KUBE_PROXY
  ETCD        etcd of the version that kubeadm expects (3.5 or newer)
  CONTAINERD  containerd 2.x
  COREDNS     optional: without it the cluster has no DNS
  BEELET_BIN  the agent; default: the one that cargo builds now

Examples:
  cargo xtask cluster up --workers 2
  cargo xtask cluster kubectl get nodes -o wide
  cargo xtask cluster ssh w1 beelet drain --timeout=5m
  cargo xtask cluster cut w1 && cargo xtask cluster heal w1
  cargo xtask cluster test            # init, drain, certificates, upgrade, reset and more
  cargo xtask cluster test failures   # StatefulSets, lost nodes, a full disk, a wrong clock
  cargo xtask cluster test plane      # three nodes with an etcd each
  cargo xtask cluster down")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Creates the machines and the cluster
    Up {
        /// Number of workers, `w1`, `w2`, …
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=50))]
        workers: u8,
        /// Number of nodes of the control plane, `cp`, `cp2`, `cp3`, each with an etcd
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=3))]
        controls: u8,
    },
    /// Removes the machines
    Down,
    /// Shows the machines, the Nodes and the pods
    Status,
    /// Runs a command on a machine, or a shell
    Ssh {
        /// Name of the machine: cp, w1, w2, …
        machine: String,
        /// Command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Runs kubectl as administrator
    Kubectl {
        /// Arguments of kubectl
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Cuts the network of a machine
    Cut {
        /// Name of the machine
        machine: String,
    },
    /// Heals a machine after `cut`, `slow`, `fill` and `clock`
    Heal {
        /// Name of the machine
        machine: String,
    },
    /// Fills the disk of a machine
    Fill {
        /// Name of the machine
        machine: String,
        /// Share of the disk in use afterwards, in percent
        #[arg(long, default_value_t = 99, value_parser = clap::value_parser!(u8).range(1..=100))]
        percent: u8,
    },
    /// Sets the clock of a machine's agent, and restarts the agent
    Clock {
        /// Name of the machine
        machine: String,
        /// Difference to the right time, as faketime(1) has it, such as `+2h` or `-1d`
        #[arg(allow_hyphen_values = true)]
        offset: String,
    },
    /// Slows the network of a machine down, and loses packets
    Slow {
        /// Name of the machine
        machine: String,
        /// Delay of each packet to the machine, in milliseconds
        #[arg(long, default_value_t = 100)]
        delay: u64,
        /// Share of lost packets, in percent
        #[arg(long, default_value_t = 1.0)]
        loss: f64,
    },
    /// Cuts the power of machines, all at once, and starts them again
    Reboot {
        /// Names of the machines
        #[arg(required = true)]
        machines: Vec<String>,
    },
    /// Runs through the whole life of a cluster, new unless there is one, and prints how long each step took
    Test {
        /// Subject of the test
        #[arg(value_enum, default_value = "life")]
        subject: subjects::Subject,
        /// Leave the cluster at the end
        #[arg(long)]
        keep: bool,
    },
    /// Process that keeps a unit of a machine running
    #[command(hide = true)]
    Unit {
        /// Name of the unit
        name: String,
    },
}

/// Runs `cargo xtask cluster`.
pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Up { workers, controls } => up(*controls, *workers).map(drop),
        Command::Down => down(),
        Command::Status => status(),
        Command::Ssh { machine, command } => ssh(machine, command),
        Command::Kubectl { arguments } => {
            let mut words = ["kubectl", "--kubeconfig", ADMIN].map(str::to_owned).to_vec();
            words.extend_from_slice(arguments);
            ssh("cp", &words)
        }
        Command::Cut { machine } => network::cut(&Machine::named(machine)?, true),
        Command::Heal { machine } => {
            let machine = Machine::named(machine)?;
            network::cut(&machine, false)?;
            network::slow(&machine, None)?;
            disk::free(machine.dir())?;
            clock::set(&machine, None)
        }
        Command::Fill { machine, percent } => disk::fill(Machine::named(machine)?.dir(), *percent),
        Command::Clock { machine, offset } => clock::set(&Machine::named(machine)?, Some(offset)),
        Command::Slow { machine, delay, loss } => {
            let slow = network::Slow { delay: Duration::from_millis(*delay), loss: *loss };
            network::slow(&Machine::named(machine)?, Some(slow))
        }
        Command::Reboot { machines } => {
            let machines = machines.iter().map(|name| Machine::named(name)).collect::<Result<Vec<_>>>()?;
            reboot(&machines)
        }
        Command::Test { subject, keep } => subjects::run(*subject, *keep),
        Command::Unit { name } => unit::keep(name),
    }
}

pub(crate) use self::kubeadm::ADMIN;

/// A cluster for other commands.
pub(crate) struct Playground(Vec<Machine>);

impl Playground {
    /// Returns the existing cluster, or a new one with two workers, which stays.
    pub(crate) fn find_or_create() -> Result<Self> {
        let all = Machine::all();
        Ok(Self(if all.is_empty() { up(1, 2)? } else { all }))
    }

    fn first(&self) -> Result<&Machine> {
        self.0.first().context("the cluster has no machine")
    }

    /// Imports an archive of images on every machine.
    pub(crate) fn import(&self, archive: &Path) -> Result<()> {
        let archive = archive.canonicalize().with_context(|| format!("cannot find {}", archive.display()))?;
        self.0.iter().try_for_each(|machine| images::import_archive(machine, &archive))
    }

    /// Returns the API server's version, `v1.36.2`.
    pub(crate) fn version(&self) -> Result<String> {
        let answer = kubeadm::kubectl(self.first()?, &["get", "--raw", "/version"])?;
        let answer: serde_json::Value = serde_json::from_str(&answer).context("the server's version")?;
        Ok(answer["gitVersion"].as_str().unwrap_or_default().to_owned())
    }

    /// Returns the table of the Nodes.
    pub(crate) fn nodes(&self) -> Result<String> {
        kubeadm::kubectl(self.first()?, &["get", "nodes", "-o", "wide"])
    }

    /// Returns a command on the first machine.
    pub(crate) fn command(&self, words: &[String]) -> Result<std::process::Command> {
        self.first()?.command(words)
    }
}

/// Returns the agent: the named one, or the one that cargo built with this program.
fn beelet() -> Result<PathBuf> {
    agent::binary()?.canonicalize().context("the agent's program")
}

/// Creates the machines and the cluster. Returns the machines, the control plane's first.
fn up(controls: u8, workers: u8) -> Result<Vec<Machine>> {
    if !Machine::all().is_empty() {
        bail!("there is a cluster; `cargo xtask cluster down` removes it");
    }
    let programs = Programs::find()?;
    let agent = beelet()?;
    let version = programs.version()?;
    let step = Step::start(format!("make the images of Kubernetes {version}"));
    let images = images::build(&programs, &version)?;
    step.done("");
    let controls: Vec<Machine> = (0..controls).map(Machine::control).collect();
    let mut machines = controls.clone();
    machines.extend((1..=workers).map(Machine::worker));
    for machine in &machines {
        let step = Step::start(format!("start the machine {}", machine.name));
        machine.create(&programs, &agent, &images.pause, &controls)?;
        if machine.is_control() {
            images::import(machine, &images.control_plane)?;
        }
        images::import(machine, &images.every)?;
        step.done(&machine.address.to_string());
    }
    let (first, rest) = machines.split_first().context("no machine")?;
    let step = Step::start("kubeadm init");
    kubeadm::init(first, &version, programs.coredns.is_some())?;
    step.done("");
    for machine in rest {
        let step = Step::start(format!("kubeadm join of {}", machine.name));
        kubeadm::join(machine)?;
        step.done("");
    }
    let step = Step::start("the nodes become ready");
    kubeadm::connect(first, &machines)?;
    kubeadm::until_ready(first, &machines, "True")?;
    step.done("");
    Ok(machines)
}

/// Removes all machines.
fn down() -> Result<()> {
    for machine in Machine::all() {
        let step = Step::start(format!("remove the machine {}", machine.name));
        network::slow(&machine, None)?;
        power::remove(&machine)?;
        step.done("");
    }
    machine::remove_switch()
}

/// Cuts the power of machines and starts them again.
fn reboot(machines: &[Machine]) -> Result<()> {
    machines.iter().try_for_each(power::off)?;
    machines.iter().try_for_each(power::on)
}

fn status() -> Result<()> {
    let all = Machine::all();
    if all.is_empty() {
        println!("no machines; `cargo xtask cluster up` creates some");
        return Ok(());
    }
    for machine in &all {
        let state = if machine.is_up() { "up" } else { "down" };
        println!("{:<4} {:<12} {state}", machine.name, machine.address.to_string());
    }
    let first = Machine::named("cp")?;
    for kind in ["nodes", "pods"] {
        println!("\n{}", kubeadm::kubectl(&first, &["get", kind, "-A", "-o", "wide"])?);
    }
    Ok(())
}

/// Becomes a command on a machine.
fn ssh(machine: &str, words: &[String]) -> Result<()> {
    let machine = Machine::named(machine)?;
    let shell = [String::from("bash")];
    let words = if words.is_empty() { &shell[..] } else { words };
    Err(machine.command(words)?.exec()).context("cannot start nsenter")
}

/// Returns true if this program was called as a machine's systemctl.
pub(crate) fn is_systemctl(program: Option<&str>) -> bool {
    program
        .is_some_and(|program| Path::new(program).file_name().is_some_and(|name| name == machine::SYSTEMCTL))
}
