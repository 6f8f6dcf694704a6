//! Tier 2: the programs and their reader under more load than any node has. The short versions always run,
//! the long ones with `cargo xtask test --long`.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use crate::place::{Container, LOOPBACK, Place, other_object, start};
use beelet_bpf::{self as programs, Edge, Interest, Kernel, KernelOptions};
use beelet_ebpf_abi::MAX_CONTAINERS;
use beelet_tests::guards::remove_cgroups;
use beelet_tests::load::Load;
use beelet_tests::require;
use beelet_tests::workdir::PATIENCE;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable with the paths for a reader in a process of its own.
const READER: &str = "BEELET_TEST_READER";

fn switches_are_all_counted(rounds: u64) {
    let place = Place::new("bk-switches");
    let kernel = place.start();
    let memory = kernel.memory().to_vec();
    let container = place.container("pod1/one", &[]);
    let mut loads: Vec<Load> = (0..2).map(|cpu| container.load(Some(cpu))).collect();
    let (before, started) = (container.counters(&kernel), Instant::now());
    for load in &mut loads {
        load.begin(&format!("pingpong {rounds}")).unwrap();
    }
    for load in &mut loads {
        load.answer().unwrap();
    }
    let took = started.elapsed();
    let after = container.counters(&kernel);
    let switches = after.switches - before.switches;
    println!("{switches} switches, {:.0} a second", switches as f64 / took.as_secs_f64());
    // Each round has two switches, unless a pipe happened to be full or empty already; other work adds some.
    assert!(switches as f64 > 2.0 * 2.0 * rounds as f64 * 0.95, "{switches}");
    let waits: u64 = after.run_queue_waits.iter().sum::<u64>() - before.run_queue_waits.iter().sum::<u64>();
    assert!(waits as f64 > switches as f64 * 0.95, "{waits} waits of {switches} switches");
    let drops = kernel.drops().unwrap().unwrap();
    assert_eq!((drops.ring_full, drops.containers_full), (0, 0));
    assert_eq!(kernel.memory(), memory);
}

#[test]
fn every_switch_of_a_storm_is_counted() {
    require!(bpf);
    switches_are_all_counted(100_000);
}

#[test]
fn every_switch_of_a_long_storm_is_counted() {
    require!(bpf, long);
    switches_are_all_counted(3_000_000);
}

fn cgroups_come_and_go(count: usize) {
    let place = Place::new("bk-churn");
    let kernel = place.start();
    let edges = kernel.subscribe(Interest::EXITS);
    let (mut exits, mut most) = (0, 0);
    for round in 0..count {
        let container = place.container(&format!("pod{round}/c"), &[]);
        let mut short = container.load(None);
        short.begin("exit 0").unwrap();
        let pid = short.pid();
        assert!(short.wait().unwrap().success());
        let deadline = Instant::now() + PATIENCE;
        loop {
            match edges.recv_deadline(deadline).unwrap() {
                Edge::ContainerExited { pid: found, .. } if found == pid => break,
                Edge::Lost => panic!("edges were lost"),
                _ => {}
            }
        }
        exits += 1;
        std::fs::remove_dir(&container.dirs[0]).unwrap();
        std::fs::remove_dir(container.dirs[0].parent().unwrap()).unwrap();
        if round % 64 == 0 {
            most = most.max(kernel.measures().unwrap().snapshot().unwrap().len());
        }
    }
    println!("{exits} cgroups, at most {most} counted at a time");
    assert!(most < MAX_CONTAINERS, "{most}");
    assert_eq!(kernel.drops().unwrap().unwrap().containers_full, 0);
    let after = place.container("pod-after/c", &[]);
    let mut load = after.load(None);
    load.run("burn 20").unwrap();
    assert!(after.counters(&kernel).on_cpu_ns > 5_000_000, "a later container is not counted");
    buried(&kernel, &after, &mut load);
}

/// Waits until only `alive` is still counted. The reader checks every 256 exits, and removes cgroups that are
/// missing at two checks.
fn buried(kernel: &Kernel, alive: &Container, load: &mut Load) {
    let edges = kernel.subscribe(Interest::EXITS);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let counted = kernel.measures().unwrap().snapshot().unwrap();
        if counted.keys().all(|id| *id == alive.id()) {
            break;
        }
        assert!(Instant::now() < deadline, "{} dead cgroups are still counted", counted.len() - 1);
        load.run("spawn 100").unwrap();
        while edges.try_recv().is_some() {}
    }
}

