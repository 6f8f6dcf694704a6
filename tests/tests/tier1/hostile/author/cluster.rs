//! Cases as pods of an API server, on the whole agent. Beside them run two pods whose readiness must not
//! change; the agent lives, its memory has a bound, and a pod that does not run says why: in its status, by
//! an event, or, where it cannot even be read, in the log.

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

/// Pods at a time.
const BATCH: usize = 150;
/// Memory that the agent may use beyond what it uses with its bystanders alone, in KiB: for [`BATCH`] pods
/// of which some have 1000 elements, and for texts of 300 KB in several copies.
const MEMORY_KIB: u64 = 400 << 10;
/// Seconds with which pods are deleted, in turn. An API server 1.36 takes any, and hands negative ones on.
const GRACES: [i64; 8] = [i64::MAX, 1_000_000_000_000, 2_147_483_647, 30, 1, 0, -1, i64::MIN];
/// The log's words for a pod that cannot be read. The node says nothing to the API server of one, and does
/// not confirm its end.
const UNREADABLE: &str = "a pod of the API server can't be read";
/// The pods that must not notice.
const BYSTANDERS: [&str; 2] = ["bystander", "bystander-probed"];

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{name}")
}

/// A pod to try, by the name that it has here.
struct Tried {
    name: String,
    /// What is hostile in it.
    what: String,
    pod: Value,
}

/// What became of a pod.
#[derive(Debug)]
enum Outcome {
    /// It runs, or ran.
    Runs,
    /// It does not, and this is said of it.
    Told(String),
    /// There is no such pod any more.
    Gone,
}

/// An agent with its bystanders.
struct Node {
    member: Member,
    /// Requests that the API server had before any pod was tried.
    first: usize,
    /// Memory that the agent used then.
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

    /// Puts pods onto the node, all at once, and waits until it is known what becomes of each.
    fn put(&self, pods: &[Tried]) -> BTreeMap<String, Outcome> {
        for tried in pods {
            let mut pod = tried.pod.clone();
            pod["metadata"]["name"] = tried.name.clone().into();
            // The API server's own.
            for field in ["namespace", "resourceVersion", "uid"] {
                pod["metadata"].as_object_mut().map(|metadata| metadata.remove(field));
            }
            self.member.api.put(&path(&tried.name), pod);
        }
        self.outcomes(pods)
    }

