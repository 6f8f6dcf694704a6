//! A node with hostile pods and with bystander pods that must not notice them, and the account of a case's
//! costs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use beelet_tests::agent::Options;
use beelet_tests::containerd::block_on;
use beelet_tests::machine::{cpu_of, resident_kib};
use beelet_tests::manifests::{self, CONTROL, PORT};
use beelet_tests::pods::{PodView, Watch};
use beelet_tests::traces::{Held, Traces};
use beelet_tests::workdir::{self, PATIENCE, wait_for};
use serde_json::{Value, json};

use crate::node::Node;

/// The grace period of hostile pods.
pub(crate) const GRACE: Duration = Duration::from_secs(2);
/// Time that a hostile pod may take beyond its grace period.
const FAREWELL: Duration = Duration::from_secs(10);
/// Time for which the idle agent is observed.
const QUIET: Duration = Duration::from_secs(3);
/// Memory that the agent may use for a moment beyond twice its idle figure, in KiB.
const MEMORY: u64 = 16 << 10;
/// CPU time that the agent may use beyond twice its idle figure: a fraction of one core, and an amount for
/// the start and end of a pod.
const CPU: (f64, Duration) = (0.1, Duration::from_secs(2));
/// Bystander pods: one with a readiness probe that the kernel answers, one with an HTTP liveness probe.
const BYSTANDERS: [&str; 2] = ["bystander", "answering"];

/// Cost that one case may have beyond the common limits.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Allowance {
    /// Time for work that must be done once per item, like removing files.
    pub(crate) time: Duration,
    /// CPU time for the same work.
    pub(crate) cpu: Duration,
}

/// Usage of the idle agent.
#[derive(Debug, Clone, Copy)]
struct Quiet {
    /// Fraction of one core.
    cpu: f64,
    /// KiB.
    resident: u64,
    /// Time in which a harmless pod was removed.
    removal: Duration,
}

/// A node under attack: an agent on a containerd of its own, hostile pods, and bystander pods that must not
/// notice them.
pub(crate) struct Scene {
    pub(crate) node: Node,
    witness: Witness,
    before: BTreeMap<&'static str, Value>,
    traces: Traces,
    held: Held,
    quiet: Quiet,
    /// Start of the account, and the agent's CPU time at that moment.
    since: (Instant, Duration),
}

impl Scene {
    /// Starts a node with only the bystander pods.
    pub(crate) fn start(change: impl FnOnce(Options) -> Options) -> Scene {
        Scene::on(Node::start(|options| change(options.http().unwrap())))
    }

    pub(crate) fn on(node: Node) -> Scene {
        for (name, pod) in
            BYSTANDERS.iter().zip([manifests::serving("bystander"), manifests::answering("answering")])
        {
            node.apply(&pod);
            node.wait(name, "to be ready", PodView::ready);
        }
        // The first pod that is removed creates the traces that all pods share, and shows how long a removal
        // takes on this machine.
        node.apply(&manifests::serving("harmless"));
        node.wait("harmless", "to be ready", PodView::ready);
        let removal = removed(&node, &["harmless"]);
        let traces = settled(&node);
        let held = Held::by(&node.agent).unwrap();
        let before = BYSTANDERS.iter().map(|name| (*name, identity(&node, name))).collect();
        let witness = Witness::start(&node.agent.socket());
        let quiet = Quiet { cpu: 0.0, resident: 0, removal };
        let mut scene =
            Scene { node, witness, before, traces, held, quiet, since: (Instant::now(), Duration::ZERO) };
        scene.open_account();
        scene
    }

