//! Tier 2: the objects that stay in the kernel while the agent is away, and their adoption by the next agent.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use crate::place::{LOOPBACK, Place, Process, listener_edges, other_object, start};
use aya::maps::{Array, MapData};
use aya::programs::links::{FdLink, PinnedLink};
use beelet_bpf::{Capability, Interest, Kernel, KernelOptions};
use beelet_tests::guards::Mount;
use beelet_tests::{require, requires, workdir};
use beelet_units::bpf_settings::BpfMode;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const PROGRAMS: [&str; 2] = ["pod_socket", "listener_state"];

/// Returns a kernel link's id and the id of its program.
fn link(place: &Place, program: &str) -> (u32, u32) {
    let pinned = PinnedLink::from_pin(place.pins().join("links").join(program)).unwrap();
    let info = FdLink::from(pinned).info().unwrap();
    (info.id(), info.program_id())
}

fn links(place: &Place) -> [(u32, u32); 2] {
    PROGRAMS.map(|program| link(place, program))
}

/// Returns every path below a folder, sorted.
fn tree(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

fn row<'a>(kernel: &'a Kernel, program: &str) -> &'a Capability {
    kernel.capabilities().iter().find(|row| row.program == program).unwrap()
}

fn stranger(path: &Path) {
    Array::<MapData, u32>::create(1, 0).unwrap().pin(path).unwrap();
}

#[test]
fn byte_counters_of_earlier_agents_are_detached() {
    require!(bpf);
    let place = Place::new("bk-demand-pin");
    place.start().stop(true).unwrap();
    let links = place.pins().join("links");
    let left = links.join("traffic_in");
    assert!(!left.exists(), "attached without a reader of its counts");
    FdLink::from(PinnedLink::from_pin(links.join("listener_state")).unwrap()).pin(&left).unwrap();
    let kernel = place.start();
    assert!(!left.exists());
    kernel.stop(false).unwrap();
}

#[test]
fn a_restart_adopts_the_programs_and_knows_changes_in_between() {
    require!(bpf);
    let place = Place::new("bk-adopt");
    let mut process = place.process();
    let kernel = place.start();
    assert!(!kernel.adopted());
    let gone = process.socket("listen 127.0.0.1:80");
    let stays = process.socket("listen 127.0.0.1:81");
    let before = links(&place);
    kernel.stop(true).unwrap();
    process.close(gone);
    let came = process.socket("listen 127.0.0.1:82");
    let unbound = process.socket("listen-unbound");
    let kernel = place.start();
    assert!(kernel.adopted());
    assert_eq!(links(&place), before, "a program was loaded or attached again");
    // Each CPU assigns cookies from its own range: their order has no meaning.
    let seen: BTreeSet<u64> = place.snapshot(&kernel).iter().map(|listener| listener.cookie).collect();
    assert_eq!(seen, BTreeSet::from([stays.cookie, came.cookie, unbound.cookie]));
    for (port, expected) in [(80, false), (81, true), (82, true), (unbound.port, true)] {
        assert_eq!(place.listens(&kernel, port, LOOPBACK), expected, "port {port}");
    }
    // Edges of the agent's absence are not repeated; new ones arrive.
    let edges = listener_edges(&kernel);
    process.close(came);
    assert_eq!(place.next(&edges).closed().0.cookie, came.cookie);
    kernel.stop(false).unwrap();
    assert!(!place.pins().exists());
}

#[test]
fn a_dropped_kernel_leaves_its_programs_running() {
    require!(bpf);
    let place = Place::new("bk-drop");
    drop(place.start()); // as kill -9 does
    let mut process = place.process();
    let socket = process.socket("listen 127.0.0.1:80");
    let kernel = place.start();
    assert!(kernel.adopted());
    assert_eq!(place.snapshot(&kernel).iter().map(|l| l.cookie).collect::<Vec<_>>(), [socket.cookie]);
}

