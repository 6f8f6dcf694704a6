use super::*;

fn status(value: Value) -> PodStatus {
    serde_json::from_value(value).unwrap()
}

fn condition(kind: &str, is: &str, since: u32) -> Value {
    json!({"type": kind, "status": is, "lastTransitionTime": format!("2026-01-01T00:00:{since:02}Z")})
}

fn container(state: Value) -> Value {
    json!({"name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": state})
}

fn of(phase: &str, conditions: Value, state: Value) -> PodStatus {
    status(json!({"phase": phase, "conditions": conditions, "containerStatuses": [container(state)]}))
}

/// Prints conditions as `Type=Status@seconds`.
fn shown(status: &PodStatus) -> String {
    let one = |c: &PodCondition| {
        let second = c.last_transition_time.as_ref().map(|t| t.0.as_second() % 60).unwrap_or_default();
        format!("{}={}@{second}", c.type_, c.status)
    };
    let all: Vec<String> = status.conditions.iter().flatten().map(one).collect();
    format!("{} {}", status.phase.as_deref().unwrap_or_default(), all.join(" "))
}

fn running() -> Value {
    json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})
}

fn ended(code: i32) -> Value {
    json!({"terminated": {"exitCode": code, "reason": "Completed"}})
}

#[test]
fn foreign_fields_stay_and_the_nodes_fields_are_written() {
    let check = |theirs: Value, ours: PodStatus, expected: &str| {
        let theirs = of("Running", theirs, running());
        assert_eq!(shown(&merged(&theirs, &ours)), expected);
    };
    let ours = || of("Running", json!([condition("Ready", "True", 9)]), running());
    check(json!([]), ours(), "Running Ready=True@9");
    check(json!([condition("Ready", "False", 1)]), ours(), "Running Ready=True@9");
    // The time changes only with the status.
    check(json!([condition("Ready", "True", 1)]), ours(), "Running Ready=True@1");
    check(
        json!([condition("example.com/gate", "True", 1)]),
        ours(),
        "Running example.com/gate=True@1 Ready=True@9",
    );
    // A node's condition that no longer holds is removed.
    check(json!([condition("PodResizePending", "True", 1)]), ours(), "Running Ready=True@9");
    check(
        json!([condition("DisruptionTarget", "True", 1)]),
        ours(),
        "Running DisruptionTarget=True@1 Ready=True@9",
    );
}

/// Returns a pod as the API server has it.
fn assigned(status: &PodStatus) -> Pod {
    Pod { status: Some(status.clone()), ..Pod::default() }
}

#[test]
fn a_pod_ends_on_the_api_server_only_once_no_container_runs() {
    let before = of("Running", json!([condition("Ready", "True", 1)]), running());
    let target = || json!([condition("Ready", "True", 5), condition("DisruptionTarget", "True", 5)]);
    let still = merged(&before, &of("Failed", target(), running()));
    assert_eq!(shown(&still), "Running Ready=True@1");
    let over = merged(&before, &of("Failed", target(), ended(1)));
    assert_eq!(shown(&over), "Failed Ready=False@1 DisruptionTarget=True@5");
    let ready = over.conditions.unwrap().remove(0);
    assert_eq!(ready.reason.as_deref(), Some("PodFailed"));
    // An ended pod never continues.
    let again = merged(&of("Failed", json!([]), ended(1)), &of("Running", json!([]), running()));
    assert_eq!(again.phase.as_deref(), Some("Failed"));
}

#[test]
fn a_container_stopped_for_its_successor_differs_from_a_crashed_one() {
    let one = |id: &str, state: Value, last: Value| {
        status(json!({"phase": "Running", "containerStatuses": [{"name": "main", "containerID": id,
            "image": "a", "imageID": "", "ready": false, "restartCount": 0, "state": state, "lastState": last}]}))
    };
    let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
    let ended = |id: &str| json!({"terminated": {"containerID": id, "exitCode": 143}});
    let runs = one("c://1", running(), json!({}));
    let check = |in_api: &PodStatus, ours: PodStatus, expected: bool| {
        let expected = expected.then_some(BETWEEN_CONTAINERS);
        assert_eq!(patience(&assigned(in_api), &ours), expected, "{ours:?}");
    };
    check(&runs, one("c://1", waiting("ContainerCreating"), ended("c://1")), true);
    // The successor is created, but not running yet.
    check(&runs, one("c://2", waiting("ContainerCreating"), ended("c://1")), true);
    check(&runs, one("c://2", running(), ended("c://1")), false);
    check(&runs, one("c://1", waiting("CrashLoopBackOff"), ended("c://1")), false);
    check(&runs, one("c://1", waiting("ErrImagePull"), ended("c://1")), false);
    check(&runs, one("c://1", ended("c://1"), json!({})), false);
    let told = one("c://1", waiting("ContainerCreating"), ended("c://1"));
    check(&told, told.clone(), false);
}

