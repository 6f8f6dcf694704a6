//! Tests of the engine over plain folders.

use std::{collections::BTreeSet, fs, path::PathBuf, sync::Arc, time::Duration, time::Instant};

use beelet_policy::{
    resources::qos::QosClass,
    tuner::{ContainerSample, CpuCaps, KnobKind, Law, Observed, PodSample, Supports, TunerMode},
};
use tempfile::TempDir;

use super::{ColdSettings, Engine, Metrics, Outcome, Settings, longer_pause, recover};
use beelet_cgroups::{Cgroups, Hierarchy, Layout, Version};
use beelet_state::State;

const BEST_EFFORT: &str = "/kubepods/besteffort";

struct Fake {
    dir: TempDir,
    cgroups: Arc<Cgroups>,
}

impl Fake {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let mount = dir.path().join("cgroup");
        fs::create_dir_all(mount.join("kubepods/besteffort/podhog")).unwrap();
        let hierarchies = vec![Hierarchy { mount: mount.clone(), is_v2: true, controllers: BTreeSet::new() }];
        for folder in ["", "kubepods", "kubepods/besteffort", "kubepods/besteffort/podhog"] {
            for (file, content) in [
                ("cgroup.controllers", "cpu memory"),
                ("cgroup.subtree_control", "cpu memory"),
                ("cpu.idle", "0"),
                ("cpu.weight", "1"),
                ("cpu.max", "max 50000"),
                ("memory.high", "max"),
            ] {
                fs::write(mount.join(folder).join(file), content).unwrap();
            }
        }
        let layout = Layout { version: Version::V2, hierarchies };
        Self { dir, cgroups: Arc::new(Cgroups::over_folders(layout, "/").unwrap()) }
    }

    fn state(&self) -> Arc<State> {
        Arc::new(State::open(&self.dir.path().join("state")).unwrap())
    }

    fn engine(&self) -> Engine {
        self.engine_by(Law { hot_ticks: 1, calm_ticks: 1, cpu_caps: CpuCaps::Always, ..Law::default() })
    }

    fn engine_by(&self, law: Law) -> Engine {
        let (interval, back_off) = (Duration::from_secs(1), Duration::from_secs(60));
        let cold = ColdSettings::default();
        let settings = Settings { mode: TunerMode::Enforce, interval, back_off, law, cold };
        Engine::new(Arc::clone(&self.cgroups), self.state(), None, settings, Metrics::default())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("cgroup").join(&BEST_EFFORT[1..]).join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap()
    }
}

fn seen(wait: u32) -> Observed {
    let pod = |name: &str, class, cgroup: &str| PodSample {
        name: name.to_owned(),
        class,
        cgroup: cgroup.to_owned(),
        cpu_request: 0,
        cpu_used: Some(0),
        can_cap: true,
        quota_us: None,
        memory_request: 0,
        memory_used: 0,
        working_set: 0,
        memory_still_permille: None,
        memory_growth_permille: None,
        containers: vec![ContainerSample { cpu_wait_permille: Some(wait), ..ContainerSample::default() }],
    };
    Observed {
        cpus: 2000,
        best_effort: BEST_EFFORT.to_owned(),
        best_effort_used: if wait > 0 { 1000 } else { 0 },
        supports: Supports {
            idle: true,
            harmless_caps: true,
            memory_high: true,
            burst: false,
            disk_weight: false,
            weights: false,
        },
        pods: vec![
            pod("server", QosClass::Guaranteed, "/kubepods/pods"),
            pod("hog", QosClass::BestEffort, "/x"),
        ],
    }
}

#[test]
fn a_cap_keeps_its_owners_period() {
    let fake = Fake::new();
    let mut engine = fake.engine();
    for _ in 0..2 {
        engine.act(&seen(500), Instant::now());
    }
    assert_eq!((fake.read("cpu.idle"), fake.read("cpu.max")), ("1".to_owned(), "37500 50000".to_owned()));
    assert_eq!(engine.restore(), 3);
    assert_eq!((fake.read("cpu.idle"), fake.read("cpu.max")), ("0".to_owned(), "max 50000".to_owned()));
}