#[test]
fn another_object_of_the_same_version_replaces_the_programs_and_keeps_the_maps() {
    require!(bpf);
    let place = Place::new("bk-replace");
    let folder = tempfile::tempdir().unwrap();
    let mut process = place.process();
    let kernel = place.start();
    let socket = process.socket("listen 127.0.0.1:80");
    let before = links(&place);
    kernel.stop(true).unwrap();
    let options = KernelOptions { object: Some(other_object(folder.path())), ..place.options() };
    let kernel = start(&options);
    assert!(kernel.adopted());
    let after = links(&place);
    assert_eq!(after[0].0, before[0].0, "the cgroup's link was replaced, not only its program");
    assert_ne!(after[0].1, before[0].1);
    assert_ne!(after[1].0, before[1].0, "the tracing link was not replaced, but can't be updated");
    assert_ne!(after[1].1, before[1].1);
    assert!(place.listens(&kernel, 80, LOOPBACK));
    let edges = listener_edges(&kernel);
    process.close(socket);
    let (closed, _) = place.next(&edges).closed();
    assert_eq!(closed.cookie, socket.cookie);
    assert_ne!(closed.since_ns, 0);
    let next = process.socket("listen-unbound");
    assert_eq!(place.next(&edges).opened().0.cookie, next.cookie);
    kernel.stop(true).unwrap();
    // The third start, with the same object, loads nothing.
    let kernel = start(&options);
    assert_eq!(links(&place), after);
    drop(kernel);
}

#[test]
fn an_unneeded_program_is_removed() {
    require!(bpf);
    let place = Place::new("bk-spared");
    let folder = tempfile::tempdir().unwrap();
    let link = place.pins().join("links/sched_wakeup");
    start(&KernelOptions { without: &["OFF_TASK_RUN_DELAY"], ..place.options() }).stop(true).unwrap();
    assert!(link.exists());
    let kernel = start(&KernelOptions { object: Some(other_object(folder.path())), ..place.options() });
    assert!(kernel.adopted() && row(&kernel, "sched_wakeup").spared.is_some());
    assert!(!link.exists(), "the pin of an unused program was not removed");
}

#[test]
fn nothing_is_missed_while_programs_are_replaced() {
    require!(bpf);
    let place = Place::new("bk-gapless");
    let folder = tempfile::tempdir().unwrap();
    place.start().stop(true).unwrap();
    let mut process = place.process();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = std::sync::Arc::clone(&stop);
    let churn = std::thread::spawn(move || {
        let mut open = BTreeMap::new();
        let mut round = 0_usize;
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            let socket = process.socket(&format!("listen 127.0.0.1:{} reuseport", 3000 + round % 7));
            open.insert(socket.cookie, socket);
            if open.len() > 20 {
                let (_, first) = open.pop_first().unwrap();
                process.close(first);
            }
            round += 1;
        }
        (process, open)
    });
    let other = KernelOptions { object: Some(other_object(folder.path())), ..place.options() };
    for round in 0..6 {
        let kernel = if round % 2 == 0 { start(&other) } else { place.start() };
        assert!(kernel.adopted());
        kernel.stop(true).unwrap();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let (_process, open) = churn.join().unwrap();
    let kernel = place.start();
    let seen: Vec<u64> = place.snapshot(&kernel).iter().map(|listener| listener.cookie).collect();
    assert_eq!(seen, open.keys().copied().collect::<Vec<_>>());
    for port in 3000..3007 {
        let expected = open.values().any(|socket| socket.port == port);
        assert_eq!(place.listens(&kernel, port, LOOPBACK), expected, "port {port}");
    }
}

#[test]
fn pins_of_another_version_are_replaced() {
    require!(bpf);
    let place = Place::new("bk-stale");
    place.start().stop(true).unwrap();
    let old = place.pins().with_file_name("v999");
    std::fs::rename(place.pins(), &old).unwrap();
    let kernel = place.start();
    assert!(!kernel.adopted());
    assert!(!old.exists());
    assert!(place.pins().join("META").exists());
}

#[test]
fn pins_that_were_half_made_are_made_again() {
    require!(bpf);
    let place = Place::new("bk-half");
    place.start().stop(true).unwrap();
    std::fs::remove_file(place.pins().join("ADDRESSES")).unwrap();
    std::fs::remove_file(place.pins().join("links/listener_state")).unwrap();
    let kernel = place.start();
    assert!(!kernel.adopted());
    let mut process = place.process();
    process.socket("listen 127.0.0.1:80");
    assert!(place.listens(&kernel, 80, LOOPBACK));
}

