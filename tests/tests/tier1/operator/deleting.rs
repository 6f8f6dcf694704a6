//! Pods that are deleted, by force or with a grace period, and applied or deleted again.

use std::io::{BufRead as _, BufReader};

use super::*;

/// Error with which the runtime refuses to stop a sandbox.
const REFUSES: &str = "cannot signal container in state created";
/// Name of the pod on the node.
const WEB: &str = "web-testnode";

impl Node {
    fn sandbox_id(&self) -> String {
        self.cri.sandbox(WEB).unwrap().id
    }

    /// Waits until the pod's line of `get pods -o wide` has all these words.
    fn until_shown(&self, words: &[&str]) -> String {
        workdir::wait_for(&format!("the pod to be shown as {words:?}"), workdir::PATIENCE, || {
            // An agent that has just started knows no pods yet.
            let outcome = self.run(&["get", "pods", "-o", "wide"]);
            let line = outcome.out.lines().find(|line| line.contains(WEB)).unwrap_or_default().to_owned();
            if words.iter().all(|word| line.contains(word)) { Ok(line) } else { Err(format!("{outcome:?}")) }
        })
        .unwrap()
    }

    /// Waits until a new pod runs, which has another sandbox and none of the old state.
    fn until_new(&self, before: &str) {
        self.run(&["wait", WEB, "--for=ready", "--timeout=90s"]).well();
        assert_ne!(self.sandbox_id(), before);
        assert_eq!(self.cri.container(WEB, "main").unwrap().attempt(), 0, "the restart count was kept");
        let line = self.until_shown(&["1/1", "Running"]);
        assert!(line.split_whitespace().any(|cell| cell == "0"), "{line}");
    }
}

#[test]
fn a_pod_deleted_by_force_and_applied_again_runs_as_a_new_pod() {
    require!(root);
    let node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    let ways: [&[&str]; 4] = [
        &["--no-wait"],
        &["--no-wait", "--grace-period", "1"],
        &["--force"],
        &["--force", "--keep-manifest"],
    ];
    for how in ways {
        node.run(&["apply", "--wait", "-f", &file]).well();
        node.run(&["restart", "web"]).well();
        assert_eq!(node.cri.container(WEB, "main").unwrap().attempt(), 1);
        let before = node.sandbox_id();
        node.run(&[&["delete", "pod", "web"], how].concat()).well();
        node.run(&["apply", "-f", &file]).well();
        node.until_new(&before);
        let events = node.run(&["events"]).well().out;
        assert!(!events.contains("deleted on request"), "a deletion was reported as a failure: {events}");
    }
}

/// Forces out a pod that the runtime cannot stop, and applies `next`; then kills and restarts the agent.
#[track_caller]
fn check_that_it_waits_in_view(next: &Value) {
    let mut node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--wait", "-f", &file]).well();
    node.run(&["restart", "web"]).well();
    let before = node.sandbox_id();
    node.cri.on(Op::StopPodSandbox).always().fail(tonic::Code::Unknown, REFUSES);
    node.run(&["delete", "pod", "web", "--force"]).well();
    let file = node.file("next.json", &next.to_string());
    let outcome = node.run(&["apply", "--wait", "--timeout", "3s", "-f", &file]);
    let waits = "waiting for the force-deleted pod of the same name: ";
    assert!(
        outcome.err.contains("not ready within 3 s") && outcome.err.contains(waits),
        "{}{}",
        outcome.out,
        outcome.err
    );
    let words = ["0/1", "Pending", waits, REFUSES];
    node.until_shown(&words);
    assert!(node.run(&["events"]).well().out.contains("WaitsForDeletedPod"));
    let doctor = node.run(&["doctor", "-o", "json", "--config", node.agent.config().to_str().unwrap()]);
    let forced = "1 force-deleted pod still runs: default/web-testnode";
    assert!(doctor.out.contains(forced), "{}{}", doctor.out, doctor.err);
    node.agent.kill9();
    node.agent.resume().unwrap();
    // The new pod is not mistaken for the deleted one, which still runs.
    node.until_shown(&words);
    let starts = || node.cri.count(Op::RunPodSandbox);
    assert_eq!((node.sandbox_id(), starts()), (before.clone(), 1));
    node.cri.heal();
    node.until_new(&before);
    assert_eq!(starts(), 2);
}

#[test]
fn the_same_pod_shows_that_it_waits_for_a_pod_deleted_by_force() {
    require!(root);
    check_that_it_waits_in_view(&pod("web", "shop"));
}

#[test]
fn another_pod_shows_that_it_waits_for_a_pod_deleted_by_force() {
    require!(root);
    check_that_it_waits_in_view(&pod("web", "door"));
}

