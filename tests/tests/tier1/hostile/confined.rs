//! Tests in restricted environments: a read-only root file system, another umask, few descriptors, no bpf
//! file system, a capability that is missing after a restart; and two agents on one node.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use beelet_tests::agent::{Agent, Options};
use beelet_tests::cri::{FakeCri, Op};
use beelet_tests::guards::{CgroupRoot, mounts};
use beelet_tests::{manifests, require, workdir};
use serde_json::{Value, json};

use super::scene::{Scene, config_map, files_below, in_own_mounts, is_relist, pod, through, with_volumes};

// ---- A read-only root ----

/// Runs the agent in its own mount namespace, in which only its folders and separate file systems (/run,
/// /sys/fs/cgroup, /proc) are writable.
fn on_read_only_root(dir: &Path, options: Options) -> Options {
    let dir_text = dir.display();
    in_own_mounts(
        dir,
        options,
        &format!(
            "mount --rbind {dir_text} {dir_text}; mountpoint -q /run || mount --bind /run /run; \
             mount -o remount,bind,ro /"
        ),
    )
}

#[test]
fn on_a_read_only_root_everything_works_in_its_own_folders() {
    require!(root);
    let mut scene = Scene::start(on_read_only_root);
    // The agent's root is read-only.
    let pid = scene.agent.pid().unwrap();
    // Other tests mount at paths that are not UTF-8.
    let table = fs::read(format!("/proc/{pid}/mountinfo")).unwrap();
    let table = String::from_utf8_lossy(&table);
    let root = table.lines().rfind(|line| line.split(' ').nth(4) == Some("/")).unwrap();
    assert!(root.split(' ').nth(5).unwrap().starts_with("ro"), "{root}");
    scene.apply(&config_map());
    scene.apply(&with_volumes("web"));
    let web = scene.until_ready("web");
    scene.exit("web", 1);
    scene.until_pod("web", "to run again", |pod| pod.ready() && pod.restarts() == 1);
    scene.agent.kill9();
    scene.agent.resume().unwrap();
    assert_eq!(scene.until_ready("web").uid(), web.uid());
    let file = scene.dir.path().join("other.yaml");
    workdir::write(&file, pod("other").to_string()).unwrap();
    scene.stdout_of(&["apply", "-f", file.to_str().unwrap()]);
    scene.until_ready("other");
    scene.stdout_of(&["delete", "pod", "other"]);
    scene.until_gone("other");
    scene.remove("web");
    scene.until_gone("web");
    scene.is_well();
}

#[test]
fn with_a_read_only_state_folder_the_agent_refuses_to_start_and_names_it() {
    require!(root);
    let mut folder = PathBuf::new();
    let mut scene = Scene::spawn(|dir, options| {
        // A folder of the read-only root: even a failing test cannot create it.
        folder = PathBuf::from("/usr/lib").join(workdir::unique("beelet-hostile"));
        on_read_only_root(dir, options.beelet("stateDir", folder.display().to_string()))
    });
    let status = scene.agent.wait_for_exit().unwrap();
    let log = scene.agent.log();
    assert!(!status.success(), "{log}");
    assert!(log.contains(&folder.display().to_string()) && log.contains("Read-only file system"), "{log}");
    assert!(!folder.exists());
}

// ---- A separate mount namespace ----

#[test]
fn an_agent_whose_mounts_the_runtime_does_not_see_refuses_to_start_like_the_doctor() {
    require!(root);
    for propagation in ["private", "slave"] {
        let alone = format!("unshare --mount --propagation {propagation}");
        let mut scene = Scene::spawn(|dir, options| through(dir, options, "", &format!("{alone} {{}}")));
        let status = scene.agent.wait_for_exit().unwrap();
        let log = scene.agent.log();
        let sentence = format!(
            "(process {}) does not see what the agent mounts below {}",
            std::process::id(),
            scene.path("pods").display()
        );
        assert!(!status.success() && log.contains(&sentence), "{propagation}: {log}");
        assert!(log.contains("PrivateTmp=") && log.contains("mountPropagation: Bidirectional"), "{log}");
        assert_eq!(fs::read_dir(scene.path("pods")).unwrap().count(), 0);
        let mut doctor = std::process::Command::new("unshare");
        doctor.args(["--mount", "--propagation", propagation]).arg(beelet_tests::agent::binary().unwrap());
        let doctor = doctor
            .args(["doctor", "-o", "json"])
            .env("BEELET_CONFIG", scene.agent.config())
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
        let mut findings = report["findings"].as_array().unwrap().iter();
        let found = findings.find(|finding| finding["check"] == "mounts").unwrap();
        assert_eq!(found["state"], "missing", "{found}");
        assert!(found["detail"].as_str().unwrap().contains(&sentence), "{found}");
    }
}

