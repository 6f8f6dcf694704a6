//! Tests that set the clock forward and back while pods run, crash and are evicted. Only the agent's clock
//! (libfaketime) and the fake runtime's are set, never the machine's. The monotonic clocks continue, as they
//! do when an administrator or an NTP client sets the time.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use beelet_tests::agent::Options;
use beelet_tests::guards::Mount;
use beelet_tests::pods::PodView;
use beelet_tests::{images, require, requires, workdir};
use serde_json::{Value, json};

use super::scene::{Scene, in_own_mounts, pod};

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
const YEAR: i64 = 365 * DAY;

/// Successive offsets from the true clock: forward, back, and correct again.
const STEPS: [i64; 7] = [HOUR, -HOUR, DAY, -DAY, YEAR, -YEAR, 0];

/// Returns the path of the file with the offset.
fn clock(dir: &Path) -> PathBuf {
    dir.join("clock")
}

/// Sets the clock that the agent sees.
fn set(dir: &Path, ahead: i64) {
    let (path, new) = (clock(dir), dir.join("clock.new"));
    workdir::write(&new, format!("{ahead:+}\n")).unwrap();
    std::fs::rename(new, path).unwrap();
}

/// Runs the agent on its own clock. libfaketime leaves shared memory behind when a process is killed, so the
/// agent has a private /dev/shm.
fn on_own_clock(dir: &Path, options: Options) -> Options {
    set(dir, 0);
    let library = requires::faketime_library().unwrap();
    let prelude = "mount -t tmpfs tmpfs /dev/shm";
    let environment = [
        format!("LD_PRELOAD='{}'", library.display()),
        format!("FAKETIME_TIMESTAMP_FILE='{}'", clock(dir).display()),
        "FAKETIME_NO_CACHE=1".to_owned(),
        "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
        "DONT_FAKE_MONOTONIC=1".to_owned(),
        "NO_FAKE_STAT=1".to_owned(),
    ];
    let inner = format!("{prelude}; export {}", environment.join(" ").replace('\'', ""));
    in_own_mounts(dir, options, &inner)
}

impl Scene {
    /// Sets the agent's clock and the runtime's.
    fn step(&self, ahead: i64) {
        set(self.dir.path(), ahead);
        self.cri.change(|world| world.clock_ahead = ahead);
    }
}

