//! A node with pods that must notice nothing, and the account of what a case cost.

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
/// How much longer than its grace period a hostile pod may stay.
const FAREWELL: Duration = Duration::from_secs(10);
/// How long the agent is watched while nothing happens.
const QUIET: Duration = Duration::from_secs(3);
/// What the agent may hold for a moment beyond twice its quiet figure, in KiB.
const MEMORY: u64 = 16 << 10;
/// The CPU that it may use beyond twice its quiet figure: a part of one core, and so much at once for a pod's
/// coming and going.
const CPU: (f64, Duration) = (0.1, Duration::from_secs(2));
/// Those that must notice nothing: one whose readiness the kernel tells, one whose liveness an HTTP probe
/// asks for.
const BYSTANDERS: [&str; 2] = ["bystander", "answering"];

/// What a case may cost beyond what all may.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Allowance {
    /// For what must be done once for each of many things, like removing files.
    pub(crate) time: Duration,
    /// CPU for the same.
    pub(crate) cpu: Duration,
}

/// What the agent used while nothing happened.
#[derive(Debug, Clone, Copy)]
struct Quiet {
    /// A part of one core.
    cpu: f64,
    /// KiB.
    resident: u64,
    /// How long a harmless pod took to go.
    removal: Duration,
}

/// A node under attack: an agent on a containerd of its own, and pods beside the hostile ones that must
/// notice nothing.
pub(crate) struct Scene {
    pub(crate) node: Node,
    witness: Witness,
    before: BTreeMap<&'static str, Value>,
    traces: Traces,
    held: Held,
    quiet: Quiet,
    /// Since when the account runs, and the agent's CPU time at that moment.
    since: (Instant, Duration),
}

impl Scene {
    /// A node on which nothing happens but two pods that run.
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
        // What all pods share is made with the first one that goes, and it shows what this machine takes for
        // one.
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

    /// Looks at the agent while nothing happens, and counts from now on.
    fn open_account(&mut self) {
        let pid = self.node.agent.pid().unwrap();
        let (at, used) = (Instant::now(), cpu_of(pid).unwrap());
        std::thread::sleep(QUIET);
        let now = cpu_of(pid).unwrap();
        self.quiet.cpu = (now - used).as_secs_f64() / at.elapsed().as_secs_f64();
        self.quiet.resident = resident_kib(pid).unwrap();
        // From now on the kernel keeps the highest figure (proc(5), clear_refs).
        workdir::write(Path::new(&format!("/proc/{pid}/clear_refs")), "5").unwrap();
        self.since = (Instant::now(), now);
    }

    /// Kills the agent and starts it again: it must find its way about what the case has made. Its account
    /// begins anew.
    pub(crate) fn restart_agent(&mut self) {
        self.node.agent.kill9();
        self.node.agent.resume().unwrap();
        self.node.wait("bystander", "to be ready", PodView::ready);
        self.held = Held::by(&self.node.agent).unwrap();
        self.open_account();
    }

    /// Puts a hostile pod's manifest there and waits until it has done its harm.
    pub(crate) fn run(&self, pod: &Value) -> PodView {
        self.node.apply(pod);
        self.harmed(pod["metadata"]["name"].as_str().unwrap())
    }

    /// Waits until a hostile pod has done its harm: then it listens.
    pub(crate) fn harmed(&self, name: &str) -> PodView {
        self.node.wait(name, "to have done its harm", PodView::ready)
    }

    /// A harmless pod with every kind of volume that is made for pods comes and goes while the hostile ones
    /// are there.
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
        assert!(took <= most, "a harmless pod took {took:?} to go beside hostile ones, {most:?} is the most");
        for object in ["configmap-conf.yaml", "secret-word.yaml"] {
            self.node.agent.remove(object).unwrap();
        }
    }

    /// Ends the sandbox of a pod, as a crash would: the pod must be set up anew.
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

    /// Ends the sandbox of a pod, and waits until its containers run again.
    pub(crate) fn lose_sandbox(&self, pod: &PodView) -> PodView {
        self.kill_sandbox(pod);
        let before = pod.container("main").unwrap().container_id.clone();
        let name = pod.pod.metadata.name.clone().unwrap();
        let name = name.strip_suffix("-testnode").unwrap();
        self.node.wait(name, "to run again", |pod| {
            pod.ready() && pod.container("main").is_some_and(|container| container.container_id != before)
        })
    }

    /// The longest that a pod may stay once its manifest is gone.
    fn longest_stay(&self, more: Duration) -> Duration {
        GRACE + FAREWELL + self.quiet.removal + more
    }

    /// Takes the hostile pods away, and sees that all is as it was before them.
    pub(crate) fn end(&self, hostile: &[&str], allowance: Allowance) {
        self.gone(Instant::now(), hostile, allowance);
    }

    /// The same for pods that can go only from some moment on. Those whose manifests are still there are told
    /// to go.
    pub(crate) fn gone(&self, from: Instant, hostile: &[&str], allowance: Allowance) {
        for name in hostile {
            let _ = self.node.agent.remove(&format!("pod-{name}.yaml")); // it may have been taken already
        }
        let most = self.longest_stay(allowance.time);
        wait_for("the hostile pods to be gone", PATIENCE + most, || {
            let there = |watch: &Watch| hostile.iter().any(|name| watch.pod(name).is_some());
            let (any, how) = self.node.agent.look(|watch| (there(watch), watch.describe())).unwrap();
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
            "{hostile:?}: gone after {took:.1?} of {most:.1?} (a harmless one: {removal:.1?}); CPU {used:.2?} of \
             {most_cpu:.2?} in {ran:.1?} (quiet: {:.1} %); memory {} of {} MiB (quiet: {} MiB)",
            cpu * 100.0,
            highest >> 10,
            most_memory >> 10,
            resident >> 10,
        );
        let seen = self.witness.end();
        assert_eq!(seen, Vec::<String>::new(), "bystanders noticed");
        for (name, before) in &self.before {
            assert_eq!(identity(&self.node, name), *before, "{name}");
        }
        assert!(took <= most, "the pods were gone after {took:?}, {most:?} is the most");
        assert!(used <= most_cpu, "the agent used {used:?} of CPU, {most_cpu:?} is the most");
        assert!(highest <= most_memory, "the agent used {highest} KiB, {most_memory} is the most");
        assert_eq!(waits_for_a_fifo(pid), 0, "threads of the agent wait for a FIFO that a container made");
        wait_for("the agent to close its files", PATIENCE, || {
            let now = Held::by(&self.node.agent).unwrap();
            // One for each client that is here now, and for what is read anew now and then.
            if now.files() <= self.held.files() + 4 { Ok(()) } else { Err(self.held.opened(&now)) }
        })
        .unwrap();
    }
}

