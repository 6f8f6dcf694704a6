//! Tier 2: the programs' measurements of containers, compared with the kernel's own files.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use crate::place::{Container, Place, load, start};
use beelet_bpf::{
    Counters, Edge, Edges, Interest, Interference, Kernel, KernelOptions, PressureKind, WaitedFor,
};
use beelet_tests::load::{Load, Seat};
use beelet_tests::workdir::PATIENCE;
use beelet_tests::{require, requires};
use beelet_units::bpf_settings::{ByQos, PressureEdges};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Returns the difference of two numbers, as a fraction of the second.
fn apart(found: u64, expected: u64) -> f64 {
    (found as f64 - expected as f64).abs() / expected as f64
}

/// Returns the next edge for which `wanted` returns a value.
fn next<T>(edges: &Edges, mut wanted: impl FnMut(Edge) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let edge = edges.recv_deadline(deadline).unwrap_or_else(|error| panic!("no edge arrived: {error}"));
        if let Some(found) = wanted(edge) {
            return found;
        }
    }
}

/// Returns the time that a process's main thread was runnable but did not run, in nanoseconds, as the
/// scheduler itself counts it.
fn run_delay(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
    text.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn cpu_time_matches_cpu_stat(seconds: u64) {
    let place = Place::new("bk-cpu");
    let kernel = place.start();
    let container = place.container("pod1/one", &[]);
    let mut loads: Vec<_> = (0..3).map(|_| container.load(None)).collect();
    let usage = || container.number("cpu.stat", "usage_usec") * 1000;
    let (before, file_before) = (container.counters(&kernel), usage());
    for (load, command) in loads.iter_mut().zip(["mixed", "burn", "mixed"]) {
        load.begin(&format!("{command} {}", seconds * 1000)).unwrap();
    }
    for load in &mut loads {
        load.answer().unwrap();
    }
    let (after, file_after) = (container.counters(&kernel), usage());
    let (ours, files) = (after.on_cpu_ns - before.on_cpu_ns, file_after - file_before);
    println!(
        "on-CPU time: programs {ours} ns, cpu.stat {files} ns, {:.2} % apart",
        100.0 * apart(ours, files)
    );
    assert!(apart(ours, files) < 0.02, "programs {ours} ns, cpu.stat {files} ns");
    assert!(after.switches > before.switches);
}

#[test]
fn time_on_the_cpu_matches_cpu_stat() {
    require!(bpf);
    cpu_time_matches_cpu_stat(6);
}

#[test]
fn time_on_the_cpu_matches_cpu_stat_over_a_minute() {
    require!(bpf, long);
    cpu_time_matches_cpu_stat(60);
}

/// Returns true if the kernel counts waits itself; otherwise prints that the test is skipped.
fn has_schedstat() -> bool {
    let has = std::path::Path::new("/proc/self/schedstat").exists();
    if !has {
        requires::skip(&requires::Missing {
            what: "the kernel has no /proc/PID/schedstat".to_owned(),
            remedy: "use a kernel built with CONFIG_SCHED_INFO".to_owned(),
        });
    }
    has
}

/// Runs CPU loads, calls `meanwhile`, and compares the waits of the loads with the kernel's own account.
/// Returns the counters before and after.
fn compared_with_schedstat(
    container: &Container,
    kernel: &Kernel,
    loads: &mut [Load],
    meanwhile: impl FnOnce(),
) -> (Counters, Counters) {
    let delays = |loads: &[Load]| -> u64 { loads.iter().map(|l| run_delay(l.pid())).sum() };
    let (before, file_before) = (container.counters(kernel), delays(loads));
    for load in &mut *loads {
        load.begin("burn 3000").unwrap();
    }
    meanwhile();
    for load in &mut *loads {
        load.answer().unwrap();
    }
    let (after, file_after) = (container.counters(kernel), delays(loads));
    let (ours, files) = (after.run_queue_wait_ns - before.run_queue_wait_ns, file_after - file_before);
    println!("waiting: programs {ours} ns, schedstat {files} ns, {:.2} % apart", 100.0 * apart(ours, files));
    assert!(apart(ours, files) < 0.05, "programs {ours} ns, schedstat {files} ns");
    (before, after)
}

/// Compares waits with the kernel's own account, on a kernel that seems to lack some fields.
fn waiting_matches_schedstat(without: &'static [&'static str]) {
    if !has_schedstat() {
        return;
    }
    let place = Place::new("bk-wait");
    let container = place.container("pod1/one", &[]);
    // Two loads start before the programs and have waited before they join the pod; two start later.
    let mut loads: Vec<_> = (0..2).map(|_| load(&Seat { cpu: Some(0), ..Seat::default() })).collect();
    for load in &mut loads {
        load.begin("burn 300").unwrap();
    }
    for load in &mut loads {
        load.answer().unwrap();
        std::fs::write(container.dirs[0].join("cgroup.procs"), load.pid().to_string()).unwrap();
    }
    let kernel = start(&KernelOptions { without, ..place.options() });
    let wakeups = kernel.capabilities().iter().find(|row| row.program == "sched_wakeup").unwrap();
    assert_eq!(wakeups.spared.is_some(), without.is_empty(), "{wakeups:?}");
    assert_eq!(place.pins().join("links/sched_wakeup").exists(), !without.is_empty());
    loads.extend((0..2).map(|_| container.load(Some(0))));
    let (before, after) = compared_with_schedstat(&container, &kernel, &mut loads, || ());
    let waits = |counters: &Counters| counters.run_queue_waits.iter().sum::<u64>();
    assert!(waits(&after) - waits(&before) > 100, "four threads on one CPU wait often: {after:?}");
}

