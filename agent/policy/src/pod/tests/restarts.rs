//! Restarts by policies, rules and probes, and hooks.

use super::*;

/// Applies `change` to the container `index` of the pod.
fn with_spec(mut pod: Pod, index: usize, change: impl Fn(&mut ContainerSpec)) -> Pod {
    change(&mut pod.spec.as_mut().unwrap().containers[index]);
    pod
}

#[test]
fn a_container_can_have_a_restart_policy_of_its_own() {
    let own = |policy, own: &'static str| {
        with_spec(pod(policy, &[], &["a", "b"]), 0, move |c| c.restart_policy = Some(own.to_owned()))
    };
    let with = |a, b| observed(&[(0, true)], vec![container("a", 0, 0, a), container("b", 0, 0, b)]);
    let none = verdicts(&[], &[]);
    check(&own("Never", "Always"), &with("exit 0 @99999", "running"), &none, "start a/1");
    check(&own("Never", "OnFailure"), &with("exit 0 @99999", "running"), &none, "");
    check(&own("Never", "OnFailure"), &with("exit 2 @99999", "running"), &none, "start a/1");
    check(&own("Always", "Never"), &with("exit 2 @99999", "running"), &none, "");
    check(&own("Always", "Never"), &with("exit 2 @99999", "exit 0 @99999"), &none, "start b/1");
    check(&own("OnFailure", "Never"), &with("exit 2 @99999", "exit 0 @99999"), &none, "stop s0; Failed");
    // Neither container runs again in a new sandbox.
    let lost = |a| {
        observed(
            &[(0, false), (1, true)],
            vec![container("a", 0, 0, a), container("b", 0, 0, "exit 9 @99999")],
        )
    };
    check(&own("Always", "Never"), &lost("exit 9 @99999"), &none, "start b/1");
    check(&own("Never", "Always"), &lost("exit 9 @99999"), &none, "start a/1");
}

#[test]
fn a_container_stopped_for_a_resize_starts_at_once_after_any_exit_code() {
    let mut resized = verdicts(&[], &[]);
    resized.condemned.insert("a-3".to_owned(), KillReason::Resized);
    for policy in ["Always", "OnFailure", "Never"] {
        let pod = pod(policy, &[], &["a"]);
        let check = |state: &str, expect: &str| {
            check(&pod, &observed(&[(0, true)], vec![container("a", 3, 0, state)]), &resized, expect);
        };
        check("running", "kill a-3");
        check("exit 0 @99999", "start a/4");
        check("exit 143 @99999", "start a/4");
    }
}

#[test]
fn an_init_container_stopped_for_a_resize_has_not_succeeded() {
    let mut resized = verdicts(&[], &[]);
    resized.condemned.insert("i-0".to_owned(), KillReason::Resized);
    for policy in ["Always", "Never"] {
        let pod = pod(policy, &["i"], &["a"]);
        let check = |state: &str, expect: &str| {
            check(&pod, &observed(&[(0, true)], vec![container("i", 0, 0, state)]), &resized, expect);
        };
        check("running", "kill i-0");
        check("exit 0 @99999", "start i/1");
        check("exit 143 @99999", "start i/1");
    }
}

