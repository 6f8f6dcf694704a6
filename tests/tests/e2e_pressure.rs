//! A node under pressure, with a real runtime, real cgroups and a real file system: who is let in, who goes, which images
//! go. The machine itself is never in danger: the pods' own limit, in a cgroup root of the test's, is what runs short.

#![allow(clippy::unwrap_used)] // a test's helpers may panic as the test itself may

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use beelet_tests::agent::{Agent, Control, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::images::{self, Entry};
use beelet_tests::manifests::{self, CONTROL};
use beelet_tests::pods::PodView;
use beelet_tests::{guards, require, workdir};
use serde_json::{Value, json};

/// What the pods may use together.
const PODS_MIB: u64 = 320;

/// An agent on a containerd of its own. The agent ends first.
struct Node {
    agent: Agent,
    containerd: Containerd,
}

impl Node {
    fn start(change: impl FnOnce(Options) -> Options) -> Node {
        Node::on(Containerd::start_for_test().unwrap(), change)
    }

    fn on(containerd: Containerd, change: impl FnOnce(Options) -> Options) -> Node {
        let agent = Agent::start(change(Options::on(&containerd))).unwrap();
        Node { agent, containerd }
    }

    fn apply(&self, manifest: &Value) {
        let name = manifest["metadata"]["name"].as_str().unwrap();
        self.agent.apply(&format!("{name}.yaml"), manifest.to_string()).unwrap();
    }

    fn wait(&self, name: &str, what: &str, condition: impl Fn(&PodView) -> bool + Send + Sync) -> PodView {
        let what = format!("{name} {what}");
        self.agent.until(&what, |watch| watch.pod(name).filter(|pod| condition(pod)).cloned()).unwrap()
    }

    fn wait_running(&self, name: &str) -> PodView {
        self.wait(name, "to run", |pod| pod.ready() && pod.ip().is_some())
    }

    fn pod(&self, name: &str) -> PodView {
        self.agent.look(|watch| watch.pod(name).cloned()).unwrap().unwrap()
    }

    /// What the pods have left, in MiB: their limit less their working set, as the agent computes it.
    fn available(&self) -> u64 {
        let dir = self.containerd.cgroup().dir("memory").unwrap().join("kubepods");
        let number =
            |file: &str| -> Option<u64> { std::fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok() };
        let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap();
        let line = |name: &str| -> Option<u64> {
            stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
        };
        let usage = number("memory.usage_in_bytes").or_else(|| number("memory.current")).unwrap();
        let limit = number("memory.limit_in_bytes").or_else(|| number("memory.max")).unwrap();
        let inactive = line("total_inactive_file").or_else(|| line("inactive_file")).unwrap();
        limit.saturating_sub(usage.saturating_sub(inactive)) >> 20
    }
}

/// Leaves the pods so much memory, and not a byte less to the machine.
fn small(options: Options) -> Options {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = total.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap();
    options
        .kubelet("systemReserved", json!({ "memory": format!("{}Ki", kib - PODS_MIB * 1024) }))
        .kubelet("evictionHard", json!({ "memory.available": "64Mi" }))
}

fn controlled(name: &str) -> Value {
    manifests::pod(name, &["/bin/testapp", "serve", "--control", &CONTROL.to_string()])
}

fn with_spec(mut pod: Value, field: &str, value: Value) -> Value {
    pod["spec"][field] = value;
    pod
}

fn reason(pod: &PodView) -> &str {
    pod.pod.status.as_ref().and_then(|status| status.reason.as_deref()).unwrap_or_default()
}

fn message(pod: &PodView) -> &str {
    pod.pod.status.as_ref().and_then(|status| status.message.as_deref()).unwrap_or_default()
}

/// How its container ended: `OOMKilled` if the kernel killed it.
fn end(pod: &PodView) -> Option<String> {
    pod.container("main")?.state.as_ref()?.terminated.as_ref()?.reason.clone()
}

#[test]
fn a_memory_hog_is_evicted_before_the_kernel_kills_and_others_are_untouched() {
    require!(containerd);
    let node = Node::start(small);
    node.apply(&manifests::with_resources(controlled("good"), ("100m", "64Mi"), ("", "")));
    node.apply(&controlled("hog"));
    let good = node.wait_running("good");
    let hog = node.wait_running("hog");
    assert_eq!(hog.qos(), "BestEffort");
    Control::connect(good.ip().unwrap(), CONTROL).unwrap().send("hold 32").unwrap();
    let mut control = Control::connect(hog.ip().unwrap(), CONTROL).unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while reason(&node.pod("hog")) != "Evicted" {
        assert!(Instant::now() < deadline, "the hog is never evicted; {} MiB left", node.available());
        // About 100 MiB/s, and no more once the threshold is crossed: what counts is who goes, not who wins.
        if node.available() > 56 && control.send("hold 4").is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(40));
    }
    let hog = node.wait("hog", "to be evicted", |pod| pod.phase() == "Failed");
    assert_eq!(reason(&hog), "Evicted");
    assert!(
        message(&hog).starts_with("The node was low on resource: memory. Threshold quantity: 64Mi"),
        "{hog:?}"
    );
    assert!(message(&hog).contains("Container main was using"), "{}", message(&hog));
    assert_ne!(end(&hog).as_deref(), Some("OOMKilled"));
    let good = node.pod("good");
    assert!(good.ready() && good.restarts() == 0, "{good:?}");
    // While memory was just short, nobody without requests comes in; who has some does.
    node.apply(&controlled("late"));
    let late = node.wait("late", "to be refused", |pod| pod.phase() == "Failed");
    assert_eq!(
        (reason(&late), message(&late)),
        ("Evicted", "Pod was rejected: The node had condition: [MemoryPressure]")
    );
    node.apply(&manifests::with_resources(controlled("later"), ("10m", "8Mi"), ("", "")));
    node.wait_running("later");
}

