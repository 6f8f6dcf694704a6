//! Floods: more processes, listeners and log output than a node has room for.

use std::process::Stdio;
use std::time::Duration;

use beelet_tests::manifests;
use beelet_tests::require;
use beelet_tests::workdir::{PATIENCE, wait_for};
use std::io::Read as _;

use super::scene::{Allowance, Scene, hostile, scaled};

#[test]
fn a_fork_bomb_stays_within_its_pods_limit_of_processes() {
    require!(containerd);
    const LIMIT: usize = 64;
    let scene = Scene::start(|options| options.kubelet("podPidsLimit", LIMIT));
    // The bomb waits until the server runs, as the server could not start its threads later.
    let pod = hostile("bomb", "{ sleep 2; exec testapp hurt bomb; } & true");
    scene.run(&manifests::with_resources(pod, ("", ""), ("1", "256Mi")));
    let root = scene.node.containerd.cgroup().dir("pids").unwrap();
    let processes = || {
        let below = beelet_tests::guards::processes_below(&root).into_iter();
        below.filter(|pid| {
            let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            line.windows(4).any(|word| word == b"bomb")
        })
    };
    wait_for("the bomb to reach its limit", PATIENCE, || match processes().count() {
        found if found >= LIMIT / 2 => Ok(()),
        found => Err(format!("{found} processes")),
    })
    .unwrap();
    for _ in 0..20 {
        assert!(processes().count() <= LIMIT);
        std::thread::sleep(Duration::from_millis(100));
    }
    // Other pods still have room.
    scene.another_comes_and_goes();
    scene.end(&["bomb"], Allowance::default());
}

#[test]
fn sixty_four_thousand_short_lived_listeners_disturb_no_pod() {
    require!(containerd);
    let count = scaled("BEELET_HOSTILE_LISTENERS", 64_000, 64_000);
    let scene = Scene::start(|options| options);
    let pod = hostile("listeners", &format!("testapp hurt listeners {count}"));
    scene.node.apply(&manifests::with_resources(pod, ("", ""), ("1", "512Mi")));
    // A pod that begins to listen during the flood becomes ready.
    scene.another_comes_and_goes();
    let view = scene.harmed("listeners");
    eprintln!("{}", scene.node.log(&view, "main", 0));
    // The agent reads one record of the kernel per listener, also for those that were held at once.
    let cpu = Duration::from_micros(100) * u32::try_from(count).unwrap();
    scene.end(&["listeners"], Allowance { cpu, ..Allowance::default() });
}

#[test]
fn a_line_without_an_end_is_rotated_and_shown_in_bounded_memory() {
    require!(containerd);
    let bytes = scaled("BEELET_HOSTILE_SHOUT", 200 << 20, 1 << 30);
    let scene = Scene::start(|options| {
        options
            .kubelet("containerLogMaxSize", "10Mi")
            .kubelet("containerLogMaxFiles", 3)
            .kubelet("containerLogMonitorInterval", "1s")
    });
    let pod = hostile("shout", &format!("testapp hurt shout {bytes}"));
    scene.node.apply(&manifests::with_resources(pod, ("", ""), ("1", "256Mi")));
    scene
        .node
        .wait("shout", "to run", |pod| pod.container("main").is_some_and(|one| one.started == Some(true)));
    // The log is read while it is written: by a reader that stops at once, and by one that reads to the end.
    let mut follow = scene.node.agent.cli(&["logs", "-f", "shout"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut some = vec![0; 1 << 20];
    follow.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    let _ = follow.kill(); // the command may end by itself at the same time
    let _ = follow.wait();
    let view = scene.harmed("shout");
    let folder = scene.node.pod_logs(&view).join("main");
    let kept = || -> u64 {
        let files = std::fs::read_dir(&folder).unwrap().flatten();
        files.filter_map(|entry| entry.metadata().ok()).map(|found| found.len()).sum()
    };
    wait_for("the pod's log to be rotated", PATIENCE, || {
        let current = std::fs::metadata(folder.join("0.log")).map_err(|error| error.to_string())?.len();
        if current <= 10 << 20 { Ok(()) } else { Err(format!("the log has {current} bytes")) }
    })
    .unwrap();
    for arguments in [&["logs", "shout"][..], &["logs", "shout", "--tail", "1"]] {
        let mut child = scene.node.agent.cli(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let (mut read, mut buffer) = (0, vec![0; 1 << 16]);
        let mut out = child.stdout.take().unwrap();
        loop {
            match out.read(&mut buffer).unwrap() {
                0 => break,
                length => read += length,
            }
        }
        assert!(child.wait().unwrap().success(), "{arguments:?}");
        eprintln!("{arguments:?}: {read} bytes; {} bytes kept", kept());
        assert!(read > 0, "{arguments:?}");
    }
    // Each byte is written once more for the compression, and read for the output.
    let cpu = Duration::from_millis(100) * u32::try_from(bytes >> 20).unwrap();
    scene.end(&["shout"], Allowance { cpu, ..Allowance::default() });
}