/// The crowd fills three quarters of all slots: most cgroups don't get their first choice.
#[test]
fn a_crowd_of_cgroups_is_counted_each_by_itself_and_so_is_the_next() {
    require!(bpf);
    let place = Place::new("bk-crowd");
    let kernel = place.start();
    let mut before = u64::MAX;
    for rounds in [100, 2] {
        let crowd: Vec<Container> =
            (0..MAX_CONTAINERS * 3 / 4).map(|n| place.container(&format!("crowd/{n}"), &[])).collect();
        let mut load = place.container("crowd/first", &[]).load(None);
        for container in &crowd {
            std::fs::write(container.dirs[0].join("cgroup.procs"), load.pid().to_string()).unwrap();
            load.run(&format!("pingpong {rounds}")).unwrap();
        }
        let counted = kernel.measures().unwrap().snapshot().unwrap();
        for container in &crowd {
            assert!(counted.contains_key(&container.id()), "{:?}", container.dirs[0]);
        }
        // If the slots were not cleared, the counts of the first crowd would appear here.
        let switches: u64 = counted.values().map(|counters| counters.switches).sum();
        assert!(
            switches >= crowd.len() as u64 && switches < before / 4,
            "{switches}, the crowd before {before}"
        );
        before = switches;
        assert_eq!(kernel.drops().unwrap().unwrap().containers_full, 0);
        drop(load);
        remove_cgroups(&[crowd[0].dirs[0].parent().unwrap().to_owned()]).unwrap();
        let after = place.container("after/c", &[]);
        let mut load = after.load(None);
        buried(&kernel, &after, &mut load);
    }
}

#[test]
fn cgroups_that_come_and_go_leave_nothing() {
    require!(bpf);
    cgroups_come_and_go(100);
}

#[test]
fn five_thousand_cgroups_that_come_and_go_leave_nothing() {
    require!(bpf, long);
    cgroups_come_and_go(5000);
}

