//! An operator's commands: `beelet` against `beelet run` on a fake runtime.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

mod deleting;

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use beelet_tests::agent::{Agent, Options};
use beelet_tests::cri::{FakeCri, Op};
use beelet_tests::guards::CgroupRoot;
use beelet_tests::{images, manifests, require, workdir};
use serde_json::{Value, json};

/// An agent on a fake runtime, with its surroundings, dropped in this order at the end of the test.
struct Node {
    agent: Agent,
    cri: FakeCri,
    _cgroup: CgroupRoot,
    dir: tempfile::TempDir,
}

/// Output and exit code of a command.
#[derive(Debug)]
struct Outcome {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

impl Node {
    fn start() -> Self {
        Self::with(|options| options)
    }

    fn with(change: impl FnOnce(Options) -> Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cri = FakeCri::start();
        cri.add_image(images::APP);
        let cgroup = CgroupRoot::new(&workdir::unique("bo")).unwrap();
        let mut options = Options::at(dir.path(), "agent", &cri.endpoint(), &cgroup);
        options.mount_bpffs = false;
        let agent = Agent::start(change(options)).unwrap();
        Self { agent, cri, _cgroup: cgroup, dir }
    }

    fn run(&self, arguments: &[&str]) -> Outcome {
        self.agent.cli(arguments).output().unwrap().into()
    }