#[test]
fn a_new_sandbox_is_written_with_the_first_container_or_a_moment_later() {
    let one = |phase: &str, sandbox: &str, reason: &str| {
        let conditions = json!([{"type": "PodReadyToStartContainers", "status": sandbox}]);
        of(phase, conditions, json!({"waiting": {"reason": reason}}))
    };
    let check = |ours: PodStatus, expected: Option<Duration>| {
        let in_api = one("Pending", "False", "ContainerCreating");
        assert_eq!(patience(&assigned(&in_api), &ours), expected, "{ours:?}");
    };
    check(one("Pending", "True", "ContainerCreating"), Some(SANDBOX_ONLY));
    check(one("Pending", "True", "PodInitializing"), Some(SANDBOX_ONLY));
    check(one("Pending", "False", "ContainerCreating"), None);
    check(one("Pending", "True", "ErrImagePull"), None);
    check(one("Failed", "True", "ContainerCreating"), None);
    let conditions = json!([{"type": "PodReadyToStartContainers", "status": "True"}]);
    check(of("Running", conditions.clone(), running()), None);
    // An init container is running.
    check(of("Pending", conditions, running()), None);
    // The first status is written at once.
    let first = assigned(&status(json!({"phase": "Pending"})));
    assert_eq!(patience(&first, &one("Pending", "False", "ContainerCreating")), None);
}

#[test]
fn a_started_container_is_written_with_its_readiness_if_that_follows_at_once() {
    let one = |phase: &str, ready: &str, started: bool, state: Value| {
        status(json!({"phase": phase, "conditions": [condition("Ready", ready, 1)], "containerStatuses": [
            {"name": "main", "image": "a", "imageID": "", "ready": ready == "True", "started": started,
             "restartCount": 0, "state": state}]}))
    };
    let waiting = json!({"waiting": {"reason": "ContainerCreating"}});
    let pending = assigned(&one("Pending", "False", false, waiting));
    let check = |in_api: &Pod, ours: PodStatus, expected: Option<Duration>| {
        assert_eq!(patience(in_api, &ours), expected, "{ours:?}");
    };
    check(&pending, one("Running", "False", true, running()), Some(READY_AT_ONCE));
    check(&pending, one("Running", "True", true, running()), None);
    // The startup probe runs first.
    check(&pending, one("Running", "False", false, running()), None);
    check(&pending, one("Running", "False", true, ended(1)), None);
    let known = assigned(&one("Running", "False", true, running()));
    check(&known, one("Running", "False", true, running()), None);
}

#[test]
fn of_a_deleted_pod_only_readiness_and_the_end_are_written_at_once() {
    let mut pod = assigned(&of("Running", json!([condition("Ready", "True", 1)]), running()));
    let mut next = pod.status.clone().unwrap();
    next.observed_generation = Some(2);
    assert_eq!(patience(&pod, &next), None);
    pod.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
    let check = |ours: &PodStatus, expected: Option<Duration>| {
        assert_eq!(patience(&pod, ours), expected, "{ours:?}");
    };
    check(&next, Some(ENDING));
    check(&of("Running", json!([condition("Ready", "False", 5)]), running()), None);
    check(&of("Running", json!([condition("Ready", "True", 1)]), ended(0)), Some(ENDING));
    check(&of("Succeeded", json!([condition("Ready", "False", 5)]), ended(0)), None);
}

#[test]
fn an_object_vanishes_if_nothing_keeps_it() {
    let check = |metadata: Value, expected: bool| {
        let pod: Pod = serde_json::from_value(json!({"metadata": metadata})).unwrap();
        assert_eq!(vanishes(&pod), expected, "{metadata}");
    };
    let at = "2026-01-01T00:00:00Z";
    check(json!({"deletionTimestamp": at, "deletionGracePeriodSeconds": 0}), true);
    check(json!({"deletionTimestamp": at, "deletionGracePeriodSeconds": 0, "finalizers": []}), true);
    check(json!({"deletionTimestamp": at, "deletionGracePeriodSeconds": 0, "finalizers": ["a.io/b"]}), false);
    check(json!({"deletionTimestamp": at, "deletionGracePeriodSeconds": 30}), false);
    check(json!({"deletionTimestamp": at}), false);
    check(json!({}), false);
}