/// Returns the seconds since 1970 by the machine's clock.
fn now() -> i64 {
    i64::try_from(UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap()
}

fn steady(pod: &PodView) -> Value {
    let status = pod.pod.status.clone().unwrap();
    json!({ "uid": pod.uid(), "conditions": status.conditions, "restarts": pod.restarts() })
}

#[test]
fn pods_that_run_do_not_notice_that_the_clock_was_set() {
    require!(root, faketime);
    let mut scene = Scene::start(on_own_clock);
    scene.apply(&pod("web"));
    // A pod that may run for ten hours; a clock step must not count.
    let mut timed = pod("timed");
    timed["spec"]["activeDeadlineSeconds"] = json!(10 * HOUR);
    scene.apply(&timed);
    let before = steady(&scene.until_ready("web"));
    scene.until_ready("timed");
    let changes = scene.changes();
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"];
    let usual = conditions.map(|name| scene.condition(name));
    for ahead in STEPS {
        scene.step(ahead);
        scene.until_relisted();
        assert_eq!(steady(&scene.until_ready("web")), before, "{ahead}");
        assert_eq!(conditions.map(|name| scene.condition(name)), usual, "{ahead}");
        assert_eq!(scene.changes(), changes, "{ahead}");
        assert!(scene.until_pod("timed", "to exist", |_| true).ready(), "{ahead}");
    }
    scene.remove("timed");
    scene.until_gone("timed");
    // Pods start and end at any clock, and the agent uses its own clock for the pod's start time.
    for ahead in STEPS {
        scene.step(ahead);
        scene.apply(&pod("new"));
        let new = scene.until_ready("new");
        let started = new.pod.status.as_ref().and_then(|status| status.start_time.as_ref()).unwrap();
        let off = started.0.as_second() - ahead - now();
        assert!(off.abs() < HOUR / 2, "{ahead}: {started:?}");
        scene.exit("new", 1);
        scene.until_pod("new", "to run again", |pod| pod.ready() && pod.restarts() == 1);
        scene.remove("new");
        scene.until_gone("new");
        assert_eq!(steady(&scene.until_ready("web")), before, "{ahead}");
    }
    // An agent that starts at another time adopts the pods.
    for ahead in STEPS {
        scene.agent.kill9();
        scene.step(ahead);
        scene.agent.resume().unwrap();
        let first = scene.until_pod("web", "to be known", |_| true);
        assert_eq!(steady(&first), before, "{ahead}");
        scene.until_relisted();
        assert_eq!(steady(&scene.until_ready("web")), before, "{ahead}");
        scene.is_well();
    }
}

/// Crashes a pod and waits until it runs again.
fn crashes(scene: &Scene, name: &str, restarts: i32) {
    scene.exit(name, 1);
    scene.until_pod(name, "to run again", |pod| pod.ready() && pod.restarts() == restarts);
}

#[test]
fn a_crashed_container_never_waits_longer_than_its_delay() {
    require!(root, faketime);
    let delay = json!({ "maxContainerRestartPeriod": "2s" });
    let scene = Scene::start(|dir, options| on_own_clock(dir, options).kubelet("crashLoopBackOff", delay));
    for (n, ahead) in [HOUR, -HOUR, DAY, -DAY, YEAR, -YEAR].into_iter().enumerate() {
        scene.step(0);
        let name = format!("web{n}");
        scene.apply(&pod(&name));
        scene.until_ready(&name);
        crashes(&scene, &name, 1);
        // The second crash causes a back-off, during which the clock is set.
        scene.exit(&name, 1);
        scene.until_pod(&name, "to wait", |pod| !pod.ready());
        scene.step(ahead);
        scene.until_pod(&name, "to run again", |pod| pod.ready() && pod.restarts() == 2);
        // The third crash happens when the container's last exit is in the future or long past.
        crashes(&scene, &name, 3);
        scene.remove(&name);
        scene.until_gone(&name);
    }
    scene.is_well();
}

#[test]
fn a_crashed_container_waits_no_longer_for_an_agent_that_starts_in_the_past() {
    require!(root, faketime);
    let delay = json!({ "maxContainerRestartPeriod": "2s" });
    let mut scene =
        Scene::start(|dir, options| on_own_clock(dir, options).kubelet("crashLoopBackOff", delay));
    scene.apply(&pod("web"));
    scene.until_ready("web");
    crashes(&scene, "web", 1);
    scene.agent.kill9();
    scene.exit("web", 1);
    scene.step(-YEAR);
    scene.agent.resume().unwrap();
    scene.until_pod("web", "to run again", |pod| pod.ready() && pod.restarts() == 2);
    scene.is_well();
}

/// Node whose state is on a separate disk, which the test fills.
struct Tight {
    scene: Scene,
    disk: Mount,
}

const DISK: u64 = 16 << 20;

impl Tight {
    fn start(change: impl FnOnce(Options) -> Options) -> Tight {
        let mut disk = None;
        let scene = Scene::start(|dir, options| {
            disk = Some(Mount::tmpfs(&dir.join("agent/state"), DISK).unwrap());
            let options = options
                .kubelet("evictionPressureTransitionPeriod", "2s")
                .kubelet("localStorageCapacityIsolation", false)
                .beelet("podsDir", dir.join("agent/state/pods").display().to_string());
            on_own_clock(dir, change(options))
        });
        // The agent first removes unused images, which are pulled again later.
        scene.cri.add_to_registry(images::APP);
        Tight { scene, disk: disk.unwrap() }
    }

    /// Fills the disk with a file of `mib` MiB.
    fn fill(&self, mib: usize) {
        workdir::write(&self.disk.path().join("filler"), vec![1; mib << 20]).unwrap();
    }

    /// Removes the file of [`Tight::fill`].
    fn free(&self) {
        std::fs::remove_file(self.disk.path().join("filler")).unwrap();
    }

    fn until_evicted(&self, name: &str) -> PodView {
        self.scene.until_pod(name, "to be evicted", |pod| {
            let reason = pod.pod.status.as_ref().and_then(|status| status.reason.as_deref());
            pod.phase() == "Failed" && reason == Some("Evicted")
        })
    }
}

fn hard(options: Options) -> Options {
    options.kubelet("evictionHard", json!({ "nodefs.available": "4Mi", "memory.available": "16Mi" }))
}

#[test]
fn pressure_ends_when_it_ends_wherever_the_clock_is_set() {
    require!(root, faketime);
    let tight = Tight::start(hard);
    for ahead in [HOUR, -HOUR, DAY, -DAY, YEAR, -YEAR] {
        tight.scene.step(0);
        tight.scene.apply(&pod("web"));
        tight.scene.until_ready("web");
        tight.fill(14);
        tight.scene.until_condition("DiskPressure", "True");
        tight.until_evicted("web");
        tight.scene.step(ahead);
        tight.scene.until_relisted();
        assert_eq!(tight.scene.condition("DiskPressure"), "True", "{ahead}");
        tight.free();
        tight.scene.until_condition("DiskPressure", "False");
        // The pod comes back by itself, as it does without a step.
        let web = tight.scene.until_ready("web");
        assert_eq!(web.restarts(), 0, "{ahead}");
        tight.scene.is_well();
        tight.scene.remove("web");
        tight.scene.until_gone("web");
    }
}

#[test]
fn a_hard_threshold_acts_at_once_though_the_clock_was_just_set_back() {
    require!(root, faketime);
    let tight = Tight::start(hard);
    for ahead in [-HOUR, -DAY, -YEAR] {
        // The agent observes the shortage at this time; the next observation has an earlier time.
        tight.scene.step(0);
        tight.fill(14);
        tight.scene.until_condition("DiskPressure", "True");
        tight.free();
        tight.scene.until_condition("DiskPressure", "False");
        tight.scene.apply(&pod("web"));
        tight.scene.until_ready("web");
        // Two evictions: the second while the agent still remembers the first observation.
        tight.fill(14);
        tight.scene.step(ahead);
        tight.until_evicted("web");
        tight.free();
        tight.scene.until_ready("web");
        tight.fill(14);
        tight.scene.step(2 * ahead);
        tight.until_evicted("web");
        tight.free();
        tight.scene.until_ready("web");
        tight.scene.remove("web");
        tight.scene.until_gone("web");
    }
    tight.scene.is_well();
}

#[test]
fn a_soft_threshold_keeps_its_grace_period_wherever_the_clock_is_set() {
    require!(root, faketime);
    let tight = Tight::start(|options| {
        hard(options)
            .kubelet("evictionSoft", json!({ "nodefs.available": "8Mi" }))
            .kubelet("evictionSoftGracePeriod", json!({ "nodefs.available": "30m" }))
    });
    tight.scene.apply(&pod("web"));
    tight.scene.until_ready("web");
    // Below the soft threshold, above the hard one.
    tight.fill(10);
    tight.scene.until_condition("DiskPressure", "True");
    for ahead in STEPS {
        tight.scene.step(ahead);
        // The agent decides at least once per second, and lists the runtime each time.
        for _ in 0..2 {
            tight.scene.until_relisted();
        }
        let web = tight.scene.until_pod("web", "to exist", |_| true);
        assert!(web.ready(), "{ahead}");
    }
    // The hard threshold has no grace period.
    tight.fill(14);
    tight.until_evicted("web");
    tight.scene.is_well();
}

#[test]
fn an_evicted_pod_comes_back_under_an_agent_that_starts_in_the_past() {
    require!(root, faketime);
    let mut tight = Tight::start(hard);
    tight.scene.apply(&pod("web"));
    tight.scene.until_ready("web");
    tight.fill(14);
    tight.until_evicted("web");
    tight.scene.poll_until("the eviction to be on disk", || {
        let records = tight.scene.agent.record("pods").unwrap_or_default().to_string();
        if records.contains("Evicted") { Ok(()) } else { Err(records) }
    });
    tight.scene.agent.kill9();
    tight.free();
    tight.scene.step(-YEAR);
    tight.scene.agent.resume().unwrap();
    tight.scene.until_ready("web");
    tight.scene.is_well();
}
