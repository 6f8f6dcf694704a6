//! Drain of a node: the pods that an eviction removes, and the next step for each of them.
//!
//! Which pods leave is kubectl's rule (staging/src/k8s.io/kubectl/pkg/drain/filters.go), and so are the waits
//! after a refused eviction (drain.go, `evictPods`). Unlike kubectl, which deletes by name, an eviction here
//! concerns one UID: a pod of the same name that a controller has created elsewhere stays.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use beelet_units::selector::Selector;
use k8s_openapi::api::core::v1::Pod;

use crate::pod::mirror;

/// Pause after an eviction that a PodDisruptionBudget refuses, as in kubectl.
const BUDGET: Duration = Duration::from_secs(5);
/// Pause after a failure that may end by itself.
const TRANSIENT: Duration = Duration::from_secs(2);

/// The pods that may be evicted.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// True to evict pods that no controller creates again.
    pub force: bool,
    /// True to evict pods whose emptyDir volumes are lost.
    pub delete_empty_dir_data: bool,
    /// The pods that are concerned at all.
    pub selector: Selector,
}

/// The fate of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The pod is evicted, and loses this, if anything.
    Evict(Option<&'static str>),
    /// The pod stays, for this reason.
    Stay(&'static str),
    /// The pod may not be evicted, for this reason: the drain does not begin.
    Refuse(&'static str),
}

/// Decides on the fate of a pod.
#[must_use]
pub fn verdict(pod: &Pod, options: &Options) -> Verdict {
    if !options.selector.matches(pod.metadata.labels.as_ref()) {
        return Verdict::Stay("the selector excludes it");
    }
    if mirror::is_mirror(pod) {
        return Verdict::Stay("the node's manifests own static pods");
    }
    // A pod that has ended loses nothing.
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Verdict::Evict(None);
    }
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let controller = owners.iter().find(|owner| owner.controller == Some(true));
    if controller.is_some_and(|owner| owner.kind == "DaemonSet") {
        return Verdict::Stay("a DaemonSet manages it");
    }
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let has_data = volumes.any(|volume| volume.empty_dir.is_some());
    match (has_data, controller.is_some()) {
        (true, _) if !options.delete_empty_dir_data => {
            Verdict::Refuse("its emptyDir volumes would be lost; --delete-emptydir-data permits that")
        }
        (_, false) if !options.force => {
            Verdict::Refuse("no controller would create it again; --force permits that")
        }
        (_, false) => Verdict::Evict(Some("no controller creates it again")),
        (true, true) => Verdict::Evict(Some("its emptyDir volumes are lost")),
        (false, true) => Verdict::Evict(None),
    }
}

/// A pod of the API server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
}

impl Target {
    fn of(pod: &Pod) -> Self {
        let metadata = &pod.metadata;
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Result of a request for an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The API server terminates the pod.
    Accepted,
    /// The pod does not exist any more, or another pod has its name.
    Gone,
    /// The eviction may succeed after this pause; the reason.
    Later(Duration, String),
    /// The eviction can't succeed; the reason.
    Never(String),
}

/// Returns the meaning of a refusal by `code` (None: no answer), with the pause that the server asks for.
#[must_use]
pub fn refusal(code: Option<u16>, message: &str, retry_after: Option<Duration>) -> Answer {
    let later = |least: Duration| Answer::Later(retry_after.unwrap_or(least).max(least), message.to_owned());
    match code {
        Some(404) => Answer::Gone,
        // The precondition failed, or the pod changed meanwhile: the next list shows which.
        Some(409) | None => later(TRANSIENT),
        Some(429) => later(BUDGET),
        // A namespace that is being deleted refuses new objects, and so evictions, and deletes its pods
        // itself.
        Some(403) if message.contains("because it is being terminated") => later(BUDGET),
        // The registry's answer for two budgets on one pod (registry/core/pod/storage/eviction.go).
        Some(500) if message.contains("more than one PodDisruptionBudget") => {
            Answer::Never(message.to_owned())
        }
        Some(500..) => later(TRANSIENT),
        Some(_) => Answer::Never(message.to_owned()),
    }
}

/// The steps of one round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Pods to evict now.
    pub evict: Vec<Target>,
    /// Pods that have left since the last round.
    pub left: Vec<Target>,
}

/// State of one pod of the drain.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// The next request is due at this time.
    Due(Duration),
    /// The API server terminates the pod.
    Leaving,
    /// The eviction can't succeed.
    Stuck(String),
}

/// A drain in progress. Times count from its start.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    options: Options,
    pods: BTreeMap<Target, State>,
    /// The last refusal of each pod that is still there.
    refusals: BTreeMap<Target, String>,
}

