//! The agent is killed right after each of its system calls that change the disk, where strace stops it.
//! Everything that the agent had acknowledged holds after its restart, and half-done work is not left behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use beelet_tests::agent::{Options, binary};
use beelet_tests::{require, workdir};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::scene::{Scene, config_map, names_in, pod, through, with_volumes};

/// System calls that rename a file to its final path or remove it.
const PLACING: &str = "rename,renameat,renameat2,unlink,unlinkat";
/// The calls of [`PLACING`] and those before and after them.
const ALL: &str =
    "rename,renameat,renameat2,unlink,unlinkat,rmdir,symlink,symlinkat,fsync,fdatasync,mount,umount2";

/// Steps of an operator, in this order; each waits until the agent has acknowledged it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Applied,
    Ready,
    Changed,
    ReadyAgain,
    Ended,
    Deleted,
    Gone,
}

/// Returns options of an agent that is stopped at the end of each of these calls.
fn traced(dir: &Path, options: Options, calls: &str) -> Options {
    let trace = dir.join("trace");
    // The flag `--seccomp-bpf` is left out: with it, strace 6.1 stops each thread only once.
    let command = format!(
        "strace -D -f -qq -o '{}' -e trace={calls} -e inject={calls}:signal=STOP:when=1+ {{}}",
        trace.display()
    );
    through(dir, options, "", &command)
}

/// Returns the number of stops of the agent so far.
fn stops(trace: &Path) -> usize {
    let text = fs::read_to_string(trace).unwrap_or_default();
    // Only stops that the kernel sent, which are strace's, count: not the stop of each further thread.
    text.lines().filter(|line| line.contains("--- SIGSTOP {") && line.contains("SI_KERNEL")).count()
}

/// Continues the agent at each stop until the stop `number`, and kills it there. Returns false if `done` was
/// true before.
fn kill_at(pid: Pid, trace: &Path, number: usize, done: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + workdir::PATIENCE;
    let mut seen = 0;
    let mut idle_since = Instant::now();
    while Instant::now() < deadline {
        let now = stops(trace);
        if now >= number {
            kill_process(pid, Signal::KILL).unwrap();
            return true;
        }
        if now > seen {
            (seen, idle_since) = (now, Instant::now());
        }
        // The agent is continued also without a new stop in the trace: an earlier SIGCONT may have arrived
        // before the stop.
        if is_stopped(pid) {
            kill_process(pid, Signal::CONT).unwrap();
        } else if done() && idle_since.elapsed() > Duration::from_secs(3) {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
    panic!("{} stops, and the work is not done", stops(trace));
}

fn is_stopped(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['t', 'T']))
}

/// Runs `beelet` as an operator would. Returns true if it succeeded.
fn call(config: &Path, socket: &Path, arguments: &[&str]) -> bool {
    let mut command = Command::new(binary().unwrap());
    command.args(arguments).env("BEELET_CONFIG", config).env("BEELET_SOCKET", socket);
    command.output().unwrap().status.success()
}

fn web(hostname: &str) -> Value {
    let mut web = with_volumes("web");
    web["spec"]["hostname"] = json!(hostname);
    web
}

/// Runs all steps, until one fails because the agent is dead.
fn work(scene: &Scene, acknowledged: &Mutex<Vec<Step>>) {
    let (config, socket) = (scene.agent.config(), scene.agent.socket());
    let write = |name: &str, manifest: &Value| {
        let path = scene.dir.path().join(name);
        workdir::write(&path, manifest.to_string()).unwrap();
        path.display().to_string()
    };
    let until = |name: &'static str, wanted: fn(Option<&beelet_tests::pods::PodView>) -> bool| {
        scene.agent.until("the pod", |watch| wanted(watch.pod(name)).then_some(())).is_ok()
    };
    let ready = |hostname: &'static str| {
        let there = move |watch: &beelet_tests::pods::Watch| {
            let web = watch.pod("web").filter(|pod| pod.ready())?;
            let spec = web.pod.spec.as_ref()?;
            (spec.hostname.as_deref() == Some(hostname)).then_some(())
        };
        scene.agent.until("web to be ready", there).is_ok()
    };
    let steps: [(Step, &dyn Fn() -> bool); 7] = [
        (Step::Applied, &|| {
            let (conf, one) = (write("conf.yaml", &config_map()), write("web.yaml", &web("one")));
            let mut job = pod("job");
            job["spec"]["activeDeadlineSeconds"] = json!(1);
            let job = write("job.yaml", &job);
            [conf, one, job].iter().all(|file| call(&config, &socket, &["apply", "-f", file]))
        }),
        (Step::Ready, &|| ready("one")),
        (Step::Changed, &|| call(&config, &socket, &["apply", "-f", &write("web.yaml", &web("two"))])),
        (Step::ReadyAgain, &|| ready("two")),
        (Step::Ended, &|| until("job", |pod| pod.is_some_and(|pod| pod.phase() == "Failed"))),
        (Step::Deleted, &|| call(&config, &socket, &["delete", "pod", "web"])),
        (Step::Gone, &|| until("web", |pod| pod.is_none())),
    ];
    for (step, act) in steps {
        if !act() {
            return;
        }
        acknowledged.lock().unwrap().push(step);
    }
}