    /// Runs a command with standard input.
    fn feed(&self, arguments: &[&str], input: &str) -> Outcome {
        let mut command = self.agent.cli(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap().into()
    }

    /// Writes a file next to the agent's own.
    fn file(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.agent.manifests().join(name)
    }
}

impl Outcome {
    fn well(self) -> Self {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.err);
        self
    }
}

fn pod(name: &str, app: &str) -> Value {
    let mut pod = manifests::pod(name, &["/bin/testapp"]);
    pod["metadata"]["labels"] = json!({ "app": app });
    pod
}

#[test]
fn a_dry_run_matches_the_later_apply_which_keeps_comments() {
    require!(root);
    let node = Node::start();
    let mut wrong = pod("wrong", "shop");
    wrong["spec"]["priorityClassName"] = "nobody".into();
    wrong["spec"]["containers"][0]["comand"] = json!(["x"]);
    let web = "# the shop's door\napiVersion: v1\nkind: Pod # one\nmetadata: {name: web, labels: {app: shop}}\nspec:\n  \
               terminationGracePeriodSeconds: 1\n  containers:\n  - {name: main, image: IMAGE}\n";
    let web = web.replace("IMAGE", images::APP);
    let text = format!("{web}---\n{wrong:#}\n");
    let line = 1 + text.lines().position(|line| line.contains("comand")).unwrap();
    let file = node.file("all.yaml", &text);
    let dry = node.run(&["apply", "--dry-run", "-f", &file]);
    assert_eq!(
        (dry.code, dry.out.as_str()),
        (Some(1), "pod/web created (dry run)\npod/wrong created (dry run), but rejected\n")
    );
    assert!(
        dry.err.contains(&format!("line {line}: spec.containers[0].comand: unknown field")),
        "{}",
        dry.err
    );
    assert!(dry.err.contains("rejected by the node: wrong.yaml: spec.priorityClassName"), "{}", dry.err);
    assert!(!node.manifest("web.yaml").exists());
    let real = node.run(&["apply", "-f", &file]);
    let printed = "pod/web created\npod/wrong created, but rejected\n";
    assert_eq!((real.code, real.out.as_str()), (Some(1), printed));
    assert_eq!(real.err.lines().take(2).collect::<Vec<_>>(), dry.err.lines().take(2).collect::<Vec<_>>());
    assert_eq!(fs::read_to_string(node.manifest("web.yaml")).unwrap(), web);
}

#[test]
fn one_run_reports_all_errors_in_a_folder() {
    require!(root);
    let node = Node::start();
    node.file("shop/a.yaml", "kind: [");
    node.file("shop/b.yaml", &format!("{:#}\n---\nkind: Pot\napiVersion: v1\n", pod("b", "shop")));
    node.file("shop/c.json", "{\"kind\": \"Pod\"}");
    let folder = node.dir.path().join("shop");
    let outcome = node.run(&["apply", "-f", folder.to_str().unwrap()]);
    assert_eq!(outcome.code, Some(2));
    for part in ["a.yaml:1:", "b.yaml:24:7: kind: \"Pot\"", "c.json:1:"] {
        assert!(outcome.err.contains(part), "{part}: {}", outcome.err);
    }
    assert_eq!(fs::read_dir(node.agent.manifests()).unwrap().count(), 0);
}

#[test]
fn a_list_from_standard_input_is_applied_diffed_pruned_and_deleted() {
    require!(root);
    let node = Node::start();
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf", "labels": {"app": "shop"}}, "data": {"a": "b"}});
    let list = |items: &[&Value]| json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string();
    let (one, two) = (pod("one", "shop"), pod("two", "shop"));
    let outcome = node.feed(&["apply", "--wait", "-f", "-"], &list(&[&map, &one, &two])).well();
    assert!(
        outcome.out.starts_with("configmap/conf created\npod/one created\npod/two created\n"),
        "{}",
        outcome.out
    );
    assert!(outcome.out.contains("pod default/one-testnode is ready"), "{}", outcome.out);
    let table = node.run(&["get", "configmaps"]).well();
    assert!(table.out.contains("conf") && table.out.contains("configmap.conf.yaml"), "{}", table.out);
    let mut changed = one.clone();
    changed["metadata"]["labels"]["tier"] = "front".into();
    assert_eq!(node.feed(&["diff", "-f", "-"], &list(&[&map, &one, &two])).well().out, "");
    let diff = node.feed(&["diff", "-f", "-"], &list(&[&map, &changed]));
    assert_eq!(diff.code, Some(1), "{}", diff.err);
    assert!(diff.out.contains("\n+      \"tier\": \"front\"\n"), "{}", diff.out);
    let prune = ["apply", "--prune", "-l", "app=shop", "-f", "-"];
    let outcome = node.feed(&prune, &list(&[&map, &one])).well();
    assert_eq!(outcome.out, "configmap/conf unchanged\npod/one unchanged\npod/two-testnode pruned\n");
    node.run(&["wait", "two", "--for=deleted", "--timeout=60s"]).well();
    let names = |outcome: &Outcome| outcome.out.lines().skip(1).count();
    assert_eq!(names(&node.run(&["get", "pods", "one", "-l", "app=shop"]).well()), 1);
    let outcome = node.feed(&["delete", "-f", "-"], &list(&[&map, &one])).well();
    assert!(
        outcome.out.contains("configmap/conf deleted") && outcome.out.contains("pod/one-testnode deleted"),
        "{}",
        outcome.out
    );
    assert_eq!(names(&node.run(&["get", "pods"]).well()), 0);
    assert_eq!(fs::read_dir(node.agent.manifests()).unwrap().count(), 0);
}

#[test]
fn a_pod_that_the_runtime_cannot_stop_shows_the_reason_and_is_hidden_by_force() {
    require!(root);
    let node = Node::start();
    let file = node.file("web.json", &pod("web", "shop").to_string());
    node.run(&["apply", "--wait", "-f", &file]).well();
    let why = "cannot signal container in state created";
    node.cri.on(Op::StopPodSandbox).always().fail(tonic::Code::Unknown, why);
    let outcome = node.run(&["delete", "pod", "web", "--timeout", "15s"]);
    assert_eq!((outcome.code, outcome.out.as_str()), (Some(1), ""), "{}", outcome.err);
    let waiting = outcome
        .err
        .lines()
        .find(|line| line.starts_with("waiting: pod default/web-testnode: error killing pod: "));
    assert!(waiting.is_some_and(|line| line.contains(why)), "{}", outcome.err);
    assert!(
        outcome.err.contains("error: not deleted within 15 s: pod default/web-testnode: error killing"),
        "{}",
        outcome.err
    );
    for shown in [
        node.run(&["get", "pods", "-o", "wide"]).well().out,
        node.run(&["describe", "pod", "web"]).well().out,
        node.run(&["events"]).well().out,
    ] {
        assert!(shown.contains("error killing pod: ") && shown.contains(why), "{shown}");
    }
    assert!(node.run(&["events"]).well().out.contains("FailedKillPod"));
    // The first delete removed the pod's manifest.
    let forced = node.run(&["delete", "pod", "web", "--force"]).well();
    assert!(
        forced.out.starts_with("pod/web-testnode force deleted; its containers may run"),
        "{}",
        forced.out
    );
    let there = || node.run(&["get", "pods"]).well().out.contains("web-testnode");
    let patience = workdir::PATIENCE;
    workdir::wait_for("the pod to be hidden", patience, || {
        if there() { Err("the pod is shown") } else { Ok(()) }
    })
    .unwrap();
    assert!(node.cri.sandbox("web-testnode").is_some(), "the sandbox was stopped too early");
    node.cri.heal();
    let gone = || node.cri.sandbox("web-testnode").map_or(Ok(()), |sandbox| Err(sandbox.id));
    workdir::wait_for("the sandbox to be stopped", patience, gone).unwrap();
}

#[test]
fn a_selector_limits_a_deletion_and_a_map_in_use_is_reported() {
    require!(root);
    let node = Node::start();
    let map =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"a": "b"}});
    let mut user = pod("user", "shop");
    user["spec"]["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "conf"}}]);
    let all = format!("{map}\n---\n{user}\n---\n{}\n", pod("other", "door"));
    node.feed(&["apply", "--wait=running", "-f", "-"], &all).well();
    let outcome = node.run(&["delete", "configmap", "conf"]).well();
    assert!(
        outcome.err.contains("in use: default/user-testnode cannot be started without it"),
        "{}",
        outcome.err
    );
    let outcome = node.run(&["delete", "pods", "-l", "app=shop", "--timeout", "1m"]).well();
    assert!(
        outcome.out.contains("pod/user-testnode deleted") && !outcome.out.contains("other"),
        "{}",
        outcome.out
    );
    let outcome = node.run(&["delete", "pods", "--all"]).well();
    assert!(outcome.out.contains("pod/other-testnode deleted"), "{}", outcome.out);
    let outcome = node.run(&["delete", "pod", "other"]);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.err.contains("no manifest describes the Pod default/other"), "{}", outcome.err);
}

