//! More than a node has room for: processes, listeners, words.

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
    // It waits until the server runs, which could not start its threads any more.
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
    wait_for("the bomb to fill its room", PATIENCE, || match processes().count() {
        found if found >= LIMIT / 2 => Ok(()),
        found => Err(format!("{found} processes")),
    })
    .unwrap();
    for _ in 0..20 {
        assert!(processes().count() <= LIMIT);
        std::thread::sleep(Duration::from_millis(100));
    }
    // There is room for others.
    scene.another_comes_and_goes();
    scene.end(&["bomb"], Allowance::default());
}

#[test]
fn sixty_four_thousand_listeners_that_come_and_go_disturb_nobody() {
    require!(containerd);
    let count = scaled("BEELET_HOSTILE_LISTENERS", 64_000, 64_000);
    let scene = Scene::start(|options| options);
    let pod = hostile("listeners", &format!("testapp hurt listeners {count}"));
    scene.node.apply(&manifests::with_resources(pod, ("", ""), ("1", "512Mi")));
    // One that begins to listen meanwhile is found ready.
    scene.another_comes_and_goes();
    let view = scene.harmed("listeners");
    eprintln!("{}", scene.node.log(&view, "main", 0));
    // Each costs one record of the kernel's to read, and so do those that were held at once.
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
    // Read while it is written: by somebody who stops at once, and by somebody who takes all.
    let mut follow = scene.node.agent.cli(&["logs", "-f", "shout"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut some = vec![0; 1 << 20];
    follow.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    let _ = follow.kill(); // it may see its end just now
    let _ = follow.wait();
    let view = scene.harmed("shout");
    let folder = scene.node.pod_logs(&view).join("main");
    let kept = || -> u64 {
        let files = std::fs::read_dir(&folder).unwrap().flatten();
        files.filter_map(|entry| entry.metadata().ok()).map(|found| found.len()).sum()
    };
    wait_for("its log to be rotated", PATIENCE, || {
        let current = std::fs::metadata(folder.join("0.log")).map_err(|error| error.to_string())?.len();
        if current <= 10 << 20 { Ok(()) } else { Err(format!("{current} bytes are in it")) }
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
        eprintln!("{arguments:?}: {read} bytes; {} bytes are kept", kept());
        assert!(read > 0, "{arguments:?}");
    }
    // Each byte is written once more when it is compressed, and read when it is shown.
    let cpu = Duration::from_millis(100) * u32::try_from(bytes >> 20).unwrap();
    scene.end(&["shout"], Allowance { cpu, ..Allowance::default() });
}
