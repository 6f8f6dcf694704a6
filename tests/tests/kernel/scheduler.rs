//! The scheduler of the tuner's top rung: the order of pods, the CPU time that every pod keeps, and the
//! return to the kernel's own scheduler.
//!
//! The machine has only one scheduler, so these tests run in turn and compare times only within one test.

#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use crate::place::load;
use beelet_bpf::{PodFolders, Scheduler};
use beelet_ebpf_abi::scheduler::WATCHDOG_MS;
use beelet_tests::guards::{CgroupRoot, Process};
use beelet_tests::load::{Load, Seat};
use beelet_tests::requires::{self, Missing};
use beelet_tests::workdir::{PATIENCE, unique};
use beelet_units::scheduling::{SchedulingClass, SchedulingShare};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable with the pods' root, for the process that holds the scheduler.
const HOLDER: &str = "BEELET_SCHEDULER_OF";
/// `enabled` while a scheduler is loaded.
const STATE: &str = "/sys/kernel/sched_ext/state";

fn sched_ext() -> Result<(), Missing> {
    requires::bpf()?;
    let remedy = "boot such a kernel: cargo xtask vm";
    Scheduler::supported().map_err(|error| requires::missing(error.to_string(), remedy))
}

/// Cgroups in the layout of pods.
struct Pods {
    cgroup: CgroupRoot,
    root: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

/// Lock that the running test holds.
static TURN: Mutex<()> = Mutex::new(());

impl Pods {
    /// Creates the cgroups. Returns `None`, and prints a skip, on kernels that can't run the scheduler.
    fn new() -> Option<Pods> {
        if let Err(missing) = sched_ext() {
            requires::skip(&missing);
            return None;
        }
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        until("disabled");
        let cgroup = CgroupRoot::new(&unique("bk-scheduler")).unwrap();
        let root = cgroup.dir("unified").unwrap();
        for folder in ["burstable", "besteffort"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        Some(Pods { cgroup, root, _turn: turn })
    }

    fn container(&self, path: &str) -> PathBuf {
        let folder = self.root.join(path);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn start(&self) -> Scheduler {
        start(&self.root).unwrap()
    }
}

fn start(root: &Path) -> Result<Scheduler, beelet_bpf::KernelError> {
    let (burstable, best_effort) = (root.join("burstable"), root.join("besteffort"));
    Scheduler::start(&PodFolders { root, burstable: &burstable, best_effort: &best_effort })
}

fn in_cgroup(cgroup: &Path) -> Load {
    load(&Seat { cgroups: vec![cgroup.to_path_buf()], ..Seat::default() })
}

/// Keeps every CPU busy from a cgroup, with two threads per CPU, until dropped.
fn crowd(cgroup: &Path) -> Vec<Load> {
    let cpus = std::thread::available_parallelism().unwrap().get();
    let busy = |_| {
        let mut one = in_cgroup(cgroup);
        one.begin("burn 600000").unwrap();
        one
    };
    (0..2 * cpus).map(busy).collect()
}

fn id(cgroup: &Path) -> u64 {
    std::fs::metadata(cgroup).unwrap().ino()
}

/// Returns the CPU time that a cgroup has used.
fn used(cgroup: &Path) -> Duration {
    let text = std::fs::read_to_string(cgroup.join("cpu.stat")).unwrap();
    let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec ")).unwrap();
    Duration::from_micros(usage.parse().unwrap())
}

/// Returns the number of threads of a cgroup's processes.
fn threads(cgroup: &Path) -> usize {
    std::fs::read_to_string(cgroup.join("cgroup.threads")).unwrap().lines().count()
}

/// Returns the CPU time that cgroups use within `time`.
fn meanwhile<const N: usize>(cgroups: [&Path; N], time: Duration) -> [f64; N] {
    let before = cgroups.map(used);
    // The passage of time itself is measured here.
    std::thread::sleep(time);
    let after = cgroups.map(used);
    std::array::from_fn(|index| (after[index] - before[index]).as_secs_f64())
}

fn state() -> String {
    std::fs::read_to_string(STATE).unwrap().trim().to_owned()
}

/// Waits for a state, and returns the time that took.
fn until(wanted: &str) -> Duration {
    let began = Instant::now();
    while state() != wanted {
        assert!(began.elapsed() < PATIENCE, "the scheduler is {}, not {wanted}", state());
        std::thread::sleep(Duration::from_millis(1));
    }
    began.elapsed()
}

#[test]
fn a_latency_critical_pod_wakes_up_before_busy_best_effort_pods() {
    let Some(pods) = Pods::new() else { return };
    let (first, last) = (pods.container("podfirst/c"), pods.container("besteffort/podlast/c"));
    let _busy = crowd(&last);
    let late = |sleeper: &mut Load| sleeper.run("doze 200").unwrap().parse::<f64>().unwrap();
    let (mut sleeper, mut last_sleeper) = (in_cgroup(&first), in_cgroup(&last));
    let without = late(&mut sleeper);
    let scheduler = pods.start();
    let (with, behind) = (late(&mut sleeper), late(&mut last_sleeper));
    println!("woke up {with} ns late, a BestEffort pod {behind} ns; {without} ns without the scheduler");
    assert_eq!(scheduler.ended().unwrap(), None);
    assert!(with < behind, "{with} ns late, a BestEffort pod {behind} ns");
}

#[test]
fn best_effort_pods_get_the_rest_and_never_nothing() {
    let Some(pods) = Pods::new() else { return };
    let (first, last) = (pods.container("podfirst/c"), pods.container("besteffort/podlast/c"));
    let scheduler = pods.start();
    let _behind = crowd(&last);
    let _ahead = crowd(&first);
    let [ahead, behind] = meanwhile([&first, &last], Duration::from_secs(4));
    println!("latency-critical {ahead:.2} s, BestEffort {behind:.2} s");
    assert_eq!(scheduler.ended().unwrap(), None);
    assert!(behind > 0.0, "BestEffort pods got nothing");
    assert!(ahead > behind * 3.0, "latency-critical pods got {ahead} s, BestEffort pods {behind} s");
}

#[test]
fn burstable_pods_share_by_their_requests() {
    let Some(pods) = Pods::new() else { return };
    let (small, large) = (pods.container("burstable/podsmall/c"), pods.container("burstable/podlarge/c"));
    let mut scheduler = pods.start();
    let share = |weight| SchedulingShare { class: SchedulingClass::Shared, weight };
    let shares = [(&small, share(100)), (&large, share(400))];
    let shares = shares.map(|(container, share)| (id(container.parent().unwrap()), share));
    scheduler.share_out(&BTreeMap::from(shares), &BTreeMap::new()).unwrap();
    let (_one, _other) = (crowd(&small), crowd(&large));
    let [small, large] = meanwhile([&small, &large], Duration::from_secs(4));
    println!("requests of 1 : 4 got {small:.2} s : {large:.2} s");
    assert!(large > small * 2.0, "{small} s and {large} s");
    assert!(small > 0.0);
}

#[test]
fn a_cpu_limit_holds_though_the_machine_is_idle() {
    let Some(pods) = Pods::new() else { return };
    let container = pods.container("burstable/podlimited/c");
    let mut scheduler = pods.start();
    let limits = BTreeMap::from([(id(&container), 250)]);
    scheduler.share_out(&BTreeMap::new(), &limits).unwrap();
    let _busy = crowd(&container);
    let [used] = meanwhile([&container], Duration::from_secs(4));
    println!("a limit of 250 millicores let {used:.2} s pass in 4 s");
    assert_eq!(scheduler.ended().unwrap(), None);
    assert!(used > 0.7 && used < 2.0, "{used} s of 4 s, with a limit of a quarter of a CPU");
}

#[test]
fn a_cpu_limit_holds_for_many_threads_with_a_latency_critical_pod() {
    const THREADS: usize = 200;
    const MILLI_CPUS: u64 = 100;
    let Some(pods) = Pods::new() else { return };
    let (first, limited) = (pods.container("podfirst/c"), pods.container("burstable/podlimited/c"));
    let mut scheduler = pods.start();
    let mut swarm = in_cgroup(&limited);
    swarm.begin(&format!("swarm {THREADS} 600000")).unwrap();
    let began = Instant::now();
    while threads(&limited) <= THREADS {
        assert!(began.elapsed() < PATIENCE, "{} of {THREADS} threads have begun", threads(&limited));
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut sleeper = in_cgroup(&first);
    sleeper.begin("doze 1000").unwrap();
    scheduler.share_out(&BTreeMap::new(), &BTreeMap::from([(id(&limited), MILLI_CPUS)])).unwrap();
    // The time is longer than the kernel lets a thread wait.
    let time = Duration::from_millis(u64::from(WATCHDOG_MS)) + Duration::from_secs(5);
    let [used] = meanwhile([&limited], time);
    let late = sleeper.answer().unwrap();
    let allowed = time.as_secs_f64() * MILLI_CPUS as f64 / 1000.0;
    println!("used {used:.2} s of {allowed:.2} s; a latency-critical pod woke up {late} ns late");
    assert_eq!(scheduler.ended().unwrap(), None);
    assert!(used > allowed / 2.0 && used < allowed * 1.5, "{used} s, with a limit of {allowed} s");
}

#[test]
fn the_kernel_has_its_own_scheduler_back_when_the_holder_is_killed() {
    let Some(pods) = Pods::new() else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "scheduler::holder_process", "--ignored", "--nocapture"])
        .env(HOLDER, &pods.root);
    let mut holder = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(holder.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.into_iter().any(|line| line.contains("holder: ready")));
    assert_eq!(state(), "enabled");
    let second = start(&pods.root).unwrap_err().to_string();
    assert!(second.contains("another scheduler"), "{second}");
    drop(holder); // kill -9
    println!("back {:?} after the holder was killed", until("disabled"));
    drop(pods.cgroup);
}

/// Holds the scheduler until this process is killed.
#[test]
#[ignore = "a part of another test, which starts it"]
fn holder_process() {
    let Some(root) = std::env::var_os(HOLDER) else { return };
    let _scheduler = start(Path::new(&root)).unwrap();
    println!("holder: ready");
    std::thread::sleep(PATIENCE);
}

#[test]
fn a_scheduler_that_fails_is_unloaded_with_the_reason() {
    let Some(pods) = Pods::new() else { return };
    let scheduler = pods.start();
    // SysRq-S restores the kernel's own scheduler (Documentation/admin-guide/sysrq.rst).
    std::fs::write("/proc/sysrq-trigger", "S").unwrap();
    until("disabled");
    let began = Instant::now();
    let end = loop {
        if let Some(end) = scheduler.ended().unwrap() {
            break end;
        }
        assert!(began.elapsed() < PATIENCE, "the scheduler did not report its end");
        std::thread::sleep(Duration::from_millis(1));
    };
    println!("reported reason: {}", end.reason);
    assert!(!end.reason.is_empty());
    drop(scheduler);
    drop(pods.start());
    until("disabled");
}

#[test]
fn a_broken_program_is_refused_and_nothing_changes() {
    let Some(pods) = Pods::new() else { return };
    let (burstable, best_effort) = (pods.root.join("burstable"), pods.root.join("besteffort"));
    let folders = PodFolders { root: &pods.root, burstable: &burstable, best_effort: &best_effort };
    let refused = Scheduler::start_object(beelet_bpf::built_in_object(), &folders).unwrap_err().to_string();
    println!("refused: {refused}");
    assert_eq!(state(), "disabled");
}
