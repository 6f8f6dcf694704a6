//! Pods are created, killed, changed and removed at random for a long time, next to some that damage the node
//! as much as they can. Usage must not grow, and nothing may be left.
//!
//! `BEELET_CHURN_MINUTES` sets the duration (default: 30). `BEELET_CHURN_SEED` repeats a run: the seed is
//! printed first.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::time::{Duration, Instant};

use crate::node::{Node, object};
use beelet_tests::guards;
use beelet_tests::manifests::{self, PORT};
use beelet_tests::require;
use beelet_tests::traces::{Held, Traces};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

/// Number of pods at the same time, without the hostile ones.
const ALIVE: usize = 40;
/// Pause between two actions: half an hour has some 700 pods.
const PACE: Duration = Duration::from_secs(1);

/// Pseudo-random numbers that the seed determines (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).unwrap()
    }
}

/// Numbers of completed actions.
#[derive(Default)]
struct Deeds {
    created: usize,
    killed: usize,
    changed: usize,
    removed: usize,
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Returns a pod of one of some kinds.
fn pod(name: &str, kind: usize) -> Value {
    let pod = match kind {
        0 => manifests::serving(name),
        1 => manifests::answering(name),
        // The container ends and is restarted, each time after a longer wait.
        2 => manifests::pod(name, &["/bin/sh", "-c", "sleep 1; exit 1"]),
        3 => {
            let mut pod = manifests::pod(name, &["/bin/sh", "-c", "sleep 2"]);
            pod["spec"]["restartPolicy"] = json!("Never");
            pod
        }
        _ => manifests::pod(name, &["/bin/testapp", "pause"]),
    };
    let volumes = json!([
        { "name": "disk", "emptyDir": { "sizeLimit": "16Mi" } },
        { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
        { "name": "conf", "configMap": { "name": "conf" } },
    ]);
    let mounts = json!([
        { "name": "disk", "mountPath": "/disk" }, { "name": "disk", "mountPath": "/part", "subPath": "part" },
        { "name": "memory", "mountPath": "/memory" }, { "name": "conf", "mountPath": "/conf" },
    ]);
    let mut pod = manifests::with(pod, "volumeMounts", mounts);
    pod["spec"]["volumes"] = volumes;
    pod
}

/// Returns pods that do harm again and again.
fn hostile() -> Vec<Value> {
    let run = |name: &str, script: &str| {
        let pod = manifests::pod(name, &["/bin/sh", "-c", script]);
        let pod = manifests::with_resources(pod, ("", ""), ("200m", "256Mi"));
        let mut pod = manifests::with(pod, "volumeMounts", json!([{ "name": "v", "mountPath": "/v" }]));
        pod["spec"]["volumes"] = json!([{ "name": "v", "emptyDir": { "sizeLimit": "1Gi" } }]);
        pod
    };
    let forever = |harm: &str| format!("while true; do {harm}; done");
    let exec = json!({ "command": ["/bin/testapp", "hurt", "probe", "never", "churn"] });
    let never = json!({ "exec": exec, "periodSeconds": 2, "timeoutSeconds": 1 });
    let flood = json!({ "httpGet": { "path": "/", "port": PORT }, "periodSeconds": 1, "timeoutSeconds": 1 });
    vec![
        run("bomb", "testapp hurt bomb & exec testapp pause"),
        run("listeners", &forever("testapp hurt listeners 2000; sleep 1")),
        run("shout", &forever("testapp hurt shout 5000000; sleep 1")),
        run("files", &forever("testapp hurt many /v 20000; testapp hurt deep /v 2000; sleep 1; rm -rf /v/*")),
        run("names", "testapp hurt names /v; exec testapp hurt processes"),
        manifests::with(run("never", "exec testapp pause"), "readinessProbe", never),
        manifests::with(
            run("flood", &format!("exec testapp hurt http flood {PORT}")),
            "readinessProbe",
            flood,
        ),
    ]
}

fn kill_one(node: &Node, name: &str, random: &mut Random) -> bool {
    let Some(pod) = node.agent.inspect(|watch| watch.pod(name).cloned()).unwrap() else { return false };
    let path = beelet_tests::cgroup_values::pod_path(pod.qos(), pod.uid());
    let dir = node.containerd.cgroup().folder("memory", &path).unwrap();
    let processes = guards::processes_below(&dir);
    // A process of a container or of the sandbox.
    !processes.is_empty() && kill_process(processes[random.below(processes.len())], Signal::KILL).is_ok()
}

fn until_gone(node: &Node, pods: usize) {
    let deadline = Instant::now() + Duration::from_secs(120 + 10 * pods as u64);
    loop {
        let (count, how) = node.agent.inspect(|watch| (watch.pods.len(), watch.describe())).unwrap();
        if count == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "pods are still there: {how}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn random_pods_and_hostile_ones_leave_nothing_and_nothing_grows() {
    require!(long, containerd);
    let minutes = number("BEELET_CHURN_MINUTES", 30);
    let seed = number("BEELET_CHURN_SEED", u64::from(std::process::id()));
    eprintln!("BEELET_CHURN_SEED={seed} BEELET_CHURN_MINUTES={minutes}");
    let node = Node::start(|options| {
        options
            .kubelet("podPidsLimit", 64)
            .kubelet("containerLogMaxSize", "1Mi")
            .kubelet("containerLogMonitorInterval", "2s")
    });
    node.apply(&object("ConfigMap", "conf", &json!({ "color": "red" })));
    // The first pod creates the traces that all pods share.
    node.apply(&pod("first", 4));
    node.wait("first", "to run", beelet_tests::pods::PodView::ready);
    node.remove("first");
    node.wait_gone("first");
    std::thread::sleep(Duration::from_secs(2));
    let before = Traces::of(&node.containerd, &node.agent).unwrap();
    let held_before = Held::by(&node.agent).unwrap();
    let hostile = hostile();
    hostile.iter().for_each(|pod| node.apply(pod));

    let (mut random, mut deeds, mut alive) = (Random(seed), Deeds::default(), Vec::<String>::new());
    let (started, length) = (Instant::now(), Duration::from_secs(60 * minutes));
    // Samples start when the caches and the event log are full; then one is taken per minute.
    let mut samples: Vec<Held> = Vec::new();
    let mut sampled = Instant::now();
    while started.elapsed() < length {
        let chosen = (!alive.is_empty()).then(|| random.below(alive.len()));
        match (random.below(100), chosen) {
            (0..45, _) if alive.len() < ALIVE => {
                let name = format!("churn{}", deeds.created);
                node.apply(&pod(&name, random.below(6)));
                alive.push(name);
                deeds.created += 1;
            }
            (0..80, Some(index)) => {
                node.remove(&alive.swap_remove(index));
                deeds.removed += 1;
            }
            (80..95, Some(index)) => deeds.killed += usize::from(kill_one(&node, &alive[index], &mut random)),
            (_, Some(index)) => {
                let mut changed = pod(&alive[index], random.below(6));
                changed["metadata"]["labels"] = json!({ "change": deeds.changed.to_string() });
                node.apply(&changed);
                deeds.changed += 1;
            }
            (_, None) => {}
        }
        if sampled.elapsed() >= Duration::from_secs(60).min(length / 10) {
            samples.push(Held::by(&node.agent).unwrap());
            sampled = Instant::now();
        }
        std::thread::sleep(PACE);
    }
    let left = alive.len() + hostile.len();
    alive.iter().for_each(|name| node.remove(name));
    for pod in &hostile {
        node.remove(pod["metadata"]["name"].as_str().unwrap());
    }
    until_gone(&node, left);
    let clean = before.wait_as_before(&node.containerd, &node.agent);
    let (mut after, held) =
        (Traces::of(&node.containerd, &node.agent).unwrap(), Held::by(&node.agent).unwrap());
    let lost = if clean.is_err() { after.remove_lost(&node.containerd) } else { Vec::new() };

    let Deeds { created, killed, changed, removed } = deeds;
    println!(
        "{minutes} min, seed {seed}: {created} created, {killed} killed, {changed} changed, {removed} removed"
    );
    println!("{:34} {:>10} {:>10}", "", "before", "after");
    for ((what, count), (_, now)) in before.counts().into_iter().zip(after.counts()) {
        println!("{what:34} {count:>10} {now:>10}");
    }
    println!("{:34} {:>10} {:>10}", "open files of the agent", held_before.files(), held.files());
    println!("{:34} {:>10} {:>10}", "memory of the agent, KiB", held_before.resident, held.resident);
    let over_time: Vec<u64> = samples.iter().map(|sample| sample.resident >> 10).collect();
    println!("the agent's memory over time, MiB: {over_time:?}");
    if !lost.is_empty() {
        println!("lost by the runtime itself, which reports them as removed: {lost:#?}");
    }
    if !before.difference(&after).is_empty() {
        clean.unwrap();
    }
    assert!(held.files() <= held_before.files() + 4, "left open: {}", held_before.opened(&held));
    // Memory is flat: the means of the last and of the second quarter are compared.
    let mean = |part: &[Held]| part.iter().map(|one| one.resident).sum::<u64>() / part.len().max(1) as u64;
    let quarter = samples.len() / 4;
    if quarter > 0 {
        let (early, late) = (mean(&samples[quarter..2 * quarter]), mean(&samples[3 * quarter..]));
        assert!(
            late * 10 <= early * 11 + (40 << 10),
            "{early} KiB in the second quarter, {late} KiB in the last"
        );
    }
}