    /// Measures the idle agent and starts the account.
    fn open_account(&mut self) {
        let pid = self.node.agent.pid().unwrap();
        let (at, used) = (Instant::now(), cpu_of(pid).unwrap());
        std::thread::sleep(QUIET);
        let now = cpu_of(pid).unwrap();
        self.quiet.cpu = (now - used).as_secs_f64() / at.elapsed().as_secs_f64();
        self.quiet.resident = resident_kib(pid).unwrap();
        // The kernel keeps the highest figure from now on (proc(5), clear_refs).
        workdir::write(Path::new(&format!("/proc/{pid}/clear_refs")), "5").unwrap();
        self.since = (Instant::now(), now);
    }

    /// Kills the agent and starts it again: the agent must cope with the remains of the case. The account
    /// starts again.
    pub(crate) fn restart_agent(&mut self) {
        self.node.agent.kill9();
        self.node.agent.resume().unwrap();
        self.node.wait("bystander", "to be ready", PodView::ready);
        self.held = Held::by(&self.node.agent).unwrap();
        self.open_account();
    }

    /// Applies a hostile pod and waits until it has done its harm.
    pub(crate) fn run(&self, pod: &Value) -> PodView {
        self.node.apply(pod);
        self.harmed(pod["metadata"]["name"].as_str().unwrap())
    }

    /// Waits until a hostile pod has done its harm, after which it listens.
    pub(crate) fn harmed(&self, name: &str) -> PodView {
        self.node.wait(name, "to have done its harm", PodView::ready)
    }

