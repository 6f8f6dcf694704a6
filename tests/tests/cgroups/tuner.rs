//! The tuner on the real kernel: under a cgroup root of the test's own, with the machine's cgroup version.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beelet_cgroups::{Cgroups, Files, Version};
use beelet_policy::{
    resources::qos::QosClass,
    tuner::{ContainerSample, CpuCaps, KnobKind, Law, Observed, PodSample, Supports, TunerMode},
};
use beelet_state::State;
use beelet_tests::guards::{CgroupRoot, Process};
use beelet_tests::{require, requires, workdir};
use beelet_tuner::{
    ColdSettings, Engine, Metrics, Outcome, Settings, Target, TargetContainer, View, recover,
};
use beelet_units::cgroup_driver::CgroupDriver;

const BEST_EFFORT: &str = "/kubepods/besteffort";
const HOG: &str = "/kubepods/besteffort/podhog";
const SERVER: &str = "/kubepods/podserver";
/// Environment variable with the root and the state folder, for the process that is killed.
const VICTIM: &str = "BEELET_TEST_TUNER_VICTIM";
const PATIENCE: Duration = Duration::from_secs(120);
/// Number of kills in the midst of the agent's work, and their time limit: a test in an emulated guest has
/// 300 s.
const KILLS: u64 = 100;
const KILLS_WITHIN: Duration = Duration::from_secs(240);

struct Node {
    root: CgroupRoot,
    cgroups: Arc<Cgroups>,
    dir: tempfile::TempDir,
}

impl Node {
    fn new(name: &str) -> Self {
        let root = CgroupRoot::new(&workdir::unique(name)).unwrap();
        let cgroups = Arc::new(Cgroups::discover(root.path(), CgroupDriver::Cgroupfs).unwrap());
        for (path, files) in owners_values(&cgroups) {
            cgroups.ensure(&path, &files).unwrap();
        }
        cgroups.ensure(&format!("{SERVER}/c1"), &Files::new()).unwrap();
        cgroups.ensure(&format!("{HOG}/c2"), &Files::new()).unwrap();
        Self { root, cgroups, dir: tempfile::tempdir().unwrap() }
    }

    fn engine(&self, mode: TunerMode, law: Law) -> Engine {
        engine(&self.cgroups, Arc::new(State::open(self.dir.path()).unwrap()), mode, law)
    }

    /// Starts a process in the cgroup `path`, in every hierarchy.
    fn process_in(&self, path: &str, program: &str) -> Process {
        let child = Process(Command::new("sh").args(["-c", program]).stdout(Stdio::null()).spawn().unwrap());
        for dir in self.root.dirs() {
            std::fs::write(dir.join(&path[1..]).join("cgroup.procs"), child.0.id().to_string()).unwrap();
        }
        child
    }

    /// Returns the current values that the tuner may change.
    fn values(&self) -> BTreeMap<String, String> {
        let mut values = BTreeMap::new();
        for cgroup in [BEST_EFFORT, HOG, SERVER, &format!("{SERVER}/c1")] {
            for file in files(&self.cgroups) {
                if let Some(value) = self.cgroups.read(cgroup, file) {
                    values.insert(format!("{cgroup} {file}"), value);
                }
            }
        }
        values
    }
}

fn files(cgroups: &Cgroups) -> &'static [&'static str] {
    match cgroups.paths.version() {
        Version::V2 => &["cpu.idle", "cpu.weight", "cpu.max", "cpu.max.burst", "memory.high"],
        _ => &["cpu.idle", "cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_burst_us"],
    }
}

/// Returns the values that the cgroups' owner has set.
fn owners_values(cgroups: &Cgroups) -> Vec<(String, Files)> {
    let files = |list: &[(&str, &str)]| -> Files {
        list.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
    };
    let (least, quota) = match cgroups.paths.version() {
        Version::V2 => (files(&[("cpu.weight", "1")]), files(&[("cpu.max", "6400000 100000")])),
        _ => (
            files(&[("cpu.shares", "2")]),
            files(&[("cpu.cfs_quota_us", "6400000"), ("cpu.cfs_period_us", "100000")]),
        ),
    };
    vec![(BEST_EFFORT.to_owned(), least), (SERVER.to_owned(), quota)]
}

fn engine(cgroups: &Arc<Cgroups>, state: Arc<State>, mode: TunerMode, law: Law) -> Engine {
    let settings = Settings {
        mode,
        interval: Duration::from_millis(100),
        back_off: Duration::from_secs(600),
        law,
        cold: ColdSettings::default(),
    };
    Engine::new(Arc::clone(cgroups), state, None, settings, Metrics::default())
}

fn skip(what: &str, remedy: &str) {
    requires::skip(&requires::Missing { what: what.to_owned(), remedy: remedy.to_owned() });
}

fn quick() -> Law {
    Law { hot_ticks: 1, calm_ticks: 1, cpu_caps: CpuCaps::Always, ..Law::default() }
}