#[test]
fn a_pod_that_thrashes_at_its_own_limit_costs_nobody_anything() {
    require!(containerd);
    let node = Node::start(small);
    node.apply(&controlled("good"));
    node.wait_running("good");
    let work =
        "dd if=/dev/zero of=/tmp/f bs=1M count=96 2>/dev/null; while true; do cat /tmp/f > /dev/null; done";
    let thrashing = manifests::pod("thrashing", &["/bin/sh", "-c", work]);
    node.apply(&manifests::with_resources(thrashing, ("100m", "32Mi"), ("", "32Mi")));
    let pod = node.wait("thrashing", "to run", PodView::ready);
    // Its memory stalls for real: the kernel counts it at the pods' cgroup. Without PSI nothing is shown, and said so.
    let unified =
        node.containerd.cgroup().dirs().into_iter().find(|dir| dir.join("memory.pressure").exists());
    let stalled = || -> Option<u64> {
        let text = std::fs::read_to_string(unified.as_ref()?.join("kubepods/memory.pressure")).ok()?;
        text.lines().next()?.rsplit_once("total=")?.1.parse().ok()
    };
    let began = stalled();
    let until = Instant::now() + Duration::from_secs(60);
    while began.is_some() && stalled() < began.map(|began| began + 300_000) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(100));
    }
    // Long enough for every way of looking: hints, the fast pace, the slow one.
    std::thread::sleep(Duration::from_secs(3));
    for name in ["good", "thrashing"] {
        let pod = node.pod(name);
        assert!(pod.ready() && reason(&pod).is_empty() && pod.restarts() == 0, "{pod:?}");
    }
    assert_eq!(node.pod("thrashing").uid(), pod.uid());
    println!("stalled for {:?} us", stalled().zip(began).map(|(now, began)| now - began));
}

#[test]
fn a_critical_pod_takes_the_room_of_others_even_of_one_that_ignores_sigterm() {
    require!(containerd);
    let cpus = std::thread::available_parallelism().unwrap().get();
    let reserved = json!({ "cpu": format!("{}m", cpus * 1000 - 900) });
    let node =
        Node::start(|options| options.kubelet("systemReserved", reserved).kubelet("evictionHard", json!({})));
    // The first process of a container ignores SIGTERM unless it asks for it.
    let deaf = manifests::pod("deaf", &["/bin/sleep", "10000"]);
    node.apply(&manifests::with_resources(deaf, ("400m", "8Mi"), ("", "")));
    node.apply(&manifests::with_resources(controlled("other"), ("400m", "8Mi"), ("", "")));
    node.wait("deaf", "to run", PodView::ready);
    node.wait_running("other");
    let full = manifests::with_resources(controlled("full"), ("200m", "8Mi"), ("", ""));
    node.apply(&full);
    let full = node.wait("full", "to be refused", |pod| pod.phase() == "Failed");
    assert_eq!(reason(&full), "OutOfcpu");
    let words =
        "Pod was rejected: Node didn't have enough resource: cpu, requested: 200, used: 800, capacity: 900";
    assert_eq!(message(&full), words);
    let critical = manifests::with_resources(controlled("critical"), ("800m", "8Mi"), ("", ""));
    node.apply(&with_spec(critical, "priorityClassName", json!("system-node-critical")));
    node.wait_running("critical");
    for name in ["deaf", "other"] {
        let victim = node.wait(name, "to have made room", |pod| pod.phase() == "Failed");
        assert_eq!(
            (reason(&victim), message(&victim)),
            ("Preempting", "Preempted in order to admit critical pod")
        );
    }
}