#[test]
fn a_link_that_was_lost_is_attached_again() {
    require!(bpf);
    let place = Place::new("bk-relink");
    place.start().stop(true).unwrap();
    std::fs::remove_file(place.pins().join("links/listener_state")).unwrap();
    let before = link(&place, "pod_socket");
    let kernel = place.start();
    assert_eq!(link(&place, "pod_socket"), before, "an intact link was replaced");
    let edges = listener_edges(&kernel);
    let mut process = Process::start(None, &place.netns);
    let socket = process.socket("listen 127.0.0.1:80"); // outside the cgroup: seen only by the tracepoint
    assert_eq!(place.next(&edges).opened().0.cookie, socket.cookie);
}

#[test]
fn a_recreated_cgroup_is_attached_to() {
    require!(bpf);
    let place = Place::new("bk-cgroup");
    place.start().stop(true).unwrap();
    let before = place.cgroup_id();
    std::fs::remove_dir(place.cgroup_dir()).unwrap();
    std::fs::create_dir(place.cgroup_dir()).unwrap();
    assert_ne!(place.cgroup_id(), before);
    let kernel = place.start();
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let socket = process.socket("listen-unbound"); // the tracepoint alone doesn't know the port
    assert_eq!(place.next(&edges).opened().0.cookie, socket.cookie);
}

#[test]
fn foreign_pins_at_the_agents_path_are_named_and_left_alone() {
    require!(bpf);
    let check = |what: &str, make: &dyn Fn(&Place), expected: &dyn Fn(&Place) -> String| {
        let place = Place::new("bk-foreign");
        make(&place);
        let before = tree(place.bpffs.path());
        let kernel = Kernel::start(&place.options());
        assert!(kernel.listeners().is_none(), "{what}");
        for row in kernel.capabilities() {
            let why = row.have.as_ref().unwrap_err().to_string();
            assert!(why.starts_with(&expected(&place)), "{what}: {why}");
            assert!(why.contains("left alone") && !row.remedy.is_empty(), "{what}: {row:?}");
        }
        kernel.stop(false).unwrap();
        assert_eq!(tree(place.bpffs.path()), before, "{what}");
    };
    let base = |place: &Place| place.bpffs.path().join("beelet");
    let version = format!("v{}", beelet_ebpf_abi::ABI_VERSION);
    let current = |place: &Place| base(place).join(&version);
    let folder = |place: &Place, path: &str| std::fs::create_dir_all(base(place).join(path)).unwrap();
    check("a map for our folder", &|p| stranger(&base(p)), &|p| {
        format!("{} is not a folder", base(p).display())
    });
    check(
        "a map next to our versions",
        &|p| {
            folder(p, "");
            stranger(&base(p).join("other"));
        },
        &|p| format!("{} is something", base(p).join("other").display()),
    );
    check(
        "a version folder without our mark",
        &|p| {
            folder(p, &version);
            stranger(&current(p).join("LISTENERS"));
        },
        &|p| format!("{} is a folder of pins without our META map", current(p).display()),
    );
    check(
        "another map called META",
        &|p| {
            folder(p, &version);
            stranger(&current(p).join("META"));
        },
        &|p| format!("{} is a map of another shape", current(p).join("META").display()),
    );
    check(
        "a map among ours",
        &|p| {
            p.start().stop(true).unwrap();
            stranger(&current(p).join("theirs"));
        },
        &|p| format!("{} is an object", current(p).join("theirs").display()),
    );
    check(
        "a map for a link of ours",
        &|p| {
            p.start().stop(true).unwrap();
            let path = current(p).join("links/listener_state");
            std::fs::remove_file(&path).unwrap();
            stranger(&path);
        },
        &|p| format!("{} is a BPF map", current(p).join("links/listener_state").display()),
    );
}

