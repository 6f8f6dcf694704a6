//! Hostile pods from an API server, on the whole agent. The readiness of two other pods must not change, the
//! agent must survive within a memory bound, and every pod that does not run must have a reason: in its
//! status, in an event or, if the pod cannot be parsed, in the log.

use std::cell::RefCell;
use std::collections::BTreeMap;

use beelet_testing::hostile_pods::{Group, Pair, pairs, plain};
use beelet_tests::agent::NODE;
use beelet_tests::apiserver::{Asked, FakeApi, Verb};
use beelet_tests::cri::Op;
use beelet_tests::{machine, require};
use serde_json::{Value, json};

use super::sampled;
use crate::cluster::scene::{Member, status_of};

/// Pods that are created at once.
const BATCH: usize = 150;
/// Allowed growth of the agent's memory over its use with the bystanders alone, in KiB: for [`BATCH`] pods,
/// some of them with 1000 elements, and for texts of 300 KB in several copies.
const MEMORY_KIB: u64 = 400 << 10;
/// Grace periods of the deletions, in turn, in seconds. An API server 1.36 accepts all of them and passes
/// negative ones on.
const GRACES: [i64; 8] = [i64::MAX, 1_000_000_000_000, 2_147_483_647, 30, 1, 0, -1, i64::MIN];
/// Log message about a pod that cannot be parsed. The node reports nothing about it to the API server, and
/// does not confirm its end.
const UNREADABLE: &str = "cannot read a pod of the API server";
/// Pods that must stay unaffected.
const BYSTANDERS: [&str; 2] = ["bystander", "bystander-probed"];

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{name}")
}

/// Hostile pod.
struct Tried {
    /// Name of the pod in the API server.
    name: String,
    /// Description of the hostile part.
    what: String,
    pod: Value,
}

/// Outcome of a hostile pod.
#[derive(Debug)]
enum Outcome {
    /// The pod runs, or ran.
    Runs,
    /// The pod does not run, for this published reason.
    Reported(String),
    /// The API server no longer has the pod.
    Gone,
}

/// Agent with its bystanders.
struct Node {
    member: Member,
    /// Number of requests to the API server before the first hostile pod.
    first: usize,
    /// Memory of the agent before the first hostile pod.
    before_kib: u64,
}

impl Node {
    async fn start() -> Node {
        let api = FakeApi::start();
        let data = json!({ "greeting": "hello" });
        api.put("/api/v1/namespaces/default/configmaps/conf", json!({ "metadata": {}, "data": data }));
        let data = json!({ "greeting": "aGVsbG8=" });
        api.put("/api/v1/namespaces/default/secrets/secret", json!({ "metadata": {}, "data": data }));
        let member =
            Member::start(api, |options| options.kubelet("maxPods", 1000).kubelet("eventRecordQPS", 0)).await;
        for name in BYSTANDERS {
            let mut pod = plain(name);
            if name == BYSTANDERS[1] {
                let probe = json!({ "exec": { "command": ["true"] }, "periodSeconds": 1, "timeoutSeconds": 60, "failureThreshold": 1 });
                pod["spec"]["containers"][0]["readinessProbe"] = probe;
            }
            member.api.put(&path(name), pod);
            member.until_running(name).await;
        }
        let before_kib = machine::resident_kib(member.scene.agent.pid().unwrap()).unwrap();
        let first = member.api.asked().len();
        Node { member, first, before_kib }
    }

    /// Creates pods on the node, all at once, and waits for the outcome of each.
    fn create(&self, pods: &[Tried]) -> BTreeMap<String, Outcome> {
        for tried in pods {
            let mut pod = tried.pod.clone();
            pod["metadata"]["name"] = tried.name.clone().into();
            // Fields that the API server sets.
            for field in ["namespace", "resourceVersion", "uid"] {
                pod["metadata"].as_object_mut().map(|metadata| metadata.remove(field));
            }
            self.member.api.put(&path(&tried.name), pod);
        }
        self.outcomes(pods)
    }

    fn outcomes(&self, pods: &[Tried]) -> BTreeMap<String, Outcome> {
        let found: RefCell<BTreeMap<String, Outcome>> = RefCell::default();
        self.member.scene.poll_until("the outcome of each pod", || {
            let mut found = found.borrow_mut();
            let reports = self.reports();
            for tried in pods {
                if !found.contains_key(&tried.name)
                    && let Some(outcome) = self.outcome(tried, &reports)
                {
                    found.insert(tried.name.clone(), outcome);
                }
            }
            let left: Vec<&Tried> = pods.iter().filter(|tried| !found.contains_key(&tried.name)).collect();
            // Only 20 of them: this text is built at each poll.
            let some: Vec<String> = left
                .iter()
                .take(20)
                .map(|tried| format!("{} ({}): {}", tried.name, tried.what, self.status(&tried.name)))
                .collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{} pods have no outcome: {some:#?}", left.len()))
            }
        });
        found.into_inner()
    }

    fn status(&self, name: &str) -> String {
        let pod = self.member.api.get(&path(name)).unwrap_or_default();
        pod["status"].to_string().chars().take(1500).collect()
    }