#[test]
fn apply_reports_the_pods_outcome() {
    require!(root);
    let node = Node::start();
    let large = manifests::with_resources(pod("large", "shop"), ("900", ""), ("", ""));
    let outcome = node.feed(&["apply", "-f", "-"], &large.to_string()).well();
    assert_eq!(outcome.out, "pod/large created\n");
    assert!(outcome.err.contains("pod default/large-testnode: OutOfcpu: "), "{}", outcome.err);
    let outcome = node.feed(&["apply", "--wait", "--timeout=5m", "-f", "-"], &large.to_string());
    assert_eq!(outcome.code, Some(1));
    assert!(
        outcome.err.contains("will not be ready: pod default/large-testnode: OutOfcpu"),
        "{}",
        outcome.err
    );
    let mut absent = pod("absent", "shop");
    absent["spec"]["containers"][0]["imagePullPolicy"] = "Never".into();
    absent["spec"]["containers"][0]["image"] = "example.com/none:1".into();
    let outcome = node.feed(&["apply", "--wait", "--timeout=3s", "-f", "-"], &absent.to_string());
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.err.contains("not ready within 3 s: pod default/absent-testnode: "), "{}", outcome.err);
    assert!(outcome.err.contains("Never"), "{}", outcome.err);
}

#[test]
fn a_restart_waits_for_no_back_off() {
    require!(root);
    let node = Node::start();
    node.feed(&["apply", "--wait", "-f", "-"], &pod("web", "shop").to_string()).well();
    let attempt = || node.cri.container("web-testnode", "main").unwrap().attempt();
    assert_eq!(attempt(), 0);
    let outcome = node.run(&["restart", "web"]).well();
    assert_eq!(outcome.out, "container main of pod default/web-testnode restarted\n");
    assert_eq!(attempt(), 1);
    let events = node.run(&["events", "--for", "web-testnode"]).well().out;
    assert!(events.contains("Container main is restarted on request"), "{events}");
    // The container crashes again and again; its delay is 10 s at least.
    for _ in 0..2 {
        let id = node.cri.container("web-testnode", "main").unwrap().id.clone();
        node.cri.exit(&id, 1);
        let waits = node.agent.until("the back-off", |watch| {
            let pod = watch.pod("web").cloned()?;
            (!pod.ready()).then_some(())
        });
        waits.unwrap();
        let before = attempt();
        node.run(&["restart", "web", "-c", "main", "--timeout", "60s"]).well();
        assert_eq!(attempt(), before + 1);
    }
    let outcome = node.run(&["restart", "web", "-c", "none"]);
    assert!(outcome.err.contains("has no container \"none\"; it has main"), "{}", outcome.err);
    let mut job = pod("job", "shop");
    job["spec"]["restartPolicy"] = "Never".into();
    node.feed(&["apply", "--wait=running", "-f", "-"], &job.to_string()).well();
    let outcome = node.run(&["restart", "job"]);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.err.contains("delete the pod and apply its manifest again"), "{}", outcome.err);
}