#[test]
fn waiting_for_the_cpu_matches_schedstat() {
    require!(bpf);
    waiting_matches_schedstat(&[]);
}

#[test]
fn waiting_is_measured_from_wake_ups_where_the_kernel_does_not_count_it() {
    require!(bpf);
    waiting_matches_schedstat(&["OFF_TASK_RUN_DELAY"]);
}

#[test]
fn waiting_is_measured_where_run_queues_have_no_clock_that_can_be_read() {
    require!(bpf);
    waiting_matches_schedstat(&["OFF_RQ_CLOCK"]);
}

#[test]
fn waiting_of_moved_threads_matches_schedstat() {
    require!(bpf);
    if !has_schedstat() {
        return;
    }
    let place = Place::new("bk-moved");
    let kernel = place.start();
    let container = place.container("pod1/one", &[]);
    let mut loads: Vec<_> = (0..6).map(|_| container.load(None)).collect();
    let pids: Vec<u32> = loads.iter().map(Load::pid).collect();
    compared_with_schedstat(&container, &kernel, &mut loads, || {
        // The loads are moved between the two CPUs until they end, whether running or waiting.
        let cpus = rustix::thread::sched_getaffinity(None).unwrap();
        let all: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).collect();
        let started = Instant::now();
        for round in 0.. {
            if started.elapsed() > Duration::from_millis(2500) {
                break;
            }
            for (number, pid) in pids.iter().enumerate() {
                let mut one = rustix::thread::CpuSet::new();
                one.set(all[(round + number) % all.len()]);
                let pid = rustix::process::Pid::from_raw(*pid as i32);
                rustix::thread::sched_setaffinity(pid, &one).unwrap();
            }
        }
    });
}