    /// Starts and removes a harmless pod with every kind of volume that is made for pods, next to the hostile
    /// ones.
    pub(crate) fn another_comes_and_goes(&self) {
        let conf = crate::node::object("ConfigMap", "conf", &json!({ "color": "red" }));
        let word = crate::node::object("Secret", "word", &json!({ "pass": "sesame" }));
        [conf, word].iter().for_each(|object| self.node.apply(object));
        let mut pod = manifests::serving("guest");
        pod["spec"]["volumes"] = json!([
            { "name": "conf", "configMap": { "name": "conf" } },
            { "name": "word", "secret": { "secretName": "word" } },
            { "name": "disk", "emptyDir": {} },
            { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
        ]);
        let mounts = json!([
            { "name": "conf", "mountPath": "/conf" }, { "name": "word", "mountPath": "/word" },
            { "name": "disk", "mountPath": "/part", "subPath": "part" }, { "name": "memory", "mountPath": "/memory" },
        ]);
        self.node.apply(&manifests::with(pod, "volumeMounts", mounts));
        self.node.wait("guest", "to be ready", PodView::ready);
        let took = removed(&self.node, &["guest"]);
        let most = self.longest_stay(Duration::ZERO);
        assert!(
            took <= most,
            "a harmless pod took {took:?} to be removed next to hostile ones; the limit is {most:?}"
        );
        for object in ["configmap-conf.yaml", "secret-word.yaml"] {
            self.node.agent.remove(object).unwrap();
        }
    }

    /// Kills the sandbox of a pod, as a crash would: the pod needs a new one.
    pub(crate) fn kill_sandbox(&self, pod: &PodView) {
        let of_pod = |path: &Path| path.to_string_lossy().contains(pod.uid());
        let root = self.node.containerd.cgroup().dir("memory").unwrap();
        let pids = beelet_tests::guards::processes_below(&root);
        let sandbox = pids.into_iter().find(|pid| {
            let pid = pid.as_raw_nonzero();
            let cgroup = std::fs::read(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            command.starts_with(b"/pause\0") && of_pod(Path::new(&*String::from_utf8_lossy(&cgroup)))
        });
        rustix::process::kill_process(sandbox.unwrap(), rustix::process::Signal::KILL).unwrap();
    }

    /// Kills the sandbox of a pod, and waits until the pod's containers run again.
    pub(crate) fn lose_sandbox(&self, pod: &PodView) -> PodView {
        self.kill_sandbox(pod);
        let before = pod.container("main").unwrap().container_id.clone();
        let name = pod.pod.metadata.name.clone().unwrap();
        let name = name.strip_suffix("-testnode").unwrap();
        self.node.wait(name, "to run again", |pod| {
            pod.ready() && pod.container("main").is_some_and(|container| container.container_id != before)
        })
    }

    /// Returns the longest time that a pod may stay after its manifest's removal.
    fn longest_stay(&self, more: Duration) -> Duration {
        GRACE + FAREWELL + self.quiet.removal + more
    }

    /// Removes the hostile pods, and checks that everything is as before them.
    pub(crate) fn end(&self, hostile: &[&str], allowance: Allowance) {
        self.gone(Instant::now(), hostile, allowance);
    }

    /// Removes pods that can end only from the moment `from` on, and checks that everything is as before
    /// them. Manifests that are still there are removed.
    pub(crate) fn gone(&self, from: Instant, hostile: &[&str], allowance: Allowance) {
        for name in hostile {
            let _ = self.node.agent.remove(&format!("pod-{name}.yaml")); // the manifest may be removed already
        }
        let most = self.longest_stay(allowance.time);
        wait_for("the hostile pods to be removed", PATIENCE + most, || {
            let there = |watch: &Watch| hostile.iter().any(|name| watch.pod(name).is_some());
            let (any, how) = self.node.agent.inspect(|watch| (there(watch), watch.describe())).unwrap();
            if any { Err(how) } else { Ok(()) }
        })
        .unwrap();
        let took = from.elapsed();
        self.traces.wait_as_before(&self.node.containerd, &self.node.agent).unwrap();
        let pid = self.node.agent.pid().unwrap();
        let (ran, used) = (self.since.0.elapsed(), cpu_of(pid).unwrap() - self.since.1);
        let highest = high_water(pid);
        let Quiet { cpu, resident, removal } = self.quiet;
        let (share, once) = CPU;
        let most_cpu = ran.mul_f64(2.0 * cpu + share) + once + allowance.cpu;
        let most_memory = 2 * resident + MEMORY;
        eprintln!(
            "{hostile:?}: removed after {took:.1?} of {most:.1?} (a harmless one: {removal:.1?}); CPU {used:.2?} of \
             {most_cpu:.2?} in {ran:.1?} (quiet: {:.1} %); memory {} of {} MiB (quiet: {} MiB)",
            cpu * 100.0,
            highest >> 10,
            most_memory >> 10,
            resident >> 10,
        );
        let seen = self.witness.end();
        assert_eq!(seen, Vec::<String>::new(), "bystanders were affected");
        for (name, before) in &self.before {
            assert_eq!(identity(&self.node, name), *before, "{name}");
        }
        assert!(took <= most, "the pods were removed after {took:?}; the limit is {most:?}");
        assert!(used <= most_cpu, "the agent used {used:?} of CPU; the limit is {most_cpu:?}");
        assert!(highest <= most_memory, "the agent used {highest} KiB; the limit is {most_memory}");
        assert_eq!(waits_for_a_fifo(pid), 0, "threads of the agent wait for a FIFO that a container made");
        wait_for("the agent to close its files", PATIENCE, || {
            let now = Held::by(&self.node.agent).unwrap();
            // The allowance is for the current clients and for files that the agent reopens at times.
            if now.files() <= self.held.files() + 4 { Ok(()) } else { Err(self.held.opened(&now)) }
        })
        .unwrap();
    }
}

/// Removes pods and waits until they are removed. Returns the time that took.
fn removed(node: &Node, pods: &[&str]) -> Duration {
    let started = Instant::now();
    pods.iter().for_each(|name| node.remove(name));
    pods.iter().for_each(|name| node.wait_gone(name));
    started.elapsed()
}

/// Returns the node's traces once two readings are equal: the runtime cleans up after the pods.
fn settled(node: &Node) -> Traces {
    let look = || Traces::of(&node.containerd, &node.agent).unwrap();
    let mut last = look();
    wait_for("the traces of a removed pod to settle", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(500));
        let now = look();
        let same = now == last;
        last = now;
        if same { Ok(()) } else { Err("the traces still change") }
    })
    .unwrap();
    last
}