/// Returns an observation of a node with or without trouble.
fn seen(cgroups: &Cgroups, trouble: bool) -> Observed {
    let pod = |name: &str, class, cgroup: &str, id: &str| PodSample {
        name: format!("default/{name}"),
        class,
        cgroup: cgroup.to_owned(),
        cpu_request: 0,
        cpu_used: Some(1000),
        can_cap: true,
        quota_us: (class == QosClass::Guaranteed).then_some(50_000),
        memory_request: 0,
        memory_used: 512 << 20,
        working_set: 128 << 20,
        memory_still_permille: None,
        memory_growth_permille: None,
        containers: vec![ContainerSample {
            name: "main".to_owned(),
            cgroup: format!("{cgroup}/{id}"),
            cpu_wait_permille: Some(if trouble { 500 } else { 0 }),
            memory_stall_permille: Some(if trouble { 500 } else { 0 }),
            throttled_permille: Some(if trouble { 100 } else { 0 }),
            quota_us: (class == QosClass::Guaranteed && cgroups.paths.version() != Version::V2)
                .then_some(50_000),
            ..ContainerSample::default()
        }],
    };
    Observed {
        cpus: 2000,
        best_effort: BEST_EFFORT.to_owned(),
        best_effort_used: if trouble { 1800 } else { 0 },
        supports: Supports {
            idle: cgroups.read(BEST_EFFORT, "cpu.idle").is_some(),
            harmless_caps: false,
            memory_high: cgroups.paths.version() == Version::V2,
            burst: false,
            disk_weight: false,
            weights: false,
        },
        pods: vec![
            pod("server", QosClass::Guaranteed, SERVER, "c1"),
            pod("hog", QosClass::BestEffort, HOG, "c2"),
        ],
    }
}

fn targets() -> Vec<Target> {
    let pod = |name: &str, class, cgroup: &str, id: &str| Target {
        is_limited: false,
        priority: 0,
        name: format!("default/{name}"),
        class,
        cgroup: cgroup.to_owned(),
        cpu_request: 0,
        memory_request: 0,
        containers: vec![TargetContainer { name: "main".to_owned(), id: id.to_owned() }],
    };
    vec![pod("server", QosClass::Guaranteed, SERVER, "c1"), pod("hog", QosClass::BestEffort, HOG, "c2")]
}

/// Tightens and restores settings as fast as possible, without end.
fn victim(argument: &str) {
    let (root, state) = argument.split_once(' ').unwrap();
    let cgroups = Arc::new(Cgroups::discover(root, CgroupDriver::Cgroupfs).unwrap());
    let mut engine =
        engine(&cgroups, Arc::new(State::open(Path::new(state)).unwrap()), TunerMode::Enforce, quick());
    loop {
        for tick in 0..16 {
            let view = engine.act(&seen(&cgroups, tick < 8), Instant::now());
            assert!(view.blocked.is_empty(), "{:?}", view.blocked);
            if tick == 1 {
                println!("held {}", view.held.len());
                std::io::stdout().flush().unwrap();
            }
        }
    }
}