#[test]
fn users_of_the_cpu_are_distinguished() {
    require!(bpf);
    let place = Place::new("bk-preempt");
    let kernel = place.start();
    let one = place.container("pod1/one", &[]);
    let mut own = one.load(Some(0));
    let check = |other: Option<&Container>, field: fn(&Counters) -> u64, what: &str, own: &mut Load| {
        let mut rivals: Vec<Load> = (0..4)
            .map(|_| match other {
                Some(container) => container.load(Some(0)),
                None => load(&Seat { cpu: Some(0), ..Seat::default() }),
            })
            .collect();
        let before = one.counters(&kernel);
        let deadline = Instant::now() + PATIENCE;
        // The scheduler chooses the next thread, and other processes want the CPU too.
        while field(&one.counters(&kernel)) == field(&before) {
            assert!(Instant::now() < deadline, "never preempted by {what}: {:?}", one.counters(&kernel));
            for load in rivals.iter_mut().chain([&mut *own]) {
                load.begin("burn 300").unwrap();
            }
            for load in rivals.iter_mut().chain([&mut *own]) {
                load.answer().unwrap();
            }
        }
    };
    check(Some(&place.container("pod1/two", &[])), |c| c.preempted_by_same_pod, "its own pod", &mut own);
    check(Some(&place.container("pod2/one", &[])), |c| c.preempted_by_other_pod, "another pod", &mut own);
    check(None, |c| c.preempted_by_system, "the machine", &mut own);
}

/// Returns the time in `held` that belongs to this cgroup.
fn held_by(waited: &WaitedFor, cgroup_id: u64) -> u64 {
    waited.held.iter().find(|(id, _)| *id == cgroup_id).map_or(0, |(_, held_ns)| *held_ns)
}

#[test]
fn a_wait_is_attributed_in_proportion_to_the_time_that_each_ran() {
    require!(bpf);
    let place = Place::new("bk-held");
    let outside = Place::new("bk-held2");
    let kernel = place.start();
    let one = place.container("pod1/one", &[]);
    let neighbours = [place.container("pod2/one", &[]), place.container("burstable/pod3/one", &[])];
    let stranger = outside.container("daemon", &[]);
    // The waiter, four threads of neighbours and one of the machine share one CPU.
    let mut own = one.load(Some(0));
    let mut rivals: Vec<Load> = (0..3).map(|_| neighbours[0].load(Some(0))).collect();
    rivals.push(neighbours[1].load(Some(0)));
    rivals.push(stranger.load(Some(0)));
    let used = |container: &Container| container.counters(&kernel).on_cpu_ns;
    let (before, waited_before) = (neighbours.each_ref().map(used), one.counters(&kernel).run_queue_wait_ns);
    for load in rivals.iter_mut().chain([&mut own]) {
        load.begin("burn 3000").unwrap();
    }
    for load in rivals.iter_mut().chain([&mut own]) {
        load.answer().unwrap();
    }
    let ran = [0, 1].map(|n| used(&neighbours[n]) - before[n]);
    let measures = kernel.measures().unwrap();
    let all = measures.waited_for(|id| id == one.id()).unwrap();
    let waited = &all[&one.id()];
    // This counter is read last, as the container may wait once more after the first reading.
    let waited_ns = one.counters(&kernel).run_queue_wait_ns - waited_before;
    let held = neighbours.each_ref().map(|container| held_by(waited, container.id()));
    let share = |of: [u64; 2]| of[0] as f64 / (of[0] + of[1]) as f64;
    println!("ran {ran:?} ns, held {held:?} ns of {waited_ns} ns: {waited:?}");
    assert!((share(held) - share(ran)).abs() < 0.1, "held {held:?}, ran {ran:?}");
    assert!(held_by(waited, stranger.id()) > 0, "the machine's cgroup is named too: {waited:?}");
    let named: u64 = waited.held.iter().map(|(_, held_ns)| held_ns).sum();
    // Time before a half-life that ended during the measurement counts half, on both sides.
    assert!(named <= waited.waited_ns && named > waited.waited_ns / 10, "{named} of {waited:?}");
    // The two values come from different clocks of the kernel.
    let most = waited_ns + waited_ns / 100;
    assert!(waited.waited_ns <= most && waited.waited_ns > waited_ns / 5, "{waited_ns}: {waited:?}");
    assert_eq!(all.len(), 1, "only one container was asked for");
}