#[test]
fn an_agent_whose_mounts_the_runtime_sees_runs_in_a_mount_namespace_of_its_own() {
    require!(root);
    let scene = Scene::start(|dir, options| in_own_mounts(dir, options, ":"));
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "hidden" }, "stringData": { "a": "b" },
    });
    scene.agent.apply("secret.yaml", secret.to_string()).unwrap();
    let mut web = pod("web");
    web["spec"]["volumes"] = json!([{ "name": "secret", "secret": { "secretName": "hidden" } }]);
    web["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "secret", "mountPath": "/s" }]);
    scene.apply(&web);
    let uid = scene.until_ready("web").uid().to_owned();
    let volume = scene.path("pods").join(uid).join("volumes/secret");
    // This process is in the runtime's mount namespace.
    assert_eq!(fs::read_to_string(volume.join("a")).unwrap(), "b");
    assert!(scene.stdout_of(&["doctor", "-v"]).contains("sees what is mounted below"));
    scene.remove("web");
    scene.until_gone("web");
    scene.is_well();
}

// ---- Another umask ----

/// Returns the mode of every file that an agent creates, by its path without parts that differ between runs.
fn modes(umask: &str) -> BTreeMap<String, u32> {
    let scene = Scene::start(|dir, options| through(dir, options, &format!("umask {umask}"), "{}"));
    let uid = {
        scene.apply(&config_map());
        let mut web = with_volumes("web");
        let made = |kind: &str, path: &str| json!({ "type": kind, "path": scene.dir.path().join(path) });
        let volumes = web["spec"]["volumes"].as_array_mut().unwrap();
        volumes.push(json!({ "name": "dir", "hostPath": made("DirectoryOrCreate", "host/made/dir") }));
        volumes.push(json!({ "name": "file", "hostPath": made("FileOrCreate", "host/file") }));
        volumes.push(json!({ "name": "secret", "secret": { "secretName": "hidden" } }));
        volumes.push(json!({ "name": "memory", "emptyDir": { "medium": "Memory" } }));
        let mount = |name: &str| json!({ "name": name, "mountPath": format!("/mnt/{name}") });
        let mounts: Vec<Value> = ["dir", "file", "secret", "memory"].map(mount).into();
        let first = &mut web["spec"]["containers"][0];
        match first["volumeMounts"].as_array_mut() {
            Some(known) => known.extend(mounts),
            None => first["volumeMounts"] = mounts.into(),
        }
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "hidden" }, "stringData": { "a": "b" },
        });
        scene.agent.apply("secret.yaml", secret.to_string()).unwrap();
        fs::create_dir(scene.dir.path().join("host")).unwrap();
        scene.apply(&web);
        scene.until_ready("web").uid().to_owned()
    };
    let file = scene.dir.path().join("other.yaml");
    workdir::write(&file, pod("other").to_string()).unwrap();
    scene.stdout_of(&["apply", "-f", file.to_str().unwrap()]);
    let other = scene.until_ready("other").uid().to_owned();
    scene.poll_until("the records", || {
        let known = ["pods", "events"].iter().all(|name| scene.agent.record(name).is_some());
        if known { Ok(()) } else { Err("a record is missing".to_owned()) }
    });
    scene.is_well();
    // Files that the test itself creates.
    let given =
        ["manifests", "manifests/web.yaml", "manifests/conf.yaml", "manifests/secret.yaml", "config.yaml"];
    let given: BTreeSet<PathBuf> = given.iter().map(|name| scene.path(name)).collect();
    let mut found = BTreeMap::new();
    let made = files_below(scene.agent.dir()).into_iter().chain(files_below(&scene.dir.path().join("host")));
    for path in made.filter(|path| !given.contains(path)) {
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        if metadata.file_type().is_symlink() {
            continue;
        }
        let name = path.strip_prefix(scene.dir.path()).unwrap().display().to_string();
        let name = name.replace(&uid, "UID").replace(&other, "OTHER");
        // The name of the folder behind `..data` is a time.
        let name: Vec<&str> =
            name.split('/').map(|part| if part.starts_with("..20") { "..TIME" } else { part }).collect();
        found.insert(name.join("/"), metadata.mode() & 0o7777);
    }
    found
}

