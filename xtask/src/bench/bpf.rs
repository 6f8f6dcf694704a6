//! What the kernel programs cost: by the kernel's own count of their runs, and by what a load does with and without them,
//! in turns, so that whatever else the machine does hits both alike.
//!
//! The socket programs belong to a cgroup, so two loads take turns of some milliseconds, one in a pod and one in a cgroup
//! beside the pods; hundreds of pairs make one per cent visible on a machine whose speed swings by ten. What belongs to
//! no cgroup (the tracepoint of the sockets' states) is added by the kernel's count.

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
/// The socket program that runs for every cgroup.
const EVERYWHERE: [&str; 1] = ["listener_state"];

/// A pods' root, a bpf file system and a network namespace of the bench's own, and a load in a container there.
struct Place {
    options: KernelOptions,
    /// In a container of a pod.
    load: Load,
    /// The same in a cgroup beside the pods'.
    outside: Load,
    /// Who calls both: not in a pod.
    client: Load,
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
        // As deep as the container: each level costs every switch.
        let beside = root.join("beside/pod1/c");
        let (root, container) = (root.join("pods"), root.join("pods/pod1/c"));
        std::fs::create_dir_all(&container)?;
        std::fs::create_dir_all(&beside)?;
        let options = KernelOptions {
            bpffs: bpffs.path().to_path_buf(),
            pin_name: "beelet".to_owned(),
            cgroup: root,
            mode: Mode::Auto,
            object: None,
            thresholds: Thresholds::default(),
        };
        let load_in = |dir| {
            let seat = Seat { cgroups: vec![dir], netns: Some(netns.path()), cpu: Some(0) };
            Load::start(&std::env::current_exe()?, &["load"], &seat)
        };
        let (load, outside, client) = (load_in(container)?, load_in(beside.clone())?, load_in(beside)?);
        Ok(Place {
            options,
            load,
            outside,
            client,
            _cgroup: cgroup,
            _netns: netns,
            _bpffs: bpffs,
            _folder: folder,
        })
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

    /// Nanoseconds that the command took in the pod, by the load's own clock.
    fn timed(&mut self, command: &str) -> Result<f64> {
        timed(&mut self.load, command)
    }

    /// Runs and nanoseconds of some of the programs, by the kernel's count.
    fn runs(&self, of: &[&str]) -> Result<(u64, u64)> {
        let pinned = kernel::pinned(&self.options.bpffs, &self.options.pin_name)?;
        let programs = pinned.programs.iter().filter(|program| of.contains(&program.name));
        Ok(programs.fold((0, 0), |(runs, ns), program| (runs + program.runs, ns + program.run_ns)))
    }

    /// Takes the scheduler's programs off, which would cost the pod's load more than the other one.
    fn detach_scheduler(&self) -> Result<()> {
        let links = kernel::pinned(&self.options.bpffs, &self.options.pin_name)?.dir.join("links");
        for program in SCHEDULER {
            std::fs::remove_file(links.join(program)).with_context(|| format!("no link of {program}"))?;
        }
        Ok(())
    }
}

/// Nanoseconds that the command took, by the load's own clock.
fn timed(load: &mut Load, command: &str) -> Result<f64> {
    if interrupted() {
        bail!("interrupted");
    }
    Ok(load.tell(command)?.parse()?)
}

/// Measures all rows.
pub(super) fn run(quick: bool) -> Result<Vec<Row>> {
    let rounds = if quick { 6 } else { 30 };
    let mut place = Place::new()?;
    let mut rows = scheduler(&mut place, rounds)?;
    rows.extend(sockets(&mut place, if quick { 300 } else { 1500 })?);
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

fn sockets(place: &mut Place, pairs: usize) -> Result<Vec<Row>> {
    let step = Step::start("bpf: the socket programs, over loopback");
    place.start()?.stop(true)?;
    place.detach_scheduler()?;
    let ports = (place.load.tell("listen")?, place.outside.tell("listen")?);
    let mut rows = Vec::new();
    // Connections and bytes: some ten milliseconds each.
    for (row, many, bytes) in [("accept_slowdown", 200, 0), ("throughput_slowdown", 1, 30_000_000)] {
        let everywhere = counted_everywhere(place, &ports.0, many, bytes)?;
        let mut slowdowns = Vec::new();
        for pair in 0..pairs {
            step.detail(&format!("{row}: {pair} of {pairs} pairs"));
            let mut inside = || called(&mut place.client, &mut place.load, &ports.0, many, bytes);
            // Which comes first changes: a machine that grows slower would blame the second.
            let first = if pair % 2 == 0 { Some(inside()?) } else { None };
            let outside = called(&mut place.client, &mut place.outside, &ports.1, many, bytes)?;
            let mut inside = || called(&mut place.client, &mut place.load, &ports.0, many, bytes);
            let inside = first.map_or_else(&mut inside, Ok)?;
            slowdowns.push((inside / outside - 1.0 + everywhere) * 100.0);
        }
        rows.push(Row::by_median("bpf", row, "%", slowdowns, SOCKET_BOUND));
    }
    place.start()?.stop(false)?;
    step.done(&format!("{pairs} pairs each"));
    Ok(rows)
}

/// Nanoseconds that `many` connections of `bytes` each take, one after the other.
fn called(client: &mut Load, server: &mut Load, port: &str, many: u32, bytes: u32) -> Result<f64> {
    server.begin(&format!("take {many}"))?;
    let took = timed(client, &format!("call {port} {many} {bytes}"))?;
    server.answer()?;
    Ok(took)
}

/// The share of the load's time that goes into the programs of every cgroup, by the kernel's count.
fn counted_everywhere(place: &mut Place, port: &str, many: u32, bytes: u32) -> Result<f64> {
    const TIMES: u32 = 20;
    let statistics = kernel::count_runs()?;
    let before = place.runs(&EVERYWHERE)?;
    let mut took = 0.0;
    for _ in 0..TIMES {
        took += called(&mut place.client, &mut place.load, port, many, bytes)?;
    }
    let after = place.runs(&EVERYWHERE)?;
    drop(statistics);
    Ok((after.1 - before.1) as f64 / took)
}
