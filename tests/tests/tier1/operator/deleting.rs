//! Pods that are deleted, by force or with a grace period, and applied again, or deleted again.

use std::io::{BufRead as _, BufReader};

use super::*;

/// Why the runtime refuses to stop a sandbox.
const REFUSES: &str = "cannot signal container in state created";
/// The pod's name on the node.
const WEB: &str = "web-testnode";

impl Node {
    fn sandbox_id(&self) -> String {
        self.cri.sandbox(WEB).unwrap().id
    }

    /// Waits until the line of `get pods -o wide` about the pod has all these words.
    fn until_shown(&self, words: &[&str]) -> String {
        workdir::wait_for(&format!("the pod to be shown as {words:?}"), workdir::PATIENCE, || {
            // An agent that has only begun knows nothing yet.
            let said = self.run(&["get", "pods", "-o", "wide"]);
            let line = said.out.lines().find(|line| line.contains(WEB)).unwrap_or_default().to_owned();
            if words.iter().all(|word| line.contains(word)) { Ok(line) } else { Err(format!("{said:?}")) }
        })
        .unwrap()
    }

    /// Waits until a pod runs that is not the one of this sandbox, and has nothing of it.
    fn until_new(&self, before: &str) {
        self.run(&["wait", WEB, "--for=ready", "--timeout=90s"]).well();
        assert_ne!(self.sandbox_id(), before);
        assert_eq!(self.cri.container(WEB, "main").unwrap().attempt(), 0, "the restart count begins anew");
        let line = self.until_shown(&["1/1", "Running"]);
        assert!(line.split_whitespace().any(|cell| cell == "0"), "{line}");
    }
}

#[test]
fn what_is_deleted_in_haste_and_applied_again_runs_as_a_new_pod() {
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
        assert!(!events.contains("deleted on request"), "a deletion is no failure: {events}");
    }
}

/// Forces a pod out that the runtime cannot stop, and applies `next`; then the agent is killed and started
/// again.
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
    let said = node.run(&["apply", "--wait", "--timeout", "3s", "-f", &file]);
    let waits = "waiting for the force-deleted pod of the same name: ";
    assert!(
        said.err.contains("not ready within 3 s") && said.err.contains(waits),
        "{}{}",
        said.out,
        said.err
    );
    let words = ["0/1", "Pending", waits, REFUSES];
    node.until_shown(&words);
    assert!(node.run(&["events"]).well().out.contains("WaitsForDeletedPod"));
    let doctor = node.run(&["doctor", "-o", "json", "--config", node.agent.config().to_str().unwrap()]);
    let forced = "1 force-deleted pod still runs: default/web-testnode";
    assert!(doctor.out.contains(forced), "{}{}", doctor.out, doctor.err);
    node.agent.kill9();
    node.agent.resume().unwrap();
    // It is not taken for the one that was deleted, which still runs.
    node.until_shown(&words);
    let starts = || node.cri.count(Op::RunPodSandbox);
    assert_eq!((node.sandbox_id(), starts()), (before.clone(), 1));
    node.cri.heal();
    node.until_new(&before);
    assert_eq!(starts(), 2);
}

#[test]
fn the_same_pod_that_waits_for_one_deleted_by_force_is_shown_and_says_so() {
    require!(root);
    check_that_it_waits_in_view(&pod("web", "shop"));
}

#[test]
fn another_pod_that_waits_for_one_deleted_by_force_is_shown_and_says_so() {
    require!(root);
    check_that_it_waits_in_view(&pod("web", "door"));
}

#[test]
fn a_deletion_that_the_agent_did_not_live_to_finish_is_finished_before_the_pod_runs_again() {
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
fn a_second_delete_waits_as_the_first_one_did_and_may_be_in_more_haste() {
    require!(root);
    let node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--wait", "-f", &file]).well();
    node.cri.on(Op::StopPodSandbox).always().fail(tonic::Code::Unknown, REFUSES);
    node.run(&["delete", "pod", "web", "--no-wait", "--grace-period", "500"]).well();
    node.until_shown(&["Terminating"]);
    let grace = || {
        let said = node.run(&["get", "pods", "web", "-o", "json"]).well().out;
        let said: Value = serde_json::from_str(&said).unwrap();
        let pod = said["items"].get(0).unwrap_or(&said);
        pod["metadata"]["deletionGracePeriodSeconds"].as_u64().unwrap()
    };
    assert_eq!(grace(), 500, "a person may also give more time");
    let said = node.run(&["delete", "pod", "web", "--timeout", "15s"]);
    assert_eq!((said.code, said.out.as_str()), (Some(1), ""), "{}", said.err);
    let waiting =
        |line: &String| line.starts_with("waiting: pod default/web-testnode: ") && line.contains(REFUSES);
    assert!(said.err.lines().map(str::to_owned).any(|line| waiting(&line)), "{}", said.err);
    assert!(said.err.contains("error: not deleted within 15 s: pod default/web-testnode: "), "{}", said.err);
    assert_eq!(grace(), 500);
    for (asked, expected) in [("7", 7), ("100", 7)] {
        node.run(&["delete", "pod", "web", "--no-wait", "--grace-period", asked]).well();
        workdir::wait_for("the pod's new grace period", workdir::PATIENCE, || match grace() {
            seconds if seconds == expected => Ok(()),
            other => Err(other.to_string()),
        })
        .unwrap();
    }
    // By its whole name, too; and it comes back once the pod is gone.
    let mut waits = node.agent.cli(&["delete", "pod", WEB]);
    let mut waits = waits.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let told = BufReader::new(waits.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(told.into_iter().any(|line| waiting(&line)), "it ended, and said nothing of what it waits for");
    node.cri.heal();
    let said = Said::from(waits.wait_with_output().unwrap()).well();
    assert_eq!(said.out, "pod/web-testnode deleted (manifest already removed)\n");
    assert!(node.run(&["delete", "pod", "web"]).err.contains("no manifest describes the Pod"));
}

#[test]
fn the_wait_for_a_runtime_that_hangs_ends_with_what_is_being_done() {
    require!(root);
    let node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--wait", "-f", &file]).well();
    let held = node.cri.on(Op::StopPodSandbox).always().hold();
    let said = node.run(&["delete", "pod", "web", "--timeout", "4s"]);
    let end =
        "error: not deleted within 4 s: pod default/web-testnode: is terminating; its grace period ends at ";
    assert!(said.code == Some(1) && said.err.contains(end), "{}", said.err);
    held.release();
}

#[test]
fn the_first_manifest_makes_the_folder_of_manifests() {
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
fn a_new_configuration_says_how_this_machine_is_checked_against_it() {
    require!(root);
    let node = Node::start();
    let path = node.dir.path().join("new.yaml");
    let path = path.to_str().unwrap();
    let said = node.run(&["config", "init", path]).well();
    assert!(said.out.contains(&format!("`beelet doctor --config {path}`")), "{}", said.out);
}