#[test]
fn a_rule_restarts_all_containers_of_the_pod_in_order() {
    let mut pod = with_spec(pod("Never", &["i", "s*"], &["a", "b"]), 0, |c| {
        let codes = k8s_openapi::api::core::v1::ContainerRestartRuleOnExitCodes {
            operator: "In".to_owned(),
            values: Some(vec![42]),
        };
        c.restart_policy = Some("Never".to_owned());
        c.restart_policy_rules = Some(vec![k8s_openapi::api::core::v1::ContainerRestartRule {
            action: "RestartAllContainers".to_owned(),
            exit_codes: Some(codes),
        }]);
    });
    let of = |round: u32, mut container: Container| {
        container.round = round;
        container
    };
    let check = |pod: &Pod, containers: Vec<Container>, expect: &str| {
        check(pod, &observed(&[(0, true)], containers), &verdicts(&["s-0", "s-1"], &[]), expect);
    };
    let rest = |s: &str, b: &str| {
        vec![container("i", 0, 0, "exit 0 @10"), container("s", 0, 0, s), container("b", 0, 0, b)]
    };
    let with_a = |state: &str, mut rest: Vec<Container>| {
        rest.push(container("a", 0, 0, state));
        rest
    };
    check(&pod, with_a("exit 1 @99999", rest("running", "running")), "");
    // All others are stopped before the first one restarts.
    check(&pod, with_a("exit 42 @99999", rest("running", "running")), "kill b-0; kill s-0");
    check(&pod, with_a("exit 42 @99999", rest("running", "exit 0 @9")), "kill s-0");
    let stopped = || with_a("exit 42 @99999", rest("exit 137 @99999", "exit 137 @99999"));
    check(&pod, stopped(), "start i/1");
    // Containers started since belong to the next round; later ones are still missing.
    let mut begun = stopped();
    begun.push(of(1, container("i", 1, 0, "running")));
    check(&pod, begun.clone(), "");
    begun.last_mut().unwrap().state = container("i", 1, 0, "exit 0 @99999").state;
    check(&pod, begun.clone(), "start s/1");
    begun.push(of(1, container("s", 1, 0, "running")));
    check(&pod, begun.clone(), "start a/1; start b/1");
    let started =
        decided_at(NOW, &pod, &observed(&[(0, true)], begun.clone()), &verdicts(&["s-1"], &[])).start;
    assert!(started.iter().all(|start| start.round == 1));
    // An end in this round counts like any other, and the same code requires the next round.
    begun.push(of(1, container("a", 1, 0, "exit 0 @99999")));
    begun.push(of(1, container("b", 1, 0, "exit 0 @99999")));
    check(&pod, begun.clone(), "stop s0; Succeeded");
    begun.retain(|c| (c.name.as_str(), c.attempt) != ("a", 1));
    begun.push(of(1, container("a", 1, 0, "exit 42 @99999")));
    check(&pod, begun.clone(), "kill s-1");
    // The container that required another restart is delayed as if restarted alone.
    begun.iter_mut().find(|c| c.id == "s-1").unwrap().state = container("s", 1, 0, "exit 137 @99999").state;
    check(&pod, begun, "wait a");
    // The pod gets a new sandbox in this state, too.
    check_lost(&pod, stopped());
    pod.spec.as_mut().unwrap().containers[0].restart_policy = None;
    check(&pod, stopped(), "stop s0; Failed");
}

/// Checks that a pod without a sandbox gets one.
fn check_lost(pod: &Pod, containers: Vec<Container>) {
    check(pod, &observed(&[(0, false)], containers), &verdicts(&[], &[]), "stop s0; create 1");
}

#[test]
fn rules_by_exit_code_come_before_the_policy() {
    let ruled = |operator: &'static str| {
        with_spec(pod("Always", &[], &["a", "b"]), 0, move |c| {
            let codes = k8s_openapi::api::core::v1::ContainerRestartRuleOnExitCodes {
                operator: operator.to_owned(),
                values: Some(vec![42, 43]),
            };
            c.restart_policy = Some("Never".to_owned());
            c.restart_policy_rules = Some(vec![k8s_openapi::api::core::v1::ContainerRestartRule {
                action: "Restart".to_owned(),
                exit_codes: Some(codes),
            }]);
        })
    };
    let case = |operator, code: &str, expect| {
        let a = container("a", 0, 0, &format!("exit {code} @99999"));
        let o = observed(&[(0, true)], vec![a, container("b", 0, 0, "running")]);
        check(&ruled(operator), &o, &verdicts(&[], &[]), expect);
    };
    case("In", "42", "start a/1");
    case("In", "1", "");
    case("NotIn", "42", "");
    case("NotIn", "1", "start a/1");
    case("NotIn", "0", "start a/1");
}

