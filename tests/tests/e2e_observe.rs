//! `beelet observe` beside the owner of a real containerd: it sees what the kernel's own files say, and changes nothing.
//! The owner is `beelet run` on the same runtime; to an observer it is as foreign as a kubelet.

#![allow(clippy::unwrap_used)] // a test's helpers may panic as the test itself may

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use beelet_tests::agent::{self, Agent, Options, http_get};
use beelet_tests::containerd::Containerd;
use beelet_tests::guards::{CgroupRoot, Process};
use beelet_tests::requires::{self, Missing};
use beelet_tests::workdir::{self, PATIENCE, wait_for};
use beelet_tests::{manifests, require};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// An observer as a child process.
struct Observer {
    process: Process,
    socket: PathBuf,
    address: String,
    pins: PathBuf,
    log: PathBuf,
}

impl Observer {
    /// On the runtime and its cgroup root, with its pins in this BPF file system.
    fn start_at(bpffs: &Path, containerd: &Containerd) -> Observer {
        let dir = containerd.dir();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (socket, log) = (dir.join("observe/beelet.sock"), dir.join("observe.log"));
        let address = format!("127.0.0.1:{port}");
        let output = std::fs::File::create(&log).unwrap();
        let child = Command::new(agent::binary().unwrap())
            .args(["observe", "--node-name", "observed", "--listen", &address, "--pin-name", "seen"])
            .args(["--runtime-endpoint", &containerd.endpoint(), "--cgroup-root", containerd.cgroup().path()])
            .arg("--socket")
            .arg(&socket)
            .arg("--bpffs")
            .arg(bpffs)
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let observer = Observer { process: Process(child), socket, address, pins: bpffs.join("seen"), log };
        observer.wait("its health to be ok", || match observer.get("/healthz") {
            Ok((200, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        observer
    }

    fn get(&self, path: &str) -> anyhow::Result<(u16, String)> {
        http_get(&self.address, path)
    }

    /// `beelet top -o json`, asked of it.
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

    /// The container of this pod, once it was read and has rates.
    fn measured(&self, pod: &str) -> Value {
        self.wait(&format!("{pod} to be measured"), || {
            let snapshot = self.snapshot()?;
            let container = container(&snapshot, pod).ok_or("it is not there")?;
            if container["last_10s"].is_null() {
                return Err("it has no rates yet".to_owned());
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

/// A pod that keeps a CPU busy, up to its limit.
fn busy(name: &str) -> Value {
    let pod = manifests::pod(name, &["sh", "-c", "while true; do :; done"]);
    manifests::with_resources(pod, ("50m", "32Mi"), ("200m", "64Mi"))
}

fn apply(owner: &Agent, manifest: &Value) {
    let name = manifest["metadata"]["name"].as_str().unwrap();
    owner.apply(&format!("{name}.yaml"), manifest.to_string()).unwrap();
    let found = |watch: &beelet_tests::pods::Watch| watch.pod(name).filter(|pod| pod.ready()).cloned();
    owner.until(&format!("{name} to be ready"), found).unwrap();
}

/// Everything below the root that somebody could have set, by file.
fn settings(root: &CgroupRoot) -> BTreeMap<PathBuf, String> {
    const SET: [&str; 9] = [
        "cpu.shares",
        "cpu.cfs_quota_us",
        "cpu.weight",
        "cpu.max",
        "cpu.idle",
        "memory.limit_in_bytes",
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

/// Containers that the runtime has, by id.
fn containers(containerd: &Containerd) -> String {
    let output = containerd.ctr().args(["containers", "ls", "-q"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// CPU time of the container's cgroup in seconds, from the kernel's own file.
fn cpu_seconds(root: &CgroupRoot, cgroup: &str) -> f64 {
    let below = cgroup.trim_start_matches('/');
    let v1 = root.dir("cpuacct").map(|dir| dir.join(below).join("cpuacct.usage"));
    if let Some(text) = v1.and_then(|file| std::fs::read_to_string(file).ok()) {
        return text.trim().parse::<f64>().unwrap() / 1e9;
    }
    let text = workdir::read(&root.dir("unified").unwrap().join(below).join("cpu.stat")).unwrap();
    let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec ")).unwrap();
    usage.trim().parse::<f64>().unwrap() / 1e6
}

#[test]
fn an_observer_sees_what_the_kernel_says_and_leaves_no_trace() {
    require!(containerd, bpf);
    let containerd = Containerd::start_for_test().unwrap();
    let owner = Agent::start(Options::on(&containerd)).unwrap();
    apply(&owner, &busy("busy"));
    let (set, made) = (settings(containerd.cgroup()), containers(&containerd));
    let mut observer = Observer::start_at(&owner.dir().join("bpf"), &containerd);

    // The same numbers as the kernel's files: read before and after, ours lies between.
    let seen = observer.measured("busy");
    let cgroup = seen["cgroup"].as_str().unwrap();
    let before = cpu_seconds(containerd.cgroup(), cgroup);
    let snapshot = observer.snapshot().unwrap();
    let after = cpu_seconds(containerd.cgroup(), cgroup);
    let ours = container(&snapshot, "busy").unwrap();
    let cpu = ours["usage"]["cpu_seconds"].as_f64().unwrap();
    // cgroup2's and cpuacct's clocks tick apart by less than a scheduler tick.
    assert!(before - 0.05 <= cpu && cpu <= after + 0.05, "{before} <= {cpu} <= {after}");
    assert_eq!(ours["usage"]["memory_limit_bytes"], 64 << 20);
    assert_eq!(ours["usage"]["cpu_limit"], 0.2);
    let rates = &ours["last_10s"];
    assert!(rates["cpu"].as_f64().unwrap() > 0.02, "{rates:#}");
    assert!(rates["throttled"].as_f64().is_some(), "{rates:#}");
    assert_eq!((&snapshot["node"], &snapshot["mode"]), (&"observed".into(), &"observe".into()));

    pages(&observer);

    // Containers come and go.
    apply(&owner, &manifests::pod("late", &["sh", "-c", "sleep 1000"]));
    observer.measured("late");
    owner.remove("late.yaml").unwrap();
    observer.wait("the second pod to be gone", || match container(&observer.snapshot()?, "late") {
        None => Ok(()),
        Some(still) => Err(format!("{still:#}")),
    });
    owner.until("the pod to be gone", |watch| watch.pod("late").is_none().then_some(())).unwrap();

    // It ends without a trace, and nothing is other than it was.
    kill_process(Pid::from_child(&observer.process.0), Signal::TERM).unwrap();
    let status = observer.process.0.wait().unwrap();
    assert!(status.success(), "{status}: {}", workdir::read(&observer.log).unwrap());
    assert!(!observer.socket.exists() && !observer.pins.exists());
    assert_eq!(containers(&containerd), made);
    unchanged(containerd.cgroup(), &set);
}

/// Waits until everything is set as it was: the owner itself takes a moment after a pod has gone.
fn unchanged(root: &CgroupRoot, set: &BTreeMap<PathBuf, String>) {
    wait_for("everything to be set as it was", PATIENCE, || {
        let now = settings(root);
        let files: Vec<&PathBuf> =
            set.keys().chain(now.keys()).filter(|file| set.get(*file) != now.get(*file)).collect();
        let other: Vec<_> = files.iter().map(|file| (file, set.get(*file), now.get(*file))).collect();
        if other.is_empty() { Ok(()) } else { Err(format!("{other:#?}")) }
    })
    .unwrap();
}

/// Every page has the pod.
fn pages(observer: &Observer) {
    for (page, expected) in [
        ("/metrics", "beelet_observe_lists_total"),
        ("/metrics/cadvisor", "container_memory_working_set_bytes{container=\"main\""),
        ("/metrics/resource", "container_cpu_usage_seconds_total{container=\"main\""),
        ("/stats/summary", "\"podRef\":{\"name\":\"busy-"),
        ("/pods", "\"name\":\"busy-"),
    ] {
        let (status, body) = observer.get(page).unwrap();
        assert!(status == 200 && body.contains(expected), "{page}: {status}\n{body}");
    }
}

/// A kubelet as a child process, in a mount namespace of its own (its device plugin folder is fixed).
struct Kubelet {
    _process: Process,
    manifests: PathBuf,
    log: PathBuf,
}

impl Kubelet {
    fn start(binary: &Path, containerd: &Containerd) -> Kubelet {
        let dir = containerd.dir().join("kubelet");
        let (manifests, log) = (dir.join("manifests"), dir.join("kubelet.log"));
        std::fs::create_dir_all(&manifests).unwrap();
        let config = serde_json::json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "staticPodPath": manifests, "cgroupRoot": containerd.cgroup().path(), "cgroupDriver": "cgroupfs",
            "failSwapOn": false, "enableServer": false, "healthzPort": 0, "volumePluginDir": dir.join("plugins"),
            "evictionHard": {"memory.available": "1Mi"}, "authentication": {"webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
        });
        workdir::write(&dir.join("config.yaml"), config.to_string()).unwrap();
        let version = Command::new(binary).arg("--version").output().unwrap();
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let minor: u32 = version.split('.').nth(1).and_then(|minor| minor.parse().ok()).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c"]);
        command.arg("mkdir -p /var/lib/kubelet && mount -t tmpfs none /var/lib/kubelet && exec \"$@\"");
        command.arg("sh").arg(binary).arg("--config").arg(dir.join("config.yaml"));
        command.arg(format!("--container-runtime-endpoint={}", containerd.endpoint()));
        command.arg(format!("--root-dir={}", dir.join("root").display())).arg("--hostname-override=observed");
        if minor < 24 {
            command.arg("--container-runtime=remote");
        }
        let output = std::fs::File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        Kubelet { _process: Process(command.spawn().unwrap()), manifests, log }
    }

    fn apply(&self, manifest: &Value) {
        let name = manifest["metadata"]["name"].as_str().unwrap();
        workdir::write(&self.manifests.join(format!("{name}.yaml")), manifest.to_string()).unwrap();
    }
}

/// Ours and the kernel's, in per cent of the kernel's.
fn apart(ours: f64, kernels: f64) -> f64 {
    (ours - kernels).abs() / kernels * 100.0
}

/// The container's working set, from the kernel's own files.
fn working_set(root: &CgroupRoot, cgroup: &str) -> f64 {
    let dir = root.dir("memory").unwrap().join(cgroup.trim_start_matches('/'));
    let number = |file: &str| std::fs::read_to_string(dir.join(file)).ok()?.trim().parse::<f64>().ok();
    let usage = number("memory.usage_in_bytes").or_else(|| number("memory.current")).unwrap();
    let stat = workdir::read(&dir.join("memory.stat")).unwrap();
    let of = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    usage - of("total_inactive_file ").or_else(|| of("inactive_file ")).unwrap_or(0.0)
}

#[test]
fn beside_a_kubelet_for_ten_minutes_nothing_is_changed_and_the_numbers_are_right() {
    require!(containerd, bpf, long);
    let Some(binary) = std::env::var_os("KUBELET").map(PathBuf::from) else {
        let (what, remedy) = ("no kubelet is given", "give the path of a kubelet in KUBELET");
        requires::skip(&Missing { what: what.into(), remedy: remedy.into() });
        return;
    };
    let containerd = Containerd::start_for_test().unwrap();
    // For its bpffs alone; it has no pods and no part in this.
    let bystander_dir = containerd.dir().join("bystander/bpf");
    let _bpffs = beelet_tests::guards::Mount::bpffs(&bystander_dir).unwrap();
    let kubelet = Kubelet::start(&binary, &containerd);
    kubelet.apply(&busy("busy"));
    // Memory that stays: 20 MB in a variable.
    let hold = "x=$(head -c 20000000 /dev/zero | tr '\\0' a); while true; do sleep 1; done";
    kubelet.apply(&manifests::pod("holder", &["sh", "-c", hold]));
    let mut observer = Observer::start_at(&bystander_dir, &containerd);
    let why = |kubelet: &Kubelet| workdir::read(&kubelet.log).unwrap_or_default();
    observer.measured("busy");
    observer.measured("holder");
    let (set, made) = (settings(containerd.cgroup()), containers(&containerd));
    let until = std::time::Instant::now() + std::time::Duration::from_secs(600);
    let (mut round, mut worst) = (0, [0.0_f64; 2]);
    while std::time::Instant::now() < until {
        let name = format!("churn-{round}");
        kubelet.apply(&manifests::pod(&name, &["sh", "-c", "sleep 1000"]));
        observer.measured(&name);
        let snapshot = observer.snapshot().unwrap();
        for pod in ["busy", "holder"] {
            let seen = container(&snapshot, pod).unwrap();
            let cgroup = seen["cgroup"].as_str().unwrap();
            if pod == "busy" && seen["usage"]["cpu_seconds"].as_f64().unwrap() > 5.0 {
                let ours = seen["usage"]["cpu_seconds"].as_f64().unwrap();
                worst[0] = worst[0].max(apart(ours, cpu_seconds(containerd.cgroup(), cgroup)));
            }
            if pod == "holder" {
                let ours = seen["usage"]["working_set_bytes"].as_f64().unwrap();
                worst[1] = worst[1].max(apart(ours, working_set(containerd.cgroup(), cgroup)));
            }
        }
        std::fs::remove_file(kubelet.manifests.join(format!("{name}.yaml"))).unwrap();
        observer.wait(&format!("{name} to be gone"), || match container(&observer.snapshot()?, &name) {
            None => Ok(()),
            Some(still) => Err(format!("{still:#}\n{}", why(&kubelet))),
        });
        round += 1;
    }
    eprintln!(
        "{round} pods came and went; apart by at most {:.2} % (CPU), {:.2} % (memory)",
        worst[0], worst[1]
    );
    assert!(worst.iter().all(|apart| *apart <= 2.0), "{worst:?} %");
    kill_process(Pid::from_child(&observer.process.0), Signal::TERM).unwrap();
    assert!(observer.process.0.wait().unwrap().success());
    // The kubelet collects the sandboxes of removed pods a while later.
    wait_for("only the two pods to be left", PATIENCE * 3, || match containers(&containerd) {
        now if now == made => Ok(()),
        now => Err(format!("{now}\n{}", why(&kubelet))),
    })
    .unwrap();
    unchanged(containerd.cgroup(), &set);
    drop(kubelet);
}
