//! Cost of the kernel programs: by the kernel's own run statistics, and by the time of a load with and
//! without them, in turns, so that disturbances of the machine affect both alike.
//!
//! A scheduler event is a switch or a wake-up, with or without a program attached to it: where the kernel
//! itself accounts how long threads wait, wake-ups need none. The number of events is counted with the
//! programs that see them all.
//!
//! The socket programs belong to a cgroup, so two loads take turns of some milliseconds, one in a pod and one
//! in a cgroup outside the pods; hundreds of pairs make one per cent visible on a machine whose speed varies
//! by ten. The program that counts bytes is attached only while there is a reader: rows with `_counted`
//! include it, the others do not. The program that belongs to no cgroup (the tracepoint of socket states) is
//! added by the kernel's statistics.

use super::Row;
use anyhow::{Context as _, Result, bail};
use beelet_bpf::{Kernel, KernelOptions};
use beelet_tests::guards::{CgroupRoot, Mount, NetNs};
use beelet_tests::load::{Load, Seat};
use beelet_tests::workdir::{self, interrupted};
use xtask::progress::Step;

/// Nanoseconds per scheduler event: design §6.
const EVENT_BOUND: f64 = 150.0;
/// Per cent of accepted connections and of throughput.
const SOCKET_BOUND: f64 = 1.0;
/// Ping-pong rounds timed as one sample: some 15 ms, so that most samples are undisturbed.
const PINGPONG: u32 = 2_000;
/// Samples per figure, of which the median counts: the first ones after loading are slow.
const PLAYED: usize = 30;
const SWITCHES: &str = "sched_switch";
const SCHEDULER: [&str; 3] = [SWITCHES, "sched_wakeup", "sched_wakeup_new"];
/// Without this program, those of the wake-ups are needed.
const RUN_DELAY: &[&str] = &["OFF_TASK_RUN_DELAY"];
/// Socket program that runs for every cgroup.
const EVERYWHERE: [&str; 1] = ["listener_state"];

