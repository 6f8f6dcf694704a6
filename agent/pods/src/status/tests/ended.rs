//! Statuses of ended pods, and of containers that the runtime has lost.

use super::*;

#[test]
fn a_failed_pod_keeps_the_last_statuses_of_its_containers() {
    let evicted = |cleared| PodFailure { cleared, ..PodFailure::new("Evicted", "too much", None) };
    let running = Case::default().status(&pod(one()), &seen(&["a 0 running"]));
    let ending = Case { previous: Some(running), failure: Some(evicted(false)), ..Case::default() };
    let status = ending.status(&pod(one()), &seen(&["a 0 running"]));
    assert_eq!(line(&status), "Running Ready=True a: running ready");
    assert_eq!(status.reason.as_deref(), Some("Evicted"));
    // The container's end was observed before its records were removed.
    let seen_end = ending.status(&pod(one()), &seen(&["a 0 exit 143"]));
    let cleared = Case { previous: Some(seen_end), failure: Some(evicted(true)), ..Case::default() };
    assert_eq!(line(&cleared.status(&pod(one()), &seen(&[]))), "Failed Ready=False a: Error");
    // The pod has failed as soon as its containers have stopped, even if its volumes take longer.
    let stopped = PodFailure { stopped: true, ..evicted(false) };
    let stopped = Case { failure: Some(stopped), previous: ending.previous.clone(), ..Case::default() };
    let status = stopped.status(&pod(one()), &seen(&["a 0 exit 143"]));
    assert_eq!(line(&status), "Failed Ready=False a: Error");
    // The container's end was not observed.
    let cleared = Case { failure: Some(evicted(true)), ..ending };
    let status = cleared.status(&pod(one()), &seen(&[]));
    assert_eq!(line(&status), "Failed Ready=False a: ContainerStatusUnknown");
    assert_eq!(condition(&status, "Ready").reason.as_deref(), Some("PodFailed"));
}

#[test]
fn a_lost_container_has_ended_for_an_unknown_reason() {
    let spec = |policy: &str| {
        let init = json!([{"name": "i", "image": "i"}]);
        json!({"restartPolicy": policy, "initContainers": init, "containers": [{"name": "a", "image": "i"}]})
    };
    let of = |pod: core::Pod, lost: bool| {
        let previous = Some(Case::default().status(&pod, &seen(&["i 0 exit 0", "a 2 running"])));
        let codes = [("i".to_owned(), 0), ("a".to_owned(), 137)];
        let last_codes = codes.into_iter().filter(|_| lost).collect();
        let mut case = Case { previous, last_codes, ..Case::default() };
        let first = case.status(&pod, &Observation::default());
        case.previous = Some(first.clone());
        // The published status stays.
        assert_eq!(case.status(&pod, &Observation::default()).container_statuses, first.container_statuses);
        let a = first.container_statuses.as_ref().unwrap()[0].clone();
        let code =
            |state: &Option<core::ContainerState>| state.as_ref()?.terminated.as_ref().map(|t| t.exit_code);
        (line(&first), a.restart_count, code(&a.state), code(&a.last_state))
    };
    let after = |policy: &str, lost: bool| of(pod(spec(policy)), lost);
    let unknown = "Failed Ready=False i: Completed ready, a: ContainerStatusUnknown".to_owned();
    assert_eq!(after("Never", true), (unknown, 3, Some(137), None));
    let waiting = "Pending Ready=False i: PodInitializing, a: PodInitializing".to_owned();
    assert_eq!(after("Always", true), (waiting.clone(), 3, None, Some(137)));
    assert_eq!(after("Always", false), (waiting, 0, None, None), "an unknown container");
    // No container of a deleted pod starts again.
    let mut deleted = pod(spec("Always"));
    deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2027-01-01T00:00:00Z")).unwrap();
    let unknown = "Running Ready=False i: Completed ready, a: ContainerStatusUnknown".to_owned();
    assert_eq!(of(deleted, true), (unknown, 2, Some(137), None));
}

#[test]
fn a_pod_that_fails_during_creation_of_its_sandbox_has_failed_after_removal_of_the_sandbox() {
    let phase = |stopped| {
        let failure = PodFailure { stopped, ..PodFailure::new("DeadlineExceeded", "too long", None) };
        let case = Case { failure: Some(failure), ..Case::default() };
        case.status(&pod(one()), &Observation::default()).phase.unwrap()
    };
    assert_eq!((phase(false).as_str(), phase(true).as_str()), ("Pending", "Failed"));
}