impl Drain {
    /// Begins a drain.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self { options, ..Self::default() }
    }

    /// Decides on the next steps for the node's current pods. Pods that were bound to the node after the
    /// start leave, too, unless they would have been refused.
    pub fn round(&mut self, pods: &[Pod], now: Duration) -> Round {
        let mut present = BTreeSet::new();
        for pod in pods.iter().filter(|pod| matches!(verdict(pod, &self.options), Verdict::Evict(_))) {
            let target = Target::of(pod);
            let state = self.pods.entry(target.clone()).or_insert(State::Due(now));
            // A pod that is being deleted needs no eviction, and no budget protects it.
            if pod.metadata.deletion_timestamp.is_some() {
                *state = State::Leaving;
            }
            present.insert(target);
        }
        let left: Vec<Target> = self.pods.keys().filter(|pod| !present.contains(*pod)).cloned().collect();
        for pod in &left {
            self.pods.remove(pod);
            self.refusals.remove(pod);
        }
        let due = self.pods.iter().filter(|(_, state)| matches!(state, State::Due(at) if *at <= now));
        Round { evict: due.map(|(pod, _)| pod.clone()).collect(), left }
    }

    /// Records the answer to an eviction. A refusal that was not known yet is returned for the report.
    pub fn answered(&mut self, pod: &Target, answer: Answer, now: Duration) -> Option<String> {
        let state = self.pods.get_mut(pod)?;
        let (next, why) = match answer {
            Answer::Accepted | Answer::Gone => (State::Leaving, None),
            Answer::Later(pause, why) => (State::Due(now.saturating_add(pause)), Some(why)),
            Answer::Never(why) => (State::Stuck(why.clone()), Some(why)),
        };
        *state = next;
        let Some(why) = why else {
            self.refusals.remove(pod);
            return None;
        };
        let known = self.refusals.insert(pod.clone(), why.clone());
        (known.as_ref() != Some(&why)).then_some(why)
    }

    /// Returns true if no pod is left that may still leave.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.pods.values().all(|state| matches!(state, State::Stuck(_)))
    }

    /// Returns the pods that are still there, each with the last refusal of its eviction.
    #[must_use]
    pub fn rest(&self) -> Vec<(Target, Option<String>)> {
        self.pods.keys().map(|pod| (pod.clone(), self.refusals.get(pod).cloned())).collect()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pod(name: &str, owner: Option<&str>) -> Pod {
        let owner = owner.map(|kind| OwnerReference {
            kind: kind.to_owned(),
            controller: Some(true),
            ..OwnerReference::default()
        });
        let metadata = ObjectMeta {
            namespace: Some("shop".to_owned()),
            name: Some(name.to_owned()),
            uid: Some(format!("uid-{name}")),
            labels: Some([("app".to_owned(), name.to_owned())].into()),
            owner_references: Some(owner.into_iter().collect()),
            ..ObjectMeta::default()
        };
        Pod { metadata, ..Pod::default() }
    }

    fn with_data(mut pod: Pod) -> Pod {
        let volume = serde_json::json!({ "volumes": [{ "name": "v", "emptyDir": {} }], "containers": [] });
        pod.spec = serde_json::from_value(volume).unwrap();
        pod
    }

    fn ended(mut pod: Pod) -> Pod {
        pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
        pod
    }

    fn mirrored(mut pod: Pod) -> Pod {
        pod.metadata.annotations.get_or_insert_default().insert(mirror::MIRROR.to_owned(), "x".to_owned());
        pod
    }

    #[test]
    fn pods_leave_stay_or_forbid_the_drain_as_under_kubectl() {
        let check = |pod: Pod, options: &str, expected: &str| {
            let options = Options {
                force: options.contains("force"),
                delete_empty_dir_data: options.contains("data"),
                selector: if options.contains("only") {
                    "app=only".parse().unwrap()
                } else {
                    Selector::default()
                },
            };
            let word = match verdict(&pod, &options) {
                Verdict::Evict(None) => "evict",
                Verdict::Evict(Some(_)) => "evict with a loss",
                Verdict::Stay(_) => "stay",
                Verdict::Refuse(_) => "refuse",
            };
            assert_eq!(word, expected, "{:?} {options:?}", pod.metadata);
        };
        check(pod("a", Some("ReplicaSet")), "", "evict");
        check(pod("a", Some("StatefulSet")), "", "evict");
        check(pod("a", Some("DaemonSet")), "force data", "stay");
        check(ended(pod("a", Some("DaemonSet"))), "", "evict");
        check(pod("a", None), "", "refuse");
        check(pod("a", None), "force", "evict with a loss");
        check(ended(pod("a", None)), "", "evict");
        check(with_data(pod("a", Some("ReplicaSet"))), "", "refuse");
        check(with_data(pod("a", Some("ReplicaSet"))), "force", "refuse");
        check(with_data(pod("a", Some("ReplicaSet"))), "data", "evict with a loss");
        check(with_data(pod("a", None)), "data", "refuse");
        check(with_data(pod("a", None)), "data force", "evict with a loss");
        check(ended(with_data(pod("a", None))), "", "evict");
        check(mirrored(ended(pod("a", None))), "force data", "stay");
        check(pod("a", None), "only", "stay");
        check(pod("only", Some("Job")), "only", "evict");
    }

    #[test]
    fn a_refusal_is_waited_for_only_if_it_can_end() {
        let later = |seconds| Answer::Later(SECOND * seconds, "no".to_owned());
        let check = |code, asked: Option<u32>, expected| {
            assert_eq!(
                refusal(code, "no", asked.map(|asked| SECOND * asked)),
                expected,
                "{code:?} {asked:?}"
            );
        };
        check(Some(429), None, later(5));
        check(Some(429), Some(10), later(10));
        check(Some(429), Some(1), later(5));
        check(Some(404), None, Answer::Gone);
        check(Some(409), None, later(2));
        check(Some(503), None, later(2));
        check(None, None, later(2));
        check(Some(403), None, Answer::Never("no".to_owned()));
        check(Some(422), None, Answer::Never("no".to_owned()));
        let terminated = "namespace shop refuses new content because it is being terminated";
        assert!(matches!(refusal(Some(403), terminated, None), Answer::Later(..)));
        let two = "This pod has more than one PodDisruptionBudget, which eviction does not support.";
        assert!(matches!(refusal(Some(500), two, None), Answer::Never(_)));
    }

    #[test]
    fn a_drain_ends_when_the_last_pod_has_left() {
        let mut drain = Drain::new(Options::default());
        let (a, b, set) = (pod("a", Some("Job")), pod("b", Some("Job")), pod("c", Some("DaemonSet")));
        let all = [a.clone(), b.clone(), set.clone()];
        let first = drain.round(&all, Duration::ZERO);
        let targets = [Target::of(&a), Target::of(&b)];
        assert_eq!((first.evict.as_slice(), first.left.as_slice()), (&targets[..], &[][..]));
        assert_eq!(drain.answered(&targets[0], Answer::Accepted, Duration::ZERO), None);
        let budget = || Answer::Later(BUDGET, "budget".to_owned());
        assert_eq!(drain.answered(&targets[1], budget(), Duration::ZERO).as_deref(), Some("budget"));
        // Nothing is due before the pause ends, and the same refusal is not reported again.
        assert_eq!(drain.round(&all, SECOND), Round::default());
        let due = drain.round(&[b.clone(), set.clone()], BUDGET);
        assert_eq!((due.evict.as_slice(), due.left.as_slice()), (&targets[1..], &targets[..1]));
        assert_eq!(drain.answered(&targets[1], budget(), BUDGET), None);
        assert!(!drain.is_over());
        assert_eq!(drain.rest(), [(targets[1].clone(), Some("budget".to_owned()))]);
        assert_eq!(drain.round(&[set], BUDGET * 2).left, targets[1..]);
        assert!(drain.is_over() && drain.rest().is_empty());
    }

    #[test]
    fn a_pod_that_can_not_leave_does_not_hold_up_the_drain_for_ever() {
        let mut drain = Drain::new(Options::default());
        let stuck = pod("a", Some("Job"));
        let target = Target::of(&stuck);
        drain.round(std::slice::from_ref(&stuck), Duration::ZERO);
        drain.answered(&target, Answer::Never("two budgets".to_owned()), Duration::ZERO);
        assert_eq!(drain.round(&[stuck], SECOND), Round::default());
        assert!(drain.is_over());
        assert_eq!(drain.rest(), [(target, Some("two budgets".to_owned()))]);
    }

    #[test]
    fn a_terminating_pod_is_waited_for_and_a_successor_of_the_name_is_another_pod() {
        let mut drain = Drain::new(Options::default());
        let mut old = pod("a", Some("StatefulSet"));
        old.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        assert_eq!(drain.round(std::slice::from_ref(&old), Duration::ZERO), Round::default());
        assert!(!drain.is_over());
        let mut new = pod("a", Some("StatefulSet"));
        new.metadata.uid = Some("other".to_owned());
        let round = drain.round(std::slice::from_ref(&new), SECOND);
        assert_eq!((round.evict, round.left), (vec![Target::of(&new)], vec![Target::of(&old)]));
    }
}