    /// Returns the reports about pods outside of their statuses: warning events, and log lines about pods
    /// that cannot be parsed.
    fn reports(&self) -> BTreeMap<String, String> {
        let events =
            self.member.api.all("/api/v1/events").into_iter().filter(|event| event["type"] == "Warning");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of_event = |event: Value| {
            let report = format!("{}: {}", text(&event["reason"]), text(&event["message"]));
            (text(&event["involvedObject"]["name"]), report)
        };
        let mut reports: BTreeMap<String, String> = events.map(of_event).collect();
        let log = self.member.scene.agent.log();
        for line in log.lines().filter(|line| line.contains(UNREADABLE)) {
            let name = line.split("tried-").nth(1).and_then(|rest| rest.get(..5));
            reports.extend(name.map(|number| (format!("tried-{number}"), line.to_owned())));
        }
        reports
    }

    fn outcome(&self, tried: &Tried, reports: &BTreeMap<String, String>) -> Option<Outcome> {
        let Some(pod) = self.member.api.get(&path(&tried.name)) else { return Some(Outcome::Gone) };
        let status = &pod["status"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let phase = text(&status["phase"]);
        if phase == "Running" || phase == "Succeeded" {
            return Some(Outcome::Runs);
        }
        // The hostile pod came with a deletion timestamp.
        if phase == "Failed" && pod["metadata"]["deletionTimestamp"].is_string() {
            return Some(Outcome::Gone);
        }
        if phase == "Failed" {
            let reason = format!("{}: {}", text(&status["reason"]), text(&status["message"]));
            return Some(Outcome::Reported(reason));
        }
        let lists = ["initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"];
        // Statuses from the hostile pod itself do not count.
        let published = |list: &&str| {
            let own = tried.pod["status"][*list].as_array().cloned().unwrap_or_default();
            let all = status[*list].as_array().into_iter().flatten();
            all.filter(move |container| !own.contains(container))
        };
        let all = lists.iter().flat_map(published);
        let states: Vec<&Value> = all.map(|container| &container["state"]).collect();
        if states.iter().any(|state| state["running"].is_object()) {
            return Some(Outcome::Runs);
        }
        let waits = states.iter().map(|state| &state["waiting"]).find(|waiting| {
            let reason = waiting["reason"].as_str().unwrap_or_default();
            !["", "ContainerCreating", "PodInitializing"].contains(&reason)
        });
        let waits =
            waits.map(|waiting| format!("{}: {}", text(&waiting["reason"]), text(&waiting["message"])));
        waits.or_else(|| reports.get(&tried.name).cloned()).map(Outcome::Reported)
    }

    /// Deletes pods, first with the grace periods of [`GRACES`], then with one second; waits until they are
    /// removed.
    fn delete(&self, pods: &[Tried]) {
        let api = &self.member.api;
        for (number, tried) in pods.iter().enumerate() {
            // The agent may already have removed the pod.
            let _ = api.try_delete_within(&path(&tried.name), GRACES[number % GRACES.len()]);
        }
        let reports = self.reports();
        for tried in pods {
            let _ = api.release(&path(&tried.name));
            let is_unreadable = reports.get(&tried.name).is_some_and(|report| report.contains(UNREADABLE));
            let _ = api.try_delete_within(&path(&tried.name), if is_unreadable { 0 } else { 1 });
        }
        self.member.scene.poll_until("the removal of all pods", || {
            let left: Vec<&str> = pods
                .iter()
                .filter(|tried| {
                    api.get(&path(&tried.name)).is_some()
                        || self.member.scene.cri.sandbox(&tried.name).is_some()
                })
                .map(|tried| tried.what.as_str())
                .collect();
            if left.is_empty() { Ok(()) } else { Err(format!("{} are left: {left:#?}", left.len())) }
        });
        api.compact();
    }

    /// Asserts that the agent is well and that the bystanders were ready all the time.
    fn is_unharmed(&self) {
        self.member.scene.is_well();
        for name in BYSTANDERS {
            let pod = self.member.api.get(&path(name)).unwrap();
            assert_eq!(status_of(&pod, "Ready").as_deref(), Some("True"), "{name}: {:#}", pod["status"]);
            assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{name}");
        }
        let asked = self.member.api.asked().into_iter().skip(self.first);
        let flips: Vec<Value> = asked.filter(was_unready).map(|asked| asked.body).collect();
        assert!(flips.is_empty(), "{flips:#?}");
    }

    fn memory(&self) -> String {
        let pid = self.member.scene.agent.pid().unwrap();
        let (peak, before) = (machine::peak_kib(pid).unwrap(), self.before_kib);
        assert!(peak <= before + MEMORY_KIB, "{peak} KiB at most, {before} KiB before the hostile pods");
        format!("{before} KiB before, at most {peak} KiB")
    }
}

/// Returns true for a status update in which a bystander is not ready.
fn was_unready(asked: &Asked) -> bool {
    let of_bystander = BYSTANDERS.iter().any(|name| asked.path == format!("{}/status", path(name)));
    let conditions = asked.body["status"]["conditions"].as_array();
    let unready = |all: &Vec<Value>| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "False");
    asked.verb == Verb::Patch && of_bystander && conditions.is_some_and(unready)
}