/// Takes pods away and waits until they are gone; how long that took.
fn removed(node: &Node, pods: &[&str]) -> Duration {
    let started = Instant::now();
    pods.iter().for_each(|name| node.remove(name));
    pods.iter().for_each(|name| node.wait_gone(name));
    started.elapsed()
}

/// The node's traces, once two looks see the same: the runtime cleans up behind the pods.
fn settled(node: &Node) -> Traces {
    let look = || Traces::of(&node.containerd, &node.agent).unwrap();
    let mut last = look();
    wait_for("the traces of a pod that is gone to settle", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(500));
        let now = look();
        let same = now == last;
        last = now;
        if same { Ok(()) } else { Err("they change") }
    })
    .unwrap();
    last
}

/// The highest figure of a process' resident memory since it was set back, in KiB.
fn high_water(pid: u32) -> u64 {
    let status = workdir::read(Path::new(&format!("/proc/{pid}/status"))).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

/// How many threads of a process sleep in the opening of a FIFO whose other end nobody opens.
fn waits_for_a_fifo(pid: u32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let where_it_sleeps = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("wchan")).ok());
    where_it_sleeps.filter(|place| place == "wait_for_partner" || place == "fifo_open").count()
}

/// What of a bystander must not change: its identity, its containers, and since when it is ready.
fn identity(node: &Node, name: &str) -> Value {
    let pod = node.agent.look(|watch| watch.pod(name).cloned()).unwrap().unwrap();
    let status = pod.pod.status.clone().unwrap();
    let containers: Vec<_> =
        pod.containers().iter().map(|one| (one.container_id.clone(), one.restart_count, one.ready)).collect();
    json!({ "uid": pod.uid(), "ip": pod.ip(), "conditions": status.conditions, "containers": containers })
}

/// Watches the bystanders' events: every moment in which one isn't ready, or has restarted.
struct Witness {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<String>>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Witness {
    fn start(socket: &Path) -> Witness {
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (stopped, told, socket) = (Arc::clone(&stop), Arc::clone(&seen), socket.to_path_buf());
        let thread = std::thread::spawn(move || {
            // An agent that is started again has a new stream.
            while !stopped.load(Ordering::Relaxed) {
                let watched = block_on(async {
                    let mut watch = Watch::start(&socket).await?;
                    // One that has just started may know of no pods yet.
                    let mut known = BTreeSet::new();
                    while !stopped.load(Ordering::Relaxed) {
                        let next = tokio::time::timeout(Duration::from_millis(200), watch.next()).await;
                        next.map_or(Ok(()), |event| event.map(drop))?;
                        for name in BYSTANDERS {
                            let pod = watch.pod(name);
                            known.extend(pod.map(|_| name));
                            let well = pod.is_some_and(|pod| pod.ready() && pod.restarts() == 0);
                            if !well && known.contains(name) {
                                told.lock().unwrap().push(format!("{name}: {}", watch.describe()));
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

/// A pod that does harm by a script and listens when it is done: it is ready then.
pub(crate) fn hostile(name: &str, harm: &str) -> Value {
    let serve = format!("exec /bin/testapp serve --tcp {PORT} --control {CONTROL}");
    let script = format!("set -e; {harm}; {serve}");
    let pod = manifests::pod(name, &["/bin/sh", "-c", &script]);
    manifests::with(pod, "readinessProbe", json!({ "tcpSocket": { "port": PORT }, "periodSeconds": 1 }))
}

/// The pod with these volumes, and these mounts in its container.
pub(crate) fn with_volumes(mut pod: Value, volumes: Value, mounts: Value) -> Value {
    pod["spec"]["volumes"] = volumes;
    manifests::with(pod, "volumeMounts", mounts)
}

/// A number of things: the one that a variable names, else the whole one with `--long`, else the small one.
pub(crate) fn scaled(variable: &str, small: usize, whole: usize) -> usize {
    let given = std::env::var(variable).ok().and_then(|text| text.parse().ok());
    given.unwrap_or(if beelet_tests::requires::long().is_ok() { whole } else { small })
}