#[test]
fn the_journal_is_written_before_the_file() {
    let fake = Fake::new();
    // The journal cannot be written: a folder is in its place.
    let mut engine = fake.engine();
    fs::create_dir_all(fake.dir.path().join("state/tuner.json/x")).unwrap();
    let view = engine.act(&seen(500), Instant::now());
    assert_eq!(fake.read("cpu.idle"), "0");
    assert!(
        matches!(&view.history[0].outcome, Outcome::Failed(why) if why.contains("cannot record")),
        "{view:?}"
    );
    assert_eq!(view.blocked[0].knob.kind, KnobKind::Idle);
}

#[test]
fn the_owners_latest_value_is_restored() {
    let fake = Fake::new();
    let mut engine = fake.engine();
    engine.act(&seen(500), Instant::now());
    let weight = [("cpu.weight".to_owned(), "7".to_owned())].into();
    fake.cgroups.ensure(BEST_EFFORT, &weight).unwrap();
    assert_eq!(fake.read("cpu.weight"), "1", "a held file is not written");
    engine.restore();
    assert_eq!(fake.read("cpu.weight"), "7");
    fake.cgroups.ensure(BEST_EFFORT, &[("cpu.weight".to_owned(), "8".to_owned())].into()).unwrap();
    assert_eq!(fake.read("cpu.weight"), "8", "and is written again once it is no longer held");
}

#[test]
fn a_pod_that_fell_short_while_idle_gets_its_own_weight_before_a_lower_one() {
    let (fake, greedy) = (Fake::new(), "/kubepods/burstable/podgreedy");
    let folder = fake.dir.path().join("cgroup").join(&greedy[1..]);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("cpu.idle"), "0").unwrap();
    fs::write(folder.join("cpu.weight"), "12").unwrap();
    let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
    let tick = |used: u64, its_wait: u32| {
        let mut seen = seen(0);
        seen.supports = Supports { harmless_caps: false, weights: true, ..seen.supports };
        let mut web = seen.pods[0].clone();
        (web.class, web.cgroup, web.cpu_request) = (QosClass::Burstable, "/kubepods/web".to_owned(), 300);
        (web.cpu_used, web.containers[0].cpu_wait_permille) = (Some(310), Some(500));
        let mut pod = PodSample { name: "greedy".to_owned(), cgroup: greedy.to_owned(), ..web.clone() };
        (pod.cpu_used, pod.containers[0].cpu_wait_permille) = (Some(used), Some(its_wait));
        seen.pods.extend([web, pod]);
        seen
    };
    let mut engine = fake.engine_by(Law { hot_ticks: 1, calm_ticks: 1, ..Law::default() });
    engine.act(&tick(1600, 0), Instant::now());
    assert_eq!((read("cpu.idle"), read("cpu.weight")), ("1".to_owned(), "12".to_owned()));
    engine.act(&tick(200, 900), Instant::now());
    assert_eq!((read("cpu.idle"), read("cpu.weight")), ("0".to_owned(), "12".to_owned()));
    engine.act(&tick(1600, 0), Instant::now());
    assert_eq!((read("cpu.idle"), read("cpu.weight")), ("0".to_owned(), "4".to_owned()));
    engine.restore();
    assert_eq!(read("cpu.weight"), "12");
}

#[test]
fn the_next_start_restores_a_killed_agents_settings_unless_overwritten() {
    let fake = Fake::new();
    let mut engine = fake.engine();
    for _ in 0..3 {
        engine.act(&seen(500), Instant::now());
    }
    let journal = fs::read(fake.dir.path().join("state/tuner.json")).unwrap();
    drop(engine);
    fs::write(fake.file("cpu.max"), "1000 50000").unwrap();
    // A new process knows the held settings only from the journal.
    let fresh = Fake { cgroups: Arc::new((*fake.cgroups).clone()), dir: fake.dir };
    assert_eq!(recover(&fresh.cgroups, &fresh.state()), 2);
    assert_eq!(fresh.read("cpu.idle"), "0");
    assert_eq!(fresh.read("cpu.max"), "1000 50000");
    assert_eq!(recover(&fresh.cgroups, &fresh.state()), 0);
    // After a kill between journal and write, the file still holds its owner's value.
    fs::write(fresh.dir.path().join("state/tuner.json"), journal).unwrap();
    recover(&fresh.cgroups, &fresh.state());
    assert_eq!((fresh.read("cpu.idle"), fresh.read("cpu.weight")), ("0".to_owned(), "1".to_owned()));
}