#[test]
fn an_init_container_that_may_not_be_restarted_fails_the_pod() {
    let mut p = pod("Always", &["i"], &["a"]);
    p.spec.as_mut().unwrap().init_containers.as_mut().unwrap()[0].restart_policy = Some("Never".to_owned());
    let with = |state| observed(&[(0, true)], vec![container("i", 0, 0, state)]);
    check(&p, &with("exit 1 @99999"), &verdicts(&[], &[]), "stop s0; Failed");
    check(&p, &with("exit 0 @99999"), &verdicts(&[], &[]), "start a/0");
}

fn hook(container: &mut ContainerSpec) {
    let post_start = Some(k8s_openapi::api::core::v1::LifecycleHandler::default());
    container.lifecycle = Some(k8s_openapi::api::core::v1::Lifecycle { post_start, ..Default::default() });
}

#[test]
fn a_hook_with_unknown_result_runs_and_delays_the_later_containers() {
    let p = with_spec(pod("Always", &[], &["a", "b"]), 0, hook);
    let one = |state| observed(&[(0, true)], vec![container("a", 0, 0, state)]);
    let done = Verdicts { hooked: ["a-0".to_owned()].into(), ..verdicts(&[], &[]) };
    // The hook runs before the next container starts.
    check(&p, &observed(&[(0, true)], vec![]), &verdicts(&[], &[]), "start a/0; start b/0");
    check(&p, &one("running"), &verdicts(&[], &[]), "hook a-0");
    check(&p, &one("running"), &done, "start b/0");
    check(&p, &one("exit 1 @99999"), &verdicts(&[], &[]), "start a/1; start b/0");
    // A failed hook does not run again in the same container.
    check(&p, &one("running"), &verdicts(&[], &["a-0"]), "kill a-0");
    // A crash of a later container does not start that one before its turn.
    let both = vec![container("a", 0, 0, "running"), container("b", 0, 0, "exit 1 @99999")];
    check(&p, &observed(&[(0, true)], both), &verdicts(&[], &[]), "hook a-0");
}

#[test]
fn a_sidecar_has_started_once_its_hook_has_finished_too() {
    let mut p = pod("Always", &["proxy*"], &["a"]);
    hook(&mut p.spec.as_mut().unwrap().init_containers.as_mut().unwrap()[0]);
    let o = observed(&[(0, true)], vec![container("proxy", 0, 0, "running")]);
    check(&p, &o, &verdicts(&["proxy-0"], &[]), "hook proxy-0");
    let done = Verdicts { hooked: ["proxy-0".to_owned()].into(), ..verdicts(&["proxy-0"], &[]) };
    check(&p, &o, &done, "start a/0");
}

#[test]
fn a_container_stopped_by_a_probe_restarts_after_any_exit_code() {
    let now = i64::try_from(NOW).unwrap();
    let ended = |code: i32| {
        observed(&[(0, true)], vec![container("a", 0, 0, &format!("exit {code} @{now} after 50"))])
    };
    let stopped = verdicts(&[], &["a-0"]);
    for policy in ["Always", "OnFailure"] {
        check(&pod(policy, &[], &["a"]), &ended(0), &stopped, "start a/1");
        check(&pod(policy, &[], &["a"]), &ended(137), &stopped, "start a/1");
    }
    check(&pod("OnFailure", &[], &["a"]), &ended(0), &verdicts(&[], &[]), "stop s0; Succeeded");
    check(&pod("Never", &[], &["a"]), &ended(0), &stopped, "stop s0; Succeeded");
    let mut own = pod("OnFailure", &[], &["a"]);
    own.spec.as_mut().unwrap().containers[0].restart_policy = Some("Never".to_owned());
    check(&own, &ended(0), &stopped, "stop s0; Succeeded");
}

