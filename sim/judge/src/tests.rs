//! Each rule has a trace that breaks it, and one that differs in one fact and keeps it.

use std::time::Duration;

use crate::rules::{Judge, Node};
use crate::trace::*;

const NODE: Node = Node { cpu: 4000, devices: 2 };

fn container(name: &str, role: Role) -> Container {
    Container { name: name.to_owned(), role, cpu: 100, devices: 0, probes: vec![(ProbeKind::Liveness, 2)] }
}

fn pod(uid: &str, restart: Restart, containers: Vec<Container>) -> Fact {
    let uid = uid.to_owned();
    Fact::Wanted(Pod { name: uid.clone(), uid, restart, grace: 30, deadline: None, containers })
}

fn one(restart: Restart) -> Fact {
    pod("a", restart, vec![container("main", Role::Main)])
}

fn ran(sandbox: &str, uid: &str) -> Fact {
    Fact::SandboxRan { sandbox: sandbox.to_owned(), uid: uid.to_owned() }
}

fn created(container: &str, sandbox: &str, name: &str) -> Fact {
    with_devices(container, sandbox, name, &[])
}

fn with_devices(container: &str, sandbox: &str, name: &str, devices: &[&str]) -> Fact {
    let devices = devices.iter().map(|id| (*id).to_owned()).collect();
    Fact::Created {
        container: container.to_owned(),
        sandbox: sandbox.to_owned(),
        name: name.to_owned(),
        devices,
    }
}

fn exited(container: &str, code: i32) -> Fact {
    Fact::Exited { container: container.to_owned(), code, by: End::Itself }
}

fn stop(container: &str, grace: i64) -> Fact {
    Fact::StopAsked { container: container.to_owned(), grace }
}

fn status(phase: &str, containers: Vec<ContainerStatus>) -> Fact {
    Fact::Status(Status { uid: "a".to_owned(), phase: phase.to_owned(), reason: None, containers })
}

fn state(name: &str, id: &str, state: State, restarts: u32) -> ContainerStatus {
    ContainerStatus { name: name.to_owned(), id: Some(id.to_owned()), state, restarts, ready: true }
}

/// Returns the names of the rules that the facts break. A `Started` is requested at its own time.
fn judge(facts: Vec<(u64, Fact)>, end: u64) -> Vec<&'static str> {
    let mut judge = Judge::new(NODE);
    for (seconds, mut fact) in facts {
        let at = Duration::from_secs(seconds);
        if let Fact::Started { asked, .. } = &mut fact {
            *asked = at;
        }
        judge.observe(&Event { at, fact });
    }
    judge.finish(Duration::from_secs(end)).into_iter().map(|violation| violation.rule).collect()
}

fn started(container: &str) -> Fact {
    Fact::Started { container: container.to_owned(), asked: Duration::ZERO }
}

/// A pod `a` with the container `c1`, which runs since second 2.
fn running(restart: Restart) -> Vec<(u64, Fact)> {
    vec![(0, one(restart)), (1, ran("s1", "a")), (1, created("c1", "s1", "main")), (2, started("c1"))]
}

#[track_caller]
fn check(facts: impl IntoIterator<Item = (u64, Fact)>, expected: &[&str]) {
    let start = running(Restart::Always).into_iter().chain(facts).collect();
    assert_eq!(judge(start, 10), expected);
}

#[test]
fn a_container_never_runs_twice() {
    let second = || [(5, created("c2", "s1", "main")), (15, started("c2"))];
    check(second(), &["runs-once"]);
    check([(4, exited("c1", 1))].into_iter().chain(second()), &[]);
}

#[test]
fn containers_start_in_their_order() {
    let spec =
        || pod("a", Restart::Always, vec![container("init", Role::Init), container("main", Role::Main)]);
    let base =
        || vec![(0, spec()), (1, ran("s1", "a")), (1, created("c1", "s1", "init")), (2, started("c1"))];
    let main = || [(3, created("c2", "s1", "main")), (4, started("c2"))];
    let all = |code| base().into_iter().chain([(3, exited("c1", code))]).chain(main()).collect();
    assert_eq!(judge(all(0), 10), [""; 0]);
    assert_eq!(judge(all(1), 10), ["starts-in-order"]);
}

#[test]
fn nothing_starts_in_a_pod_that_ends() {
    let after = |seconds| {
        let deleted = (5, Fact::Deleting { uid: "a".to_owned(), grace: 30 });
        [(4, exited("c1", 1)), deleted, (5, created("c2", "s1", "main")), (seconds, started("c2"))]
    };
    check(after(6), &[]);
    check(after(30), &["starts-are-wanted"]);
}