#[test]
fn a_failed_restoration_is_retried_once_the_setting_is_no_longer_left_alone() {
    // A constant of the kernel: a file with the value that the tuner writes, and that no process can write,
    // not even root.
    let constant = "/proc/sys/kernel/ngroups_max";
    let value: u64 = fs::read_to_string(constant).unwrap().trim().parse().unwrap();
    let fake = Fake::new();
    let (hog, high) = ("/kubepods/besteffort/podhog", fake.file("podhog/memory.high"));
    let law =
        Law { hot_ticks: 1, calm_ticks: 1, memory_step_percent: 100, memory_floor: value, ..Law::default() };
    let mut engine = fake.engine_by(law);
    let tick = |stalled: u32, used: u64| {
        let mut seen = seen(0);
        seen.pods[0].containers[0].memory_stall_permille = Some(stalled);
        seen.pods[1].cgroup = hog.to_owned();
        seen.pods[1].memory_used = used;
        seen
    };
    let start = Instant::now();
    engine.act(&tick(500, 2 * value), start);
    assert_eq!(fs::read_to_string(&high).unwrap(), value.to_string());
    fs::remove_file(&high).unwrap();
    std::os::unix::fs::symlink(constant, &high).unwrap();
    let view = engine.act(&tick(0, 0), start);
    assert!(matches!(view.history.last().unwrap().outcome, Outcome::Failed(_)), "{view:?}");
    assert!(view.held.is_empty());
    assert_eq!(view.blocked[0].knob.kind, KnobKind::MemoryHigh);
    // A later attempt fails, too.
    let view = engine.tick(&[], start + Duration::from_secs(61));
    assert!(view.blocked[0].reason.contains("cannot restore it"), "{view:?}");
    fs::remove_file(&high).unwrap();
    fs::write(&high, value.to_string()).unwrap();
    engine.tick(&[], start + Duration::from_secs(100));
    assert_eq!(fs::read_to_string(&high).unwrap(), value.to_string(), "the file is left alone for a minute");
    let view = engine.tick(&[], start + Duration::from_secs(122));
    assert_eq!(fs::read_to_string(&high).unwrap(), "max");
    assert!(view.blocked.is_empty() && view.history.last().unwrap().outcome == Outcome::Done, "{view:?}");
    assert!(!fake.dir.path().join("state/tuner.json").exists(), "the journal is no longer needed");
}

#[test]
fn a_long_tick_is_followed_by_a_longer_pause() {
    let ms = Duration::from_millis;
    let of = |mode| Settings {
        mode,
        interval: ms(500),
        back_off: Duration::ZERO,
        law: Law::default(),
        cold: ColdSettings::default(),
    };
    let (enforce, advise) = (of(TunerMode::Enforce), of(TunerMode::Advise));
    assert_eq!(longer_pause(&enforce, ms(10), false), None, "2 % of a processor");
    assert_eq!(longer_pause(&enforce, ms(300), false), Some(ms(7200)), "4 %");
    assert_eq!(longer_pause(&advise, ms(4), false), None, "0.8 %");
    assert_eq!(longer_pause(&advise, ms(10), false), Some(ms(990)), "1 %");
    assert_eq!(longer_pause(&enforce, Duration::ZERO, false), None);
    assert_eq!(longer_pause(&enforce, ms(1), true), None, "the next suffering container is helped in time");
    assert_eq!(longer_pause(&advise, ms(1), true), Some(ms(2000)));
}

#[test]
fn the_disk_weight_is_held_until_the_end_and_restored_after_a_kill() {
    let fake = Fake::new();
    fs::write(fake.dir.path().join("cgroup/cgroup.controllers"), "cpu io memory").unwrap();
    fs::write(fake.file("io.weight"), "default 100").unwrap();
    let law = Law { best_effort_disk_weight: 10, ..Law::default() };
    let mut engine = fake.engine_by(law);
    for _ in 0..3 {
        engine.tick(&[], Instant::now());
        assert_eq!(fake.read("io.weight"), "default 10");
    }
    assert!(engine.is_quiet());
    drop(engine);
    assert_eq!(recover(&fake.cgroups, &fake.state()), 1);
    assert_eq!(fake.read("io.weight"), "default 100");
    let mut engine = fake.engine_by(law);
    engine.tick(&[], Instant::now());
    assert_eq!((engine.restore(), fake.read("io.weight")), (1, "default 100".to_owned()));
}
