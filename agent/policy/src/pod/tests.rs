use std::collections::BTreeSet;

use jiff::Timestamp;

use super::*;

mod restarts;

/// A pod whose init containers are `init` (a trailing `*` marks a sidecar) and containers `main`.
fn pod(policy: &str, init: &[&str], main: &[&str]) -> Pod {
    let container = |name: &&str| ContainerSpec {
        name: name.trim_end_matches('*').to_owned(),
        restart_policy: name.ends_with('*').then(|| "Always".to_owned()),
        ..Default::default()
    };
    Pod {
        spec: Some(PodSpec {
            restart_policy: Some(policy.to_owned()),
            init_containers: Some(init.iter().map(container).collect()),
            containers: main.iter().map(container).collect(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

const NOW: u64 = 100_000;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// Creates a container whose `state` is `running`, `created`, `unknown`, or `exit CODE @FINISHED [after RAN]`
/// in seconds.
fn container(name: &str, attempt: u32, sandbox: u32, state: &str) -> Container {
    let words: Vec<&str> = state.split(' ').collect();
    let state = match words[0] {
        "running" => ContainerState::Running { started_at: at(0) },
        "created" => ContainerState::Created,
        "unknown" => ContainerState::Unknown,
        _ => {
            let finished: i64 = words[2][1..].parse().unwrap();
            let ran: i64 = words.get(4).map_or(1, |w| w.parse().unwrap());
            ContainerState::Exited {
                exit_code: words[1].parse().unwrap(),
                started_at: Some(at(finished - ran)),
                finished_at: at(finished),
            }
        }
    };
    Container {
        id: format!("{name}-{attempt}"),
        name: name.to_owned(),
        attempt,
        sandbox_id: format!("s{sandbox}"),
        state,
        restart_delay: Duration::ZERO,
        round: 0,
    }
}

fn sandbox(attempt: u32, ready: bool) -> Sandbox {
    Sandbox { id: format!("s{attempt}"), attempt, ready }
}

fn observed(sandboxes: &[(u32, bool)], containers: Vec<Container>) -> Observed {
    Observed { sandboxes: sandboxes.iter().map(|(a, r)| sandbox(*a, *r)).collect(), containers }
}

fn verdicts(started: &[&str], condemned: &[&str]) -> Verdicts {
    Verdicts {
        started: started.iter().map(|s| (*s).to_owned()).collect(),
        hooked: BTreeSet::new(),
        condemned: condemned.iter().map(|s| ((*s).to_owned(), KillReason::Liveness)).collect(),
        hurried: BTreeSet::new(),
        last_codes: BTreeMap::new(),
    }
}

/// Prints the decision as a line: `kill a-0; stop s0; create 1; remove b-0; rm-sandbox s0; start a/1; wait a;
/// Succeeded`.
fn line(actions: &Actions) -> String {
    let mut out = Vec::new();
    out.extend(actions.kill.iter().map(|k| format!("kill {}", k.id)));
    out.extend(actions.stop_sandboxes.iter().map(|s| format!("stop {s}")));
    out.extend(actions.create_sandbox.map(|a| format!("create {a}")));
    out.extend(actions.remove_containers.iter().map(|c| format!("remove {c}")));
    out.extend(actions.remove_sandboxes.iter().map(|s| format!("rm-sandbox {s}")));
    out.extend(actions.post_start.iter().map(|h| format!("hook {}", h.id)));
    out.extend(actions.start.iter().map(|s| {
        let created = if s.created.is_some() { "!" } else { "" };
        format!("start {}/{}{created}", s.name, s.attempt)
    }));
    out.extend(actions.backoff.keys().map(|name| format!("wait {name}")));
    out.extend(actions.outcome.map(|o| format!("{o:?}")));
    out.extend(actions.release.then(|| "release".to_owned()));
    out.join("; ")
}

fn moment(second: u64) -> Moment {
    Moment::after_start(Duration::from_secs(second))
}

/// Decides at this second, by a monotonic clock that agrees with the runtime's.
fn decided_at(second: u64, pod: &Pod, observed: &Observed, verdicts: &Verdicts) -> Actions {
    let ended = observed.containers.iter().filter_map(|c| match c.state {
        ContainerState::Exited { finished_at, .. } => {
            Some((c.id.clone(), moment(finished_at.as_second().try_into().unwrap())))
        }
        _ => None,
    });
    let times = Times { ended: &ended.collect(), now: moment(second) };
    actions(pod, observed, verdicts, RESTART_DELAY_MAX, times)
}

fn check(pod: &Pod, observed: &Observed, verdicts: &Verdicts, expect: &str) {
    assert_eq!(line(&decided_at(NOW, pod, observed, verdicts)), expect);
}

/// Adds these ephemeral containers to the pod.
fn with_ephemeral(mut pod: Pod, names: &[&str]) -> Pod {
    let container = |name: &&str| k8s_openapi::api::core::v1::EphemeralContainer {
        name: (*name).to_owned(),
        ..Default::default()
    };
    pod.spec.as_mut().unwrap().ephemeral_containers = Some(names.iter().map(container).collect());
    pod
}

#[test]
fn an_ephemeral_container_starts_once_and_does_not_affect_the_pod() {
    let all_said = || verdicts(&[], &[]);
    let check = |pod: &Pod, sandboxes: &[(u32, bool)], containers: Vec<Container>, expect: &str| {
        let pod = with_ephemeral(pod.clone(), &["e"]);
        check(&pod, &observed(sandboxes, containers), &all_said(), expect);
    };
    let plain = pod("Always", &[], &["a"]);
    check(&plain, &[], vec![], "create 0");
    check(&plain, &[(0, true)], vec![container("a", 0, 0, "running")], "start e/0");
    let ran = |state: &str| vec![container("a", 0, 0, "running"), container("e", 0, 0, state)];
    check(&plain, &[(0, true)], ran("running"), "");
    check(&plain, &[(0, true)], ran("exit 1 @10"), "");
    check(&plain, &[(0, true)], ran("created"), "start e/0!");
    check(&plain, &[(0, true)], ran("unknown"), "kill e-0");
    // Ephemeral containers start during initialization, too.
    let init = pod("Always", &["i"], &["a"]);
    check(&init, &[(0, true)], vec![container("i", 0, 0, "running")], "start e/0");
    check(&init, &[(0, true)], vec![], "start e/0; start i/0");
    // A start in an earlier sandbox counts; a mere creation does not.
    let moved = |state: &str| vec![container("a", 1, 1, "running"), container("e", 0, 0, state)];
    check(&plain, &[(0, false), (1, true)], moved("exit 0 @10"), "");
    check(&plain, &[(0, false), (1, true)], moved("created"), "remove e-0; rm-sandbox s0; start e/1");
    // The ephemeral container is stopped with the pod's own containers, even if it is fine.
    let once = pod("Never", &[], &["a"]);
    let over = vec![container("a", 0, 0, "exit 0 @10"), container("e", 0, 0, "running")];
    check(&once, &[(0, true)], over, "stop s0; Succeeded");
}

#[test]
fn a_new_pod_gets_its_sandbox_and_then_all_containers_at_once() {
    let p = pod("Always", &[], &["a", "b"]);
    check(&p, &observed(&[], vec![]), &verdicts(&[], &[]), "create 0");
    check(&p, &observed(&[(0, true)], vec![]), &verdicts(&[], &[]), "start a/0; start b/0");
    let running = vec![container("a", 0, 0, "running"), container("b", 0, 0, "running")];
    check(&p, &observed(&[(0, true)], running), &verdicts(&[], &[]), "");
}

#[test]
fn init_containers_run_one_after_another() {
    let p = pod("Always", &["i", "j"], &["a"]);
    let check =
        |containers, expect| check(&p, &observed(&[(0, true)], containers), &verdicts(&[], &[]), expect);
    check(vec![], "start i/0");
    check(vec![container("i", 0, 0, "running")], "");
    check(vec![container("i", 0, 0, "exit 0 @99999")], "start j/0");
    check(vec![container("i", 0, 0, "exit 1 @99999")], "start i/1");
    let done = || vec![container("i", 0, 0, "exit 0 @99990"), container("j", 0, 0, "exit 0 @99999")];
    check(done(), "start a/0");
}

#[test]
fn a_sidecar_must_have_started_before_the_next_one() {
    let p = pod("Always", &["proxy*", "i"], &["a"]);
    let running = || vec![container("proxy", 0, 0, "running")];
    check(&p, &observed(&[(0, true)], running()), &verdicts(&[], &[]), "");
    check(&p, &observed(&[(0, true)], running()), &verdicts(&["proxy-0"], &[]), "start i/0");
}

#[test]
fn a_sidecar_that_crashes_later_is_restarted_while_the_others_run() {
    let p = pod("Never", &["proxy*"], &["a"]);
    let containers = vec![container("proxy", 0, 0, "exit 1 @99999"), container("a", 0, 0, "running")];
    check(&p, &observed(&[(0, true)], containers), &verdicts(&[], &[]), "start proxy/1");
}

#[test]
fn restart_policies() {
    let case = |policy, state, expect| {
        let p = pod(policy, &[], &["a"]);
        check(&p, &observed(&[(0, true)], vec![container("a", 0, 0, state)]), &verdicts(&[], &[]), expect);
    };
    case("Always", "exit 0 @99999", "start a/1");
    case("Always", "exit 1 @99999", "start a/1");
    case("OnFailure", "exit 1 @99999", "start a/1");
    case("OnFailure", "exit 0 @99999", "stop s0; Succeeded");
    case("Never", "exit 0 @99999", "stop s0; Succeeded");
    case("Never", "exit 1 @99999", "stop s0; Failed");
}

#[test]
fn a_pod_is_not_finished_while_one_container_runs() {
    let p = pod("Never", &[], &["a", "b"]);
    let containers = vec![container("a", 0, 0, "exit 1 @99999"), container("b", 0, 0, "running")];
    check(&p, &observed(&[(0, true)], containers), &verdicts(&[], &[]), "");
}

#[test]
fn a_finished_pods_sidecars_end_with_its_sandbox() {
    let p = pod("Never", &["x*", "y*"], &["a"]);
    let with = |x, y| {
        let a = container("a", 0, 0, "exit 0 @99999");
        observed(&[(0, true)], vec![container("x", 0, 0, x), container("y", 0, 0, y), a])
    };
    check(&p, &with("running", "running"), &verdicts(&[], &[]), "stop s0; Succeeded");
    check(&p, &with("exit 143 @99999", "exit 143 @99999"), &verdicts(&[], &[]), "stop s0; Succeeded");
}

#[test]
fn a_finished_pod_keeps_its_stopped_sandbox_and_containers() {
    let p = pod("Never", &[], &["a"]);
    let o = observed(&[(0, false)], vec![container("a", 0, 0, "exit 0 @99999")]);
    check(&p, &o, &verdicts(&[], &[]), "Succeeded; release");
}

#[test]
fn a_failed_init_container_ends_a_pod_that_is_never_restarted() {
    let p = pod("Never", &["i"], &["a"]);
    let o = observed(&[(0, true)], vec![container("i", 0, 0, "exit 3 @99999")]);
    check(&p, &o, &verdicts(&[], &[]), "stop s0; Failed");
}

#[test]
fn a_dead_sandbox_is_replaced_and_its_containers_counted_on() {
    let p = pod("Always", &["i"], &["a"]);
    let old = || vec![container("i", 0, 0, "exit 0 @99000"), container("a", 2, 0, "exit 137 @99999")];
    check(&p, &observed(&[(0, false)], old()), &verdicts(&[], &[]), "stop s0; create 1");
    check(&p, &observed(&[(0, false), (1, true)], old()), &verdicts(&[], &[]), "start i/1");
    let mut new = old();
    new.push(container("i", 1, 1, "exit 0 @99999"));
    check(&p, &observed(&[(0, false), (1, true)], new), &verdicts(&[], &[]), "start a/3");
}

#[test]
fn a_container_that_succeeded_is_not_run_again_in_a_new_sandbox() {
    let old = || vec![container("a", 0, 0, "exit 0 @99000"), container("b", 0, 0, "exit 255 @99999")];
    let p = pod("OnFailure", &[], &["a", "b"]);
    check(&p, &observed(&[(0, false)], old()), &verdicts(&[], &[]), "stop s0; create 1");
    check(&p, &observed(&[(0, false), (1, true)], old()), &verdicts(&[], &[]), "start b/1");
    let p = pod("Always", &[], &["a", "b"]);
    check(&p, &observed(&[(0, false), (1, true)], old()), &verdicts(&[], &[]), "start a/1; start b/1");
}

#[test]
fn containers_running_in_a_dead_sandbox_are_stopped_first() {
    let p = pod("Always", &[], &["a"]);
    let o = observed(&[(0, false)], vec![container("a", 0, 0, "running")]);
    check(&p, &o, &verdicts(&[], &[]), "stop s0; create 1");
}

#[test]
fn of_two_ready_sandboxes_the_older_one_is_stopped() {
    let p = pod("Always", &[], &["a"]);
    let o = observed(&[(0, true), (1, true)], vec![container("a", 0, 1, "running")]);
    check(&p, &o, &verdicts(&[], &[]), "stop s0");
    let o = observed(&[(0, false), (1, true)], vec![container("a", 0, 1, "running")]);
    check(&p, &o, &verdicts(&[], &[]), "rm-sandbox s0");
}

#[test]
fn a_pod_never_restarted_whose_sandbox_died_has_failed() {
    let p = pod("Never", &[], &["a"]);
    let o = observed(&[(0, false)], vec![container("a", 0, 0, "exit 137 @99999")]);
    check(&p, &o, &verdicts(&[], &[]), "Failed; release");
    // Nothing ever ran in the sandbox: the pod may try again.
    check(&p, &observed(&[(0, false)], vec![]), &verdicts(&[], &[]), "stop s0; create 1");
}

#[test]
fn a_condemned_container_is_killed_once_and_only_while_it_runs() {
    let p = pod("Always", &[], &["a"]);
    let with = |state| observed(&[(0, true)], vec![container("a", 0, 0, state)]);
    check(&p, &with("running"), &verdicts(&[], &["a-0"]), "kill a-0");
    check(&p, &with("exit 137 @99999"), &verdicts(&[], &["a-0"]), "start a/1");
    check(&p, &with("unknown"), &verdicts(&[], &[]), "kill a-0");
}

#[test]
fn a_container_created_before_the_agent_died_is_started_not_created_again() {
    let p = pod("Always", &[], &["a"]);
    let o = observed(&[(0, true)], vec![container("a", 4, 0, "created")]);
    check(&p, &o, &verdicts(&[], &[]), "start a/4!");
}

#[test]
fn only_the_newest_dead_container_and_the_one_before_it_are_kept() {
    let p = pod("Always", &[], &["a"]);
    let containers =
        (0..4).map(|n| container("a", n, 0, "exit 1 @99000")).chain([container("a", 4, 0, "running")]);
    check(
        &p,
        &observed(&[(0, true)], containers.collect()),
        &verdicts(&[], &[]),
        "remove a-0; remove a-1; remove a-2",
    );
}

#[test]
fn restart_delays_double_from_ten_seconds_to_five_minutes() {
    let s = Duration::from_secs;
    let mut delay = restart_delay(0, s(0), s(1), s(300));
    let mut seen = vec![delay.as_secs()];
    for attempt in 1..9 {
        delay = restart_delay(attempt, delay, s(1), s(300));
        seen.push(delay.as_secs());
    }
    assert_eq!(seen, [0, 10, 20, 40, 80, 160, 300, 300, 300]);
    assert_eq!(restart_delay(7, s(300), RESTART_DELAY_RESET, s(300)), s(0));
    assert_eq!(restart_delay(8, s(0), s(1), s(300)), s(10));
    assert_eq!(restart_delay(8, s(0), s(1), s(5)), s(5));
}

#[test]
fn a_container_in_backoff_waits_until_its_delay_has_passed() {
    let p = pod("Always", &[], &["a"]);
    let mut crashed = container("a", 3, 0, "exit 1 @99990");
    crashed.restart_delay = Duration::from_secs(20);
    let o = observed(&[(0, true)], vec![crashed]);
    let decided = decided_at(NOW, &p, &o, &verdicts(&[], &[]));
    assert_eq!(line(&decided), "wait a");
    assert!(decided.is_idle());
    assert_eq!(decided.wake_at(), Some(moment(99_990 + 40)));
    let later = decided_at(99_990 + 40, &p, &o, &verdicts(&[], &[]));
    assert_eq!(line(&later), "start a/4");
    assert_eq!(later.start[0].restart_delay, Duration::from_secs(40));
}

#[test]
fn a_container_restarted_on_request_has_no_delay() {
    let p = pod("Always", &[], &["a"]);
    let mut crashed = container("a", 3, 0, "exit 1 @99990");
    crashed.restart_delay = Duration::from_secs(20);
    let o = observed(&[(0, true)], vec![crashed]);
    let hurried = Verdicts { hurried: ["a-3".to_owned()].into(), ..verdicts(&[], &[]) };
    let decided = decided_at(NOW, &p, &o, &hurried);
    assert_eq!(line(&decided), "start a/4");
    assert_eq!(decided.start[0].restart_delay, Duration::ZERO);
    // A request for an earlier instance does not count.
    let other = Verdicts { hurried: ["a-2".to_owned()].into(), ..verdicts(&[], &[]) };
    assert_eq!(line(&decided_at(NOW, &p, &o, &other)), "wait a");
    // A container that has ended for good stays ended.
    let never = pod("Never", &[], &["a"]);
    assert!(line(&decided_at(NOW, &never, &o, &hurried)).contains("Failed"));
}

#[test]
fn a_delay_ignores_the_runtimes_clock() {
    let p = pod("Always", &[], &["a"]);
    // The container ended an hour from now, or a day ago: the wall clock was set in between.
    for state in ["exit 1 @103600", "exit 1 @13600"] {
        let mut crashed = container("a", 3, 0, state);
        crashed.restart_delay = Duration::from_secs(20);
        let o = observed(&[(0, true)], vec![crashed]);
        let ended = [("a-3".to_owned(), moment(NOW))].into();
        let decided = |second: u64| {
            let times = Times { ended: &ended, now: moment(second) };
            line(&actions(&p, &o, &verdicts(&[], &[]), RESTART_DELAY_MAX, times))
        };
        assert_eq!((decided(NOW + 39).as_str(), decided(NOW + 40).as_str()), ("wait a", "start a/4"));
    }
}

#[test]
fn phases() {
    let t = |waiting, running, restarting, succeeded, failed| Tally {
        waiting,
        running,
        restarting,
        succeeded,
        failed,
        ..Tally::default()
    };
    let case = |tally, expect| assert_eq!(phase(tally), expect, "{tally:?}");
    case(t(1, 1, 0, 0, 0), "Pending");
    case(t(0, 1, 1, 0, 0), "Running");
    case(t(0, 1, 0, 0, 1), "Running");
    case(t(0, 0, 2, 0, 0), "Running");
    case(t(0, 0, 1, 1, 1), "Running");
    case(t(0, 0, 0, 2, 0), "Succeeded");
    case(t(0, 0, 0, 1, 1), "Failed");
    case(t(0, 0, 0, 0, 0), "Pending");
    case(Tally { init_pending: 1, ..t(0, 0, 0, 0, 0) }, "Pending");
    case(Tally { init_failed: true, ..t(1, 0, 0, 0, 0) }, "Failed");
}