#[test]
fn a_restart_needs_a_policy_that_allows_it() {
    let again = |restart, code| {
        let more = [(4, exited("c1", code)), (5, created("c2", "s1", "main")), (6, started("c2"))];
        judge(running(restart).into_iter().chain(more).collect(), 10)
    };
    assert_eq!(again(Restart::Always, 0), [""; 0]);
    assert_eq!(again(Restart::OnFailure, 1), [""; 0]);
    assert_eq!(again(Restart::OnFailure, 0), ["restarts-by-policy"]);
    assert_eq!(again(Restart::Never, 1), ["restarts-by-policy"]);
}

#[test]
fn a_second_restart_waits_ten_seconds() {
    let again = |seconds| {
        [
            (4, exited("c1", 1)),
            (4, created("c2", "s1", "main")),
            (5, started("c2")),
            (6, exited("c2", 1)),
            (7, created("c3", "s1", "main")),
            (seconds, started("c3")),
        ]
    };
    check(again(16), &[]);
    check(again(10), &["restarts-after-back-off"]);
}

#[test]
fn a_stop_has_a_cause() {
    let failed = || Fact::Probed { container: "c1".to_owned(), kind: ProbeKind::Liveness, passed: false };
    check([(5, stop("c1", 30))], &["stops-have-a-cause"]);
    check([(4, failed()), (5, stop("c1", 30))], &["stops-have-a-cause"]);
    check([(4, failed()), (5, failed()), (5, stop("c1", 30))], &[]);
    check([(5, Fact::Unwanted { uid: "a".to_owned() }), (6, stop("c1", 30))], &[]);
}

#[test]
fn a_stop_gives_the_whole_grace_period() {
    let deleted = || (5, Fact::Deleting { uid: "a".to_owned(), grace: 20 });
    let killed = |seconds| (seconds, Fact::Exited { container: "c1".to_owned(), code: 137, by: End::Force });
    check([deleted(), (6, stop("c1", 10))], &["grace-is-given"]);
    check([deleted(), (6, stop("c1", 20)), killed(7)], &["grace-is-given"]);
    check([deleted(), (6, stop("c1", 20)), killed(26)], &[]);
    check([deleted(), killed(7)], &["grace-is-given"]);
}

#[test]
fn devices_are_given_once() {
    let two = |other: &str| {
        let spec = |uid: &str| pod(uid, Restart::Always, vec![container("main", Role::Main)]);
        let facts = vec![
            (0, spec("a")),
            (0, spec("b")),
            (1, ran("s1", "a")),
            (1, ran("s2", "b")),
            (1, with_devices("c1", "s1", "main", &["gpu-0"])),
            (2, started("c1")),
            (3, with_devices("c2", "s2", "main", &[other])),
        ];
        judge(facts, 10)
    };
    assert_eq!(two("gpu-1"), [""; 0]);
    assert_eq!(two("gpu-0"), ["devices-are-given-once"]);
}

#[test]
fn room_is_given_once() {
    let cpu = |milli| Fact::Cpu { container: "c1".to_owned(), milli };
    let large = |milli| {
        let spec = Container { cpu: 5000, ..container("main", Role::Main) };
        check(
            [(3, pod("a", Restart::Always, vec![spec])), (3, cpu(milli))],
            match milli {
                5000 => &["room-is-given-once"],
                _ => &[],
            },
        );
    };
    large(5000);
    large(3000);
}

#[test]
fn a_status_is_true_and_goes_forward() {
    let terminated = || state("main", "c1", State::Terminated(0), 0);
    check([(3, status("Running", vec![terminated()]))], &["statuses-are-true"]);
    check([(3, status("Succeeded", vec![]))], &["phases-are-true"]);
    check([(3, exited("c1", 0)), (4, status("Succeeded", vec![terminated()]))], &[]);
    check([(3, status("Running", vec![])), (4, status("Pending", vec![]))], &["statuses-go-forward"]);
    let twice = [(3, exited("c1", 0)), (4, status("Succeeded", vec![])), (5, status("Running", vec![]))];
    check(twice, &["statuses-go-forward"]);
}

#[test]
fn restarts_are_counted() {
    let counted = |restarts| status("Running", vec![state("main", "c1", State::Running, restarts)]);
    check([(3, counted(0))], &[]);
    check([(3, counted(2))], &["restarts-are-counted"]);
    check([(3, counted(1)), (4, counted(0))], &["restarts-are-counted"]);
}

#[test]
fn an_agent_that_ends_by_itself_is_a_fault() {
    check([(3, Fact::AgentFailed { why: "overflow".to_owned() })], &["the-agent-lives"]);
    check([(3, Fact::AgentKilled)], &[]);
}