#[test]
fn threads_of_one_container_wait_for_each_other() {
    require!(bpf);
    let place = Place::new("bk-self");
    let kernel = place.start();
    let one = place.container("pod1/one", &[]);
    let mut loads = [one.load(Some(0)), one.load(Some(0)), one.load(Some(0))];
    for load in &mut loads {
        load.begin("burn 2000").unwrap();
    }
    for load in &mut loads {
        load.answer().unwrap();
    }
    let all = kernel.measures().unwrap().waited_for(|id| id == one.id()).unwrap();
    // Other processes may want that CPU too.
    assert!(held_by(&all[&one.id()], one.id()) > 0, "{all:?}");
}

#[test]
fn processes_outside_pods_are_not_counted() {
    require!(bpf);
    let place = Place::new("bk-outside");
    let outside = Place::new("bk-outside2");
    let kernel = place.start();
    let stranger = outside.container("pod1/one", &[]);
    let container = place.container("burstable/pod1/one", &[]);
    stranger.load(None).run("burn 50").unwrap();
    let mut inside = container.load(None);
    let measures = kernel.measures().unwrap();
    let deadline = Instant::now() + PATIENCE;
    // Time on the CPU is counted when a thread leaves the CPU, so the load may answer before that. On a busy
    // machine, the load gets little of its 50 ms.
    let snapshot = loop {
        inside.run("burn 50").unwrap();
        let snapshot = measures.snapshot().unwrap();
        if snapshot.get(&container.id()).is_some_and(|counted| counted.on_cpu_ns > 10_000_000) {
            break snapshot;
        }
        assert!(Instant::now() < deadline, "{snapshot:?}");
    };
    assert!(!snapshot.contains_key(&stranger.id()));
}

/// Collects exits by cgroup and process, until that of the process `last`.
fn exits_until(edges: &Edges, last: u32) -> BTreeMap<(u64, u32), Vec<(u32, u32)>> {
    let mut found: BTreeMap<(u64, u32), Vec<(u32, u32)>> = BTreeMap::new();
    next(edges, |edge| match edge {
        Edge::ContainerExited { cgroup_id, pid, code, signal, .. } => {
            found.entry((cgroup_id, pid)).or_default().push((code, signal));
            (pid == last).then_some(())
        }
        Edge::Lost => panic!("edges were lost"),
        _ => None,
    });
    found
}

fn every_exit_is_reported_once(cgroups: usize, processes: usize) {
    let place = Place::new("bk-exits");
    let kernel = place.start();
    let edges = kernel.subscribe(Interest::EXITS);
    let containers: Vec<Container> =
        (0..cgroups).map(|index| place.container(&format!("burstable/pod{index}/c"), &[])).collect();
    // The edges are read while the processes run: a channel holds only some thousands.
    let (reported, expected) = std::thread::scope(|scope| {
        let last = containers[0].load(None);
        let pid = last.pid();
        let edges = &edges;
        let collector = scope.spawn(move || exits_until(edges, pid));
        let mut expected = BTreeMap::new();
        for some in containers.chunks(8) {
            let mut loads: Vec<_> = some.iter().map(|one| (one.id(), one.load(None))).collect();
            for (_, load) in &mut loads {
                load.begin(&format!("spawn {}", processes / cgroups)).unwrap();
            }
            for (id, load) in &mut loads {
                for process in load.answer().unwrap().split(' ') {
                    let numbers: Vec<u32> = process.split(':').map(|word| word.parse().unwrap()).collect();
                    expected.entry((*id, numbers[0])).or_insert_with(Vec::new).push((numbers[1], numbers[2]));
                }
            }
        }
        drop(last); // ends after all other processes
        (collector.join().unwrap(), expected)
    });
    assert_eq!(expected.values().map(Vec::len).sum::<usize>(), processes / cgroups * cgroups);
    for (process, ends) in &expected {
        assert_eq!(reported.get(process), Some(ends), "cgroup and process {process:?}");
    }
    let options = place.options();
    let programs = beelet_bpf::pinned(&options.bpffs, &options.pin_name).unwrap().programs;
    let passed_over = programs.iter().find(|program| program.name == "task_exited").map(|found| found.misses);
    println!(
        "{} exits reported, each once; the kernel passed over task_exited: {passed_over:?}",
        expected.len()
    );
}

