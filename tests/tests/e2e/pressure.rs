//! A node under pressure, with a real runtime, real cgroups and a real file system: which pods are admitted
//! or evicted, and which images are removed. The machine itself is never in danger: the resource that runs
//! short is the pods' own limit, in a cgroup root of the test's.

#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::node::installed;
use beelet_tests::agent::{Agent, Control, Options};
use beelet_tests::containerd::Containerd;
use beelet_tests::images::{self, Entry};
use beelet_tests::manifests::{self, CONTROL};
use beelet_tests::oom::OomWatch;
use beelet_tests::pods::PodView;
use beelet_tests::workdir::{self, PATIENCE};
use beelet_tests::{guards, require};
use k8s_openapi::api::core::v1 as core;
use serde_json::{Value, json};

/// Memory that all pods may use together, in MiB.
const PODS_MIB: u64 = 320;

/// An agent on a containerd of its own. The agent is dropped first.
struct Node {
    agent: Agent,
    containerd: Containerd,
}

impl Node {
    fn start(change: impl FnOnce(Options) -> Options) -> Node {
        Node::on(Containerd::start_for_test().unwrap(), change)
    }

    fn on(containerd: Containerd, change: impl FnOnce(Options) -> Options) -> Node {
        let agent = Agent::start(change(installed(&containerd))).unwrap();
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

    /// Returns the value of a series on the agent's metrics page, by its name with all labels.
    fn metric(&self, series: &str) -> Option<f64> {
        let (status, page) = self.agent.get("/metrics").unwrap();
        assert_eq!(status, 200, "{page}");
        page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
    }

    /// Returns the output of `beelet` with these arguments.
    fn cli(&self, arguments: &[&str]) -> String {
        let output = self.agent.cli(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the status and the reason of a condition of the node.
    fn condition(&self, name: &str) -> (String, String) {
        let node: core::Node = serde_json::from_str(&self.cli(&["get", "node", "-o", "json"])).unwrap();
        let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
        let found = conditions.into_iter().find(|condition| condition.type_ == name).unwrap();
        assert!(found.last_transition_time.is_some_and(|since| since.0.as_second() > 0));
        (found.status, found.reason.unwrap_or_default())
    }

    fn memory_dir(&self) -> PathBuf {
        self.containerd.cgroup().folder("memory", "/kubepods").unwrap()
    }

    fn pod(&self, name: &str) -> PodView {
        self.agent.inspect(|watch| watch.pod(name).cloned()).unwrap().unwrap()
    }

    /// Returns the pods' available memory in MiB: their limit less their working set, as the agent computes
    /// it.
    fn available(&self) -> u64 {
        let dir = self.memory_dir();
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

/// Leaves the pods exactly [`PODS_MIB`] of the machine's memory.
fn small(options: Options) -> Options {
    let kib = beelet_tests::machine::memory_kib().unwrap();
    options
        .kubelet("systemReserved", json!({ "memory": format!("{}Ki", kib - PODS_MIB * 1024) }))
        .kubelet("evictionHard", json!({ "memory.available": "64Mi" }))
        .http()
        .unwrap()
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

/// Returns the reason for which the container ended: `OOMKilled` if the kernel killed it.
fn end(pod: &PodView) -> Option<String> {
    pod.container("main")?.state.as_ref()?.terminated.as_ref()?.reason.clone()
}

/// Returns a line for a failed test: the waits that `beelet describe` prints, both containers' states, the
/// growth that the metrics name, and the kernel's own account of the pods' waits.
fn memory_waits(node: &Node, described: Option<&str>) -> String {
    let states = node.agent.inspect(|watch| {
        let state = |name: &str| watch.pod(name)?.container("main")?.state.clone();
        format!("{:?}", (state("server"), state("hog")))
    });
    let (_, page) = node.agent.get("/metrics").unwrap();
    let shares = page.lines().filter(|line| line.starts_with("beelet_container_memory_growth_ratio{"));
    let psi = std::fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
    let (shares, psi) = (shares.collect::<Vec<_>>().join("; "), psi.lines().next().unwrap_or_default());
    format!("{described:?}; {states:?}; {shares}; machine: {psi}; {} MiB available", node.available())
}

#[test]
fn a_pod_that_waits_for_memory_shows_the_growing_pod() {
    require!(containerd, bpf, psi);
    // No pod is evicted: both read more than all pods have, again and again.
    let node =
        Node::start(|options| small(options).kubelet("evictionHard", json!({ "memory.available": "0%" })));
    let reading = |name: &str, mib: &str| manifests::pod(name, &["/bin/testapp", "hog", "memory", mib]);
    node.apply(&manifests::with_resources(reading("server", "512"), ("100m", "32Mi"), ("", "")));
    node.apply(&reading("hog", "512"));
    node.wait("server", "to run", |pod| pod.phase() == "Running");
    workdir::wait_for("the server's status to name the hog", PATIENCE, || {
        let text = node.cli(&["describe", "pod", "server"]);
        let waits = text.lines().find(|line| line.trim_start().starts_with("Memory:"));
        let because = " % of the last minute for memory, mostly for the growth of ";
        match waits.and_then(|line| line.split_once(because)) {
            Some((_, whose)) if whose.contains("hog-") => Ok(()),
            _ => Err(memory_waits(&node, waits)),
        }
    })
    .unwrap();
    let (_, page) = node.agent.get("/metrics").unwrap();
    let mut shares = page.lines().filter(|line| line.starts_with("beelet_container_memory_growth_ratio{"));
    let of_hog = shares.find(|line| line.contains("default/hog-") && line.contains("pod=\"server-"));
    let share: f64 = of_hog.and_then(|line| line.rsplit_once(' ')).unwrap().1.parse().unwrap();
    assert!(share > 0.0 && share <= 1.0, "{share}");
}

#[test]
fn a_memory_hog_alone_is_evicted_before_the_kernel_kills() {
    require!(containerd);
    let node = Node::start(small);
    node.apply(&manifests::with_resources(controlled("good"), ("100m", "64Mi"), ("", "")));
    node.apply(&controlled("hog"));
    let good = node.wait_running("good");
    let hog = node.wait_running("hog");
    assert_eq!(hog.qos(), "BestEffort");
    Control::connect(good.ip().unwrap(), CONTROL).unwrap().send("hold 32").unwrap();
    let mut control = Control::connect(hog.ip().unwrap(), CONTROL).unwrap();
    let mut kills = OomWatch::start(&node.memory_dir()).unwrap();
    assert_eq!(node.condition("MemoryPressure"), ("False".into(), "KubeletHasSufficientMemory".into()));
    assert_eq!(node.metric(r#"beelet_node_condition{condition="MemoryPressure"}"#), Some(0.0));
    let deadline = Instant::now() + workdir::stretched(PATIENCE);
    while reason(&node.pod("hog")) != "Evicted" {
        assert!(Instant::now() < deadline, "the hog is never evicted; {} MiB left", node.available());
        // The hog grows by about 100 MiB/s, and stops once the threshold is crossed: the test checks which
        // pod is evicted, not whether the kernel or the agent is faster.
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
    assert_eq!(kills.count().unwrap(), 0, "the kernel killed as well");
    assert_eq!(node.metric(r#"kubelet_evictions{eviction_signal="allocatableMemory.available"}"#), Some(1.0));
    assert_eq!(node.metric(r#"beelet_node_condition{condition="MemoryPressure"}"#), Some(1.0));
    assert_eq!(node.condition("MemoryPressure"), ("True".into(), "KubeletHasInsufficientMemory".into()));
    assert_eq!(node.condition("DiskPressure"), ("False".into(), "KubeletHasNoDiskPressure".into()));
    assert_eq!(node.condition("PIDPressure"), ("False".into(), "KubeletHasSufficientPID".into()));
    assert_eq!(node.condition("Ready"), ("True".into(), "KubeletReady".into()));
    let table = node.cli(&["get", "node"]);
    let line = table.lines().find(|line| line.starts_with("MemoryPressure")).unwrap();
    assert!(line.contains("True") && line.ends_with("KubeletHasInsufficientMemory"), "{table}");
    let good = node.pod("good");
    assert!(good.ready() && good.restarts() == 0, "{good:?}");
    // While memory was short until recently, pods without requests are refused and pods with requests are
    // admitted.
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
fn a_pod_that_thrashes_at_its_own_limit_affects_no_other() {
    require!(containerd);
    let node = Node::start(small);
    node.apply(&controlled("good"));
    node.wait_running("good");
    let work =
        "dd if=/dev/zero of=/tmp/f bs=1M count=96 2>/dev/null; while true; do cat /tmp/f > /dev/null; done";
    let thrashing = manifests::pod("thrashing", &["/bin/sh", "-c", work]);
    node.apply(&manifests::with_resources(thrashing, ("100m", "32Mi"), ("", "32Mi")));
    let pod = node.wait("thrashing", "to run", PodView::ready);
    // The pod's memory stalls in fact, for three times as long as each of the agent's ways to notice it
    // requires. The kernel counts the stall at the pods' cgroup; where it doesn't, pages that are read back
    // again and again show it.
    let thrashed = Thrashed::start(&node);
    for part in 1..=3 {
        thrashed.wait(part);
        for name in ["good", "thrashing"] {
            let pod = node.pod(name);
            assert!(pod.ready() && reason(&pod).is_empty() && pod.restarts() == 0, "{pod:?}");
        }
    }
    assert_eq!(node.pod("thrashing").uid(), pod.uid());
    assert_eq!(node.metric(r#"beelet_node_condition{condition="MemoryPressure"}"#), Some(0.0));
}

/// Thrashing of a pod since this value was made.
struct Thrashed {
    file: PathBuf,
    /// Word before the number in the file.
    name: &'static str,
    /// Increase that is large: microseconds of stall, or pages.
    much: u64,
    began: u64,
}

impl Thrashed {
    fn start(node: &Node) -> Thrashed {
        let v2 = node.containerd.cgroup().folder("unified", "/kubepods");
        let pressure = v2.map(|dir| dir.join("memory.pressure")).filter(|file| file.exists());
        let stat = node.memory_dir().join("memory.stat");
        let is_v1 = node.memory_dir().join("memory.usage_in_bytes").exists();
        let (file, name, much) = match pressure {
            Some(file) => (file, "total=", 300_000),
            None if is_v1 => (stat, "total_pgpgin ", 64 << 10),
            None => (stat, "workingset_refault_file ", 64 << 10),
        };
        let thrashed = Thrashed { file, name, much, began: 0 };
        Thrashed { began: thrashed.number(), ..thrashed }
    }

    fn number(&self) -> u64 {
        let text = std::fs::read_to_string(&self.file).unwrap();
        // The first line of memory.pressure is that of `some`.
        let (_, rest) = text.split_once(self.name).unwrap();
        rest.split(char::is_whitespace).next().unwrap().parse().unwrap()
    }

    /// Waits until the increase is `times` times the large one.
    fn wait(&self, times: u64) {
        let enough = || {
            let more = self.number() - self.began;
            if more >= times * self.much { Ok(()) } else { Err(format!("{}{more} more", self.name)) }
        };
        workdir::wait_for("the pod to thrash", PATIENCE, enough).unwrap();
    }
}

#[test]
fn a_critical_pod_preempts_others_even_if_one_ignores_sigterm() {
    require!(containerd);
    let cpus = std::thread::available_parallelism().unwrap().get();
    let reserved = json!({ "cpu": format!("{}m", cpus * 1000 - 900) });
    let node = Node::start(|options| {
        let options = options.kubelet("systemReserved", reserved).kubelet("evictionHard", json!({}));
        options.http().unwrap()
    });
    // The first process of a container ignores SIGTERM unless it installs a handler.
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
    // As under the kubelet, a victim whose containers exit with code 0 has succeeded.
    for (name, phase) in [("deaf", "Failed"), ("other", "Succeeded")] {
        let victim = node.wait(name, "to be preempted", |pod| pod.phase() == phase);
        assert_eq!(
            (reason(&victim), message(&victim)),
            ("Preempting", "Preempted in order to admit critical pod")
        );
    }
    assert_eq!(node.metric(r#"kubelet_preemptions{preemption_signal="cpu"}"#), Some(2.0));
    assert_eq!(node.metric(r#"kubelet_admission_rejections_total{reason="OutOfcpu"}"#), Some(1.0));
    assert_eq!(node.metric(r#"kubelet_evictions{eviction_signal="memory.available"}"#), None);
}

/// Returns an image of 8 MiB that shares no layer with others.
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

/// A node whose images are on a small disk of their own. The node is dropped first.
struct Stored {
    node: Node,
    store: guards::Mount,
    file: PathBuf,
}

impl Stored {
    fn start(change: impl FnOnce(Options) -> Options) -> Stored {
        let dir = workdir::target_dir().join("e2e").join(workdir::unique("node"));
        let file = workdir::target_dir().join("e2e").join(workdir::unique("store"));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let store = guards::Mount::ext4(&dir.join("root"), &file, 256 << 20).unwrap();
        let node = Node::on(Containerd::start(&dir).unwrap(), change);
        Stored { node, store, file }
    }

    /// Returns the used part of the disk, in per cent.
    fn used(&self) -> u64 {
        let stat = rustix::fs::statvfs(self.store.path()).unwrap();
        100 - stat.f_bavail * 100 / stat.f_blocks
    }

    /// Imports unused images until `percent` of the disk is used. Returns the number of images.
    fn fill(&self, percent: u64) -> usize {
        let mut number = 0;
        while self.used() < percent {
            self.node.containerd.import(&filler(number)).unwrap();
            number += 1;
            assert!(number < 40, "the store did not fill: {} %", self.used());
        }
        number
    }

    /// Imports unused images until `percent` of the disk is used or, as the node evicts at less, until
    /// reclaim has begun. Returns the number of attempts.
    fn fill_until_reclaim(&self, percent: u64) -> usize {
        let begun = || match self.node.metric("beelet_eviction_reclaims_total") {
            Some(1.0..) => Ok(()),
            other => Err(format!("{other:?} reclaims")),
        };
        let mut number = 0;
        while self.used() < percent && begun().is_err() {
            let imported = self.node.containerd.import(&filler(number));
            number += 1;
            // An image that is removed during its import can't be unpacked any more.
            if let Err(error) = imported {
                workdir::wait_for(&format!("a reclaim, as an import failed: {error:#}"), PATIENCE, begun)
                    .unwrap();
            }
            assert!(number < 40, "the store did not fill: {} %", self.used());
        }
        number
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        // The kernel frees an unlinked file when its last user closes it.
        let _ = std::fs::remove_file(&self.file);
    }
}

/// Returns the images that `beelet gc images` lists, in that order.
fn listed(text: &str) -> Vec<String> {
    let first = text.lines().filter_map(|line| line.split_whitespace().next());
    first.filter(|name| name.starts_with("localhost/")).map(str::to_owned).collect()
}

fn needed() -> BTreeSet<String> {
    [images::APP, images::PAUSE].map(str::to_owned).into()
}

#[test]
fn a_full_image_store_is_freed_as_planned_and_used_images_stay() {
    require!(containerd);
    let stored = Stored::start(|options| {
        options
            .kubelet("imageMinimumGCAge", "1ms")
            .kubelet("imageGCHighThresholdPercent", 70)
            .kubelet("imageGCLowThresholdPercent", 50)
            .kubelet("evictionHard", json!({}))
    });
    let node = &stored.node;
    node.apply(&controlled("user"));
    node.wait_running("user");
    stored.fill(72);
    let before = tags(node);
    let planned = listed(&node.cli(&["gc", "images", "--dry-run"]));
    assert_eq!(tags(node), before, "a dry run removed images");
    let removed = listed(&node.cli(&["gc", "images"]));
    // The plan uses the sizes that the runtime reports; unpacked images free more, as only their removal
    // shows.
    assert!(!removed.is_empty() && planned.starts_with(&removed), "{planned:?}\n{removed:?}");
    let gone: BTreeSet<String> = before.difference(&tags(node)).cloned().collect();
    assert_eq!(removed.iter().cloned().collect::<BTreeSet<_>>(), gone);
    assert!(stored.used() <= 51, "{} % after {removed:?}", stored.used());
    // The removal of one image fewer would not have been enough.
    assert!(stored.used() + 100 * 16 / 256 + 1 > 50, "{} % after {removed:?}", stored.used());
    assert!(tags(node).is_superset(&needed()), "{removed:?}");
    node.cli(&["gc", "images", "--all-unused"]);
    assert_eq!(tags(node), needed());
    assert_eq!(node.pod("user").restarts(), 0);
}

#[test]
fn eviction_frees_the_image_disk_with_the_collectors_thresholds_off() {
    require!(containerd);
    let stored = Stored::start(|options| {
        let options = options.kubelet("imageMinimumGCAge", "1ms").kubelet("imageGCHighThresholdPercent", 100);
        options.kubelet("evictionHard", json!({ "imagefs.available": "40%" })).http().unwrap()
    });
    let node = &stored.node;
    node.apply(&controlled("user"));
    let user = node.wait_running("user");
    let dead = with_spec(manifests::pod("dead", &["/bin/true"]), "restartPolicy", json!("Never"));
    node.apply(&dead);
    node.wait("dead", "to have ended", |pod| pod.phase() == "Succeeded");
    // The image that crosses the threshold may still be in import when the others are removed, and then
    // stays.
    let imported = stored.fill_until_reclaim(61);
    let given_back = || {
        let (tags, used) = (tags(node), stored.used());
        let gone = tags.len() < needed().len() + imported && used < 60;
        if gone { Ok(()) } else { Err(format!("{used} % used, {tags:?}")) }
    };
    workdir::wait_for("the images to be removed", PATIENCE, given_back).unwrap();
    assert!(tags(node).is_superset(&needed()));
    assert!(node.metric("beelet_eviction_reclaims_total") >= Some(1.0));
    assert_eq!(node.condition("DiskPressure"), ("True".into(), "KubeletHasDiskPressure".into()));
    assert!(
        node.metric("beelet_container_gc_containers_total") >= Some(1.0),
        "dead containers were not removed"
    );
    let now = node.pod("user");
    assert!(now.ready() && now.uid() == user.uid() && now.restarts() == 0, "{now:?}");
    assert_eq!(node.pod("dead").phase(), "Succeeded");
}

#[test]
fn only_the_pod_whose_writable_layer_filled_the_disk_is_evicted() {
    require!(containerd);
    let stored =
        Stored::start(|options| options.kubelet("evictionHard", json!({ "imagefs.available": "40%" })));
    let (node, good) = (&stored.node, ["good0", "good1", "good2"]);
    for name in good {
        node.apply(&controlled(name));
    }
    let before = good.map(|name| node.wait_running(name));
    let fill = "dd if=/dev/zero of=/f bs=1M count=150 2>/dev/null; sleep 10000";
    node.apply(&manifests::pod("writer", &["/bin/sh", "-c", fill]));
    let writer = node.wait("writer", "to be evicted", |pod| pod.phase() == "Failed");
    assert_eq!(reason(&writer), "Evicted");
    assert!(message(&writer).contains("was: writable layer of container main 1"), "{}", message(&writer));
    // The runtime frees the layer some time after the container's removal.
    let freed = || if stored.used() < 50 { Ok(()) } else { Err(format!("{} % used", stored.used())) };
    workdir::wait_for("the disk space to become free", PATIENCE, freed).unwrap();
    for (name, before) in good.iter().zip(before) {
        let now = node.wait_running(name);
        assert!(now.uid() == before.uid() && now.restarts() == 0, "{now:?}");
    }
}

/// Returns the minimum age at which an image may be removed: about the time at which the later pods need
/// theirs. On a slow machine, the first pods take longer too, and they must be early enough.
fn gc_age() -> Duration {
    workdir::stretched(Duration::from_secs(4))
}

#[test]
fn no_image_is_removed_that_a_container_is_about_to_use() {
    require!(containerd);
    const PODS: usize = 8;
    let node = Node::start(|options| {
        let options = options.kubelet("imageMinimumGCAge", format!("{}s", gc_age().as_secs()));
        options.kubelet("evictionHard", json!({}))
    });
    let name = |i: usize| format!("localhost/beelet/variant-{i}:1");
    // Two images more than there are pods: those are removed in any case.
    for i in 0..PODS + 2 {
        node.containerd.import(&images::variant(&name(i)).unwrap()).unwrap();
    }
    let over = AtomicBool::new(false);
    let removed = std::thread::scope(|scope| {
        let collecting = scope.spawn(|| {
            let mut removed = Vec::new();
            while !over.load(Ordering::Relaxed) {
                removed.extend(listed(&node.cli(&["gc", "images", "--all-unused"])));
            }
            removed
        });
        let collects = Over(&over);
        for i in 0..PODS {
            let mut pod = controlled(&format!("user{i}"));
            pod["spec"]["containers"][0]["image"] = json!(name(i));
            pod["spec"]["containers"][0]["imagePullPolicy"] = json!("Never");
            node.apply(&pod);
            // Some pods are early enough, some too late, and some at the very moment of the removal.
            std::thread::sleep(gc_age() / PODS as u32);
        }
        // Each pod runs or was too late; other outcomes are faults.
        for i in 0..PODS {
            node.wait(&format!("user{i}"), "to run or to be too late", |pod| pod.ready() || is_too_late(pod));
        }
        let gone =
            || if tags(&node).contains(&name(PODS)) { Err("the image is still there") } else { Ok(()) };
        workdir::wait_for("an unused image to be removed", PATIENCE, gone).unwrap();
        drop(collects);
        collecting.join().unwrap()
    });
    let pods: Vec<PodView> = (0..PODS).map(|i| node.pod(&format!("user{i}"))).collect();
    let running: BTreeSet<String> = (0..PODS).filter(|i| pods[*i].ready()).map(name).collect();
    println!("{} pods ran, {} images removed", running.len(), removed.len());
    assert!(pods.iter().all(|pod| pod.ready() || is_too_late(pod)), "{pods:?}");
    assert!(!running.is_empty(), "all pods were too late: the test shows nothing");
    assert!(running.iter().all(|name| !removed.contains(name)), "{running:?} {removed:?}");
    // No pod here uses the plain app.
    assert_eq!(tags(&node), &running | &BTreeSet::from([images::PAUSE.to_owned()]));
    let events = node.cli(&["events"]);
    assert!(!events.contains("CreateContainerError") && !events.contains("RunContainerError"), "{events}");
    // Pods that were too late run as soon as their image is there again.
    for i in (0..PODS).filter(|i| !pods[*i].ready()) {
        node.containerd.import(&images::variant(&name(i)).unwrap()).unwrap();
    }
    for i in 0..PODS {
        let pod = node.wait_running(&format!("user{i}"));
        assert_eq!(pod.restarts(), 0, "{pod:?}");
    }
}

/// Sets the flag when dropped, also after a failure.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns true if the pod waits for an image that had been removed before the pod needed it.
fn is_too_late(pod: &PodView) -> bool {
    let waiting =
        pod.container("main").and_then(|main| main.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
    matches!(waiting, Some("ErrImageNeverPull" | "ImagePullBackOff"))
}

/// Returns a pod that writes 12 MiB where `work` says and whose containers have these limits on disk usage.
fn writer(work: &str, limits: &[&str]) -> Value {
    let work = format!("dd if=/dev/zero bs=1M count=12 {work} 2>/dev/null; sleep 10000");
    let mut pod = manifests::pod("writer", &["/bin/sh", "-c", &work]);
    let mut quiet = pod["spec"]["containers"][0].clone();
    quiet["name"] = json!("quiet");
    quiet["command"] = json!(["/bin/sleep", "10000"]);
    let mut containers = vec![pod["spec"]["containers"][0].clone(), quiet];
    containers.truncate(limits.len().max(1));
    for (container, limit) in containers.iter_mut().zip(limits) {
        container["resources"]["limits"]["ephemeral-storage"] = json!(limit);
    }
    pod["spec"]["containers"] = json!(containers);
    pod
}

fn costs_its_place(pod: &Value, signal: &str, words: &str) {
    // Logs are not rotated here: compressed they would be small.
    let node = Node::start(|options| {
        let options = options.kubelet("evictionHard", json!({})).kubelet("containerLogMaxSize", "64Mi");
        options.http().unwrap()
    });
    node.apply(&controlled("good"));
    node.apply(pod);
    let writer = node.wait("writer", "to be evicted", |pod| pod.phase() == "Failed");
    assert_eq!((reason(&writer), message(&writer)), ("Evicted", words));
    assert_eq!(node.metric(&format!(r#"kubelet_evictions{{eviction_signal="{signal}"}}"#)), Some(1.0));
    assert_eq!(node.wait_running("good").restarts(), 0);
}

#[test]
fn a_volume_above_its_size_costs_the_pod_its_place() {
    require!(containerd);
    let mut pod = writer("of=/scratch/f", &[]);
    pod["spec"]["volumes"] = json!([{ "name": "scratch", "emptyDir": { "sizeLimit": "8Mi" } }]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "scratch", "mountPath": "/scratch" }]);
    let words = "Usage of EmptyDir volume \"scratch\" exceeds the limit \"8Mi\". ";
    costs_its_place(&pod, "emptydirfs.limit", words);
}

#[test]
fn a_container_whose_writable_layer_is_above_its_limit_costs_the_pod_its_place() {
    require!(containerd);
    // The other container's limit leaves room for the pod as a whole.
    let words = "Container main exceeded its local ephemeral storage limit \"8Mi\". ";
    costs_its_place(&writer("of=/f", &["8Mi", "64Mi"]), "ephemeralcontainerfs.limit", words);
}

#[test]
fn a_container_whose_logs_are_above_its_limit_costs_the_pod_its_place() {
    require!(containerd);
    let words = "Container main exceeded its local ephemeral storage limit \"8Mi\". ";
    let logs = writer("| tr '\\0' 'x' | fold -w 1000", &["8Mi", "64Mi"]);
    costs_its_place(&logs, "ephemeralcontainerfs.limit", words);
}

#[test]
fn a_pod_above_all_its_containers_limits_costs_itself_its_place() {
    require!(containerd);
    let words = "Pod ephemeral local storage usage exceeds the total limit of containers 8Mi. ";
    costs_its_place(&writer("of=/f", &["8Mi"]), "ephemeralpodfs.limit", words);
}

#[test]
fn a_pod_that_fills_files_which_are_mounted_into_it_costs_itself_its_place() {
    require!(containerd);
    let words = "Pod ephemeral local storage usage exceeds the total limit of containers 8Mi. ";
    for file in ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/termination-log"] {
        costs_its_place(&writer(&format!("of={file}"), &["8Mi"]), "ephemeralpodfs.limit", words);
    }
}