/// Runs the agent until this stop, and then once more. Returns true if the agent reached the stop.
fn life(number: usize, calls: &str) -> bool {
    let mut scene = Scene::spawn(|dir, options| traced(dir, options, calls));
    let trace = scene.dir.path().join("trace");
    let pid = scene.agent.pid().and_then(|pid| Pid::from_raw(pid.try_into().ok()?)).unwrap();
    let acknowledged = Mutex::new(Vec::new());
    let killed = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // The agent has started when its socket answers, after any number of stops.
            let socket = scene.agent.socket();
            let up = || std::os::unix::net::UnixStream::connect(&socket).map(drop);
            if workdir::wait_for("the socket", Duration::from_secs(60), || {
                if fs::exists(format!("/proc/{}", pid.as_raw_nonzero())).unwrap_or(false) && !is_dead(pid) {
                    up().map(Ok).map_err(|error| error.to_string())
                } else {
                    Ok(Err(()))
                }
            })
            .is_ok_and(|up| up.is_ok())
            {
                work(&scene, &acknowledged);
            }
        });
        kill_at(pid, &trace, number, || worker.is_finished())
    });
    let acknowledged = acknowledged.into_inner().unwrap();
    let at: Vec<String> = fs::read_to_string(&trace).unwrap_or_default().lines().map(str::to_owned).collect();
    let calls_made: Vec<&String> = at.iter().filter(|line| line.contains(" = ")).collect();
    let what = format!("killed at stop {number}, after {acknowledged:?}, {:?}", calls_made.last());
    scene.agent.kill9();
    follow(&mut scene, &acknowledged, &what);
    killed
}

fn is_dead(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// Restarts the agent and checks that everything acknowledged holds.
fn follow(scene: &mut Scene, acknowledged: &[Step], what: &str) {
    let done = |step: Step| acknowledged.contains(&step);
    // This run is not traced.
    let trace_free = binary().unwrap();
    let script = scene.dir.path().join("beelet");
    workdir::write(&script, format!("#!/bin/sh\nexec '{}' \"$@\"\n", trace_free.display())).unwrap();
    scene.agent.resume().unwrap_or_else(|error| panic!("{what}: {error:#}"));
    scene.until_called("relists", 0, 1, super::scene::is_relist);
    let manifests = scene.agent.manifests();
    let manifest = |name: &str| fs::read_to_string(manifests.join(name)).ok();
    // A manifest is complete or missing.
    for name in ["web.yaml", "job.yaml", "configmap.conf.yaml"] {
        if let Some(text) = manifest(name) {
            serde_json::from_str::<Value>(&text)
                .unwrap_or_else(|error| panic!("{what}: {name}: {error}: {text}"));
        }
        let may_be_gone = name == "web.yaml" && done(Step::Ended);
        assert!(may_be_gone || !done(Step::Applied) || manifest(name).is_some(), "{what}: {name} is lost");
    }
    assert!(
        !done(Step::Deleted) || manifest("web.yaml").is_none(),
        "{what}: the deleted manifest has returned"
    );
    if done(Step::Changed)
        && let Some(text) = manifest("web.yaml")
    {
        assert!(text.contains("two"), "{what}: the changed manifest is lost: {text}");
    }
    // Every wanted pod runs, once.
    let rejected = scene.agent.inspect(|watch| watch.rejected.len()).unwrap();
    assert_eq!(rejected, 0, "{what}");
    let has_conf = manifest("configmap.conf.yaml").is_some();
    match manifest("web.yaml") {
        Some(text) if has_conf => {
            let hostname = if text.contains("two") { "two" } else { "one" };
            scene.until_pod("web", &format!("to be ready ({what})"), |pod| {
                let spec = pod.pod.spec.as_ref();
                pod.ready() && spec.is_some_and(|spec| spec.hostname.as_deref() == Some(hostname))
            });
            scene.poll_until(&format!("{what}: one sandbox and one container"), || {
                let world = scene.cri.world();
                let of_web = world.sandboxes.values().filter(|s| s.pod_name() == "web-testnode");
                let (sandboxes, containers) = (of_web.count(), scene.containers("web"));
                let well = sandboxes == 1 && containers.matches('+').count() == 1;
                if well { Ok(()) } else { Err(format!("{sandboxes} sandboxes, {containers}")) }
            });
        }
        Some(_) => {}
        None => scene.until_gone("web"),
    }
    if manifest("job.yaml").is_some() {
        let job = scene.until_pod("job", &format!("to have ended ({what})"), |pod| pod.phase() == "Failed");
        let reason = job.pod.status.and_then(|status| status.reason);
        assert_eq!(reason.as_deref(), Some("DeadlineExceeded"), "{what}");
    }
    // State files are intact, and half-written files are not left.
    let odd = |name: &std::ffi::OsString| {
        let name = name.to_string_lossy();
        name.contains("corrupt") || name.ends_with(".tmp")
    };
    scene.poll_until(&format!("{what}: a state folder in order"), || {
        let names = names_in(&scene.path("state"));
        if names.iter().any(odd) { Err(format!("{names:?}")) } else { Ok(()) }
    });
    scene.is_well();
    // All pods can be removed.
    for name in ["web.yaml", "job.yaml"] {
        let _ = fs::remove_file(manifests.join(name));
    }
    for name in ["web", "job"] {
        scene.until_gone(name);
    }
    scene.poll_until(&format!("{what}: the pods' folders to be removed"), || {
        let left: Vec<PathBuf> = super::scene::files_below(&scene.path("pods"));
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    });
    assert!(scene.cri.world().sandboxes.is_empty(), "{what}");
}

/// Kills the agent at every `step`th stop, from number `first` on.
fn each(calls: &str, first: usize, step: usize) -> usize {
    let mut number = first;
    while life(number, calls) {
        number += step;
    }
    number
}

#[test]
fn killed_after_a_write_the_agent_keeps_all_acknowledged_work() {
    require!(strace);
    let last = each(PLACING, 1, 2);
    // Records were written, manifests put in place, volumes' links exchanged.
    assert!(last > 12, "only {last} writes");
}

#[test]
fn killed_after_every_write_the_agent_keeps_all_acknowledged_work() {
    require!(strace, long);
    let last = each(ALL, 1, 1);
    assert!(last > 30, "only {last} writes");
}