/// Judges the end of a trace in which the pod `a` runs, 1,000 s after the last fault.
#[track_caller]
fn check_end(facts: impl IntoIterator<Item = (u64, Fact)>, expected: &[&str]) {
    let ended = [(20, Fact::FaultsEnded)];
    let facts = running(Restart::Always).into_iter().chain(facts).chain(ended).collect();
    assert_eq!(judge(facts, 1020), expected);
}

#[test]
fn nothing_of_an_ended_pod_is_left() {
    let gone = || (5, Fact::Unwanted { uid: "a".to_owned() });
    let removed = || (6, Fact::SandboxRemoved { sandbox: "s1".to_owned() });
    check_end([gone(), (5, exited("c1", 0))], &["ended-pods-leave-nothing"]);
    check_end([gone(), (5, exited("c1", 0)), removed()], &[]);
    let left = (7, Fact::Left { uid: "a".to_owned(), place: "pods/a".to_owned() });
    check_end([gone(), (5, exited("c1", 0)), removed(), left], &["ended-pods-leave-nothing"]);
}

#[test]
fn a_wanted_pod_runs_or_waits_for_something_named() {
    let waiting = |why: &str| status("Running", vec![state("main", "c1", State::Waiting(why.to_owned()), 0)]);
    check_end([(3, status("Running", vec![]))], &[]);
    check_end([(3, exited("c1", 1)), (4, waiting("ContainerCreating"))], &["wanted-pods-run"]);
    check_end([(3, exited("c1", 1)), (4, waiting("CrashLoopBackOff"))], &[]);
    check_end([], &["wanted-pods-run"]);
}

#[test]
fn all_restarts_are_counted() {
    let counted = |restarts| {
        let now = status("Running", vec![state("main", "c2", State::Running, restarts)]);
        [(4, exited("c1", 1)), (5, created("c2", "s1", "main")), (6, started("c2")), (7, now)]
    };
    check_end(counted(1), &[]);
    check_end(counted(0), &["restarts-are-counted"]);
}

#[test]
fn a_resize_that_fits_comes_about() {
    let cpu = |milli| (4, Fact::Cpu { container: "c1".to_owned(), milli });
    let base = |milli| [(3, status("Running", vec![])), cpu(milli)];
    check_end(base(100), &[]);
    check_end(base(300), &["resizes-come-about"]);
}

#[test]
fn the_api_server_gets_each_status_and_a_ready_node() {
    let newest = || (3, status("Running", vec![]));
    let stored = |phase: &str| match status(phase, vec![]) {
        Fact::Status(status) => (900, Fact::Stored(status)),
        other => (900, other),
    };
    check_end([newest(), stored("Running")], &[]);
    check_end([newest(), stored("Pending")], &["statuses-are-written"]);
    check_end([newest(), (900, Fact::Node { ready: true })], &[]);
    check_end([newest(), (900, Fact::Node { ready: false })], &["the-node-is-ready"]);
}

#[test]
fn the_object_of_an_ended_pod_is_deleted() {
    let deleted = || [(3, Fact::Deleting { uid: "a".to_owned(), grace: 5 }), (4, stop("c1", 5))];
    let ended = [(5, exited("c1", 0)), (6, Fact::SandboxRemoved { sandbox: "s1".to_owned() })];
    check_end(deleted().into_iter().chain(ended.clone()), &["ended-pods-leave-nothing"]);
    let gone = (7, Fact::Unwanted { uid: "a".to_owned() });
    check_end(deleted().into_iter().chain(ended).chain([gone]), &[]);
}

#[test]
fn a_step_of_the_wall_clock_excuses_early_deadlines_and_restarts() {
    let step = |seconds| (7, Fact::ClockStepped { seconds });
    let again = |seconds| {
        [
            (4, exited("c1", 1)),
            (4, created("c2", "s1", "main")),
            (5, started("c2")),
            (6, exited("c2", 1)),
            step(seconds),
            (8, created("c3", "s1", "main")),
            (9, started("c3")),
        ]
    };
    check(again(60), &[]);
    let Fact::Wanted(spec) = one(Restart::Never) else { return };
    let late = |seconds| {
        let spec = Pod { deadline: Some(100), ..spec.clone() };
        let start = vec![(0, Fact::Wanted(spec)), (1, ran("s1", "a")), (1, created("c1", "s1", "main"))];
        judge(
            start.into_iter().chain([(2, started("c1")), step(seconds), (50, stop("c1", 30))]).collect(),
            60,
        )
    };
    assert_eq!(late(60), [""; 0]);
    assert_eq!(late(20), ["stops-have-a-cause"]);
    assert_eq!(late(-60), ["stops-have-a-cause"]);
}
