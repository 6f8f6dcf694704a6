//! Starts of containers: one at a time, in order, wanted, by policy, after the back-off.

use std::time::Duration;

use super::{BACK_OFF, BACK_OFF_MAX, BACK_OFF_RESET, REACTION, View, describe};
use crate::ledger::{Instance, PodState};
use crate::trace::{End, Restart, Role};

pub(super) fn check(view: &View<'_>, id: &str, asked: Duration) {
    let Some(instance) = view.ledger.instance(id).cloned() else {
        return view.breaks("starts-are-wanted", format!("container {id} was never created"));
    };
    let Some(pod) = view.ledger.pods.get(&instance.uid).cloned() else {
        return view
            .breaks("starts-are-wanted", format!("pod of container {} is unknown", describe(&instance)));
    };
    let broken = [
        runs_once(view, &instance),
        starts_in_order(view, &pod, &instance),
        starts_are_wanted(view, &pod, &instance, asked),
        restarts_by_policy(view, &pod, &instance),
        restarts_after_back_off(view, &instance, asked),
    ];
    for (rule, detail) in broken.into_iter().flatten() {
        view.breaks(rule, format!("{} {}: {detail}", pod.spec.name, describe(&instance)));
    }
}

/// A container never runs twice (kubelet: `computePodActions` starts only containers that do not run).
fn runs_once(view: &View<'_>, instance: &Instance) -> Option<(&'static str, String)> {
    let mut others = view.ledger.of_pod(&instance.uid).filter(|other| other.name == instance.name);
    let other = others.find(|other| other.id != instance.id && other.runs())?;
    Some(("runs-once", format!("{} still runs", describe(other))))
}

/// Init containers run one after the other to success, sidecars start in their order, and the pod's
/// containers start after all of them (KEP-753; kubelet: `computeInitContainerActions`).
fn starts_in_order(view: &View<'_>, pod: &PodState, instance: &Instance) -> Option<(&'static str, String)> {
    let here = |name: &str| {
        view.ledger.started(&instance.uid, name).filter(|i| i.sandbox == instance.sandbox).collect::<Vec<_>>()
    };
    let mains = pod.spec.containers.iter().filter(|c| c.role == Role::Main);
    if mains.flat_map(|c| here(&c.name)).next().is_some() {
        return None;
    }
    for earlier in pod.spec.containers.iter().take_while(|c| c.name != instance.name) {
        let before = here(&earlier.name);
        let done = match earlier.role {
            Role::Init => before.iter().any(|i| matches!(i.exited, Some((_, 0, _)))),
            Role::Sidecar => !before.is_empty(),
            Role::Main => true,
        };
        if !done {
            return Some(("starts-in-order", format!("{} comes first", earlier.name)));
        }
    }
    None
}

/// No container starts in a pod that ends (kubelet: `syncTerminatingPod` only stops).
fn starts_are_wanted(
    view: &View<'_>,
    pod: &PodState,
    instance: &Instance,
    asked: Duration,
) -> Option<(&'static str, String)> {
    let sandbox = view.ledger.sandboxes.get(&instance.sandbox);
    if sandbox.is_none_or(|sandbox| sandbox.stopped.is_some()) {
        return Some(("starts-are-wanted", "the sandbox does not run".to_owned()));
    }
    let ends = pod.ends_since()?;
    let able = ends.max(view.ledger.agent_since.unwrap_or_default()).max(view.ledger.deaf_until);
    let noticed = able + REACTION;
    (asked > noticed).then(|| ("starts-are-wanted", format!("the pod ends since {} s", ends.as_secs())))
}

/// A container starts again only after its end, and only if its policy says so (kubelet:
/// `ShouldContainerBeRestarted`; sidecars always, KEP-753).
fn restarts_by_policy(
    view: &View<'_>,
    pod: &PodState,
    instance: &Instance,
) -> Option<(&'static str, String)> {
    let previous = previous(view, instance)?;
    let (_, code, by) = previous.exited?;
    if previous.sandbox != instance.sandbox || by == End::Machine {
        return None;
    }
    let role = pod.container(&instance.name)?.role;
    let allowed = match (role, pod.spec.restart) {
        (Role::Sidecar, _) => true,
        (Role::Main, Restart::Always) => true,
        // A container that a probe stopped starts again with any code.
        (Role::Main, Restart::OnFailure) => code != 0 || super::stops::condemned_by(pod, previous).is_some(),
        (Role::Init, Restart::Always | Restart::OnFailure) => code != 0,
        (Role::Main | Role::Init, Restart::Never) => false,
    };
    let policy = pod.spec.restart;
    (!allowed).then(|| ("restarts-by-policy", format!("{policy:?}, but ended with {code} before")))
}

/// A crashing container waits 10 s before its second restart, then twice as long each time, at most 300 s
/// (kubelet: `doBackOff`). A container that a probe stopped is replaced at once.
fn restarts_after_back_off(
    view: &View<'_>,
    instance: &Instance,
    asked: Duration,
) -> Option<(&'static str, String)> {
    // A change of the resources begins a new count (kubelet: `GetBackoffKey`), and so does a new sandbox
    // here; the kubelet's count lasts beyond a sandbox.
    let changed = view.ledger.pods.get(&instance.uid).map_or(Duration::ZERO, |pod| pod.changed);
    let here = |other: &&Instance| {
        other.sandbox == instance.sandbox && other.exited.is_none_or(|(at, ..)| at > changed)
    };
    let all: Vec<&Instance> = view.ledger.started(&instance.uid, &instance.name).filter(here).collect();
    let mut delay = Duration::ZERO;
    let mut last = None;
    for (place, one) in all.iter().enumerate() {
        let (started, (ended, _, by)) = (one.started?, one.exited?);
        if by != End::Itself && by != End::Oom {
            (delay, last) = (Duration::ZERO, None);
            continue;
        }
        let crashed_soon = ended.saturating_sub(started) < BACK_OFF_RESET;
        delay = match (place, crashed_soon) {
            (0, _) | (_, false) => Duration::ZERO,
            _ if delay.is_zero() => BACK_OFF,
            _ => (delay * 2).min(BACK_OFF_MAX),
        };
        last = Some((started, ended));
    }
    let (started, ended) = last?;
    // The runtime's times of starts and ends are the wall clock's (kubelet: `IsInBackOffSince` with
    // `FinishedAt`): a step shortens the back-off, or makes a crash look like one after a long time.
    if view.ledger.steps.iter().any(|(at, _)| *at >= started) {
        return None;
    }
    let waited = asked.saturating_sub(ended);
    let due = delay.saturating_sub(Duration::from_secs(1));
    (waited < due).then(|| {
        ("restarts-after-back-off", format!("{} s after its end, not {}", waited.as_secs(), delay.as_secs()))
    })
}

fn previous<'a>(view: &'a View<'_>, instance: &Instance) -> Option<&'a Instance> {
    view.ledger.started(&instance.uid, &instance.name).rfind(|other| other.id != instance.id)
}