#[test]
fn images_show_their_users_and_an_image_in_use_is_kept() {
    require!(root);
    let node = Node::start();
    let other = "example.com/other:1";
    node.cri.add_image(other);
    node.cri.add_to_registry("example.com/more:1");
    node.feed(&["apply", "--wait", "-f", "-"], &pod("web", "shop").to_string()).well();
    let mut absent = pod("absent", "shop");
    absent["spec"]["containers"][0]["image"] = "example.com/none:1".into();
    node.feed(&["apply", "-f", "-"], &absent.to_string()).well();
    let outcome = node.run(&["images", "ls"]).well();
    let of = |name: &str| outcome.out.lines().find(|line| line.contains(name)).unwrap_or_default().to_owned();
    assert!(of(images::APP).ends_with("default/web-testnode"), "{}", outcome.out);
    assert!(of(other).ends_with("<none>"), "{}", outcome.out);
    assert!(
        outcome.err.contains("missing: example.com/none:1 (used by default/absent-testnode)"),
        "{}",
        outcome.err
    );
    let outcome = node.run(&["images", "rm", images::APP]);
    assert!(outcome.err.contains("is in use by default/web-testnode"), "{}", outcome.err);
    node.run(&["images", "rm", other]).well();
    assert!(node.run(&["images", "rm", other]).err.contains("not found; `beelet images ls`"));
    node.run(&["images", "pull", "example.com/more:1"]).well();
    let outcome = node.run(&["get", "images", "-o", "json"]).well();
    let value: Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!(value["missing"][0]["name"], "example.com/none:1");
    assert!(outcome.out.contains("example.com/more:1") && !outcome.out.contains(other), "{}", outcome.out);
}

#[test]
fn every_command_shows_why_a_pod_does_not_start() {
    require!(root);
    let node = Node::start();
    let mut absent = pod("absent", "shop");
    absent["spec"]["containers"][0]["imagePullPolicy"] = "Never".into();
    absent["spec"]["containers"][0]["image"] = "example.com/none:1".into();
    let large = manifests::with_resources(pod("large", "shop"), ("900", ""), ("", ""));
    node.feed(&["apply", "-f", "-"], &format!("{absent}\n---\n{large}")).well();
    let why = "ErrImageNeverPull: image example.com/none:1 is not";
    let outcome = node.run(&["restart", "absent", "--timeout", "2s"]);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.err.contains(&format!("container main is waiting: {why}")), "{}", outcome.err);
    let top = node.run(&["top", "--once"]).well().out;
    let of = |name: &str| top.lines().find(|line| line.contains(name)).unwrap_or_default().to_owned();
    assert!(of("absent-testnode").contains(&format!("container main: {why}")), "{top}");
    assert!(of("large-testnode").contains("OutOfcpu: Pod was rejected: Node didn't have enough"), "{top}");
    let outcome = node.run(&["logs", "large"]);
    let refused = "container main of default/large-testnode was never started: OutOfcpu";
    assert!(outcome.err.contains(refused), "{}", outcome.err);
    assert!(
        node.run(&["logs", "-f", "large"]).err.contains(refused),
        "logs -f waited for a pod that never starts"
    );
}