    fn outcomes(&self, pods: &[Tried]) -> BTreeMap<String, Outcome> {
        let found: RefCell<BTreeMap<String, Outcome>> = RefCell::default();
        self.member.scene.look_until("it to be known what becomes of each pod", || {
            let mut found = found.borrow_mut();
            let told = self.told();
            for tried in pods {
                if !found.contains_key(&tried.name)
                    && let Some(outcome) = self.outcome(tried, &told)
                {
                    found.insert(tried.name.clone(), outcome);
                }
            }
            let left: Vec<&Tried> = pods.iter().filter(|tried| !found.contains_key(&tried.name)).collect();
            // Some of them say enough, and it is asked for often.
            let some: Vec<String> = left
                .iter()
                .take(20)
                .map(|tried| format!("{} ({}): {}", tried.name, tried.what, self.status(&tried.name)))
                .collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("nothing is said of {}: {some:#?}", left.len()))
            }
        });
        found.into_inner()
    }

    fn status(&self, name: &str) -> String {
        let pod = self.member.api.get(&path(name)).unwrap_or_default();
        pod["status"].to_string().chars().take(1500).collect()
    }

    /// What is said of pods other than in their statuses: warnings among the events, and in the log of pods
    /// that cannot be read.
    fn told(&self) -> BTreeMap<String, String> {
        let events =
            self.member.api.all("/api/v1/events").into_iter().filter(|event| event["type"] == "Warning");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of_event = |event: Value| {
            let said = format!("{}: {}", text(&event["reason"]), text(&event["message"]));
            (text(&event["involvedObject"]["name"]), said)
        };
        let mut told: BTreeMap<String, String> = events.map(of_event).collect();
        let log = self.member.scene.agent.log();
        for line in log.lines().filter(|line| line.contains(UNREADABLE)) {
            let name = line.split("tried-").nth(1).and_then(|rest| rest.get(..5));
            told.extend(name.map(|number| (format!("tried-{number}"), line.to_owned())));
        }
        told
    }

    fn outcome(&self, tried: &Tried, told: &BTreeMap<String, String>) -> Option<Outcome> {
        let Some(pod) = self.member.api.get(&path(&tried.name)) else { return Some(Outcome::Gone) };
        let status = &pod["status"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let phase = text(&status["phase"]);
        if phase == "Running" || phase == "Succeeded" {
            return Some(Outcome::Runs);
        }
        // The deletion that it came with says what becomes of it.
        if phase == "Failed" && pod["metadata"]["deletionTimestamp"].is_string() {
            return Some(Outcome::Gone);
        }
        if phase == "Failed" {
            return Some(Outcome::Told(format!("{}: {}", text(&status["reason"]), text(&status["message"]))));
        }
        let lists = ["initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"];
        // The author's own words are none of the agent's.
        let said = |list: &&str| {
            let own = tried.pod["status"][*list].as_array().cloned().unwrap_or_default();
            let all = status[*list].as_array().into_iter().flatten();
            all.filter(move |container| !own.contains(container))
        };
        let all = lists.iter().flat_map(said);
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
        waits.or_else(|| told.get(&tried.name).cloned()).map(Outcome::Told)
    }

    /// Deletes pods, each with another grace period, then with a second; waits until nothing is left of them.
    fn delete(&self, pods: &[Tried]) {
        let api = &self.member.api;
        for (number, tried) in pods.iter().enumerate() {
            // It may have gone already, by the agent's hand.
            let _ = api.try_delete_within(&path(&tried.name), GRACES[number % GRACES.len()]);
        }
        let told = self.told();
        for tried in pods {
            let _ = api.release(&path(&tried.name));
            let is_unreadable = told.get(&tried.name).is_some_and(|said| said.contains(UNREADABLE));
            let _ = api.try_delete_within(&path(&tried.name), if is_unreadable { 0 } else { 1 });
        }
        self.member.scene.look_until("all pods to be gone", || {
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

    /// The bystanders were ready all the time, the agent lives and is not larger than it may be.
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

/// A status in which a bystander is not ready.
fn was_unready(asked: &Asked) -> bool {
    let of_bystander = BYSTANDERS.iter().any(|name| asked.path == format!("{}/status", path(name)));
    let conditions = asked.body["status"]["conditions"].as_array();
    let unready = |all: &Vec<Value>| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "False");
    asked.verb == Verb::Patch && of_bystander && conditions.is_some_and(unready)
}

/// Returns true for a pod that an API server could hand to this node: it has metadata and a spec, and is
/// the node's.
fn reaches_the_node(pod: &Value) -> bool {
    let metadata = &pod["metadata"];
    pod["spec"]["nodeName"] == NODE
        && metadata.is_object()
        && (pod["status"].is_object() || pod["status"].is_null())
}

/// The part `part` of `of` of the cases of a group.
fn of_group(group: Group, part: usize, of: usize) -> Vec<Tried> {
    let cases = sampled(group).into_iter().enumerate().filter(|(number, _)| number % of == part);
    let tried = cases.map(|(number, case)| Tried {
        name: format!("tried-{number:05}"),
        what: case.to_string(),
        pod: case.pod(),
    });
    tried.filter(|tried| reaches_the_node(&tried.pod)).collect()
}

/// Tries pods on an agent, a batch after the other.
async fn check(pods: &[Tried]) {
    let node = Node::start().await;
    let (mut run, mut silent) = (0, Vec::new());
    for batch in pods.chunks(BATCH) {
        let outcomes = node.put(batch);
        for tried in batch {
            match outcomes.get(&tried.name) {
                Some(Outcome::Runs | Outcome::Gone) => run += 1,
                Some(Outcome::Told(said)) if is_helpful(said) => {}
                other => silent.push(format!("{}: {other:?}", tried.what)),
            }
        }
        node.is_unharmed();
        node.delete(batch);
    }
    node.is_unharmed();
    println!("{} pods, of which {run} run or are gone; memory: {}", pods.len(), node.memory());
    assert!(silent.is_empty(), "{} of {} do not say what is wrong: {silent:#?}", silent.len(), pods.len());
}

/// A sentence helps if it has a reason and says more than that.
fn is_helpful(said: &str) -> bool {
    said.split_once(": ").is_some_and(|(reason, message)| !reason.is_empty() && message.len() > 5)
}

#[tokio::test]
async fn pods_with_hostile_numbers_harm_nobody() {
    require!(root);
    check(&of_group(Group::Numbers, 0, 2)).await;
}

#[tokio::test]
async fn more_pods_with_hostile_numbers_harm_nobody() {
    require!(root);
    check(&of_group(Group::Numbers, 1, 2)).await;
}

#[tokio::test]
async fn pods_with_hostile_texts_harm_nobody() {
    require!(root);
    check(&of_group(Group::Texts, 0, 1)).await;
}

#[tokio::test]
async fn pods_with_very_many_elements_harm_nobody() {
    require!(root);
    check(&of_group(Group::Counts, 0, 1)).await;
}

#[tokio::test]
async fn pods_with_json_of_other_types_harm_nobody() {
    require!(root);
    check(&of_group(Group::Types, 0, 1)).await;
}

#[tokio::test]
async fn pods_whose_fields_hurt_together_harm_nobody() {
    require!(root);
    check(&worst()).await;
}

/// The pods that hurt most.
fn worst() -> Vec<Tried> {
    let tried = |(number, pair): (usize, Pair)| Tried {
        name: format!("tried-{number:05}"),
        what: pair.name.to_owned(),
        pod: pair.pod,
    };
    // An API server lets no pod without containers in, and a kubelet says nothing of such a pod either: it
    // waits.
    let all = pairs(24).into_iter().filter(|pair| pair.name != "no-containers");
    all.enumerate().map(tried).collect()
}

#[tokio::test]
async fn an_agent_that_starts_among_the_worst_pods_runs_on_and_takes_them_away() {
    require!(root);
    let mut node = Node::start().await;
    let mut pods = worst();
    for (number, grace) in GRACES.into_iter().enumerate() {
        let mut pod = plain("pod");
        pod["spec"]["terminationGracePeriodSeconds"] = grace.into();
        let name = format!("tried-{:05}", 1000 + number);
        pods.push(Tried { name, what: format!("a grace of {grace} s"), pod });
    }
    node.put(&pods);
    // None ends before the test says so: the agent starts in the midst of it.
    let held = node.member.scene.cri.on(Op::StopContainer).always().hold();
    for after in ["they were put", "they were deleted", "some were deleted by force"] {
        node.member.scene.agent.kill9();
        node.member.scene.agent.resume().unwrap();
        node.member.scene.until_relisted();
        node.is_unharmed();
        println!("the agent has started after {after}");
        let api = &node.member.api;
        for (number, tried) in pods.iter().enumerate() {
            // Those that are gone by the agent's own hand are passed over.
            let _ = match after {
                "they were put" => api.try_delete_within(&path(&tried.name), GRACES[number % GRACES.len()]),
                "they were deleted" if number % 2 == 0 => api.try_delete_within(&path(&tried.name), 0),
                _ => None,
            };
        }
    }
    held.release();
    node.delete(&pods);
    node.is_unharmed();
    println!("memory: {}", node.memory());
}
