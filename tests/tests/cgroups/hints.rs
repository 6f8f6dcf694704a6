//! The kernel's hints on memory pressure: each test lets the memory of a cgroup of its own run short, and
//! expects the hint on the descriptor that eviction polls.
#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use beelet_cgroups::{Cgroups, Files, Version, notify};
use beelet_eviction::{Hints, edges};
use beelet_policy::eviction::{Signal, Threshold, ThresholdValue};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::load::{Load, Seat};
use beelet_tests::workdir::{self, PATIENCE};
use beelet_tests::{require, requires};
use beelet_units::cgroup_driver::CgroupDriver;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

const PODS: &str = "/kubepods";
const POD: &str = "/kubepods/pod1";
/// Stall for which eviction requests a notification.
const STALL: Duration = Duration::from_millis(50);
const MIB: u64 = 1 << 20;

/// The pods' cgroup with a limit, and one pod.
struct Pods {
    cgroups: Arc<Cgroups>,
    root: CgroupRoot,
    /// File larger than the limit; the file uses no disk space.
    file: tempfile::NamedTempFile,
}

impl Pods {
    fn new(name: &str) -> Pods {
        let root = CgroupRoot::new(&workdir::unique(name)).unwrap();
        let cgroups = Arc::new(Cgroups::discover(root.path(), CgroupDriver::Cgroupfs).unwrap());
        cgroups.ensure(POD, &Files::new()).unwrap();
        let file = tempfile::NamedTempFile::new_in(workdir::target_dir()).unwrap();
        // Reading the whole file takes longer than any test waits.
        file.as_file().set_len(256 << 30).unwrap();
        let pods = Pods { cgroups, root, file };
        // Above `memory.high` a process that allocates memory is throttled; version 1 has only the limit, at
        // which a process that reads files is.
        let (limit, bytes) =
            if pods.is_v2() { ("memory.high", 16 * MIB) } else { ("memory.limit_in_bytes", 32 * MIB) };
        std::fs::write(pods.memory_dir().join(limit), bytes.to_string()).unwrap();
        pods
    }

    fn is_v2(&self) -> bool {
        self.cgroups.paths.version() == Version::V2
    }

    fn memory_dir(&self) -> PathBuf {
        self.root.dir("memory").unwrap().join("kubepods")
    }

    /// Starts a process in the pod.
    fn load(&self) -> Load {
        let cgroups = self.root.dirs().into_iter().map(|dir| dir.join(&POD[1..])).collect();
        Load::start(Path::new(env!("CARGO_BIN_EXE_load")), &[], &Seat { cgroups, ..Seat::default() }).unwrap()
    }

    /// Returns the command with which such a process must wait for memory.
    fn squeeze(&self) -> String {
        if self.is_v2() {
            return format!("allocate {}", 48 * MIB);
        }
        format!("stream {}", self.file.path().display())
    }

    /// Lets the pod wait for memory until `fd` is ready; panics after [`PATIENCE`].
    fn squeeze_until(&self, fd: &OwnedFd, flags: PollFlags) {
        let deadline = Instant::now() + PATIENCE;
        let mut loads = [self.load(), self.load()];
        while Instant::now() < deadline {
            for load in &mut loads {
                load.begin(&self.squeeze()).unwrap();
            }
            if is_ready(fd, flags, if self.is_v2() { 5 } else { PATIENCE.as_secs() as i64 }) {
                return;
            }
            if self.is_v2() {
                loads.iter_mut().for_each(|load| drop(load.answer().unwrap()));
            }
        }
        panic!("the descriptor was not ready in {PATIENCE:?}");
    }

    /// Returns the file that counts the pods' stalls; prints a skip on kernels without one.
    fn pressure_file(&self) -> Option<PathBuf> {
        let file = self.cgroups.paths.cgroup2_path(PODS).map(|dir| dir.join("memory.pressure"));
        let found = file.filter(|file| file.exists());
        if found.is_none() {
            requires::skip(&requires::missing("no cgroup2 hierarchy counts stalls", "boot with psi=1"));
        }
        found
    }
}

fn is_ready(fd: &impl AsFd, flags: PollFlags, seconds: i64) -> bool {
    let mut fds = [PollFd::new(fd, flags)];
    poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).unwrap();
    fds[0].revents().intersects(flags)
}