#[test]
fn every_exit_is_reported_once_with_its_code_or_signal() {
    require!(bpf);
    every_exit_is_reported_once(10, 500);
}

#[test]
fn ten_thousand_exits_in_fifty_cgroups_are_reported_once_each() {
    require!(bpf, long);
    every_exit_is_reported_once(50, 10_000);
}

/// Returns pressure thresholds of `millis` milliseconds, and zero for BestEffort.
fn touchy(millis: u64) -> PressureEdges {
    let all = |millis| {
        let time = Duration::from_millis(millis);
        ByQos { guaranteed: time, burstable: time, best_effort: Duration::ZERO }
    };
    PressureEdges { run_queue_wait: all(millis), reclaim: all(millis) }
}

#[test]
fn long_waits_and_their_ends_are_reported_at_most_once_per_second() {
    require!(bpf);
    let place = Place::new("bk-edges");
    std::fs::create_dir(place.cgroup_dir().join("besteffort")).unwrap();
    let kernel = start(&KernelOptions { pressure_edges: touchy(800), ..place.options() });
    let edges = kernel.subscribe(Interest::PRESSURE);
    let container = place.container("pod1/one", &[]);
    let never = place.container("besteffort/pod2/one", &[]);
    let mut loads =
        [container.load(Some(0)), container.load(Some(0)), never.load(Some(0)), never.load(Some(0))];
    for load in &mut loads {
        load.begin("burn 3000").unwrap();
    }
    let pressure = |edge| match edge {
        Edge::Pressure { cgroup_id, kind: PressureKind::RunQueue, above, value, at_ns } => {
            assert_eq!(cgroup_id, container.id(), "BestEffort's threshold is zero");
            Some((above, value, at_ns))
        }
        _ => None,
    };
    let (above, value, up_ns) = next(&edges, pressure);
    assert!(above && value >= 800_000_000, "{value}");
    for load in &mut loads {
        load.answer().unwrap();
    }
    // A calm period: only short waits, but some, because the programs check the threshold at a wait.
    loads[0].begin("idle 100000").unwrap();
    let mut last = up_ns;
    let mut now_above = true;
    while now_above {
        let (above, _, at_ns) = next(&edges, pressure);
        assert_ne!(above, now_above, "edges alternate between above and below");
        assert!(at_ns - last >= 1_000_000_000, "{} ns after the last", at_ns - last);
        (now_above, last) = (above, at_ns);
    }
}

/// Sets a memory limit for the cgroup, and enables the controller in its ancestors up to the test's root.
fn limit_memory(place: &Place, container: &Container, bytes: u64) {
    let v1 = place.cgroup.dir("memory") != place.cgroup.dir("unified");
    if v1 {
        std::fs::write(container.dirs[1].join("memory.limit_in_bytes"), bytes.to_string()).unwrap();
        return;
    }
    let root = place.cgroup_dir();
    let mut above: Vec<_> = container.dirs[0].ancestors().skip(1).take_while(|dir| *dir != root).collect();
    above.extend([root.as_path(), root.parent().unwrap()]);
    for dir in above.iter().rev() {
        std::fs::write(dir.join("cgroup.subtree_control"), "+memory").unwrap();
    }
    std::fs::write(container.dirs[0].join("memory.max"), bytes.to_string()).unwrap();
}

#[test]
fn an_oom_kill_is_reported_with_its_sizes_and_its_exit() {
    require!(bpf);
    let place = Place::new("bk-oom");
    let kernel = place.start();
    let edges = kernel.subscribe(Interest::OOM_KILLS | Interest::EXITS);
    let container = place.container("pod1/one", &["memory"]);
    let mut victim = container.load(None);
    limit_memory(&place, &container, 32 << 20);
    victim.begin(&format!("allocate {}", 256 << 20)).unwrap();
    let (cgroup_id, kill) = next(&edges, |edge| match edge {
        Edge::OomKill { cgroup_id, kill, .. } => Some((cgroup_id, kill)),
        _ => None,
    });
    assert_eq!((cgroup_id, kill.pid), (container.id(), victim.pid()));
    assert!(kill.total_vm > 256 << 20, "{kill:?}");
    assert!((16 << 20..64 << 20).contains(&kill.anon_rss), "{kill:?}");
    next(&edges, |edge| match edge {
        Edge::ContainerExited { cgroup_id, pid, code, signal, .. } if pid == victim.pid() => {
            assert_eq!((cgroup_id, code, signal), (container.id(), 0, 9));
            Some(())
        }
        _ => None,
    });
    let counters = container.counters(&kernel);
    assert_eq!(counters.oom_kills, 1);
    assert!(counters.memcg_reclaims > 0 && counters.memcg_reclaim_ns > 0, "{counters:?}");
}