/// Writes output of a pod's container, as a runtime does.
fn write_log(node: &Node, pod: &str, container: &str, lines: &[&str]) {
    let uid = node.run(&["get", "pod", pod, "-o", "jsonpath={.metadata.uid}"]).well().out;
    let folder = node.agent.dir().join(format!("logs/default_{pod}-testnode_{uid}/{container}"));
    fs::create_dir_all(&folder).unwrap();
    let line = |text: &&str| format!("2026-11-21T19:00:00.5Z stdout F {text}\n");
    fs::write(folder.join("0.log"), lines.iter().map(line).collect::<String>()).unwrap();
}

#[test]
fn logs_of_several_containers_and_pods_are_printed_with_their_names() {
    require!(root);
    let node = Node::start();
    let mut web = pod("web", "shop");
    let mut side = web["spec"]["containers"][0].clone();
    side["name"] = "side".into();
    web["spec"]["containers"].as_array_mut().unwrap().push(side);
    let list = format!("{web}\n---\n{}\n---\n{}", pod("db", "shop"), pod("other", "bank"));
    node.feed(&["apply", "--wait", "-f", "-"], &list).well();
    write_log(&node, "web", "main", &["one", "two"]);
    write_log(&node, "web", "side", &["three"]);
    write_log(&node, "db", "main", &(1..=12).map(|_| "row").collect::<Vec<_>>());
    write_log(&node, "other", "main", &["none of these"]);
    let check = |arguments: &[&str], expected: &str| {
        let outcome = node.run(&[&["logs"][..], arguments].concat()).well();
        assert_eq!((outcome.out.as_str(), outcome.err.as_str()), (expected, ""), "{arguments:?}");
    };
    check(&["web", "--all-containers"], "one\ntwo\nthree\n");
    let (main, side) = ("[pod/web-testnode/main] ", "[pod/web-testnode/side] ");
    check(&["web", "--all-containers", "--prefix"], &format!("{main}one\n{main}two\n{side}three\n"));
    check(&["web", "--prefix", "--tail=1"], &format!("{main}two\n"));
    // Only the last ten lines of each log are printed.
    check(&["-l", "app=shop"], &format!("{}one\ntwo\n", "row\n".repeat(10)));
    check(&["-l", "app=shop", "-c", "side"], "three\n");
    // A log that cannot be read does not suppress the lines of the others.
    let folder = node.agent.dir().join("logs");
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.to_string_lossy().contains("default_db") {
            fs::remove_dir_all(entry.join("main")).unwrap();
        }
    }
    let outcome = node.run(&["logs", "-l", "app=shop"]);
    assert_eq!((outcome.code, outcome.out.as_str()), (Some(1), "one\ntwo\n"));
    assert!(
        outcome.err.contains("default/db-testnode: the agent: the logs of main no longer exist"),
        "{}",
        outcome.err
    );
    assert!(outcome.err.contains("1 of 2 logs are incomplete"), "{}", outcome.err);
    let none = node.run(&["logs", "-l", "app=none"]);
    assert!(none.code == Some(1) && none.err.contains("no pod matches the selector"), "{}", none.err);
}

#[test]
fn a_config_map_is_described_with_the_pods_that_use_it() {
    require!(root);
    let node = Node::start();
    let map =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "conf"}, "data": {"a": "b"}});
    let mut web = pod("web", "shop");
    web["spec"]["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "conf"}}]);
    node.feed(&["apply", "--wait", "-f", "-"], &format!("{map}\n---\n{web}")).well();
    for name in [&["configmap", "conf"][..], &["cm/conf"]] {
        let outcome = node.run(&[&["describe"][..], name].concat()).well().out;
        assert!(outcome.contains("default/web-testnode") && outcome.contains("a:\n----\nb\n"), "{outcome}");
    }
    let outcome = node.run(&["describe", "secret", "conf"]);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.err.contains("secret \"conf\" not found"), "{}", outcome.err);
}