/// Returns true for a pod that an API server could send to this node: it has metadata and is assigned to the
/// node.
fn reaches_the_node(pod: &Value) -> bool {
    let metadata = &pod["metadata"];
    pod["spec"]["nodeName"] == NODE
        && metadata.is_object()
        && (pod["status"].is_object() || pod["status"].is_null())
}

/// Returns part `part` (of `of` parts) of the cases of a group.
fn of_group(group: Group, part: usize, of: usize) -> Vec<Tried> {
    let cases = sampled(group).into_iter().enumerate().filter(|(number, _)| number % of == part);
    let tried = cases.map(|(number, case)| Tried {
        name: format!("tried-{number:05}"),
        what: case.to_string(),
        pod: case.pod(),
    });
    tried.filter(|tried| reaches_the_node(&tried.pod)).collect()
}

/// Runs pods on an agent, one batch after the other.
async fn check(pods: &[Tried]) {
    let node = Node::start().await;
    let (mut run, mut silent) = (0, Vec::new());
    for batch in pods.chunks(BATCH) {
        let outcomes = node.create(batch);
        for tried in batch {
            match outcomes.get(&tried.name) {
                Some(Outcome::Runs | Outcome::Gone) => run += 1,
                Some(Outcome::Reported(reason)) if is_helpful(reason) => {}
                other => silent.push(format!("{}: {other:?}", tried.what)),
            }
        }
        node.is_unharmed();
        node.delete(batch);
    }
    node.is_unharmed();
    println!("{} pods, {run} of them running or removed; memory: {}", pods.len(), node.memory());
    assert!(silent.is_empty(), "{} of {} have no reason: {silent:#?}", silent.len(), pods.len());
}

/// Returns true if a report has both a reason and a message.
fn is_helpful(report: &str) -> bool {
    report.split_once(": ").is_some_and(|(reason, message)| !reason.is_empty() && message.len() > 5)
}

#[tokio::test]
async fn pods_with_hostile_numbers_are_harmless() {
    require!(root);
    check(&of_group(Group::Numbers, 0, 2)).await;
}

#[tokio::test]
async fn more_pods_with_hostile_numbers_are_harmless() {
    require!(root);
    check(&of_group(Group::Numbers, 1, 2)).await;
}

#[tokio::test]
async fn pods_with_hostile_texts_are_harmless() {
    require!(root);
    check(&of_group(Group::Texts, 0, 1)).await;
}

#[tokio::test]
async fn pods_with_very_many_elements_are_harmless() {
    require!(root);
    check(&of_group(Group::Counts, 0, 1)).await;
}

#[tokio::test]
async fn pods_with_json_of_other_types_are_harmless() {
    require!(root);
    check(&of_group(Group::Types, 0, 1)).await;
}

#[tokio::test]
async fn pods_with_hostile_combinations_are_harmless() {
    require!(root);
    check(&worst()).await;
}

/// Returns the worst combinations of hostile fields.
fn worst() -> Vec<Tried> {
    let tried = |(number, pair): (usize, Pair)| Tried {
        name: format!("tried-{number:05}"),
        what: pair.name.to_owned(),
        pod: pair.pod,
    };
    // An API server admits no pod without containers, and a kubelet does not report such a pod either: the
    // pod stays pending.
    let all = pairs(24).into_iter().filter(|pair| pair.name != "no-containers");
    all.enumerate().map(tried).collect()
}

#[tokio::test]
async fn an_agent_that_starts_among_the_worst_pods_runs_on_and_removes_them() {
    require!(root);
    let mut node = Node::start().await;
    let mut pods = worst();
    for (number, grace) in GRACES.into_iter().enumerate() {
        let mut pod = plain("pod");
        pod["spec"]["terminationGracePeriodSeconds"] = grace.into();
        let name = format!("tried-{:05}", 1000 + number);
        pods.push(Tried { name, what: format!("a grace of {grace} s"), pod });
    }
    node.create(&pods);
    // The held calls keep all pods from ending, so that the agent starts during their termination.
    let held = node.member.scene.cri.on(Op::StopContainer).always().hold();
    for after in ["creation", "deletion", "forced deletion of some"] {
        node.member.scene.agent.kill9();
        node.member.scene.agent.resume().unwrap();
        node.member.scene.until_relisted();
        node.is_unharmed();
        println!("the agent has restarted after {after}");
        let api = &node.member.api;
        for (number, tried) in pods.iter().enumerate() {
            // Pods that the agent has already removed are skipped.
            let _ = match after {
                "creation" => api.try_delete_within(&path(&tried.name), GRACES[number % GRACES.len()]),
                "deletion" if number % 2 == 0 => api.try_delete_within(&path(&tried.name), 0),
                _ => None,
            };
        }
    }
    held.release();
    node.delete(&pods);
    node.is_unharmed();
    println!("memory: {}", node.memory());
}