#[test]
fn a_refused_pod_has_no_container_statuses() {
    let refused = PodFailure { cleared: true, ..PodFailure::new("OutOfcpu", "too little", None) };
    let case = Case { failure: Some(refused), ..Case::default() };
    let status = case.status(&pod(one()), &Observation::default());
    assert_eq!(line(&status), "Failed Ready=False ");
    assert_eq!((status.container_statuses, status.message.as_deref()), (None, Some("too little")));
    // A pod without a sandbox has failed at once. A pod with a sandbox fails after the sandbox's removal.
    let phase = |seen: &Observation| {
        let case = Case { failure: Some(PodFailure::new("AppArmor", "none", None)), ..Case::default() };
        case.status(&pod(one()), seen).phase.unwrap()
    };
    assert_eq!((phase(&Observation::default()).as_str(), phase(&seen(&[])).as_str()), ("Failed", "Pending"));
}

#[test]
fn a_pod_that_has_ended_with_its_sidecar_stays_so() {
    let spec = || {
        json!({
            "restartPolicy": "Never",
            "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always"}],
            "containers": [{"name": "a", "image": "i"}]
        })
    };
    let mut ended = seen(&["s 0 exit 143", "a 0 exit 0"]);
    ended.sandbox = None;
    ended.pod.sandboxes[0].ready = false;
    let status = Case::default().status(&pod(spec()), &ended);
    assert_eq!(line(&status), "Succeeded Ready=False s: Error, a: Completed");
}

#[test]
fn a_pod_runs_until_its_sidecars_have_ended() {
    let check = |containers: &[&str], phase: &str| {
        let spec = json!({
            "restartPolicy": "Never",
            "initContainers": [
                {"name": "s", "image": "i", "restartPolicy": "Always"}, {"name": "i", "image": "i"},
            ],
            "containers": [{"name": "a", "image": "i"}]
        });
        let status = Case::default().status(&pod(spec), &seen(containers));
        assert_eq!(status.phase.as_deref(), Some(phase), "{containers:?}");
        let is_final = matches!(phase, "Succeeded" | "Failed");
        assert_eq!(Ended::of(Some(&status), false).is_some(), is_final, "{containers:?}");
    };
    check(&["s 0 running", "i 0 exit 0", "a 0 running"], "Running");
    check(&["s 0 running", "i 0 exit 0", "a 0 exit 0"], "Running");
    check(&["s 0 running", "i 0 exit 0", "a 0 exit 1"], "Running");
    check(&["s 0 exit 137", "i 0 exit 0", "a 0 exit 0"], "Succeeded");
    check(&["s 0 exit 0", "i 0 exit 0", "a 0 exit 1"], "Failed");
    // An earlier instance of a sidecar that still runs counts too.
    check(&["s 0 running", "s 1 exit 0", "i 0 exit 0", "a 0 exit 0"], "Running");
    // A running sidecar also counts if the pod failed before its main containers started.
    check(&["s 0 running", "i 0 exit 1"], "Pending");
    check(&["s 0 exit 143", "i 0 exit 1"], "Failed");
}

#[test]
fn missing_containers_of_a_pod_that_ended_on_a_lost_node_have_ended() {
    let known = Case::default().status(&pod(one()), &seen(&["a 0 running"]));
    let known = core::PodStatus { phase: Some("Failed".to_owned()), ..known };
    assert!(Ended::of(Some(&known), false).is_none());
    let gone =
        Case::default().with(&pod(one()), &Observation::default(), |inputs| inputs.as_forgotten(&known));
    assert_eq!(line(&gone), "Failed Ready=True a: ContainerStatusUnknown");
    assert!(Ended::of(Some(&gone), false).is_some());
}

#[test]
fn an_oom_kill_is_reported_with_the_kernels_numbers() {
    let spec =
        || json!({"containers": [{"name": "a", "image": "i", "resources": {"limits": {"memory": "64Mi"}}}]});
    let kill = OomKill { pid: 4711, anon_rss: 63 << 20, file_rss: 1 << 20, ..OomKill::default() };
    let facts = OomFacts { kill, first: true, ..OomFacts::default() };
    let case = Case { oom: [("a-0".to_owned(), facts.clone())].into(), ..Case::default() };
    let ended = |status: &core::PodStatus| {
        let container = &status.container_statuses.as_ref().unwrap()[0];
        container.state.clone().unwrap().terminated.unwrap()
    };
    let state = ended(&case.status(&pod(spec()), &seen(&["a 0 exit 137"])));
    assert_eq!(state.reason.as_deref(), Some("OOMKilled"));
    assert_eq!(
        state.message.as_deref(),
        Some(
            "the kernel killed process 4711 for want of memory: it had 63 MiB of its own, 1 MiB of files and 0 MiB \
             shared; the container's memory limit is 64Mi"
        )
    );
    assert!(state.message.unwrap().starts_with(why::OOM));
    let named = OomFacts { command: "java".to_owned(), ..facts.clone() };
    assert!(named.sentence(None).starts_with("the kernel killed process 4711 (java) for want of memory: "));
    // The kernel killed another process of the container, which ended later with its own exit code.
    let other = OomFacts { first: false, ..facts };
    let case = Case { oom: [("a-0".to_owned(), other)].into(), ..Case::default() };
    let state = ended(&case.status(&pod(spec()), &seen(&["a 0 exit 3"])));
    assert_eq!((state.reason.as_deref(), state.message), (Some("Error"), None));
}