#[test]
fn the_delay_after_a_failed_probe_counts_from_the_end_of_the_container_before() {
    let p = pod("Always", &[], &["a"]);
    let mut stopped = verdicts(&[], &["a-3"]);
    let check = |before: Option<&str>, stopped: &Verdicts, expect: &str| {
        let mut last = container("a", 3, 0, "exit 137 @99999 after 35");
        last.restart_delay = Duration::from_secs(10);
        let before = before.map(|state| container("a", 2, 0, state));
        let o = observed(&[(0, true)], before.into_iter().chain([last]).collect());
        let decided = decided_at(NOW, &p, &o, stopped);
        assert_eq!(line(&decided), expect, "{before:?}", before = o.containers.first());
        // The next delay grows all the same.
        assert!(decided.start.iter().all(|start| start.restart_delay == Duration::from_secs(20)));
        decided.wake_at()
    };
    check(Some("exit 1 @99964"), &stopped, "start a/4");
    check(Some("exit 1 @99979"), &stopped, "start a/4");
    // The previous delay had not passed: the delay counts from this container's own end.
    assert_eq!(check(Some("exit 1 @99980"), &stopped, "wait a"), Some(moment(99_999 + 20)));
    check(None, &stopped, "start a/4");
    stopped.condemned = [("a-3".to_owned(), KillReason::Startup)].into();
    check(Some("exit 1 @99964"), &stopped, "start a/4");
    // A crashed container waits, and so does one whose hook failed.
    check(Some("exit 1 @99964"), &verdicts(&[], &[]), "wait a");
    stopped.condemned = [("a-3".to_owned(), KillReason::PostStartHook)].into();
    check(Some("exit 1 @99964"), &stopped, "wait a");
}

#[test]
fn a_container_lost_by_the_runtime_counts_as_ended() {
    let check = |policy: &str, init: &[&str], codes: &[(&str, i32)], seen: &Observed, expect: &str| {
        let last_codes = codes.iter().map(|(name, code)| ((*name).to_owned(), *code)).collect();
        let verdicts = Verdicts { last_codes, ..verdicts(&[], &[]) };
        check(&pod(policy, init, &["a", "b"]), seen, &verdicts, expect);
    };
    let (gone, ran) = (Observed::default(), [("a", 137), ("b", 137)]);
    check("Never", &[], &ran, &gone, "Failed; release");
    check("Never", &[], &[("a", 0), ("b", 137)], &gone, "Failed; release");
    check("Never", &[], &[("a", 0), ("b", 0)], &gone, "Succeeded; release");
    check("Never", &["i"], &[("i", 137)], &gone, "Failed; release");
    // A container that never ran may still run.
    check("Never", &[], &[], &gone, "create 0");
    check("Never", &[], &[("a", 137)], &gone, "create 0");
    check("Always", &[], &ran, &gone, "create 0");
    check("OnFailure", &[], &ran, &gone, "create 0");
    let again = observed(&[(0, true)], vec![]);
    check("OnFailure", &[], &[("a", 0), ("b", 137)], &again, "start b/0");
    // The runtime's state counts.
    let runs = observed(&[(0, true)], vec![container("a", 0, 0, "running"), container("b", 0, 0, "running")]);
    check("Never", &[], &ran, &runs, "");
}

#[test]
fn a_new_image_starts_without_the_old_ones_back_off() {
    let now = i64::try_from(NOW).unwrap();
    let mut crashed = container("a", 6, 0, &format!("exit 143 @{now} after 5"));
    crashed.restart_delay = Duration::from_secs(160);
    let seen = observed(&[(0, true)], vec![crashed]);
    let delay = |reason: KillReason| {
        let condemned = [("a-6".to_owned(), reason)].into();
        let actions = decided_at(
            NOW,
            &pod("Always", &[], &["a"]),
            &seen,
            &Verdicts { condemned, ..verdicts(&[], &[]) },
        );
        actions.start[0].restart_delay
    };
    assert_eq!(delay(KillReason::Redefined), Duration::ZERO);
    assert_eq!(delay(KillReason::Resized), Duration::from_secs(160));
}