#[test]
fn the_trigger_is_ready_when_pods_have_waited_for_memory() {
    require!(root);
    let pods = Pods::new("beelet-hint-psi");
    if pods.pressure_file().is_none() {
        return;
    }
    let trigger = notify::pressure(&pods.cgroups, PODS, STALL).unwrap();
    assert!(!is_ready(&trigger, PollFlags::PRI, 0), "ready before any wait for memory");
    pods.squeeze_until(&trigger, PollFlags::PRI);
}

#[test]
fn without_cap_sys_resource_the_trigger_has_the_window_that_the_kernel_wants_then() {
    require!(root);
    let pods = Pods::new("beelet-hint-psi-2s");
    let Some(file) = pods.pressure_file() else { return };
    let cgroups = Arc::clone(&pods.cgroups);
    // Capabilities belong to a thread.
    let asked = std::thread::spawn(move || {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_RESOURCE);
        set_capabilities(None, sets).unwrap();
        let a_second = OpenOptions::new()
            .read(true)
            .write(true)
            .open(file)
            .and_then(|mut file| file.write_all(b"some 50000 1000000\0"));
        (a_second, notify::pressure(&cgroups, PODS, STALL))
    });
    let (a_second, trigger) = asked.join().unwrap();
    let trigger = trigger.unwrap();
    match a_second {
        Ok(()) => {
            let what = "this kernel allows a window of a second without the capability";
            return requires::skip(&requires::missing(what, "use Linux 6.5 or newer"));
        }
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}"),
    }
    assert!(!is_ready(&trigger, PollFlags::PRI, 0), "ready before any wait for memory");
    pods.squeeze_until(&trigger, PollFlags::PRI);
}

#[test]
fn a_changed_counter_of_memory_events_is_notified() {
    require!(root);
    let pods = Pods::new("beelet-hint-events");
    if !pods.is_v2() {
        return requires::skip(&requires::missing(
            "the memory controller uses cgroup v1",
            "use a machine with pure cgroup v2",
        ));
    }
    let events = notify::memory_events(&pods.cgroups, PODS).unwrap();
    // The kernel reports changes only after a first read.
    let mut text = String::new();
    File::from(events.try_clone().unwrap()).read_to_string(&mut text).unwrap();
    assert!(text.contains("high 0"), "{text}");
    assert!(!is_ready(&events, PollFlags::PRI, 0), "ready before any event");
    pods.squeeze_until(&events, PollFlags::PRI);
}

#[test]
fn usage_over_a_threshold_is_notified_on_version_1() {
    require!(root);
    let pods = Pods::new("beelet-hint-usage");
    if pods.is_v2() {
        return requires::skip(&requires::missing(
            "the memory controller uses cgroup v2",
            "use a machine with cgroup v1 or hybrid",
        ));
    }
    let threshold = notify::usage_threshold(&pods.cgroups, PODS, 16 * MIB).unwrap();
    let mut load = pods.load();
    load.run(&format!("allocate {}", 4 * MIB)).unwrap();
    assert!(!is_ready(&threshold, PollFlags::IN, 0), "ready below the threshold");
    load.run(&format!("allocate {}", 24 * MIB)).unwrap();
    assert!(is_ready(&threshold, PollFlags::IN, 30));
}

#[tokio::test]
async fn kernel_hints_reach_the_watchers_of_memory() {
    require!(root);
    let pods = Pods::new("beelet-hint-all");
    let value = ThresholdValue::threshold("8Mi").unwrap().unwrap();
    let threshold =
        Threshold { signal: Signal::MemoryAvailable, value, grace: Duration::ZERO, min_reclaim: None };
    let hints = Hints::default();
    let mut given = hints.subscribe();
    let listening = tokio::spawn(edges::listen(Arc::clone(&pods.cgroups), vec![threshold], hints));
    // The first hint may come from a file that was never read before.
    let enough = tokio::time::timeout(PATIENCE, given.wait_for(|count| *count >= 2));
    let (mut load, squeeze) = (pods.load(), pods.squeeze());
    let loading = std::thread::spawn(move || while load.run(&squeeze).is_ok() {});
    let heard = enough.await;
    // The removal of the cgroup ends its process, and so the thread.
    listening.abort();
    drop(pods);
    loading.join().unwrap();
    heard.unwrap().unwrap();
}
