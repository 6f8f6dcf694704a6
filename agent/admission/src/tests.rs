use serde_json::{Value, json};

use super::*;

mod held;
mod leaving;

const SECOND: Duration = Duration::from_secs(1);

fn pod(name: &str, cpu: &str, spec: &Value) -> Arc<core::Pod> {
    let mut all = json!({
        "terminationGracePeriodSeconds": 20,
        "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}],
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        all[field] = value.clone();
    }
    let pod = json!({"metadata": {"name": name, "namespace": "default", "uid": name}, "spec": all});
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn plain(name: &str, cpu: &str) -> Arc<core::Pod> {
    pod(name, cpu, &json!({}))
}

fn critical(name: &str, cpu: &str) -> Arc<core::Pod> {
    pod(name, cpu, &json!({"priority": 2_000_000_000}))
}

fn uid_of(pod: &core::Pod) -> String {
    pod.metadata.uid.clone().unwrap()
}

/// Node with 4 CPUs and room for 10 pods, and its requests to the manager.
struct Node {
    admission: Arc<Admission>,
    requests: mpsc::Receiver<Request>,
    conditions: watch::Sender<Conditions>,
}

impl Node {
    fn new() -> Self {
        let amounts = [("cpu", "4"), ("memory", "8Gi"), ("pods", "10")];
        let amounts = amounts
            .map(|(name, text)| (name.to_owned(), beelet_units::quantity::Quantity::parse(text).unwrap()));
        let (requests, receiver) = mpsc::channel(64);
        let (conditions, watched) = watch::channel(Conditions::new());
        let admission = Admission::new(Parts {
            resources: NodeResources::new(amounts.into(), &Default::default(), &[]),
            policy: preemption::Policy::Kubelet,
            conditions: watched,
            shutdown: watch::channel(None).1,
            requests,
            metrics: Metrics::default(),
        });
        Self { admission: Arc::new(admission), requests: receiver, conditions }
    }

    /// Returns the verdict, if there is one at once.
    async fn ask(&self, pod: &Arc<core::Pod>) -> Option<Result<(), AdmissionRejection>> {
        let place = self.admission.queue(&uid_of(pod));
        tokio::time::timeout(Duration::ZERO, place.admit(pod)).await.ok()
    }

    async fn admits(&self, pod: &Arc<core::Pod>) {
        assert_eq!(self.ask(pod).await, Some(Ok(())), "{:?}", pod.metadata.name);
    }

    async fn rejects(&self, pod: &Arc<core::Pod>, reason: &str, message: &str) {
        let rejection = self.ask(pod).await.expect("the pod waits").unwrap_err();
        assert_eq!((rejection.reason.as_str(), rejection.message.as_str()), (reason, message));
    }

    /// Spawns a task that waits, as the pod's worker does.
    fn waits(&self, pod: &Arc<core::Pod>) -> tokio::task::JoinHandle<Result<(), AdmissionRejection>> {
        let (admission, pod) = (Arc::clone(&self.admission), Arc::clone(pod));
        tokio::spawn(async move { admission.queue(&uid_of(&pod)).admit(&pod).await })
    }

    /// Releases a terminated pod.
    fn released(&self, uid: &str) {
        self.admission.released(uid, Ended::of(None, true).unwrap());
    }

    /// Requests a resize from `before` to `wanted`.
    fn resize(&self, before: &Arc<core::Pod>, wanted: &Arc<core::Pod>) -> Result<(), ResizeDeferral> {
        self.admission.resize(wanted, before)
    }

    /// Returns the pods preempted so far.
    fn preempted(&mut self) -> Vec<String> {
        let mut preempted = Vec::new();
        while let Ok(Request::Fail { uid, reason, message, grace }) = self.requests.try_recv() {
            assert_eq!((reason.as_str(), grace), ("Preempting", None));
            assert_eq!(message, "Preempted in order to admit critical pod");
            preempted.push(uid);
        }
        preempted
    }
}

/// Lets runnable tasks proceed.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_does_not_fit_is_refused_in_the_kubelets_words() {
    let node = Node::new();
    node.admits(&plain("a", "3")).await;
    node.admits(&plain("a", "3")).await;
    let words = "Pod was rejected: Node didn't have enough resource: cpu, requested: 2000, used: 3000, capacity: 4000";
    node.rejects(&plain("b", "2"), "OutOfcpu", words).await;
    let resources = json!({"requests": {"cpu": "0", "memory": "9Gi"}});
    let large = pod("large", "0", &json!({"containers": [{"name": "c", "resources": resources}]}));
    let words = "Pod was rejected: Node didn't have enough resource: memory, requested: 9663676416, used: 0, capacity: 8589934592";
    node.rejects(&large, "OutOfmemory", words).await;
    node.admits(&plain("c", "1")).await;
    for i in 0..8 {
        node.admits(&plain(&format!("p{i}"), "0")).await;
    }
    let words =
        "Pod was rejected: Node didn't have enough resource: pods, requested: 1, used: 10, capacity: 10";
    node.rejects(&plain("z", "0"), "OutOfpods", words).await;
}

#[tokio::test(start_paused = true)]
async fn a_taken_port_and_another_system_are_reasons_of_their_own() {
    let node = Node::new();
    let port = |name: &str| {
        pod(
            name,
            "0",
            &json!({"containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80}]}]}),
        )
    };
    node.admits(&port("a")).await;
    let words = "Pod was rejected: Predicate NodePorts failed: host port 80/TCP is in use by default/a";
    node.rejects(&port("b"), "NodePorts", words).await;
    let foreign = pod("w", "0", &json!({"os": {"name": "windows"}}));
    let words = "Pod was rejected: the pod is for windows, and this node runs linux";
    node.rejects(&foreign, "PodOSNotSupported", words).await;
}

#[tokio::test(start_paused = true)]
async fn resources_of_a_device_class_are_left_to_the_pods_claim() {
    const GPU: &str = "deviceclass.resource.kubernetes.io/gpu";
    let node = Node::new();
    let of = |name: &str, claimed: &[&str]| {
        let resources = json!({"requests": {GPU: "1"}, "limits": {GPU: "1"}});
        let containers =
            json!([{"name": "a", "resources": resources}, {"name": "b", "resources": resources}]);
        let mut pod = core::Pod::clone(&pod(name, "0", &json!({"containers": containers})));
        let mapping = |of: &&str| json!({"containerName": of, "resourceName": GPU, "requestName": "r"});
        let mappings: Vec<Value> = claimed.iter().map(mapping).collect();
        let status =
            json!({"extendedResourceClaimStatus": {"resourceClaimName": "x", "requestMappings": mappings}});
        pod.status = Some(serde_json::from_value(status).unwrap());
        Arc::new(pod)
    };
    node.admits(&of("both", &["a", "b"])).await;
    let words = |used: u32| {
        format!(
            "Pod was rejected: Node didn't have enough resource: {GPU}, requested: 2, used: {used}, capacity: 0"
        )
    };
    let reason = format!("OutOf{GPU}");
    node.rejects(&of("none", &[]), &reason, &words(2)).await;
    // A claim covers only the containers that it names.
    node.rejects(&of("one", &["a"]), &reason, &words(2)).await;
}

#[tokio::test(start_paused = true)]
async fn what_runs_already_is_never_refused_and_counts() {
    let node = Node::new();
    node.admission.adopt(&plain("big", "6"));
    node.admits(&plain("big", "6")).await;
    let words = "Pod was rejected: Node didn't have enough resource: cpu, requested: 1000, used: 6000, capacity: 4000";
    node.rejects(&plain("b", "1"), "OutOfcpu", words).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_waits_for_one_on_its_way_out_and_later_ones_wait_behind_it() {
    let node = Node::new();
    node.admits(&plain("old", "4")).await;
    node.admission.leaving("old", SECOND);
    let first = node.waits(&plain("first", "3"));
    settle().await;
    // Room that the first waits for is withheld from the second.
    let words = "Pod was rejected: Node didn't have enough resource: cpu, requested: 2000, used: 3000, capacity: 4000";
    node.rejects(&plain("second", "2"), "OutOfcpu", words).await;
    let third = node.waits(&plain("third", "1"));
    settle().await;
    assert!(!first.is_finished() && !third.is_finished());
    node.released("old");
    assert_eq!(first.await.unwrap(), Ok(()));
    assert_eq!(third.await.unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_place_in_the_queue_is_given_up_with_the_wait() {
    let node = Node::new();
    node.admits(&plain("old", "4")).await;
    node.admission.leaving("old", SECOND);
    let first = node.waits(&plain("first", "3"));
    settle().await;
    first.abort();
    settle().await;
    node.released("old");
    node.admits(&plain("second", "2")).await;
}

#[tokio::test(start_paused = true)]
async fn a_critical_pod_has_its_victims_killed_at_once_and_comes_in_when_there_is_room() {
    let mut node = Node::new();
    for name in ["a", "b", "c", "d"] {
        node.admits(&plain(name, "1")).await;
    }
    let waiting = node.waits(&critical("critical", "2"));
    settle().await;
    let victims = node.preempted();
    assert_eq!(victims.len(), 2, "both are preempted before either terminates");
    // Room made for the critical pod is withheld from others.
    node.released(&victims[0]);
    settle().await;
    assert!(!waiting.is_finished());
    let words = "Pod was rejected: Node didn't have enough resource: cpu, requested: 1000, used: 4000, capacity: 4000";
    node.rejects(&plain("thief", "1"), "OutOfcpu", words).await;
    node.released(&victims[1]);
    assert_eq!(waiting.await.unwrap(), Ok(()));
    assert_eq!(node.preempted(), Vec::<String>::new());
    assert_eq!(node.admission.parts.metrics.preemptions("cpu"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_victim_that_will_not_die_is_replaced_by_others() {
    let mut node = Node::new();
    for name in ["a", "b", "c", "d"] {
        node.admits(&plain(name, "1")).await;
    }
    let waiting = node.waits(&critical("critical", "2"));
    settle().await;
    let victims = node.preempted();
    node.released(&victims[0]);
    // The grace period is 20 s; the kubelet waits 1.5 times as long.
    tokio::time::sleep(29 * SECOND).await;
    assert_eq!(node.preempted(), Vec::<String>::new());
    tokio::time::sleep(2 * SECOND).await;
    let instead = node.preempted();
    assert_eq!(instead.len(), 1);
    assert!(!victims.contains(&instead[0]));
    node.released(&instead[0]);
    assert_eq!(waiting.await.unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn where_only_one_that_will_not_die_could_make_room_the_critical_pod_waits_on() {
    let mut node = Node::new();
    node.admits(&plain("a", "4")).await;
    let waiting = node.waits(&critical("critical", "2"));
    settle().await;
    assert_eq!(node.preempted(), ["a"]);
    tokio::time::sleep(300 * SECOND).await;
    assert!(!waiting.is_finished());
    node.released("a");
    assert_eq!(waiting.await.unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_critical_pod_that_cannot_fit_preempts_no_pod() {
    let mut node = Node::new();
    node.admits(&plain("a", "1")).await;
    node.admits(&critical("b", "2")).await;
    let rejection = node.ask(&critical("c", "3")).await.unwrap().unwrap_err();
    assert_eq!(rejection.reason, "UnexpectedAdmissionError");
    let port = json!([{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80}], "resources": {"requests": {"cpu": "1"}}}]);
    node.admits(&pod("holder", "0", &json!({"containers": port}))).await;
    let claimer = pod("claimer", "0", &json!({"containers": port, "priority": 2_000_000_000}));
    let rejection = node.ask(&claimer).await.unwrap().unwrap_err();
    assert_eq!(rejection.reason, "NodePorts");
    assert_eq!(node.preempted(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn under_pressure_only_those_come_in_that_the_kubelet_lets_in() {
    let node = Node::new();
    let best_effort = |name: &str, more: &Value| {
        let mut spec = json!({"containers": [{"name": "c"}]});
        for (field, value) in more.as_object().into_iter().flatten() {
            spec[field] = value.clone();
        }
        pod(name, "0", &spec)
    };
    let short = |conditions: &[NodeCondition]| {
        node.conditions.send_replace(conditions.iter().copied().collect());
    };
    short(&[NodeCondition::MemoryPressure]);
    let words = "Pod was rejected: The node had condition: [MemoryPressure]";
    node.rejects(&best_effort("a", &json!({})), EVICTED, words).await;
    node.admits(&best_effort("b", &json!({"priority": 2_000_000_000}))).await;
    let toleration =
        json!({"tolerations": [{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists"}]});
    node.admits(&best_effort("c", &toleration)).await;
    node.admits(&plain("d", "1")).await;
    short(&[NodeCondition::MemoryPressure, NodeCondition::DiskPressure]);
    let words = "Pod was rejected: The node had condition: [MemoryPressure DiskPressure]";
    node.rejects(&plain("e", "1"), EVICTED, words).await;
    node.rejects(&best_effort("f", &toleration), EVICTED, words).await;
    node.admits(&critical("g", "1")).await;
    // Admitted pods stay admitted.
    node.admits(&plain("d", "1")).await;
    short(&[]);
    node.admits(&plain("e", "1")).await;
}

#[tokio::test(start_paused = true)]
async fn room_for_a_pod_that_may_come_back_is_kept_for_a_while() {
    let node = Node::new();
    node.admits(&plain("a", "2")).await;
    let (back, other) = (plain("back", "2"), plain("other", "2"));
    assert!(node.admission.reserve(&back));
    assert!(!node.admission.reserve(&other));
    node.admits(&back).await;
    node.released("back");
    assert!(node.admission.reserve(&back));
    tokio::time::sleep(61 * SECOND).await;
    node.admits(&other).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_runs_may_grow_only_as_far_as_there_is_room() {
    let node = Node::new();
    node.admits(&plain("a", "1")).await;
    node.admits(&plain("b", "2")).await;
    let (a, b) = (plain("a", "1"), plain("b", "2"));
    let refused = node.resize(&a, &plain("a", "3")).unwrap_err();
    let sentence = "Node didn't have enough resource: cpu, requested: 3000, used: 2000, capacity: 4000";
    assert_eq!((refused.infeasible, refused.message.as_str()), (false, sentence));
    assert!(node.resize(&a, &plain("a", "5")).unwrap_err().infeasible, "the node has only four");
    let new = node.resize(&plain("new", "1"), &plain("new", "5"));
    assert!(new.unwrap_err().infeasible, "so for a pod that is not admitted yet");
    // A refused increase is not counted.
    assert!(node.resize(&b, &plain("b", "3")).is_ok());
    assert!(node.resize(&b, &plain("b", "1")).is_ok());
    assert!(node.resize(&a, &plain("a", "3")).is_ok());
    assert!(node.resize(&b, &critical("b", "2")).is_err(), "no pod is preempted for a resize");
}

#[tokio::test(start_paused = true)]
async fn a_pod_may_always_have_less_also_where_there_is_too_little_for_all_or_others_wait() {
    let node = Node::new();
    for (name, cpu) in [("a", "3"), ("b", "3")] {
        node.admission.adopt(&plain(name, cpu));
    }
    // Together they exceed the node.
    assert_eq!(node.resize(&plain("a", "3"), &plain("a", "2")), Ok(()));
    assert!(node.resize(&plain("a", "2"), &plain("a", "2500m")).is_err());
    node.admission.leaving("b", SECOND);
    let waits = node.waits(&plain("waits", "4"));
    settle().await;
    assert_eq!(node.resize(&plain("a", "2"), &plain("a", "1")), Ok(()));
    // A waiting pod may shrink too, even if it does not fit.
    let pending = (plain("pending", "4"), plain("pending", "3"));
    assert_eq!(node.resize(&pending.0, &pending.1), Ok(()));
    waits.abort();
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_fits_now_is_not_refused_for_one_that_waits() {
    let node = Node::new();
    node.admits(&plain("old", "3")).await;
    node.admission.leaving("old", SECOND);
    let large = node.waits(&plain("large", "4"));
    settle().await;
    // The small pod would not fit after the large one, and no other pod needs the free room now.
    node.admits(&plain("small", "1")).await;
    node.released("small");
    large.abort();
    settle().await;
    let first = node.waits(&plain("first", "3"));
    settle().await;
    // A kubelet starts a pod that fits at once, also if the pod would fit later.
    node.admits(&plain("second", "1")).await;
    assert!(!first.is_finished());
    node.released("old");
    assert_eq!(first.await.unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_waits_may_have_other_amounts_and_keeps_its_place() {
    let node = Node::new();
    for (name, cpu) in [("old", "2"), ("stays", "2")] {
        node.admits(&plain(name, cpu)).await;
    }
    node.admission.leaving("old", SECOND);
    let place = node.admission.queue("first");
    let wait = tokio::time::timeout(Duration::ZERO, place.admit(&plain("first", "2"))).await;
    assert!(wait.is_err(), "the pod must wait");
    // The same place with less: there will be room for a second pod.
    let wait = tokio::time::timeout(Duration::ZERO, place.admit(&plain("first", "1"))).await;
    assert!(wait.is_err(), "the pod must wait");
    let second = node.waits(&plain("second", "1"));
    settle().await;
    assert!(!second.is_finished());
    node.released("old");
    assert_eq!(place.admit(&plain("first", "1")).await, Ok(()));
    assert_eq!(second.await.unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_has_less_by_the_time_it_is_let_in_is_counted_with_that() {
    let node = Node::new();
    node.admits(&plain("a", "3")).await;
    node.admits(&plain("a", "1")).await;
    node.admits(&plain("b", "3")).await;
    // From then on only a resize changes the counted amounts.
    node.admits(&plain("a", "4")).await;
    let words = "Pod was rejected: Node didn't have enough resource: cpu, requested: 1000, used: 4000, capacity: 4000";
    node.rejects(&plain("c", "1"), "OutOfcpu", words).await;
}

#[tokio::test(start_paused = true)]
async fn whatever_gives_room_back_is_published() {
    let node = Node::new();
    let mut changes = node.admission.changes();
    let mut rang = |what: &str, expected: bool| {
        assert_eq!(changes.has_changed().unwrap(), expected, "{what}");
        changes.mark_unchanged();
    };
    node.admits(&plain("a", "2")).await;
    rang("a pod was admitted", false);
    assert_eq!(node.resize(&plain("a", "2"), &plain("a", "1")), Ok(()));
    rang("a pod shrank", true);
    assert_eq!(node.resize(&plain("a", "1"), &plain("a", "2")), Ok(()));
    rang("a pod grew", false);
    assert!(node.resize(&plain("a", "2"), &plain("a", "5")).is_err());
    rang("a pod may not grow", false);
    node.admission.leaving("a", SECOND);
    rang("a pod is terminating", true);
    node.admission.leaving("a", SECOND);
    rang("the pod was terminating already", false);
    let waits = node.waits(&plain("b", "4"));
    settle().await;
    rang("a pod waits", false);
    waits.abort();
    settle().await;
    rang("the pod gave up", true);
    node.released("a");
    rang("a pod terminated", true);
    node.released("a");
    rang("the pod had terminated already", false);
    assert!(node.admission.reserve(&plain("c", "4")));
    rang("room is reserved for a pod", false);
    tokio::time::sleep(61 * SECOND).await;
    node.admission.expire();
    rang("the reservation expired", true);
    node.admits(&plain("d", "4")).await;
    node.rejects(
        &plain("e", "1"),
        "OutOfcpu",
        "Pod was rejected: Node didn't have enough resource: cpu, requested: 1000, used: 4000, capacity: 4000",
    )
    .await;
    rang("a pod that never waited was rejected", false);
}

/// Checks with random sequences that no pod waits for room that it would get if it asked now.
#[tokio::test(start_paused = true)]
async fn no_pod_sleeps_while_there_is_room_for_it() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for _ in 0..200 {
        let node = Node::new();
        let mut waiting: Vec<(Arc<core::Pod>, tokio::task::JoinHandle<_>)> = Vec::new();
        let mut here: Vec<Arc<core::Pod>> = Vec::new();
        for step in 0..30 {
            match random(5) {
                0 | 1 => {
                    let (name, cpu) = (format!("p{step}"), (random(4) + 1).to_string());
                    let pod = if random(4) == 0 { critical(&name, &cpu) } else { plain(&name, &cpu) };
                    waiting.push((Arc::clone(&pod), node.waits(&pod)));
                }
                2 if !here.is_empty() => {
                    let at = usize::try_from(random(here.len() as u64)).unwrap();
                    node.admission.leaving(&uid_of(&here[at]), SECOND);
                }
                3 if !here.is_empty() => {
                    let at = usize::try_from(random(here.len() as u64)).unwrap();
                    node.released(&uid_of(&here.swap_remove(at)));
                }
                _ if !waiting.is_empty() => {
                    let at = usize::try_from(random(waiting.len() as u64)).unwrap();
                    waiting[at].1.abort();
                }
                _ => {}
            }
            settle().await;
            for (pod, wait) in std::mem::take(&mut waiting) {
                if !wait.is_finished() {
                    waiting.push((pod, wait));
                } else if matches!(wait.await, Ok(Ok(()))) {
                    here.push(pod);
                }
            }
            // Other pods may have taken the room: the next release wakes the pod.
            for (pod, _) in &waiting {
                let free = node.admission.with(|ledger| ledger.has_room(pod, Instant::now()));
                assert!(free.is_err(), "{:?} sleeps although there is room for it", pod.metadata.name);
            }
        }
        waiting.into_iter().for_each(|(_, wait)| wait.abort());
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_node_ended_comes_back_after_the_transition_period_whatever_the_clock_was_set_to() {
    use beelet_model::table::{PodEntry, PodName, PodTable, Pods};

    let mut node = Node::new();
    let condition =
        json!({"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2199-01-01T00:00:00Z"});
    let status = json!({"phase": "Failed", "reason": EVICTED, "conditions": [condition]});
    let pod = core::Pod { status: serde_json::from_value(status).unwrap(), ..(*plain("a", "1")).clone() };
    let name = PodName::of(&pod);
    let (_table, table) = watch::channel(Arc::new(PodTable {
        pods: Pods::unit(name, Arc::new(PodEntry::of(pod))),
        ..PodTable::default()
    }));
    let (requests, mut asked) = mpsc::channel(8);
    std::mem::swap(&mut node.requests, &mut asked);
    let retrying = RetryEvicted {
        table,
        conditions: node.conditions.subscribe(),
        admission: Arc::clone(&node.admission),
        requests,
        transition: 300 * SECOND,
    };
    let shutdown = tokio_util::sync::CancellationToken::new();
    let working = tokio::spawn(retrying.run(shutdown.clone()));
    assert!(tokio::time::timeout(299 * SECOND, node.requests.recv()).await.is_err());
    let request = tokio::time::timeout(2 * SECOND, node.requests.recv()).await.unwrap();
    assert!(matches!(request, Some(Request::Retry { uid }) if uid == "a"));
    shutdown.cancel();
    working.await.unwrap();
}