/// Images of 8 MiB each that share nothing.
fn filler(number: usize) -> images::ImageTar {
    let mut random = number as u64 + 1;
    let content: Vec<u8> = (0..8 << 20)
        .map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 32) as u8
        })
        .collect();
    let files = [("content".to_owned(), Entry::File(content, 0o644))];
    images::cached(&format!("localhost/beelet/filler-{number}:1"), &files, &json!({})).unwrap()
}

fn tags(node: &Node) -> BTreeSet<String> {
    let listed =
        node.containerd.ctr().args(["--namespace", "k8s.io", "images", "list", "--quiet"]).output().unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    text.lines().filter(|name| name.starts_with("localhost/")).map(str::to_owned).collect()
}

#[test]
fn a_full_image_store_is_freed_as_planned_and_what_is_in_use_stays() {
    require!(containerd);
    let dir = workdir::target_dir().join("e2e").join(workdir::unique("node"));
    let file = workdir::target_dir().join("e2e").join(workdir::unique("store"));
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    let store = guards::Mount::ext4(&dir.join("root"), &file, 256 << 20).unwrap();
    let node = Node::on(Containerd::start(&dir).unwrap(), |options| {
        options
            .kubelet("imageMinimumGCAge", "1ms")
            .kubelet("imageGCHighThresholdPercent", 70)
            .kubelet("imageGCLowThresholdPercent", 50)
            .kubelet("evictionHard", json!({}))
    });
    node.apply(&controlled("user"));
    node.wait_running("user");
    let used = || {
        let stat = rustix::fs::statvfs(store.path()).unwrap();
        100 - stat.f_bavail * 100 / stat.f_blocks
    };
    let mut number = 0;
    while used() < 72 {
        node.containerd.import(&filler(number)).unwrap();
        number += 1;
        assert!(number < 40, "the store does not fill: {} %", used());
    }
    let gc = |more: &[&str]| -> String {
        let mut arguments = vec!["gc", "images"];
        arguments.extend(more);
        let output = node.agent.cli(&arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let before = tags(&node);
    let planned = gc(&["--dry-run"]);
    assert_eq!(tags(&node), before, "a dry run removes nothing");
    let removed = gc(&[]);
    let listed = |text: &str| -> BTreeSet<String> {
        text.lines()
            .filter_map(|line| line.split_whitespace().next())
            .filter(|n| n.starts_with("localhost/"))
            .map(str::to_owned)
            .collect()
    };
    let gone: BTreeSet<String> = before.difference(&tags(&node)).cloned().collect();
    assert_eq!(listed(&removed), gone);
    assert!(
        !gone.is_empty() && listed(&planned).is_superset(&gone) || listed(&planned).is_subset(&gone),
        "{planned}{removed}"
    );
    assert!(used() <= 51, "{} % after\n{removed}", used());
    assert!(tags(&node).contains(images::APP) && tags(&node).contains(images::PAUSE), "{removed}");
    // Everything unused, while containers start from the one image that is used.
    for i in 0..3 {
        node.apply(&controlled(&format!("user{i}")));
    }
    gc(&["--all-unused"]);
    for i in 0..3 {
        node.wait_running(&format!("user{i}"));
    }
    assert_eq!(tags(&node), BTreeSet::from([images::APP.to_owned(), images::PAUSE.to_owned()]));
    assert_eq!(node.pod("user").restarts(), 0);
    drop(node);
    drop(store);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn a_volume_above_its_size_costs_the_pod_its_place() {
    require!(containerd);
    let node = Node::start(|options| options.kubelet("evictionHard", json!({})));
    let work = "dd if=/dev/zero of=/scratch/f bs=1M count=12 2>/dev/null; sleep 10000";
    let mut pod = manifests::pod("writer", &["/bin/sh", "-c", work]);
    pod["spec"]["volumes"] = json!([{ "name": "scratch", "emptyDir": { "sizeLimit": "8Mi" } }]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "scratch", "mountPath": "/scratch" }]);
    node.apply(&pod);
    let writer = node.wait("writer", "to be evicted", |pod| pod.phase() == "Failed");
    assert_eq!(reason(&writer), "Evicted");
    assert_eq!(message(&writer), "Usage of EmptyDir volume \"scratch\" exceeds the limit \"8Mi\". ");
}