/// include/uapi/linux/magic.h
const TMPFS: rustix::fs::FsWord = 0x0102_1994;
/// include/uapi/linux/magic.h
const RAMFS: rustix::fs::FsWord = 0x8584_58f6;

/// Creates a sparse file to read. The file uses no disk space, and each page is read once: no page is
/// refaulted, which PSI would count as well. Returns `None`, and prints a skip, on a file system in memory.
fn sparse_file(bytes: u64) -> Option<tempfile::NamedTempFile> {
    let file = tempfile::NamedTempFile::new_in(beelet_tests::workdir::target_dir()).unwrap();
    file.as_file().set_len(bytes).unwrap();
    if [TMPFS, RAMFS].contains(&rustix::fs::fstatfs(file.as_file()).unwrap().f_type) {
        requires::skip(&requires::Missing {
            what: "the target folder is in memory, where pages can't be reclaimed".to_owned(),
            remedy: "set CARGO_TARGET_DIR to a folder on a disk".to_owned(),
        });
        return None;
    }
    Some(file)
}

#[test]
fn containers_that_had_to_reclaim_memory_are_reported_with_the_pages() {
    require!(bpf);
    let Some(file) = sparse_file(1 << 30) else { return };
    let Some(small) = sparse_file(256 << 20) else { return };
    let place = Place::new("bk-growth");
    let outside = Place::new("bk-growth2");
    let kernel = place.start();
    let measures = kernel.measures().unwrap();
    let mut interference = Interference::new(measures.clone());
    let hog = place.container("besteffort/pod1/hog", &["memory"]);
    let other = place.container("pod2/other", &["memory"]);
    let daemon = outside.container("daemon", &["memory"]);
    let mut read = |place: &Place, container: &Container, file: &tempfile::NamedTempFile| {
        let mut load = container.load(None);
        limit_memory(place, container, 24 << 20);
        load.run(&format!("stream {}", file.path().display())).unwrap();
        interference.read(&measures.snapshot().unwrap()).unwrap().reclaimers.memcg
    };
    let pages = |freed: &[(u64, u64)], of: &Container| {
        freed.iter().find(|(id, _)| *id == of.id()).map_or(0, |(_, pages)| *pages)
    };
    assert_eq!(pages(&read(&place, &other, &small), &hog), 0);
    // The daemon is not in a container, so its own reclaim sends no edge: the hog's does.
    read(&outside, &daemon, &small);
    let freed = read(&place, &hog, &file);
    let [hog, other, daemon] = [&hog, &other, &daemon].map(|of| pages(&freed, of));
    println!("pages freed: hog {hog}, other {other}, daemon {daemon}: {freed:?}");
    // Almost all of the pages that were read had to be freed, some of them perhaps by kernel threads, and a
    // half-life may have ended during the measurement.
    let read_by_hog = (1 << 30) / 4096;
    assert!(hog > read_by_hog / 4 && hog < read_by_hog * 2, "{hog} of {read_by_hog} pages");
    assert!(other > 0 && other < hog && daemon > 0 && daemon < hog, "{other} and {daemon} next to {hog}");
}