/// The bench's own pod root, bpf file system and network namespace, with a load in a container there.
struct Place {
    options: KernelOptions,
    /// Load in a container of a pod.
    load: Load,
    /// The same load in a cgroup outside the pods.
    outside: Load,
    /// Client of both, outside the pods.
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
        // As deep as the container: each level adds to the cost of every switch.
        let beside = root.join("beside/pod1/c");
        let (root, container) = (root.join("pods"), root.join("pods/pod1/c"));
        std::fs::create_dir_all(&container)?;
        std::fs::create_dir_all(&beside)?;
        let options =
            KernelOptions { bpffs: bpffs.path().to_path_buf(), cgroup: root, ..KernelOptions::default() };
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
        self.start_without(&[])
    }

    fn start_without(&self, without: &'static [&'static str]) -> Result<Kernel> {
        let kernel = Kernel::start(&KernelOptions { without, ..self.options.clone() });
        for row in kernel.capabilities() {
            if let Err(why) = &row.have {
                bail!("cannot measure {} here: {why}", row.program);
            }
        }
        Ok(kernel)
    }

    /// Returns the nanoseconds that the command took in the pod, by the load's own clock.
    fn timed(&mut self, command: &str) -> Result<f64> {
        timed(&mut self.load, command)
    }

    /// Returns runs and nanoseconds of the given programs, by the kernel's statistics.
    fn runs(&self, of: &[&str]) -> Result<(u64, u64)> {
        let pinned = beelet_bpf::pinned(&self.options.bpffs, &self.options.pin_name)?;
        let programs = pinned.programs.iter().filter(|program| of.contains(&program.name));
        Ok(programs.fold((0, 0), |(runs, ns), program| (runs + program.runs, ns + program.run_ns)))
    }

    /// Detaches the scheduler's programs, which would slow the pod's load more than the other one.
    fn detach_scheduler(&self) -> Result<()> {
        let links = beelet_bpf::pinned(&self.options.bpffs, &self.options.pin_name)?.dir.join("links");
        for program in SCHEDULER {
            match std::fs::remove_file(links.join(program)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove the link of {program}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the nanoseconds that the command took, by the load's own clock.
fn timed(load: &mut Load, command: &str) -> Result<f64> {
    if interrupted() {
        bail!("interrupted");
    }
    Ok(load.run(command)?.parse()?)
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
    let step = Step::start("bpf: the scheduler's programs, under ping-pong on one CPU");
    let (mut by_count, mut added, mut base) = (Vec::new(), Vec::new(), Vec::new());
    played(place)?; // warm
    let events = events(place)?;
    for round in 0..rounds {
        step.detail(&format!("{round} of {rounds} rounds"));
        let without = played(place)?;
        let kernel = place.start()?;
        let with = played(place)?;
        let counted = counted(place)?;
        kernel.stop(false)?;
        by_count.push(counted.ns / (counted.switches * events.a_switch));
        added.push((with - without) / events.a_round);
        base.push(without / events.a_round);
    }
    step.done(&format!(
        "{rounds} rounds of {:.2} events; one takes {:.0} ns without them",
        events.a_round,
        super::median(&base)
    ));
    Ok(vec![
        Row::by_median("bpf", "scheduler_event_counted", "ns", by_count, EVENT_BOUND),
        Row::by_median("bpf", "scheduler_event_added", "ns", added, EVENT_BOUND),
    ])
}

/// Returns the nanoseconds of a ping-pong round.
fn played(place: &mut Place) -> Result<f64> {
    let command = format!("pingpong {PINGPONG}");
    let times = (0..PLAYED).map(|_| place.timed(&command)).collect::<Result<Vec<f64>>>()?;
    Ok(super::median(&times) / f64::from(PINGPONG))
}

/// Numbers of scheduler events.
struct Events {
    a_switch: f64,
    a_round: f64,
}

/// Counts the events, with the programs that see the wake-ups too.
fn events(place: &mut Place) -> Result<Events> {
    let kernel = place.start_without(RUN_DELAY)?;
    let counted = counted(place)?;
    kernel.stop(false)?;
    Ok(Events {
        a_switch: counted.runs / counted.switches,
        a_round: counted.runs / (f64::from(PINGPONG) * PLAYED as f64),
    })
}

/// Kernel statistics of the scheduler's programs.
struct Counted {
    switches: f64,
    runs: f64,
    ns: f64,
}

/// Plays ping-pong while the kernel counts.
fn counted(place: &mut Place) -> Result<Counted> {
    let statistics = beelet_bpf::count_runs()?;
    let before = (place.runs(&[SWITCHES])?.0, place.runs(&SCHEDULER)?);
    played(place)?;
    let after = (place.runs(&[SWITCHES])?.0, place.runs(&SCHEDULER)?);
    drop(statistics);
    Ok(Counted {
        switches: (after.0 - before.0) as f64,
        runs: (after.1.0 - before.1.0) as f64,
        ns: (after.1.1 - before.1.1) as f64,
    })
}

fn sockets(place: &mut Place, pairs: usize) -> Result<Vec<Row>> {
    let step = Step::start("bpf: the socket programs, over loopback");
    let kernel = place.start()?;
    let traffic = kernel.traffic().context("the byte counter is not loaded")?;
    kernel.stop(true)?;
    place.detach_scheduler()?;
    let ports = (place.load.run("listen")?, place.outside.run("listen")?);
    let mut rows = Vec::new();
    // Connections and bytes, for some ten milliseconds each.
    let (connections, bulk) = ((200, 0), (1, 30_000_000));
    for (row, (many, bytes), counted) in [
        ("accept_slowdown", connections, false),
        ("throughput_slowdown", bulk, false),
        ("accept_slowdown_counted", connections, true),
        ("throughput_slowdown_counted", bulk, true),
    ] {
        if counted {
            traffic.attach()?;
        }
        let everywhere = counted_everywhere(place, &ports.0, many, bytes)?;
        let mut slowdowns = Vec::new();
        for pair in 0..pairs {
            step.detail(&format!("{row}: {pair} of {pairs} pairs"));
            let mut inside = || called(&mut place.client, &mut place.load, &ports.0, many, bytes);
            // The order alternates: a machine that slows down would penalize the second.
            let first = if pair % 2 == 0 { Some(inside()?) } else { None };
            let outside = called(&mut place.client, &mut place.outside, &ports.1, many, bytes)?;
            let mut inside = || called(&mut place.client, &mut place.load, &ports.0, many, bytes);
            let inside = first.map_or_else(&mut inside, Ok)?;
            slowdowns.push((inside / outside - 1.0 + everywhere) * 100.0);
        }
        rows.push(if counted {
            Row::unbound("bpf", row, "%", slowdowns)
        } else {
            Row::by_median("bpf", row, "%", slowdowns, SOCKET_BOUND)
        });
    }
    place.start()?.stop(false)?;
    step.done(&format!("{pairs} pairs each"));
    Ok(rows)
}

/// Returns the nanoseconds of `many` consecutive connections of `bytes` each.
fn called(client: &mut Load, server: &mut Load, port: &str, many: u32, bytes: u32) -> Result<f64> {
    server.begin(&format!("take {many}"))?;
    let took = timed(client, &format!("call {port} {many} {bytes}"))?;
    server.answer()?;
    Ok(took)
}

/// Returns the share of the load's time spent in programs of every cgroup, by the kernel's statistics.
fn counted_everywhere(place: &mut Place, port: &str, many: u32, bytes: u32) -> Result<f64> {
    const TIMES: u32 = 20;
    let statistics = beelet_bpf::count_runs()?;
    let before = place.runs(&EVERYWHERE)?;
    let mut took = 0.0;
    for _ in 0..TIMES {
        took += called(&mut place.client, &mut place.load, port, many, bytes)?;
    }
    let after = place.runs(&EVERYWHERE)?;
    drop(statistics);
    Ok((after.1 - before.1) as f64 / took)
}