#[test]
fn under_every_umask_the_agents_files_have_the_same_modes() {
    require!(root);
    let usual = modes("022");
    let of = |name: &str| {
        let found: Vec<u32> =
            usual.iter().filter(|(path, _)| path.contains(name)).map(|(_, mode)| *mode).collect();
        assert!(!found.is_empty(), "{name} is not among {usual:#?}");
        found
    };
    // Files that only the agent may access.
    for name in
        ["agent/state/pods.json", "agent/state/events.json", "agent/run/beelet.sock", "manifests/other.yaml"]
    {
        assert!(of(name).iter().all(|mode| mode & 0o077 == 0), "{name}: {usual:#?}");
    }
    assert_eq!(usual["agent/state"], 0o700, "{usual:#?}");
    // Files that any user of a pod and log readers may access.
    assert_eq!(usual["agent/pods/UID/volumes/conf"] & 0o005, 0o005, "{usual:#?}");
    assert_eq!((usual["host/made/dir"], usual["host/file"]), (0o755, 0o644), "{usual:#?}");
    for umask in ["077", "000", "027"] {
        let found = modes(umask);
        let all: BTreeSet<&String> = found.keys().chain(usual.keys()).collect();
        let differences: Vec<String> = all
            .into_iter()
            .filter(|path| found.get(*path) != usual.get(*path))
            .map(|path| {
                let octal = |all: &BTreeMap<String, u32>| {
                    all.get(path).map_or_else(|| "missing".to_owned(), |mode| format!("{mode:o}"))
                };
                format!("{path}: {}, not {}", octal(&found), octal(&usual))
            })
            .collect();
        assert!(differences.is_empty(), "umask {umask}: {differences:#?}");
    }
}

// ---- Few descriptors ----