/// Returns the highest resident memory of a process since the last reset, in KiB.
fn high_water(pid: u32) -> u64 {
    let status = workdir::read(Path::new(&format!("/proc/{pid}/status"))).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// Returns the number of threads of a process that sleep in the open of a FIFO whose other end is never
/// opened.
fn waits_for_a_fifo(pid: u32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let where_it_sleeps = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("wchan")).ok());
    where_it_sleeps.filter(|place| place == "wait_for_partner" || place == "fifo_open").count()
}

/// Returns the parts of a bystander that must not change: its identity, its containers, and the times of its
/// conditions.
fn identity(node: &Node, name: &str) -> Value {
    let pod = node.agent.inspect(|watch| watch.pod(name).cloned()).unwrap().unwrap();
    let status = pod.pod.status.clone().unwrap();
    let containers: Vec<_> =
        pod.containers().iter().map(|one| (one.container_id.clone(), one.restart_count, one.ready)).collect();
    json!({ "uid": pod.uid(), "ip": pod.ip(), "conditions": status.conditions, "containers": containers })
}

/// Watches the bystanders' events and records every moment in which a bystander is not ready or has
/// restarted.
struct Witness {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<String>>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Witness {
    fn start(socket: &Path) -> Witness {
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (stopped, records, socket) = (Arc::clone(&stop), Arc::clone(&seen), socket.to_path_buf());
        let thread = std::thread::spawn(move || {
            // An agent that is restarted has a new stream.
            while !stopped.load(Ordering::Relaxed) {
                let watched = block_on(async {
                    let mut watch = Watch::start(&socket).await?;
                    // An agent that has just started may not know the pods yet.
                    let mut known = BTreeSet::new();
                    while !stopped.load(Ordering::Relaxed) {
                        let next = tokio::time::timeout(Duration::from_millis(200), watch.next()).await;
                        next.map_or(Ok(()), |event| event.map(drop))?;
                        for name in BYSTANDERS {
                            let pod = watch.pod(name);
                            known.extend(pod.map(|_| name));
                            let well = pod.is_some_and(|pod| pod.ready() && pod.restarts() == 0);
                            if !well && known.contains(name) {
                                records.lock().unwrap().push(format!("{name}: {}", watch.describe()));
                            }
                        }
                    }
                    anyhow::Ok(())
                });
                if watched.is_err() {
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        });
        Witness { stop, seen, thread: Mutex::new(Some(thread)) }
    }

    fn end(&self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.lock().unwrap().take() {
            thread.join().unwrap();
        }
        let mut seen = std::mem::take(&mut *self.seen.lock().unwrap());
        seen.truncate(3);
        seen
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Returns a pod that does harm by a script and listens afterwards, which makes it ready.
pub(crate) fn hostile(name: &str, harm: &str) -> Value {
    let serve = format!("exec /bin/testapp serve --tcp {PORT} --control {CONTROL}");
    let script = format!("set -e; {harm}; {serve}");
    let pod = manifests::pod(name, &["/bin/sh", "-c", &script]);
    manifests::with(pod, "readinessProbe", json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1 }))
}

/// Returns the pod with these volumes, and these mounts in its container.
pub(crate) fn with_volumes(mut pod: Value, volumes: Value, mounts: Value) -> Value {
    pod["spec"]["volumes"] = volumes;
    manifests::with(pod, "volumeMounts", mounts)
}

/// Returns the number that the variable names; otherwise the whole number with `--long`, or the small one.
pub(crate) fn scaled(variable: &str, small: usize, whole: usize) -> usize {
    let given = std::env::var(variable).ok().and_then(|text| text.parse().ok());
    given.unwrap_or(if beelet_tests::requires::long().is_ok() { whole } else { small })
}
