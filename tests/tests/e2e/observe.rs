//! `beelet observe` next to the owner of a real containerd: the observer reports the values of the kernel's
//! own files and changes nothing. The owner is `beelet run` on the same runtime, which to an observer is as
//! foreign as a kubelet.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::node::installed;
use beelet_cri::Runtime;
use beelet_tests::agent::{self, Agent, http_get};
use beelet_tests::cgroup_values::pod_path;
use beelet_tests::confine::{Installed, Supervisor};
use beelet_tests::containerd::{Containerd, block_on};
use beelet_tests::guards::{CgroupRoot, Process};
use beelet_tests::kubelet::{self, Kubelet};
use beelet_tests::machine::{cpu_seconds_of, stolen_seconds};
use beelet_tests::pages::{Format, PAGES, families};
use beelet_tests::pods::{PodView, Watch};
use beelet_tests::requires::{self, Missing, python_prometheus};
use beelet_tests::workdir::{self, PATIENCE, wait_for};
use beelet_tests::{manifests, ports, require};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// An observer as a child process.
struct Observer {
    process: Process,
    // Drop order: after the process, because the supervisor waits for the end of the process.
    _supervisor: Supervisor,
    socket: PathBuf,
    address: String,
    pins: PathBuf,
    log: PathBuf,
}

impl Observer {
    /// Starts an observer of the runtime and its cgroup root, with its pins in the BPF file system `bpffs`.
    fn start_at(bpffs: &Path, containerd: &Containerd) -> Observer {
        Observer::start_as("observe", bpffs, containerd, &[])
    }