#[test]
fn a_bpf_file_system_is_mounted_where_there_is_none_and_unmounted_again() {
    require!(bpf);
    let place = Place::new("bk-mount");
    let folder = tempfile::tempdir().unwrap();
    let bpffs = folder.path().join("deep/bpf");
    let options = KernelOptions { bpffs: bpffs.clone(), ..place.options() };
    let kernel = start(&options);
    assert!(kernel.pins().unwrap().starts_with(&bpffs));
    assert!(kernel.pins().unwrap().join("META").exists());
    kernel.stop(false).unwrap();
    assert_eq!(tree(&bpffs), Vec::<PathBuf>::new());
    let mounted = beelet_tests::guards::mounts().unwrap();
    assert!(!mounted.iter().any(|mount| mount.path.starts_with(folder.path())), "{mounted:?}");
}

#[test]
fn without_a_place_for_pins_everything_works_unpinned_and_reports_it() {
    require!(bpf);
    let check = |bpffs: PathBuf, expected: &str| {
        let place = Place::new("bk-unpinned");
        let before = bpffs.is_dir().then(|| tree(&bpffs));
        let kernel = Kernel::start(&KernelOptions { bpffs: bpffs.clone(), ..place.options() });
        let why = row(&kernel, "pins").have.as_ref().unwrap_err().to_string();
        assert!(why.contains(expected), "{why}");
        assert!(row(&kernel, "pins").remedy.contains("mount -t bpf"));
        for program in PROGRAMS {
            assert_eq!(row(&kernel, program).have, Ok(()));
        }
        assert_eq!((kernel.adopted(), kernel.pins()), (false, None));
        let edges = listener_edges(&kernel);
        let mut process = place.process();
        process.socket("listen 127.0.0.1:80");
        assert_eq!(place.next(&edges).opened().0.port, 80);
        assert!(place.listens(&kernel, 80, LOOPBACK));
        kernel.stop(true).unwrap();
        assert_eq!(bpffs.is_dir().then(|| tree(&bpffs)), before);
    };
    let folder = tempfile::tempdir().unwrap();
    let full = folder.path().join("full");
    std::fs::create_dir_all(full.join("something")).unwrap();
    check(full, "is not a bpf file system, and not empty");
    let other = Mount::tmpfs(&folder.path().join("tmpfs"), 4096).unwrap();
    check(other.path().to_path_buf(), "is the mount point of another file system");
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    check(file.join("below"), "could not be made");
}

#[test]
fn without_the_cgroup_the_tracepoint_still_sees_listeners() {
    require!(bpf);
    let place = Place::new("bk-nocg");
    let folder = tempfile::tempdir().unwrap();
    let check = |cgroup: PathBuf, expected: &str| {
        let kernel = Kernel::start(&KernelOptions { cgroup, ..place.options() });
        let why = row(&kernel, "pod_socket").have.as_ref().unwrap_err().to_string();
        assert!(why.contains(expected), "{why}");
        assert!(row(&kernel, "pod_socket").remedy.contains("cgroup2"));
        assert_eq!(row(&kernel, "listener_state").have, Ok(()));
        let edges = listener_edges(&kernel);
        let mut process = place.process();
        process.socket("listen 127.0.0.1:80");
        assert_eq!(place.next(&edges).opened().0.port, 80);
        process.kill();
        place.next(&edges).closed();
        kernel.stop(false).unwrap();
    };
    check(PathBuf::from("/no/such/cgroup"), "could not open the cgroup /no/such/cgroup");
    check(folder.path().to_path_buf(), "is not a cgroup2 folder");
}

/// Checks a switched-off kernel half: it is idle, answers nothing and reports the reason.
fn is_idle(kernel: &Kernel, expected: &str) {
    assert_eq!(kernel.capabilities().len(), beelet_bpf::programs().count());
    for row in kernel.capabilities() {
        let why = row.have.as_ref().unwrap_err().to_string();
        assert!(why.contains(expected), "{why}");
        assert!(!row.remedy.is_empty() && !row.fallback.is_empty(), "{row:?}");
    }
    assert!(kernel.listeners().is_none());
    assert_eq!(kernel.subscribe(Interest::ALL).try_recv(), None);
    assert!(kernel.measures().is_none());
    assert_eq!(kernel.drops().unwrap(), None);
    assert_eq!((kernel.adopted(), kernel.pins()), (false, None));
}