/// Runs a reader in a process of its own, which the test can stop.
#[test]
#[ignore = "a part of other tests, which start it"]
fn reader_process() {
    let Some(paths) = std::env::var_os(READER) else { return };
    let paths: Vec<PathBuf> = std::env::split_paths(&paths).collect();
    let kernel = start(&KernelOptions {
        bpffs: paths[0].clone(),
        cgroup: paths[1].clone(),
        ..KernelOptions::default()
    });
    let edges = kernel.subscribe(Interest::LISTENERS);
    say("ready");
    loop {
        match edges.recv_deadline(Instant::now() + PATIENCE) {
            Ok(Edge::Lost) => {
                let there = kernel.listeners().unwrap().snapshot().unwrap();
                say(&format!("lost {}", there.len()));
                // The listener may have been opened while the backlog was read, and its edge may be lost:
                // then the snapshot has it.
                if there.iter().any(|listener| listener.port == 51) {
                    say("opened 51");
                }
            }
            Ok(Edge::ListenerOpened { listener, .. }) if listener.port == 51 => say("opened 51"),
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "reader: {line}").unwrap();
    out.flush().unwrap();
}

fn a_stopped_reader_recovers(stopped_for: Duration) {
    let place = Place::new("bk-stopped");
    let paths = std::env::join_paths([place.bpffs.path().to_path_buf(), place.cgroup_dir()]).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "stress::reader_process", "--ignored", "--nocapture"]).env(READER, paths);
    let mut reader = beelet_tests::guards::Process(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(reader.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut until = |wanted: &str| {
        // The test harness prints its own text before this line's, on the same line.
        lines
            .find(|line| line.contains(&format!("reader: {wanted}")))
            .unwrap_or_else(|| panic!("the reader did not print {wanted}"))
    };
    until("ready");
    let pid = rustix::process::Pid::from_child(&reader.0);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let started = Instant::now();
    let mut process = place.process();
    let dropped = || {
        let drops = programs::dump(place.bpffs.path(), "beelet", "DROPS").unwrap();
        let cpus = drops[0]["values"].as_array().unwrap();
        cpus.iter().map(|cpu| cpu["ring_full"].as_u64().unwrap()).sum::<u64>()
    };
    let mut rounds = 0;
    while dropped() == 0 || started.elapsed() < stopped_for {
        for _ in 0..200 {
            let socket = process.socket("listen 127.0.0.1:50");
            process.close(socket);
        }
        rounds += 200;
        assert!(rounds < 2_000_000, "the ring buffer never filled");
    }
    println!("{} events dropped in {:?}", dropped(), started.elapsed());
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    until("lost");
    process.socket("listen 127.0.0.1:51");
    until("opened 51");
    // The reader's view is right again: it adopted no wrong entry.
    drop(reader);
    let kernel = Kernel::start(&place.options());
    assert!(kernel.adopted());
    assert!(place.listens(&kernel, 51, LOOPBACK));
    assert!(!place.listens(&kernel, 50, LOOPBACK));
    kernel.stop(false).unwrap();
}

#[test]
fn a_stopped_reader_is_notified_of_its_losses() {
    require!(bpf);
    a_stopped_reader_recovers(Duration::ZERO);
}

#[test]
fn a_reader_stopped_for_ten_seconds_is_notified_of_its_losses() {
    require!(bpf, long);
    a_stopped_reader_recovers(Duration::from_secs(10));
}

/// The programs are replaced while processes end: an exit is reported at most once, and exactly once after
/// the new programs count.
#[test]
fn exits_are_reported_once_while_programs_are_replaced() {
    require!(bpf);
    let place = Place::new("bk-swap");
    let folder = tempfile::tempdir().unwrap();
    let object = other_object(folder.path());
    let container = place.container("pod1/one", &[]);
    place.start().stop(true).unwrap();
    let mut spawner = container.load(None);
    spawner.begin("spawn 300").unwrap();
    let kernel = start(&KernelOptions { object: Some(object), ..place.options() });
    assert!(kernel.adopted());
    let edges = kernel.subscribe(Interest::EXITS);
    spawner.answer().unwrap();
    let answer = spawner.run("spawn 50").unwrap();
    let later: Vec<u32> =
        answer.split(' ').map(|process| process.split(':').next().unwrap().parse().unwrap()).collect();
    let deadline = Instant::now() + PATIENCE;
    let mut reported = BTreeMap::new();
    while !reported.contains_key(later.last().unwrap()) {
        if let Edge::ContainerExited { pid, .. } = edges.recv_deadline(deadline).unwrap() {
            *reported.entry(pid).or_insert(0) += 1;
        }
    }
    assert!(reported.values().all(|times| *times == 1), "an exit was reported twice: {reported:?}");
    let missing: Vec<_> = later.iter().filter(|pid| !reported.contains_key(pid)).collect();
    assert!(missing.is_empty(), "not reported: {missing:?}");
}

/// Returns the processor time of this process's reader of kernel events since its start, in seconds.
fn reader_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let is_reader = |task: &PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "kernel-events")
    };
    let reader = tasks.filter(is_reader).last().unwrap();
    let text = std::fs::read_to_string(reader.join("schedstat")).unwrap();
    text.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

#[test]
fn listeners_that_come_and_go_all_over_the_machine_hide_none_that_matters() {
    require!(bpf);
    let place = Place::new("bk-storm");
    let kernel = place.start();
    let edges = kernel.subscribe(Interest::LISTENERS);
    let started = Instant::now();
    for _ in 0..50_000 {
        drop(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    }
    let (took, used) = (started.elapsed().as_secs_f64(), reader_seconds());
    println!(
        "50000 listeners in {took:.2} s; the reader took {used:.2} s, {:.0} % of a core",
        100.0 * used / took
    );
    let mut process = place.process();
    process.socket("listen 127.0.0.1:51");
    let deadline = Instant::now() + PATIENCE;
    loop {
        match edges.recv_deadline(deadline).unwrap() {
            Edge::ListenerOpened { listener, .. } if listener.port == 51 => break,
            Edge::Lost if place.listens(&kernel, 51, LOOPBACK) => break,
            _ => {}
        }
    }
}