#[test]
fn reclaim_of_a_full_cgroup_matches_memory_pressure() {
    require!(bpf, psi);
    let Some(file) = sparse_file(6 << 30) else { return };
    let place = Place::new("bk-reclaim");
    // The edges are for reclaim only: a cgroup has one edge per second, which waits for the CPU could use up.
    let pressure_edges = PressureEdges { run_queue_wait: touchy(0).run_queue_wait, ..touchy(1) };
    let kernel = start(&KernelOptions { pressure_edges, ..place.options() });
    let edges = kernel.subscribe(Interest::PRESSURE);
    let container = place.container("pod1/one", &["memory"]);
    let mut reader = container.load(Some(0)); // PSI weighs CPUs: a single CPU needs no weights
    limit_memory(&place, &container, 24 << 20);
    let stalled = || container.number("memory.pressure", "total") * 1000; // the first line is `some`
    let (before, file_before) = (container.counters(&kernel), stalled());
    reader.run(&format!("stream {}", file.path().display())).unwrap();
    let (after, file_after) = (container.counters(&kernel), stalled());
    let (ours, files) = (after.memcg_reclaim_ns - before.memcg_reclaim_ns, file_after - file_before);
    println!(
        "memcg reclaim: programs {ours} ns in {} times, memory.pressure {files} ns",
        after.memcg_reclaims - before.memcg_reclaims
    );
    // The tolerance is a quarter: PSI counts throttling as well, and leaves out the time that a CPU spends on
    // other work.
    assert!(ours > 1_000_000, "{ours} ns");
    assert!(apart(ours, files) < 0.25, "{ours} ns, {files} ns");
    let is_reclaim = |edge: &Edge| matches!(edge, Edge::Pressure { cgroup_id, kind: PressureKind::Reclaim, above: true, .. } if *cgroup_id == container.id());
    // The kernel's programs judge one second at a time: on a busy machine, one reading may not fill a second.
    let heard = (0..10).any(|_| {
        let until = Instant::now() + Duration::from_secs(2);
        while let Ok(edge) = edges.recv_deadline(until) {
            if is_reclaim(&edge) {
                return true;
            }
        }
        reader.run(&format!("stream {}", file.path().display())).unwrap();
        false
    });
    assert!(heard, "no edge for the reclaim");
}

/// Returns received and sent bytes and packets of the interface `lo` of a process's network namespace.
fn loopback(pid: u32) -> [u64; 4] {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("lo:")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    [numbers[0], numbers[1], numbers[8], numbers[9]]
}

#[test]
fn bytes_and_packets_match_the_interface() {
    require!(bpf);
    let place = Place::new("bk-bytes");
    let kernel = place.start();
    kernel.traffic().expect("byte-counting programs").attach().unwrap();
    let container = place.container("pod1/one", &[]);
    let seat = Seat { cgroups: container.dirs.clone(), netns: Some(place.netns.path()), cpu: None };
    let mut load = load(&seat);
    let check = |load: &mut Load, command: &str, tolerance: f64, missing: u64| {
        let (before, file_before) = (container.counters(&kernel), loopback(load.pid()));
        load.run(command).unwrap();
        let (after, file_after) = (container.counters(&kernel), loopback(load.pid()));
        let delta = |index: usize| file_after[index] - file_before[index];
        let packets = (after.rx_packets - before.rx_packets, after.tx_packets - before.tx_packets);
        // Loopback counts from the IP header on, as the programs do.
        let bytes = (after.rx_bytes - before.rx_bytes, after.tx_bytes - before.tx_bytes);
        println!(
            "{command}: programs {bytes:?} bytes, {packets:?} packets; lo {file_after:?} - {file_before:?}"
        );
        for (ours, files) in [(bytes.0, delta(0)), (bytes.1, delta(2))] {
            assert!(apart(ours, files) <= tolerance, "{command}: {ours} bytes, the interface says {files}");
        }
        for (ours, files) in [(packets.0, delta(1)), (packets.1, delta(3))] {
            let range = files - missing..=files;
            assert!(range.contains(&ours), "{command}: {ours} packets, the interface says {files}");
        }
        (before, after)
    };
    check(&mut load, "udp 500 1000", 0.0, 0);
    // The remainder of a connection that both ends have closed (TIME_WAIT) no longer belongs to a socket of
    // the container: up to two packets of 40 bytes per connection.
    let sent_again = retransmitted(load.pid());
    let (before, after) = check(&mut load, "tcp 100 100000", 0.01, 200);
    assert_eq!(after.established - before.established, 200, "both ends are in the container");
    assert!(after.rtt_samples - before.rtt_samples >= 200, "{after:?}");
    // On a very slow machine an acknowledgement may be late.
    assert_eq!(after.retransmits - before.retransmits, retransmitted(load.pid()) - sent_again);
}