#[test]
fn after_kill_9_in_the_middle_of_enforcing_the_owners_values_are_back_a_hundred_times() {
    require!(root);
    if let Ok(argument) = std::env::var(VICTIM) {
        return victim(&argument);
    }
    let node = Node::new("beelet-tuner-kill");
    let before = node.values();
    let name = "after_kill_9_in_the_middle_of_enforcing_the_owners_values_are_back_a_hundred_times";
    let (mut found_held, mut rounds, began) = (0, 0, Instant::now());
    for round in 0..KILLS {
        if began.elapsed() > KILLS_WITHIN && requires::long().is_err() {
            break;
        }
        let argument = format!("{} {}", node.root.path(), node.dir.path().display());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([&format!("tuner::{name}"), "--exact", "--nocapture"]).env(VICTIM, argument);
        let mut child = Process(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        assert!(
            lines.any(|line| line.unwrap().contains("held")),
            "round {round}: the victim ended before its kill"
        );
        // Each round kills at another point of the work.
        std::thread::sleep(Duration::from_micros(round * 137 % 5000));
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        found_held += u64::from(node.values() != before);
        recover(&node.cgroups, &State::open(node.dir.path()).unwrap());
        assert_eq!(node.values(), before, "round {round}");
        assert!(!node.dir.path().join("tuner.json").exists(), "round {round}: the journal was not removed");
        rounds += 1;
    }
    assert!(
        found_held * 10 > rounds,
        "only {found_held} of {rounds} kills found a held setting: the test shows nothing"
    );
    if rounds < KILLS {
        let what = format!(
            "only {rounds} of {KILLS} kills fitted into {KILLS_WITHIN:?}; the values were back after each"
        );
        skip(&what, "run all of them with BEELET_LONG=1");
    }
}

#[test]
fn a_hog_is_idle_while_a_server_waits() {
    require!(root, psi);
    let node = Node::new("beelet-tuner-loop");
    if node.cgroups.read(BEST_EFFORT, "cpu.idle").is_none() {
        skip("the kernel has no cpu.idle", "use Linux 5.15 or newer");
        return;
    }
    let before = node.values();
    let busy = "while :; do :; done";
    let cpus = std::thread::available_parallelism().unwrap().get();
    // With more tasks than CPUs, some of them always wait.
    let servers: Vec<Process> = (0..=cpus).map(|_| node.process_in(&format!("{SERVER}/c1"), busy)).collect();
    let hogs: Vec<Process> = (0..cpus).map(|_| node.process_in(&format!("{HOG}/c2"), busy)).collect();
    // A hog without CPU time is quiet: any signal is worth a step here. The cap is off, as it would hide the
    // effect of idle.
    let law = Law {
        cpu_wait_permille: 1,
        quiet_percent: 0,
        best_effort_floor_percent: 100,
        burst_percent: 0,
        ..quick()
    };
    let mut engine = node.engine(TunerMode::Enforce, law);
    let ticks_until = |engine: &mut Engine, what: &str, done: &dyn Fn(&View) -> bool| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let view = engine.tick(&targets(), Instant::now());
            if done(&view) {
                return view;
            }
            assert!(Instant::now() < deadline, "waited for {what}: {view:#?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let view = ticks_until(&mut engine, "the hog to be idle", &|view| !view.held.is_empty());
    assert_eq!(node.cgroups.read(BEST_EFFORT, "cpu.idle").as_deref(), Some("1"));
    assert!(view.held[0].reason.contains("default/server (main) waits for a CPU"), "{view:#?}");
    // The owner's own sync leaves the weight alone while it is held, and records a new one.
    for (path, files) in owners_values(&node.cgroups) {
        node.cgroups.ensure(&path, &files).unwrap();
    }
    drop((servers, hogs));
    ticks_until(&mut engine, "the setting to be restored", &|view| view.held.is_empty());
    assert_eq!(node.values(), before);
    assert_eq!(engine.restore(), 0);
}

#[test]
fn a_stop_restores_everything() {
    require!(root);
    let node = Node::new("beelet-tuner-stop");
    let before = node.values();
    let mut engine = node.engine(TunerMode::Enforce, quick());
    for _ in 0..5 {
        engine.act(&seen(&node.cgroups, true), Instant::now());
    }
    assert_ne!(node.values(), before);
    assert!(engine.restore() > 0);
    assert_eq!(node.values(), before);
}

#[test]
fn a_setting_that_another_process_overwrote_stays() {
    require!(root);
    let node = Node::new("beelet-tuner-yield");
    let mut engine = node.engine(TunerMode::Enforce, quick());
    for _ in 0..3 {
        engine.act(&seen(&node.cgroups, true), Instant::now());
    }
    let (file, value) = match node.cgroups.paths.version() {
        Version::V2 => ("cpu.max", "77000 100000"),
        _ => ("cpu.cfs_quota_us", "77000"),
    };
    assert_ne!(node.cgroups.read(BEST_EFFORT, file).unwrap(), value);
    let dir = node.root.dir("cpu").unwrap().join(&BEST_EFFORT[1..]);
    std::fs::write(dir.join(file), value).unwrap();
    // The engine checks the setting before it acts.
    let view = engine.tick(&targets(), Instant::now());
    assert!(view.blocked.iter().any(|one| one.knob.kind.as_str() == "cpu.max"), "{view:#?}");
    assert!(view.history.iter().any(|one| matches!(one.outcome, Outcome::Overwritten(_))), "{view:#?}");
    for _ in 0..10 {
        engine.act(&seen(&node.cgroups, true), Instant::now());
    }
    engine.restore();
    assert_eq!(node.cgroups.read(BEST_EFFORT, file).as_deref(), Some(value));
    // The other settings are restored.
    assert_eq!(node.cgroups.read(BEST_EFFORT, "cpu.idle").unwrap_or("0".to_owned()), "0");
}

#[test]
fn advice_is_published_once_and_nothing_is_written() {
    require!(root);
    let node = Node::new("beelet-tuner-advise");
    let before = node.values();
    let mut engine = node.engine(TunerMode::Advise, quick());
    let mut view = View::default();
    for _ in 0..20 {
        view = engine.act(&seen(&node.cgroups, true), Instant::now());
    }
    assert_eq!(node.values(), before);
    assert!(!view.held.is_empty());
    assert!(view.history.iter().all(|one| one.outcome == Outcome::Advised), "{view:#?}");
    assert!(view.history.len() <= 3, "{view:#?}");
    // A container is throttled by its own quota, and nothing else is wrong.
    let mut throttled = seen(&node.cgroups, false);
    throttled.supports.burst = true;
    let container = &mut throttled.pods[0].containers[0];
    (container.throttled_permille, container.quota_us) = (Some(1200), Some(50_000));
    for _ in 0..20 {
        view = engine.act(&throttled, Instant::now());
    }
    let lent = view.history.iter().filter(|one| one.knob.kind == KnobKind::Burst);
    let lent: Vec<&str> = lent.map(|one| one.reason.as_str()).collect();
    assert!((1..=2).contains(&lent.len()), "{lent:#?}");
    assert!(lent[0].contains("100 % of the time"), "{lent:#?}");
    assert!(!node.dir.path().join("tuner.json").exists());
}