#[test]
fn a_deletion_interrupted_by_a_kill_is_completed_before_the_pod_runs_again() {
    require!(root);
    let mut node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--wait", "-f", &file]).well();
    let before = node.sandbox_id();
    node.cri.on(Op::StopPodSandbox).always().fail(tonic::Code::Unknown, REFUSES);
    node.run(&["delete", "pod", "web", "--no-wait", "--grace-period", "1"]).well();
    node.run(&["apply", "-f", &file]).well();
    node.until_shown(&["Terminating", REFUSES]);
    node.agent.kill9();
    node.agent.resume().unwrap();
    node.until_shown(&["Terminating", REFUSES]);
    node.cri.heal();
    node.until_new(&before);
}

#[test]
fn a_second_delete_waits_like_the_first_and_may_shorten_the_grace_period() {
    require!(root);
    let node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--wait", "-f", &file]).well();
    node.cri.on(Op::StopPodSandbox).always().fail(tonic::Code::Unknown, REFUSES);
    node.run(&["delete", "pod", "web", "--no-wait", "--grace-period", "500"]).well();
    node.until_shown(&["Terminating"]);
    let grace = || {
        let outcome = node.run(&["get", "pods", "web", "-o", "json"]).well().out;
        let pod: Value = serde_json::from_str(&outcome).unwrap();
        pod["metadata"]["deletionGracePeriodSeconds"].as_u64().unwrap()
    };
    assert_eq!(grace(), 500, "a longer grace period was not accepted");
    let outcome = node.run(&["delete", "pod", "web", "--timeout", "15s"]);
    assert_eq!((outcome.code, outcome.out.as_str()), (Some(1), ""), "{}", outcome.err);
    let waiting =
        |line: &String| line.starts_with("waiting: pod default/web-testnode: ") && line.contains(REFUSES);
    assert!(outcome.err.lines().map(str::to_owned).any(|line| waiting(&line)), "{}", outcome.err);
    assert!(
        outcome.err.contains("error: not deleted within 15 s: pod default/web-testnode: "),
        "{}",
        outcome.err
    );
    assert_eq!(grace(), 500);
    for (asked, expected) in [("7", 7), ("100", 7)] {
        node.run(&["delete", "pod", "web", "--no-wait", "--grace-period", asked]).well();
        workdir::wait_for("the pod's new grace period", workdir::PATIENCE, || match grace() {
            seconds if seconds == expected => Ok(()),
            other => Err(other.to_string()),
        })
        .unwrap();
    }
    // The pod's whole name works too; its manifest is applied again once the pod is removed.
    let mut waits = node.agent.cli(&["delete", "pod", WEB]);
    let mut waits = waits.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(waits.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(
        lines.into_iter().any(|line| waiting(&line)),
        "the command ended without naming the cause of its wait"
    );
    node.cri.heal();
    let outcome = Outcome::from(waits.wait_with_output().unwrap()).well();
    assert_eq!(outcome.out, "pod/web-testnode deleted (manifest already removed)\n");
    assert!(node.run(&["delete", "pod", "web"]).err.contains("no manifest describes the Pod"));
}

#[test]
fn the_wait_for_a_runtime_that_hangs_ends_with_the_current_operation() {
    require!(root);
    let node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--wait", "-f", &file]).well();
    let held = node.cri.on(Op::StopPodSandbox).always().hold();
    let outcome = node.run(&["delete", "pod", "web", "--timeout", "4s"]);
    let end =
        "error: not deleted within 4 s: pod default/web-testnode: is terminating; its grace period ends at ";
    assert!(outcome.code == Some(1) && outcome.err.contains(end), "{}", outcome.err);
    held.release();
}

#[test]
fn the_first_manifest_creates_the_manifest_folder() {
    require!(root);
    use std::os::unix::fs::PermissionsExt as _;
    let node = Node::start();
    let folder = node.agent.manifests();
    fs::remove_dir(&folder).unwrap();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--dry-run", "-f", &file]).well();
    assert!(!folder.exists());
    node.run(&["apply", "--wait", "-f", &file]).well();
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    node.run(&["delete", "pod", "web"]).well();
}

#[test]
fn config_init_names_the_command_that_checks_the_machine() {
    require!(root);
    let node = Node::start();
    let path = node.dir.path().join("new.yaml");
    let path = path.to_str().unwrap();
    let outcome = node.run(&["config", "init", path]).well();
    assert!(outcome.out.contains(&format!("`beelet doctor --config {path}`")), "{}", outcome.out);
}