#[test]
fn a_start_is_where_it_was() {
    let before = status(json!({"startTime": "2026-01-01T00:00:01Z"}));
    let after = merged(&before, &status(json!({"startTime": "2026-01-01T00:00:09Z"})));
    assert_eq!(after.start_time, before.start_time);
}

#[test]
fn termination_messages_of_all_containers_together_are_bounded() {
    let wordy = json!({"terminated": {"exitCode": 1, "message": "é".repeat(8000)}});
    let long = status(json!({"containerStatuses": [container(wordy.clone()), container(wordy)]}));
    let after = merged(&PodStatus::default(), &long);
    for status in after.container_statuses.unwrap() {
        assert_eq!(status.state.unwrap().terminated.unwrap().message.unwrap().len(), 6144);
    }
}

#[test]
fn messages_of_the_agent_are_bounded_and_those_of_others_unchanged() {
    let long = |text: &str| format!("first {} last", text.repeat(16 << 10));
    let waits = |text: &str| container(json!({"waiting": {"reason": "Error", "message": text}}));
    let check = |containers: usize, text: &str, expected: usize| {
        let containers: Vec<Value> = (0..containers).map(|_| waits(text)).collect();
        let conditions = json!([{"type": "Ready", "status": "False", "message": text}, {"type": "example.com/gate", "status": "True", "message": text}]);
        let said =
            status(json!({"message": text, "containerStatuses": containers, "conditions": conditions}));
        let gate = json!({"conditions": [{"type": "example.com/gate", "status": "True", "message": text}]});
        let after = merged(&status(gate), &said);
        let of_container =
            after.container_statuses.unwrap()[0].state.clone().unwrap().waiting.unwrap().message.unwrap();
        assert!(of_container.starts_with("first") && of_container.ends_with("last"), "{of_container}");
        assert!((expected - 8..=expected).contains(&of_container.len()), "{}", of_container.len());
        assert!(after.message.unwrap().len() <= MAX_SENTENCE);
        let message = |of: &str| {
            let mut all = after.conditions.iter().flatten();
            all.find(|one| one.type_ == of).unwrap().message.as_ref().unwrap().len()
        };
        assert!(message("Ready") <= MAX_SENTENCE);
        assert_eq!(message("example.com/gate"), text.len());
    };
    check(1, &long("x"), 4096);
    check(1, &long("é"), 4096);
    check(2, "first and last", 14);
    check(256, &long("x"), 1024);
    check(
        10_000,
        "first words, then the rest of a sentence that is longer than a few words are, and the last",
        64,
    );
}

#[test]
fn a_container_whose_end_was_not_observed_has_failed() {
    let check = |spec: Value, last: Value, phase: &str, states: &[&str]| {
        let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        let status = finished(&pod, &status(last));
        let state = |c: &ContainerStatus| {
            let ended = c.state.as_ref().and_then(|state| state.terminated.as_ref());
            ended.map_or_else(|| "waits".to_owned(), |ended| format!("{}", ended.exit_code))
        };
        let all: Vec<String> = all_statuses(&status).map(state).collect();
        assert_eq!(
            (status.phase.as_deref().unwrap(), all),
            (phase, states.iter().map(|s| (*s).to_owned()).collect())
        );
    };
    let one = || json!({"containers": [{"name": "a"}]});
    let with_init =
        || json!({"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "a"}]});
    let waiting = || container(json!({"waiting": {"reason": "ContainerCreating"}}));
    check(
        one(),
        json!({"phase": "Running", "containerStatuses": [container(running())]}),
        "Failed",
        &["137"],
    );
    check(
        one(),
        json!({"phase": "Running", "containerStatuses": [container(ended(0))]}),
        "Succeeded",
        &["0"],
    );
    check(one(), json!({"phase": "Running", "containerStatuses": [container(ended(3))]}), "Failed", &["3"]);
    check(one(), json!({"phase": "Pending", "containerStatuses": [waiting()]}), "Failed", &["137"]);
    check(one(), json!({"phase": "Pending"}), "Failed", &[]);
    check(
        one(),
        json!({"phase": "Succeeded", "containerStatuses": [container(ended(0))]}),
        "Succeeded",
        &["0"],
    );
    // The pod's own containers never ran: the init containers' ends explain everything.
    check(
        with_init(),
        json!({"phase": "Pending", "initContainerStatuses": [container(ended(1)), waiting()], "containerStatuses": [waiting()]}),
        "Failed",
        &["1", "waits", "waits"],
    );
    check(
        with_init(),
        json!({"phase": "Pending", "initContainerStatuses": [waiting(), waiting()], "containerStatuses": [waiting()]}),
        "Failed",
        &["137", "waits", "waits"],
    );
}

#[test]
fn a_static_pod_keeps_its_phase() {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"annotations": {"kubernetes.io/config.source": "file"}}, "spec": {"containers": []},
    }))
    .unwrap();
    assert_eq!(finished(&pod, &status(json!({"phase": "Running"}))).phase.as_deref(), Some("Running"));
}