#[test]
fn amounts_are_in_force_only_when_the_cgroups_have_them() {
    let sized = |cpu: &str| {
        pod(json!({"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}, "limits": {}}}]}))
    };
    let shown = |status: &core::PodStatus| {
        let container = &status.container_statuses.as_ref().unwrap()[0];
        let of = |list: Option<&BTreeMap<String, _>>| {
            list.map(|list| {
                let quantity: &Quantity = &list["cpu"];
                quantity.0.clone()
            })
        };
        let in_force = container.resources.as_ref().and_then(|resources| of(resources.requests.as_ref()));
        (in_force.unwrap_or_default(), of(container.allocated_resources.as_ref()).unwrap_or_default())
    };
    let resizing = |status: &core::PodStatus| {
        let conditions = status.conditions.iter().flatten().filter(|c| c.type_.starts_with("PodResize"));
        conditions
            .map(|c| format!("{} {}", c.type_, c.reason.clone().unwrap_or_default()))
            .collect::<Vec<_>>()
    };
    let running = seen(&["main 0 running"]);
    let first = Case::default().status(&sized("1"), &running);
    assert_eq!((shown(&first), resizing(&first).len()), (("1".to_owned(), "1".to_owned()), 0));

    let mut case = Case { previous: Some(first), ..Case::default() };
    let resized = case.status(&sized("2"), &running);
    assert_eq!(shown(&resized), ("1".to_owned(), "2".to_owned()));
    assert_eq!(resizing(&resized), ["PodResizeInProgress "]);
    case.resize.error = Some("too much is in use".to_owned());
    assert_eq!(resizing(&case.status(&sized("2"), &running)), ["PodResizeInProgress Error"]);
    // Another instance of the container was created with the new amounts.
    assert_eq!(shown(&case.status(&sized("2"), &seen(&["main 0 exit 1", "main 1 running"]))).0, "2");

    let mut enacted = resized;
    let amounts = resize::amounts(&sized("2").spec.unwrap().containers[0]);
    resize::enact(&mut enacted, "u1", &BTreeMap::from([("main-0".to_owned(), amounts)]));
    case.previous = Some(enacted);
    let done = case.status(&sized("2"), &running);
    assert_eq!((shown(&done), resizing(&done).len()), (("2".to_owned(), "2".to_owned()), 0));
    case.resize.pending = Some(resize::Pending { reason: "Deferred", message: "no room".to_owned() });
    assert_eq!(resizing(&case.status(&sized("2"), &running)), ["PodResizePending Deferred"]);
}

#[test]
fn a_pod_with_claims_shows_ended_containers_but_no_final_phase() {
    let pod = pod(json!({"restartPolicy": "Never", "containers": [{"name": "c"}]}));
    let ended = seen(&["c 0 exit 3"]);
    let check = |published: Option<&str>, holds_claims: bool, expected: &str| {
        let phase = |phase: &str| core::PodStatus { phase: Some(phase.to_owned()), ..Default::default() };
        let case = Case { previous: published.map(phase), holds_claims, ..Case::default() };
        let status = case.status(&pod, &ended);
        assert_eq!(status.phase.as_deref(), Some(expected), "{published:?} {holds_claims}");
        let state = status.container_statuses.as_ref().unwrap()[0].state.as_ref().unwrap();
        assert_eq!(state.terminated.as_ref().unwrap().exit_code, 3);
        let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready").unwrap();
        assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("False", Some("PodFailed")));
    };
    check(Some("Running"), true, "Running");
    check(Some("Running"), false, "Failed");
    check(Some("Pending"), true, "Pending");
    check(None, true, "Running");
    // A published final phase does not change.
    check(Some("Failed"), true, "Failed");
    let running = Case { holds_claims: true, ..Case::default() }.status(&pod, &seen(&["c 0 running"]));
    assert_eq!(running.phase.as_deref(), Some("Running"));
}