#[test]
fn with_few_descriptors_the_agent_refuses_some_connections_and_recovers() {
    require!(root);
    let few = |dir: &Path, options: Options| {
        // Without CAP_SYS_RESOURCE the agent cannot raise the limit.
        through(dir, options, "ulimit -n 256", "setpriv --bounding-set=-sys_resource {}").http().unwrap()
    };
    let mut scene = Scene::start(few);
    scene.until_logged("may open 256 files");
    for n in 0..20 {
        scene.apply(&pod(&format!("web{n}")));
    }
    for n in 0..20 {
        scene.until_ready(&format!("web{n}"));
    }
    // More silent clients than descriptors, on both servers.
    let socket = scene.agent.socket();
    let port = http_port(&scene);
    for round in 0..3 {
        let unix: Vec<_> = (0..300).map_while(|_| UnixStream::connect(&socket).ok()).collect();
        let tcp: Vec<_> = (0..100).map_while(|_| TcpStream::connect(("127.0.0.1", port)).ok()).collect();
        scene.poll_until("all descriptors to be in use", || {
            let open = fs::read_dir(format!("/proc/{}/fd", scene.agent.pid().unwrap())).unwrap().count();
            if open >= 250 { Ok(()) } else { Err(format!("{open} are open")) }
        });
        // The agent manages its pods over the connections that are already open.
        let first = scene.cri.calls().len();
        scene.until_called("a relist", first, 1, is_relist);
        drop((unix, tcp));
        scene.poll_until("the agent to answer again", || match scene.agent.get("/healthz") {
            Ok((200, _)) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        let name = format!("web{round}");
        scene.exit(&name, 1);
        scene.until_pod(&name, "to run again", |pod| pod.ready() && pod.restarts() == 1);
        scene.is_well();
    }
    for n in 0..20 {
        scene.remove(&format!("web{n}"));
    }
    for n in 0..20 {
        scene.until_gone(&format!("web{n}"));
    }
    scene.agent.terminate().unwrap();
}

fn http_port(scene: &Scene) -> u16 {
    let config = workdir::read(&scene.agent.config()).unwrap();
    let first = config.split("\n---\n").next().unwrap();
    let config: Value = serde_json::from_str(first).unwrap();
    u16::try_from(config["healthzPort"].as_u64().unwrap()).unwrap()
}

// ---- No bpf file system for pins; no permission for BPF ----

/// Returns a pod whose readiness follows a host port on which the test listens.
fn following(port: u16) -> Value {
    let mut pod = manifests::pod("web", &["/bin/testapp"]);
    pod["spec"]["hostNetwork"] = true.into();
    let probe = json!({ "tcpSocket": { "port": port }, "periodSeconds": 1, "failureThreshold": 1 });
    manifests::with(pod, "readinessProbe", probe)
}

/// Application that listens, and accepts connections: connections that wait too long would make it look
/// stalled. The port is closed on drop.
struct Listening {
    port: u16,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listening {
    /// Listens on this port; 0 for any free one.
    fn at(port: u16) -> Listening {
        let listener = TcpListener::bind(("0.0.0.0", port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if listener.accept().is_err() {
                    std::thread::park_timeout(Duration::from_millis(10));
                }
            }
        });
        Listening { port, stop, thread: Some(thread) }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            thread.join().unwrap();
        }
    }
}

#[test]
fn without_a_bpf_file_system_readiness_is_still_right() {
    require!(bpf);
    // sysfs does not have this folder, and nothing can create it.
    let nowhere =
        |_: &Path, options: Options| options.beelet("bpf", "auto").beelet("bpffs", "/sys/fs/beelet-none");
    let mut scene = Scene::start(nowhere);
    let listening = Listening::at(0);
    let port = listening.port;
    scene.apply(&following(port));
    scene.until_ready("web");
    drop(listening);
    scene.until_pod("web", "to be not ready", |pod| !pod.ready());
    let doctor = scene.cli(&["doctor"]);
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(doctor.contains("/sys/fs/beelet-none"), "{doctor}");
    let changes = scene.changes();
    scene.agent.kill9();
    scene.agent.resume().unwrap();
    let listening = Listening::at(port);
    scene.until_ready("web");
    drop(listening);
    scene.until_relisted();
    assert_eq!(scene.changes(), changes);
    scene.is_well();
}

#[test]
fn in_a_mount_namespace_without_a_bpf_file_system_the_agent_mounts_a_private_one() {
    require!(bpf);
    let alone = |dir: &Path, options: Options| {
        let options = options.beelet("bpf", "auto").beelet("bpffs", "/sys/fs/bpf");
        in_own_mounts(dir, options, "while umount /sys/fs/bpf 2>/dev/null; do :; done")
    };
    let outside = || {
        let all = mounts().unwrap().into_iter();
        all.filter(|mount| mount.path.starts_with("/sys/fs/bpf")).count()
    };
    let before = outside();
    let scene = Scene::start(alone);
    let listening = Listening::at(0);
    let port = listening.port;
    scene.apply(&following(port));
    scene.until_ready("web");
    drop(listening);
    scene.until_pod("web", "to be not ready", |pod| !pod.ready());
    assert_eq!(outside(), before);
    scene.is_well();
}

#[test]
fn an_agent_that_a_restart_deprives_of_bpf_adopts_pods_and_probes_them_itself() {
    require!(bpf);
    let mut flag = PathBuf::new();
    let sometimes = |dir: &Path, mut options: Options| {
        flag = dir.join("without");
        options.mount_bpffs = true;
        let drop = "exec setpriv --bounding-set=-bpf,-perfmon,-sys_admin";
        let agent = beelet_tests::agent::binary().unwrap();
        let prelude = format!("if [ -e '{}' ]; then {drop} '{}' \"$@\"; fi", flag.display(), agent.display());
        through(
            dir,
            options.beelet("bpf", "auto").beelet("bpffs", dir.join("agent/bpf").display().to_string()),
            &prelude,
            "{}",
        )
    };
    let mut scene = Scene::start(sometimes);
    let listening = Listening::at(0);
    let port = listening.port;
    scene.apply(&following(port));
    let before = scene.until_ready("web");
    let changes = scene.changes();
    // The kernel reports the closed port, so the programs are loaded.
    drop(listening);
    let closed = scene.until_pod("web", "to be not ready", |pod| !pod.ready());
    assert!(closed.edge.is_some_and(|edge| !edge.ready), "the kernel did not report the closed port");
    let listening = Listening::at(port);
    scene.until_ready("web");
    until_recorded(&scene, before.uid());

    let mut listening = Some(listening);
    for without in [true, false] {
        scene.agent.kill9();
        if without {
            workdir::write(&flag, "").unwrap();
        } else {
            fs::remove_file(&flag).unwrap();
        }
        fs::write(scene.agent.log_path(), "").unwrap();
        scene.agent.resume().unwrap();
        // The pod is ready from its first published state on.
        let first = scene.until_pod("web", "to be known", |_| true);
        assert!(first.ready() && first.uid() == before.uid());
        let flipped = scene.agent.inspect(|watch| watch.pod("web").is_none_or(|pod| !pod.ready())).unwrap();
        assert!(!flipped);
        scene.until_relisted();
        assert!(scene.until_pod("web", "to be known", |_| true).ready());
        if without {
            scene.until_logged("is not available here (");
            let log = scene.agent.log();
            assert!(
                log.contains("the kernel refuses BPF maps") && log.contains("Operation not permitted"),
                "{log}"
            );
        }
        drop(listening.take());
        let unready = scene.until_pod("web", "to be not ready", |pod| !pod.ready());
        assert_eq!(unready.restarts(), 0);
        listening = Some(Listening::at(port));
        scene.until_ready("web");
        assert_eq!(scene.changes(), changes);
        scene.is_well();
        until_recorded(&scene, before.uid());
    }
}

/// Waits until the pod's record, which is written after its state is published, has the condition Ready.
fn until_recorded(scene: &Scene, uid: &str) {
    scene.poll_until("the record of a ready pod", || {
        let record = scene.agent.record("pods").unwrap_or_default();
        let conditions = record[uid]["status"]["conditions"].clone();
        let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        let ready = conditions.as_array().is_some_and(|all| all.iter().any(is_ready));
        if ready { Ok(()) } else { Err(conditions.to_string()) }
    });
}

// ---- Two agents ----

/// Starts two agents at the same moment; returns the index and pid of the running one, and the log of the
/// other.
fn race(options: [Options; 2]) -> (usize, u32, String) {
    let barrier = std::sync::Barrier::new(2);
    let mut agents: Vec<Agent> = std::thread::scope(|scope| {
        let start = |options: Options| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                Agent::spawn(options).unwrap()
            })
        };
        options.map(start).map(|thread| thread.join().unwrap()).into()
    });
    let up: Vec<bool> = agents.iter_mut().map(|agent| agent.wait_until_up().is_ok()).collect();
    let Some(winner) = up.iter().position(|up| *up) else {
        panic!("neither agent runs:\n{}\n{}", agents[0].log(), agents[1].log());
    };
    assert!(!up[1 - winner], "both agents run");
    let status = agents[1 - winner].wait_for_exit().unwrap();
    assert!(!status.success());
    (winner, agents[winner].pid().unwrap(), agents[1 - winner].log())
}