    /// Starts an observer with a name of its own, so that two can run.
    fn start_as(name: &str, bpffs: &Path, containerd: &Containerd, more: &[&str]) -> Observer {
        let dir = containerd.dir();
        let [port] = ports::free().unwrap();
        let (socket, log) = (dir.join(format!("{name}/beelet.sock")), dir.join(format!("{name}.log")));
        let address = format!("127.0.0.1:{port}");
        let output = std::fs::File::create(&log).unwrap();
        let installed = Installed::new(env!("CARGO_BIN_EXE_confined"), "beelet-observe.service");
        let (mut command, handover) = installed.command(&agent::binary().unwrap()).unwrap();
        command
            .args(["observe", "--node-name", "observed", "--listen", &address, "--pin-name", "seen"])
            .args(["--runtime-endpoint", &containerd.endpoint(), "--cgroup-root", containerd.cgroup().path()])
            .args(more)
            .arg("--socket")
            .arg(&socket)
            .arg("--bpffs")
            .arg(bpffs)
            .env_remove("NOTIFY_SOCKET")
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        let process = Process(command.spawn().unwrap());
        drop(command); // the command also holds the other end of the socket
        let supervisor = handover.supervise(process.0.id());
        let supervisor = supervisor.unwrap_or_else(|error| panic!("{error:#}: {}", log.display()));
        let observer =
            Observer { process, _supervisor: supervisor, socket, address, pins: bpffs.join("seen"), log };
        observer.wait("the observer to be healthy", || match observer.get("/healthz") {
            Ok((200, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        observer
    }

    fn get(&self, path: &str) -> anyhow::Result<(u16, String)> {
        http_get(&self.address, path)
    }

    /// The snapshot that `beelet top -o json` prints for this observer.
    fn snapshot(&self) -> Result<Value, String> {
        let mut top = Command::new(agent::binary().unwrap());
        let output = top.args(["top", "-o", "json", "--socket"]).arg(&self.socket).output().unwrap();
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
    }

    fn wait<T>(&self, what: &str, condition: impl FnMut() -> Result<T, String>) -> T {
        wait_for(what, PATIENCE, condition)
            .inspect_err(|_| eprintln!("{}", workdir::read(&self.log).unwrap_or_default()))
            .unwrap()
    }

    /// Waits until the pod's container has rates and returns that container.
    fn measured(&self, pod: &str) -> Value {
        self.wait(&format!("{pod} to be measured"), || {
            let snapshot = self.snapshot()?;
            let container = container(&snapshot, pod).ok_or("the container is missing from the snapshot")?;
            if container["last_10s"].is_null() {
                return Err("the container has no rates yet".to_owned());
            }
            Ok(container)
        })
    }
}

fn container(snapshot: &Value, pod: &str) -> Option<Value> {
    let pods = snapshot["pods"].as_array()?;
    let pod = pods.iter().find(|one| one["name"].as_str().is_some_and(|name| name.starts_with(pod)))?;
    Some(pod["containers"][0].clone())
}

/// CPU weight of a container that requests 50m (KEP-2254, by the formula that runtimes have used since 2025).
const BUSY_WEIGHT: &str = "11";
/// The same on cgroup version 1.
const BUSY_SHARES: &str = "51";

/// A pod that keeps a CPU busy, up to its limit.
fn busy(name: &str) -> Value {
    let pod = manifests::pod(name, &["sh", "-c", "while true; do :; done"]);
    manifests::with_resources(pod, ("50m", "32Mi"), ("200m", "64Mi"))
}

fn apply(owner: &Agent, manifest: &Value) -> PodView {
    let name = manifest["metadata"]["name"].as_str().unwrap();
    owner.apply(&format!("{name}.yaml"), manifest.to_string()).unwrap();
    let found = |watch: &Watch| watch.pod(name).filter(|pod| pod.ready()).cloned();
    owner.until(&format!("{name} to be ready"), found).unwrap()
}

/// Waits until the owner has written the shares of a [`busy`] pod at every level. The owner widens the QoS
/// class a moment after the pod started. On cgroup version 2 an older runtime also converts shares to another
/// weight than the kubelet does, and the owner corrects the container's weight then.
fn weighed(root: &CgroupRoot, pod: &PodView) {
    let id = pod.container("main").unwrap().container_id.as_deref().unwrap();
    let id = id.trim_start_matches("containerd://");
    let container = format!("{}/{id}", pod_path("Burstable", pod.uid()));
    for path in ["/kubepods/burstable", &container] {
        let folder = root.folder("cpu", path).unwrap();
        wait_for("the owner to set the shares", PATIENCE, || {
            let files = [("cpu.shares", BUSY_SHARES), ("cpu.weight", BUSY_WEIGHT)];
            let found = files.map(|(file, _)| std::fs::read_to_string(folder.join(file)).ok());
            let is_set = files
                .iter()
                .zip(&found)
                .any(|((_, value), found)| found.as_deref().is_some_and(|found| found.trim() == *value));
            if is_set { Ok(()) } else { Err(format!("{}: {found:?}", folder.display())) }
        })
        .unwrap();
    }
}

/// Returns the contents of every settable file below the root, by path.
fn settings(root: &CgroupRoot) -> BTreeMap<PathBuf, String> {
    const SET: [&str; 13] = [
        "cpu.shares",
        "cpu.cfs_quota_us",
        "cpu.cfs_burst_us",
        "cpu.weight",
        "cpu.max",
        "cpu.max.burst",
        "cpu.idle",
        "memory.limit_in_bytes",
        "memory.min",
        "memory.low",
        "memory.max",
        "memory.high",
        "pids.max",
    ];
    fn collect(dir: &Path, into: &mut BTreeMap<PathBuf, String>) {
        for file in SET {
            if let Ok(text) = std::fs::read_to_string(dir.join(file)) {
                into.insert(dir.join(file), text);
            }
        }
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                collect(&entry.path(), into);
            }
        }
    }
    let mut found = BTreeMap::new();
    root.dirs().iter().for_each(|dir| collect(dir, &mut found));
    found
}

/// Returns the ids of the runtime's containers.
fn containers(containerd: &Containerd) -> String {
    let output = containerd.ctr().args(["containers", "ls", "-q"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn an_observer_reports_the_kernels_values_and_leaves_no_trace() {
    require!(containerd, bpf);
    let containerd = Containerd::start_for_test().unwrap();
    let owner = Agent::start(installed(&containerd)).unwrap();
    weighed(containerd.cgroup(), &apply(&owner, &busy("busy")));
    let (set, made) = (settings(containerd.cgroup()), containers(&containerd));
    let mut observer = Observer::start_at(&owner.dir().join("bpf"), &containerd);

    // The kernel's files are read before and after: the observer's value lies between.
    let seen = observer.measured("busy");
    let cgroup = seen["cgroup"].as_str().unwrap();
    let before = cpu_seconds_of(containerd.cgroup(), cgroup).unwrap();
    let snapshot = observer.snapshot().unwrap();
    let after = cpu_seconds_of(containerd.cgroup(), cgroup).unwrap();
    let ours = container(&snapshot, "busy").unwrap();
    let cpu = ours["usage"]["cpu_seconds"].as_f64().unwrap();
    // cgroup2's and cpuacct's clocks differ by less than a scheduler tick.
    assert!(before - 0.05 <= cpu && cpu <= after + 0.05, "{before} <= {cpu} <= {after}");
    assert_eq!(ours["usage"]["memory_limit_bytes"], 64 << 20);
    assert_eq!(ours["usage"]["cpu_limit"], 0.2);
    let rates = &ours["last_10s"];
    assert!(rates["cpu"].as_f64().unwrap() > 0.02, "{rates:#}");
    assert!(rates["throttled"].as_f64().is_some(), "{rates:#}");
    assert_eq!((&snapshot["node"], &snapshot["mode"]), (&"observed".into(), &"observe".into()));

    pages(&observer);

    // Pods are added and removed while the observer runs.
    apply(&owner, &manifests::pod("late", &["sh", "-c", "sleep 1000"]));
    observer.measured("late");
    owner.remove("late.yaml").unwrap();
    observer.wait("the second pod to leave the snapshot", || {
        match container(&observer.snapshot()?, "late") {
            None => Ok(()),
            Some(still) => Err(format!("{still:#}")),
        }
    });
    owner.until("the pod to be removed", |watch| watch.pod("late").is_none().then_some(())).unwrap();

    // The observer ends without a trace, and every setting is unchanged.
    kill_process(Pid::from_child(&observer.process.0), Signal::TERM).unwrap();
    let status = observer.process.0.wait().unwrap();
    assert!(status.success(), "{status}: {}", workdir::read(&observer.log).unwrap());
    assert!(!observer.socket.exists() && !observer.pins.exists());
    assert_eq!(containers(&containerd), made);
    unchanged(containerd.cgroup(), &set);
}

/// Waits until every setting has its earlier value: the owner itself needs a moment after a pod's removal.
fn unchanged(root: &CgroupRoot, set: &BTreeMap<PathBuf, String>) {
    wait_for("every setting to have its earlier value", PATIENCE, || {
        let now = settings(root);
        let files: Vec<&PathBuf> =
            set.keys().chain(now.keys()).filter(|file| set.get(*file) != now.get(*file)).collect();
        let other: Vec<_> = files.iter().map(|file| (file, set.get(*file), now.get(*file))).collect();
        if other.is_empty() { Ok(()) } else { Err(format!("{other:#?}")) }
    })
    .unwrap();
}

/// Checks that every page shows the pod.
fn pages(observer: &Observer) {
    for (page, expected) in [
        ("/metrics", "beelet_observe_lists_total"),
        ("/metrics/cadvisor", "container_memory_working_set_bytes{container=\"main\""),
        ("/metrics/resource", "container_cpu_usage_seconds_total{container=\"main\""),
        ("/stats/summary", "\"podRef\":{\"name\":\"busy-"),
    ] {
        let (status, body) = observer.get(page).unwrap();
        assert!(status == 200 && body.contains(expected), "{page}: {status}\n{body}");
        let is_metrics = PAGES.iter().any(|(path, _)| *path == page);
        if is_metrics && python_prometheus().is_ok() {
            let judged = families(&body, Format::Text);
            assert!(judged.is_ok(), "{page}: {:?}\n{body}", judged.err());
        }
    }
    // Only root may read the pods' manifests.
    let (status, body) = observer.get("/pods").unwrap();
    assert!(status == 403 && !body.contains("busy"), "{status}\n{body}");
}

/// Returns the difference between the observer's and the kernel's value, in per cent of the kernel's.
fn apart(ours: f64, kernels: f64) -> f64 {
    (ours - kernels).abs() / kernels * 100.0
}

/// Memory of a container, from the kernel's own files.
#[derive(Debug, Clone, Copy)]
struct Memory {
    working_set: f64,
    rss: f64,
}

impl Memory {
    fn read(root: &CgroupRoot, cgroup: &str) -> Option<Memory> {
        let dir = root.dir("memory")?.join(cgroup.trim_start_matches('/'));
        let number = |file: &str| std::fs::read_to_string(dir.join(file)).ok()?.trim().parse::<f64>().ok();
        let usage = number("memory.usage_in_bytes").or_else(|| number("memory.current"))?;
        let stat = std::fs::read_to_string(dir.join("memory.stat")).ok()?;
        let of =
            |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        let inactive = of("total_inactive_file ").or_else(|| of("inactive_file ")).unwrap_or(0.0);
        let rss = of("total_rss ").or_else(|| of("anon "))?;
        Some(Memory { working_set: usage - inactive, rss })
    }
}

/// Largest difference between the observer's numbers and the kernel's, in per cent, and the number of
/// comparisons.
#[derive(Debug, Default)]
struct Worst {
    cpu: (f64, usize),
    working_set: (f64, usize),
    rss: (f64, usize),
}

impl Worst {
    /// Compares every container of a snapshot whose usage is large enough for one per cent to exceed a page
    /// or a tick. The files are read before and after the snapshot: any value between the two readings is
    /// right.
    fn compare(&mut self, root: &CgroupRoot, observer: &Observer) {
        let cgroups: Vec<String> =
            running(&observer.snapshot().unwrap()).map(|one| cgroup_of(&one)).collect();
        let look = |cgroup: &String| {
            let cpu = cpu_seconds_of(root, cgroup).ok()?;
            Some((cgroup.clone(), (cpu, Memory::read(root, cgroup)?)))
        };
        let before: BTreeMap<String, (f64, Memory)> = cgroups.iter().filter_map(look).collect();
        let snapshot = observer.snapshot().unwrap();
        let after: BTreeMap<String, (f64, Memory)> = cgroups.iter().filter_map(look).collect();
        for container in running(&snapshot) {
            let cgroup = cgroup_of(&container);
            let (Some(before), Some(after)) = (before.get(&cgroup), after.get(&cgroup)) else { continue };
            let usage = |field: &str| container["usage"][field].as_f64().unwrap();
            record(&mut self.cpu, usage("cpu_seconds"), (before.0, after.0), 1.0);
            let megabyte = 1e6;
            let of = |field: fn(&Memory) -> f64| (field(&before.1), field(&after.1));
            record(
                &mut self.working_set,
                usage("working_set_bytes"),
                of(|memory| memory.working_set),
                megabyte,
            );
            record(&mut self.rss, usage("rss_bytes"), of(|memory| memory.rss), megabyte);
        }
    }
}

fn record(worst: &mut (f64, usize), ours: f64, (before, after): (f64, f64), least: f64) {
    let (low, high) = (before.min(after), before.max(after));
    if low >= least {
        let nearest = ours.clamp(low, high);
        *worst = (worst.0.max(apart(ours, nearest)), worst.1 + 1);
    }
}

/// Returns the containers of a snapshot that have a usage reading.
fn running(snapshot: &Value) -> impl Iterator<Item = Value> {
    let pods = snapshot["pods"].as_array().cloned().unwrap_or_default();
    let containers =
        pods.into_iter().flat_map(|pod| pod["containers"].as_array().cloned().unwrap_or_default());
    containers.filter(|container| !container["usage"].is_null())
}

fn cgroup_of(container: &Value) -> String {
    container["cgroup"].as_str().unwrap().to_owned()
}

/// Returns the runtime's status of every sandbox and container, by id.
fn world(containerd: &Containerd) -> BTreeMap<String, String> {
    let endpoint = containerd.endpoint();
    block_on(async move {
        let runtime = Runtime::new(&endpoint, Duration::from_secs(30))?;
        let (sandboxes, containers) =
            (runtime.sandboxes.list(None).await?, runtime.containers.list(None).await?);
        let sorted =
            |labels: &HashMap<String, String>| labels.clone().into_iter().collect::<BTreeMap<_, _>>();
        let sandboxes = sandboxes.iter().map(|one| {
            let what = (one.state(), one.created_at, sorted(&one.labels), sorted(&one.annotations));
            (one.id.clone(), format!("sandbox {what:?}"))
        });
        let containers = containers.iter().map(|one| {
            let what = (one.state(), one.created_at, sorted(&one.labels), sorted(&one.annotations));
            (one.id.clone(), format!("container {what:?} {}", one.image_ref))
        });
        Ok(sandboxes.chain(containers).collect())
    })
    .unwrap()
}

/// Events that the runtime publishes to all of its clients, from the start of this process on. They come from
/// containerd's own subscription, as CRI's allows only one subscriber.
struct Events {
    _process: Process,
    file: PathBuf,
}

impl Events {
    fn follow(containerd: &Containerd) -> Events {
        let file = containerd.dir().join("events.log");
        let output = std::fs::File::create(&file).unwrap();
        let mut command = containerd.ctr();
        command.arg("events").stdin(Stdio::null()).stdout(output).stderr(Stdio::inherit());
        Events { _process: Process(command.spawn().unwrap()), file }
    }

    /// Returns the events received so far, one per line.
    fn so_far(&self) -> Vec<String> {
        workdir::read(&self.file).unwrap().lines().map(str::to_owned).collect()
    }
}

/// Time during which nothing may change while an observer runs.
const QUIET: Duration = Duration::from_secs(15);

#[test]
fn beside_a_kubelet_nothing_is_changed_and_the_numbers_are_right() {
    require!(containerd, bpf);
    let binary = match kubelet::given() {
        Ok(binary) => binary,
        Err(missing) => return requires::skip(&missing),
    };
    let length = Duration::from_secs(if requires::long().is_ok() { 600 } else { 45 });
    let containerd = Containerd::start_for_test().unwrap();
    // Provides only a bpffs; this agent runs no pods.
    let bystander_dir = containerd.dir().join("bystander/bpf");
    let _bpffs = beelet_tests::guards::Mount::bpffs(&bystander_dir).unwrap();
    let kubelet = Kubelet::start(&binary, &containerd).unwrap();
    let why = Kubelet::log;
    kubelet.apply(&busy("busy")).unwrap();
    // Memory that stays in use: 20 MB in a variable.
    let hold = "x=$(head -c 20000000 /dev/zero | tr '\\0' a); while true; do sleep 1; done";
    kubelet.apply(&manifests::pod("holder", &["sh", "-c", hold])).unwrap();

    // The state before the observer starts.
    let is_up =
        |what: &String| what.starts_with("sandbox (SandboxReady") || what.contains("(ContainerRunning");
    wait_for("the two pods to run", PATIENCE * 3, || match world(&containerd) {
        now if now.len() == 4 && now.values().all(is_up) => Ok(()),
        now => Err(format!("{now:#?}\n{}", why(&kubelet))),
    })
    .unwrap();
    let events = Events::follow(&containerd);
    let (mut set, made) = (settings(containerd.cgroup()), world(&containerd));
    // The kubelet changes a pod's cgroups once more a moment after its start.
    wait_for("the kubelet's last change to the cgroups", PATIENCE, || {
        std::thread::sleep(Duration::from_secs(5));
        let before = std::mem::replace(&mut set, settings(containerd.cgroup()));
        if before == set { Ok(()) } else { Err("the settings still change") }
    })
    .unwrap();
    let published = events.so_far();

    // The observer starts and reads, and the runtime and the cgroups stay unchanged.
    let mut observer = Observer::start_at(&bystander_dir, &containerd);
    observer.measured("busy");
    observer.measured("holder");
    let quiet = Instant::now();
    while quiet.elapsed() < QUIET {
        observer.snapshot().unwrap();
    }
    assert_eq!(events.so_far(), published, "the runtime published events without a change");
    assert_eq!(world(&containerd), made);
    unchanged(containerd.cgroup(), &set);

    // Pods are added and removed while the observer runs.
    let until = Instant::now() + length;
    let (mut round, mut worst) = (0, Worst::default());
    while Instant::now() < until {
        let name = format!("churn-{round}");
        kubelet.apply(&manifests::pod(&name, &["sh", "-c", "sleep 1000"])).unwrap();
        observer.measured(&name);
        worst.compare(containerd.cgroup(), &observer);
        kubelet.remove(&name).unwrap();
        observer.wait(&format!("{name} to leave the snapshot"), || {
            match container(&observer.snapshot()?, &name) {
                None => Ok(()),
                Some(still) => Err(format!("{still:#}\n{}", why(&kubelet))),
            }
        });
        round += 1;
    }
    eprintln!("{round} pods added and removed; largest difference (%, comparisons): {worst:?}");
    assert!(
        events.so_far().len() > published.len(),
        "the runtime published no events for the added and removed pods"
    );
    for (what, (apart, samples)) in
        [("CPU", worst.cpu), ("working set", worst.working_set), ("rss", worst.rss)]
    {
        assert!(samples > 0 && apart <= 2.0, "{what}: {apart} % of {samples} comparisons");
    }
    // The kubelet collects the sandboxes of removed pods some time later.
    wait_for("only the two pods to be left", PATIENCE * 3, || match world(&containerd) {
        now if now == made => Ok(()),
        now => Err(format!("{now:#?}\n{}", why(&kubelet))),
    })
    .unwrap();

    // The observer ends, and the runtime and the cgroups stay unchanged.
    let published = events.so_far();
    kill_process(Pid::from_child(&observer.process.0), Signal::TERM).unwrap();
    assert!(observer.process.0.wait().unwrap().success());
    assert!(!observer.pins.exists());
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(events.so_far(), published, "the runtime published events after the observer ended");
    assert_eq!(world(&containerd), made);
    unchanged(containerd.cgroup(), &set);
    drop(kubelet);
}

// ---- By the kernel's programs or by files ----

/// Returns the sum of all samples of a pod's metric on one page.
fn value(observer: &Observer, page: &str, metric: &str, pod: &str) -> Result<f64, String> {
    let (status, body) = observer.get(page).map_err(|error| error.to_string())?;
    let of_pod = format!("pod=\"{pod}-");
    // The pod's cgroup has a line of its own, without a container's name; traffic has only that line.
    let counted = |line: &str| metric.starts_with("container_network_") || !line.contains("container=\"\"");
    let lines = body.lines().filter(|line| {
        line.strip_prefix(metric).is_some_and(|rest| rest.starts_with('{'))
            && line.contains(&of_pod)
            && counted(line)
    });
    // A sample may end with a timestamp.
    let values: Vec<f64> =
        lines.filter_map(|line| line.rsplit_once("} ")?.1.split(' ').next()?.parse().ok()).collect();
    if values.is_empty() {
        return Err(format!("{page} ({status}) has no {metric} of {pod}"));
    }
    Ok(values.iter().sum())
}

/// The same metric from two observers: each with its page and metric name.
struct Pair<'a> {
    by_kernel: (&'a Observer, &'a str, &'a str),
    by_files: (&'a Observer, &'a str, &'a str),
    pod: &'a str,
}

impl Pair<'_> {
    /// Reads the files before and after the programs' value, which must lie between.
    fn read(&self) -> Result<(f64, [f64; 2]), String> {
        // Pages may show a reading of up to 100 ms ago. After this pause they must read again.
        std::thread::sleep(Duration::from_millis(110));
        let get = |(observer, page, metric): (&Observer, &str, &str)| value(observer, page, metric, self.pod);
        let before = get(self.by_files)?;
        let by_kernel = get(self.by_kernel)?;
        Ok((by_kernel, [before, get(self.by_files)?]))
    }

    /// Checks the growth of both values since `then`: they differ by at most 2 per cent, and by 0 if the
    /// kernel's value lies between the two readings of the files. The files' value may be `more` higher. The
    /// growth must be at least `least`.
    fn apart(&self, then: (f64, [f64; 2]), more: f64, least: f64) {
        let now = self.read().unwrap();
        let grown = now.0 - then.0;
        let files = [now.1[0] - then.1[1], now.1[1] - then.1[0] + more];
        let apart = apart(grown, grown.clamp(files[0], files[1]));
        let name = self.by_files.2;
        eprintln!("{name}: {apart:.2} % apart ({grown}, files {} to {})", files[0], files[1]);
        assert!(grown >= least && apart <= 2.0, "{name}: {apart} %: {grown}, files {files:?}");
    }
}

const CADVISOR: &str = "/metrics/cadvisor";

#[test]
fn programs_and_files_say_the_same_of_the_same_containers() {
    require!(containerd, bpf);
    let containerd = Containerd::start_for_test().unwrap();
    let owner = Agent::start(installed(&containerd)).unwrap();
    apply(&owner, &busy("busy"));
    let hold = "x=$(head -c 20000000 /dev/zero | tr '\\0' a); while true; do sleep 1; done";
    apply(&owner, &manifests::pod("holder", &["sh", "-c", hold]));
    let serve = format!("while true; do head -c {BULK} /dev/zero | nc -l -p 5000 > /dev/null; done");
    apply(&owner, &manifests::pod("talker", &["sh", "-c", &serve]));
    let kernel = Observer::start_at(&owner.dir().join("bpf"), &containerd);
    let files = Observer::start_as("files", &owner.dir().join("bpf"), &containerd, &["--bpf", "off"]);
    for observer in [&kernel, &files] {
        ["busy", "holder", "talker"].into_iter().for_each(|pod| drop(observer.measured(pod)));
    }
    assert_eq!(
        (&kernel.snapshot().unwrap()["by_kernel"], &files.snapshot().unwrap()["by_kernel"]),
        (&true.into(), &false.into())
    );

    // Traffic, one bulk in each direction.
    let ours = |direction: &str| format!("beelet_container_network_{direction}_bytes_total");
    let theirs = |direction: &str| format!("container_network_{direction}_bytes_total");
    let names = ["receive", "transmit"].map(|direction| (ours(direction), theirs(direction)));
    let network = names.each_ref().map(|(ours, theirs)| Pair {
        by_kernel: (&kernel, "/metrics", ours),
        by_files: (&files, CADVISOR, theirs),
        pod: "talker",
    });
    let cpu = Pair {
        by_kernel: (&kernel, "/metrics", "beelet_container_on_cpu_seconds_total"),
        by_files: (&files, CADVISOR, "container_cpu_usage_seconds_total"),
        pod: "busy",
    };
    let (started, stolen_before) = (cpu.read().unwrap(), stolen_seconds().unwrap());
    let before = network.each_ref().map(|pair| pair.read().unwrap());
    let ip = owner
        .inspect(|watch| watch.pod("talker").and_then(|pod| pod.ip().map(str::to_owned)))
        .unwrap()
        .unwrap();
    talk(&ip);
    for (pair, then) in network.iter().zip(before) {
        pair.apart(then, 0.0, BULK as f64);
    }

    // Memory, the same for both observers.
    for metric in ["container_memory_working_set_bytes", "container_memory_rss"] {
        let pair = Pair {
            by_kernel: (&kernel, CADVISOR, metric),
            by_files: (&files, CADVISOR, metric),
            pod: "holder",
        };
        let (ours, [one, other]) = pair.read().unwrap();
        let apart = apart(ours, ours.clamp(one.min(other), one.max(other)));
        assert!(ours > 19e6 && apart <= 2.0, "{metric}: {ours} is not {one} to {other}");
    }

    // CPU, over a few seconds of use.
    files.wait("four seconds of CPU", || {
        match value(&files, CADVISOR, cpu.by_files.2, "busy")? - started.1[1] {
            enough if enough > 4.0 => Ok(()),
            so_far => Err(format!("{so_far} s")),
        }
    });
    // While a hypervisor runs another guest on the CPU (steal time), the programs still count the task as
    // running and the files don't.
    cpu.apart(started, stolen_seconds().unwrap() - stolen_before, 1.0);
}

/// Bytes sent in each direction.
const BULK: usize = 20_000_000;

/// Sends and receives [`BULK`] bytes.
fn talk(ip: &str) {
    let connect = || std::net::TcpStream::connect((ip, 5000)).map_err(|error| error.to_string());
    let stream = wait_for("the pod to listen", PATIENCE, connect).unwrap();
    let mut sending = stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || sending.write_all(&vec![0; BULK]));
    // The other end is an nc, which exits when our end is closed even if it still has data to send. So our
    // end is closed last.
    let received = std::io::copy(&mut &stream, &mut std::io::sink()).unwrap();
    assert_eq!(received, BULK as u64);
    sender.join().unwrap().unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
}

// ---- The example client ----

/// Finds a Python that has gRPC.
fn python() -> Result<PathBuf, Missing> {
    let python = std::env::var_os("BEELET_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    let mut import = Command::new(&python);
    import.args(["-c", "import grpc_tools.protoc"]).stdout(Stdio::null()).stderr(Stdio::null());
    if import.status().is_ok_and(|status| status.success()) {
        return Ok(python);
    }
    let remedy = "run `python3 -m venv V && V/bin/pip install grpcio grpcio-tools`, then set \
                  BEELET_PYTHON=V/bin/python";
    Err(Missing { what: "Python has no grpcio-tools".into(), remedy: remedy.into() })
}

#[test]
fn the_example_in_python_shows_containers_and_edges() {
    require!(containerd, bpf);
    let python = match python() {
        Ok(python) => python,
        Err(missing) => return requires::skip(&missing),
    };
    let containerd = Containerd::start_for_test().unwrap();
    let owner = Agent::start(installed(&containerd)).unwrap();
    let flip = "while true; do timeout 1 nc -l -p 5000; done";
    apply(&owner, &manifests::pod("flip", &["sh", "-c", flip]));
    let observer = Observer::start_at(&owner.dir().join("bpf"), &containerd);
    observer.measured("flip");
    let example = workdir::repository().join("examples/python/signals.py");
    let client = |command: &str| {
        let mut client = Command::new(&python);
        client.arg(&example).args([command, "--socket"]).arg(&observer.socket).stdin(Stdio::null());
        client
    };
    let output = client("snapshot").output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.starts_with("observed (observe, by kernel programs): 1 pods"), "{shown}");
    assert!(shown.contains("default/flip-") && shown.contains(" main: Running, "), "{shown}");

    let file = containerd.dir().join("watch.log");
    let log = std::fs::File::create(&file).unwrap();
    let mut watch = client("watch");
    watch.args(["--type", "LISTENER_OPENED", "--namespace", "default"]);
    let _watching = Process(watch.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
    observer.wait("an edge to be shown", || {
        let shown = workdir::read(&file).unwrap();
        let is_it = |line: &str| line.contains("default/flip-") && line.contains(" main: listens at ");
        if shown.lines().any(is_it) { Ok(()) } else { Err(shown) }
    });
}