fn check_patch(before: Value, after: Value, expected: Value) {
    let patch = patch("u1", &before, &after);
    let expected = (!expected.is_null()).then(|| json!({"metadata": {"uid": "u1"}, "status": expected}));
    assert_eq!(patch, expected);
}

#[test]
fn a_patch_has_only_the_differences() {
    check_patch(json!({"phase": "Running"}), json!({"phase": "Running"}), Value::Null);
    check_patch(json!({"phase": "Pending"}), json!({"phase": "Running"}), json!({"phase": "Running"}));
    check_patch(json!({"reason": "Evicted"}), json!({}), json!({"reason": null}));
    // Fields of other components.
    check_patch(json!({"nominatedNodeName": "n2"}), json!({}), Value::Null);
    check_patch(json!({"resourceClaimStatuses": [{"name": "c"}]}), json!({}), Value::Null);
}

#[test]
fn a_patch_of_conditions_names_them_by_type() {
    let ready = json!({"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "m"});
    let gate = json!({"type": "example.com/gate", "status": "True"});
    check_patch(
        json!({"conditions": [gate, ready, {"type": "PodResizePending", "status": "True"}]}),
        json!({"conditions": [gate, {"type": "Ready", "status": "True"}, {"type": "Initialized", "status": "True"}]}),
        json!({"conditions": [
            {"type": "Ready", "status": "True", "reason": null, "message": null},
            {"type": "Initialized", "status": "True"},
            {"$patch": "delete", "type": "PodResizePending"},
        ]}),
    );
}

#[test]
fn a_patch_of_addresses_leaves_no_old_one() {
    check_patch(
        json!({"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}),
        json!({"podIP": "10.0.0.2", "podIPs": [{"ip": "10.0.0.2"}]}),
        json!({"podIP": "10.0.0.2", "podIPs": [{"ip": "10.0.0.2"}, {"$patch": "replace"}]}),
    );
    check_patch(json!({"podIPs": [{"ip": "10.0.0.1"}]}), json!({}), json!({"podIPs": null}));
    // An older server would take the directive for an address if no list exists yet.
    let first = json!({"podIPs": [{"ip": "10.0.0.1"}]});
    check_patch(json!({}), first.clone(), first);
}

#[test]
fn readiness_and_ends_are_written_first() {
    let check =
        |before: PodStatus, after: PodStatus, expected| assert_eq!(urgency(&before, &after), expected);
    let ready = |is: &str| of("Running", json!([condition("Ready", is, 0)]), running());
    let phase = |phase: &str| of(phase, json!([]), running());
    check(ready("True"), ready("False"), Urgency::Traffic);
    check(phase("Running"), ready("True"), Urgency::Traffic);
    check(phase("Running"), phase("Failed"), Urgency::Traffic);
    check(phase("Pending"), phase("Running"), Urgency::Phase);
    check(ready("True"), ready("True"), Urgency::Detail);
    assert!(Urgency::Traffic > Urgency::Phase && Urgency::Phase > Urgency::Detail);
}

#[test]
fn a_pod_is_ready_once_its_gates_are_open() {
    let pod: Pod = serde_json::from_value(json!({
        "spec": {"containers": [], "readinessGates": [{"conditionType": "example.com/lb"}]},
    }))
    .unwrap();
    let check = |gate: Value, expected: &str| {
        let in_api = of("Running", gate, running());
        let mut ours = of("Running", json!([condition("Ready", "True", 1)]), running());
        let now: Time = serde_json::from_value(json!("2026-01-01T00:00:05Z")).unwrap();
        open_gates(&pod, &in_api, &mut ours, &now);
        assert_eq!(shown(&ours), expected);
    };
    check(json!([]), "Running Ready=False@5");
    check(json!([condition("example.com/lb", "False", 1)]), "Running Ready=False@5");
    check(json!([condition("example.com/lb", "True", 1)]), "Running Ready=True@1");
}