#[test]
fn of_two_agents_started_at_the_same_moment_one_runs_and_the_other_names_it() {
    require!(root);
    let dir = tempfile::tempdir().unwrap();
    let cri = FakeCri::start();
    let cgroup = CgroupRoot::new(&workdir::unique("bh")).unwrap();
    let agent = |name: &str, endpoint: &str| {
        let mut options = Options::at(dir.path(), name, endpoint, &cgroup).beelet("bpf", "off");
        options.mount_bpffs = false;
        options
    };
    let shared_state = dir.path().join("shared").display().to_string();
    for round in 0..8 {
        // The same runtime, or the same state folder.
        let (what, options) = if round % 2 == 0 {
            let options = ["a", "b"].map(|name| agent(&format!("{name}{round}"), &cri.endpoint()));
            ("the runtime at", options)
        } else {
            let options = ["a", "b"].map(|name| {
                let endpoint = format!("unix://{}", dir.path().join(format!("{name}{round}.sock")).display());
                agent(&format!("{name}{round}"), &endpoint).beelet("stateDir", shared_state.clone())
            });
            ("state folder", options)
        };
        let (_, pid, log) = race(options);
        assert!(log.contains(what) && log.contains("is in use by another beelet"), "{log}");
        assert!(log.contains(&format!("process {pid}")), "{pid}: {log}");
        assert!(log.contains("lock"), "{log}");
    }
    assert_eq!(cri.count(Op::RunPodSandbox), 0);
}