#[test]
fn bytes_are_counted_only_on_request() {
    require!(bpf);
    let place = Place::new("bk-demand");
    let kernel = place.start();
    let container = place.container("pod1/one", &[]);
    let seat = Seat { cgroups: container.dirs.clone(), netns: Some(place.netns.path()), cpu: None };
    let mut load = load(&seat);
    let mut grown = |kernel: &Kernel| {
        let before = container.counters(kernel).rx_packets;
        load.run("udp 100 500").unwrap();
        container.counters(kernel).rx_packets - before
    };
    let traffic = kernel.traffic().expect("byte-counting programs");
    assert_eq!(grown(&kernel), 0, "counted before a subscriber attached");
    for _ in 0..2 {
        traffic.attach().unwrap();
        traffic.attach().unwrap();
        assert_eq!(grown(&kernel), 100);
        traffic.detach();
        assert_eq!(grown(&kernel), 0, "counted after the last detach");
    }
    // An agent that adopts the programs counts into the same maps.
    kernel.stop(true).unwrap();
    let kernel = place.start();
    assert!(kernel.adopted());
    kernel.traffic().expect("byte-counting programs").attach().unwrap();
    assert_eq!(grown(&kernel), 100);
}

/// Returns the segments that TCP retransmitted in a process's network namespace.
fn retransmitted(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/snmp")).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let index = names.split_whitespace().position(|name| name == "RetransSegs").unwrap();
    values.split_whitespace().nth(index).unwrap().parse().unwrap()
}

#[test]
fn retransmits_are_counted_like_tcps_own() {
    require!(bpf);
    let place = Place::new("bk-again");
    let kernel = place.start();
    let container = place.container("pod1/one", &[]);
    let seat = Seat { cgroups: container.dirs.clone(), netns: Some(place.netns.path()), cpu: None };
    let mut load = load(&seat);
    assert_eq!(container.counters(&kernel).retransmits, 0);
    load.run("lose").unwrap();
    // TCP retransmits after 200 ms, 400 ms, …
    let deadline = Instant::now() + PATIENCE;
    while retransmitted(load.pid()) < 3 {
        assert!(Instant::now() < deadline, "TCP does not retransmit");
        std::thread::sleep(Duration::from_millis(20));
    }
    load.run("found").unwrap();
    assert_eq!(container.counters(&kernel).retransmits, retransmitted(load.pid()));
}

#[test]
fn counters_of_dead_cgroups_are_removed() {
    require!(bpf);
    let place = Place::new("bk-dead");
    let kernel = place.start();
    let edges = kernel.subscribe(Interest::EXITS);
    let stays = place.container("pod0/c", &[]);
    let mut load = stays.load(None);
    let goes = place.container("pod1/c", &[]);
    goes.load(None).run("burn 5").unwrap();
    let gone = goes.id();
    assert!(kernel.measures().unwrap().snapshot().unwrap().contains_key(&gone));
    beelet_tests::guards::remove_cgroups(&[place.cgroup_dir().join("pod1")]).unwrap();
    // The reader checks every 256 exits and removes the counters of a cgroup that is missing at two checks.
    let deadline = Instant::now() + PATIENCE;
    while kernel.measures().unwrap().snapshot().unwrap().contains_key(&gone) {
        load.run("spawn 100").unwrap();
        while edges.try_recv().is_some() {}
        assert!(Instant::now() < deadline, "the counters of a dead cgroup were not removed");
    }
    assert!(kernel.measures().unwrap().snapshot().unwrap().contains_key(&stays.id()));
}