#[test]
fn switched_off_it_does_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let options = KernelOptions {
        bpffs: folder.path().join("bpf"),
        cgroup: folder.path().to_path_buf(),
        mode: BpfMode::Off,
        ..KernelOptions::default()
    };
    let kernel = Kernel::start(&options);
    is_idle(&kernel, "BPF is switched off");
    kernel.stop(false).unwrap();
    assert!(!options.bpffs.exists());
}

#[test]
fn an_object_that_logs_works_as_the_built_in_one() {
    require!(bpf);
    let object = workdir::repository().join("target/bpf/beelet-log.bpf.o");
    if !object.exists() {
        requires::skip(&requires::Missing {
            what: "the object that logs is not built".to_owned(),
            remedy: "cargo xtask build-ebpf --log".to_owned(),
        });
        return;
    }
    let place = Place::new("bk-log");
    let options = KernelOptions { object: Some(object), ..place.options() };
    start(&options).stop(true).unwrap();
    let before = links(&place);
    let kernel = start(&options);
    assert_ne!(links(&place)[0].1, before[0].1, "the program's log isn't pinned, so it must be loaded again");
    let edges = listener_edges(&kernel);
    let mut process = place.process();
    let socket = process.socket("listen 127.0.0.1:80");
    assert_eq!(place.next(&edges).opened().0.cookie, socket.cookie);
    process.close(socket);
    assert_eq!(place.next(&edges).closed().0.cookie, socket.cookie);
}

#[test]
fn a_bad_object_is_named() {
    require!(bpf);
    let place = Place::new("bk-object");
    let folder = tempfile::tempdir().unwrap();
    let object = folder.path().join("bad.o");
    let options = KernelOptions { object: Some(object.clone()), ..place.options() };
    is_idle(&Kernel::start(&options), &format!("could not read the BPF object {}", object.display()));
    std::fs::write(&object, b"no ELF at all").unwrap();
    is_idle(&Kernel::start(&options), "the BPF object could not be loaded");
}

#[test]
fn without_the_privileges_everything_falls_back_and_the_remedy_names_them() {
    require!(bpf);
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let place = Place::new("bk-eperm");
    let before = tree(place.bpffs.path()); // the kernel's own, see kernel/bpf/preload
    let options = place.options();
    // Capabilities belong to a thread.
    let kernel = std::thread::spawn(move || {
        let mut sets = capabilities(None).unwrap();
        let dropped =
            CapabilitySet::SYS_ADMIN | CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::NET_ADMIN;
        sets.effective -= dropped;
        set_capabilities(None, sets).unwrap();
        Kernel::start(&options)
    })
    .join()
    .unwrap();
    assert!(kernel.listeners().is_none());
    for program in PROGRAMS {
        let row = row(&kernel, program);
        assert!(row.have.is_err(), "{row:?}");
        assert!(row.remedy.contains("CAP_BPF"), "{row:?}");
    }
    kernel.stop(false).unwrap();
    assert_eq!(tree(place.bpffs.path()), before);
}

#[test]
fn the_memory_of_each_map_is_reported() {
    require!(bpf);
    let place = Place::new("bk-memory");
    let kernel = place.start();
    let names: Vec<&str> = kernel.memory().iter().map(|map| map.map).collect();
    let expected = [
        "ADDRESSES",
        "ANCESTRY",
        "CONTAINERS",
        "DROPS",
        "EVENTS",
        "EXITED",
        "HOLDERS",
        "LISTENERS",
        "META",
        "PRESSURE",
        "RECLAIMERS",
        "RUNNING",
        "SETTINGS",
        "SLOTS",
        "TASKS",
        "TASK_STORAGE",
    ];
    assert_eq!(names, expected);
    for map in kernel.memory() {
        assert_eq!(map.bytes, map.entries * map.entry_bytes * map.copies, "{map:?}");
    }
    let sum = |per_cpu: bool| -> u64 {
        let maps = kernel.memory().iter().filter(|map| (map.copies > 1) == per_cpu);
        maps.map(|map| map.entries * map.entry_bytes).sum()
    };
    assert!(sum(true) < 5 << 18, "{} bytes for each CPU", sum(true));
    assert!(sum(false) < 6 << 20, "{} bytes once", sum(false));
}
