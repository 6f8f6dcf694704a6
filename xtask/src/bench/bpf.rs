//! What the kernel programs cost: by the kernel's own count of their runs, and by what a load does with and without them,
//! in turns, so that whatever else the machine does hits both alike.

use super::Row;
use crate::progress::Step;
use anyhow::{Context as _, Result, bail};
use beelet::kernel::{self, Kernel, KernelOptions, Mode, Thresholds};
use beelet_tests::guards::{CgroupRoot, Mount, NetNs};
use beelet_tests::load::{Load, Seat};
use beelet_tests::workdir::{self, interrupted};

/// Nanoseconds an event of the scheduler: design §6.
const EVENT_BOUND: f64 = 150.0;
/// Per cent of accepted connections and of throughput.
const SOCKET_BOUND: f64 = 1.0;
/// A round of ping-pong is two switches and two wake-ups.
const EVENTS_A_ROUND: f64 = 4.0;
const SCHEDULER: [&str; 3] = ["sched_switch", "sched_wakeup", "sched_wakeup_new"];
const SOCKETS: [&str; 4] = ["listener_socket", "connection_socket", "traffic_in", "traffic_out"];

/// A pods' root, a bpf file system and a network namespace of the bench's own, and a load in a container there.
struct Place {
    options: KernelOptions,
    load: Load,
    _cgroup: CgroupRoot,
    _netns: NetNs,
    _bpffs: Mount,
    _folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Result<Place> {
        let name = workdir::unique("bench-bpf");
        let cgroup = CgroupRoot::new(&name)?;
        let netns = NetNs::new(&name)?;
        let folder = tempfile::tempdir()?;
        let bpffs = Mount::bpffs(&folder.path().join("bpf"))?;
        let root = cgroup.dir("unified").context("no cgroup2 hierarchy is mounted")?;
        let container = root.join("pod1/c");
        std::fs::create_dir_all(&container)?;
        let options = KernelOptions {
            bpffs: bpffs.path().to_path_buf(),
            pin_name: "beelet".to_owned(),
            cgroup: root,
            mode: Mode::Auto,
            object: None,
            thresholds: Thresholds::default(),
        };
        let seat = Seat { cgroups: vec![container], netns: Some(netns.path()), cpu: Some(0) };
        let load = Load::start(&std::env::current_exe()?, &["load"], &seat)?;
        Ok(Place { options, load, _cgroup: cgroup, _netns: netns, _bpffs: bpffs, _folder: folder })
    }

    fn start(&self) -> Result<Kernel> {
        let kernel = Kernel::start(&self.options);
        for row in kernel.capabilities() {
            if let Err(why) = &row.have {
                bail!("{} can't be measured here: {why}", row.program);
            }
        }
        Ok(kernel)
    }

    /// Nanoseconds that the command took by the load's own clock.
    fn timed(&mut self, command: &str) -> Result<f64> {
        if interrupted() {
            bail!("interrupted");
        }
        Ok(self.load.tell(command)?.parse()?)
    }

    /// Runs and nanoseconds of some of the programs, by the kernel's count.
    fn runs(&self, of: &[&str]) -> Result<(u64, u64)> {
        let pinned = kernel::pinned(&self.options.bpffs, &self.options.pin_name)?;
        let programs = pinned.programs.iter().filter(|program| of.contains(&program.name));
        Ok(programs.fold((0, 0), |(runs, ns), program| (runs + program.runs, ns + program.run_ns)))
    }

    /// Takes the socket programs off the cgroup; the next start puts them on again.
    fn detach_sockets(&self) -> Result<()> {
        let links = kernel::pinned(&self.options.bpffs, &self.options.pin_name)?.dir.join("links");
        for program in SOCKETS {
            std::fs::remove_file(links.join(program)).with_context(|| format!("no link of {program}"))?;
        }
        Ok(())
    }
}

/// Measures all rows.
pub(super) fn run(quick: bool) -> Result<Vec<Row>> {
    let rounds = if quick { 6 } else { 30 };
    let mut place = Place::new()?;
    let mut rows = scheduler(&mut place, rounds)?;
    rows.extend(sockets(&mut place, rounds)?);
    Ok(rows)
}

fn scheduler(place: &mut Place, rounds: usize) -> Result<Vec<Row>> {
    const PINGPONG: u32 = 40_000;
    let step = Step::start("bpf: the scheduler's programs, under ping-pong on one CPU");
    let command = format!("pingpong {PINGPONG}");
    let (mut counted, mut added, mut base) = (Vec::new(), Vec::new(), Vec::new());
    place.timed(&command)?; // warm
    for round in 0..rounds {
        step.detail(&format!("{round} of {rounds} rounds"));
        let without = place.timed(&command)?;
        let kernel = place.start()?;
        let with = place.timed(&command)?;
        let statistics = kernel::count_runs()?;
        let before = place.runs(&SCHEDULER)?;
        place.timed(&command)?;
        let after = place.runs(&SCHEDULER)?;
        drop(statistics);
        kernel.stop(false)?;
        counted.push((after.1 - before.1) as f64 / (after.0 - before.0) as f64);
        added.push((with - without) / (f64::from(PINGPONG) * EVENTS_A_ROUND));
        base.push(without / (f64::from(PINGPONG) * 2.0));
    }
    step.done(&format!("{rounds} rounds; a switch takes {:.0} ns without them", super::median(&base)));
    Ok(vec![
        Row::by_median("bpf", "scheduler_event_counted", "ns", counted, EVENT_BOUND),
        Row::by_median("bpf", "scheduler_event_added", "ns", added, EVENT_BOUND),
    ])
}

fn sockets(place: &mut Place, rounds: usize) -> Result<Vec<Row>> {
    let step = Step::start("bpf: the socket programs, over loopback");
    // Some two hundred milliseconds each.
    let commands = [("accept_slowdown", "tcp 4000 0"), ("throughput_slowdown", "tcp 1 400000000")];
    let mut rows = Vec::new();
    for (row, command) in commands {
        let mut slowdowns = Vec::new();
        place.start()?.stop(true)?;
        place.timed(command)?; // warm
        for round in 0..rounds {
            step.detail(&format!("{row}: {round} of {rounds} rounds"));
            // Which comes first changes: a machine that grows slower would blame the second.
            let mut took = [0.0; 2];
            for turn in 0..2 {
                let with = (round + turn) % 2;
                if with == 1 {
                    place.start()?.stop(true)?;
                    took[with] = place.timed(command)?;
                } else {
                    place.start()?.stop(true)?;
                    place.detach_sockets()?;
                    took[with] = place.timed(command)?;
                }
            }
            slowdowns.push((took[1] / took[0] - 1.0) * 100.0);
        }
        place.start()?.stop(false)?;
        rows.push(Row::by_median("bpf", row, "%", slowdowns, SOCKET_BOUND));
    }
    step.done(&format!("{rounds} rounds each"));
    Ok(rows)
}
