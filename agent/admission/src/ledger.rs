//! Arithmetic of admission: decides which pods get room, wait, preempt others or are rejected. Time is an
//! argument.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_model::failure::{REJECTED, Refusal as Waits};
use beelet_policy::{
    admission::{self, Refusal, preemption},
    devices::registration::is_extended_resource_name,
    dra::is_claimed,
    resources::resize_order,
};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;

use super::{
    AdmissionRejection, NodeResources, ResizeDeferral,
    book::{Book, Claims, Leaving, Tenant, uid_of},
    grace_of,
};

/// Time for which room is reserved for a pod that was asked to restart.
const RESERVED: Duration = Duration::from_secs(60);

/// Decision about a pod.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The pod has its room.
    Admitted,
    /// The pod may not run on this node.
    Rejected(AdmissionRejection),
    /// There will be room for the pod. The pod must ask again after a change or at `until`.
    Wait {
        /// Next time at which a terminating pod becomes overdue.
        until: Option<Instant>,
    },
    /// Like [`Verdict::Wait`], after preempting the victims.
    Preempt {
        /// Pods to preempt, in eviction order.
        victims: Vec<Arc<core::Pod>>,
        /// Insufficient resource; the first one if there are several.
        resource: String,
        /// Next time at which a terminating pod becomes overdue.
        until: Option<Instant>,
    },
}

/// Decides which pods get the room of the node.
#[derive(Debug)]
pub(super) struct Ledger {
    resources: NodeResources,
    policy: preemption::Policy,
    /// The pods, without judgement.
    pub(super) book: Book,
}

impl Ledger {
    pub(super) fn new(resources: NodeResources, policy: preemption::Policy) -> Self {
        Self { resources, policy, book: Book::default() }
    }

    /// Like [`Book::has`], for a pod that asks again. The first call after the admission adopts the amounts
    /// in `pod`, which may have changed in the meantime. Later only [`Self::resize`] changes them.
    pub(super) fn still_has(&mut self, pod: &Arc<core::Pod>, now: Instant) -> bool {
        let tenant = self.book.tenants.get_mut(&uid_of(pod)).filter(|tenant| tenant.is_admitted());
        let Some(tenant) = tenant else { return false };
        let known = Arc::clone(&tenant.pod);
        if std::mem::take(&mut tenant.is_new) && !Arc::ptr_eq(&known, pod) {
            // An increase beyond the free room is not counted. The admitted pod stays.
            let _ = self.resize(pod, &known, now);
        }
        true
    }

    /// Admits `pod`, or decides whether it waits, preempts or is rejected.
    pub(super) fn decide(&mut self, pod: &Arc<core::Pod>, now: Instant) -> Verdict {
        let uid = uid_of(pod);
        if self.book.has(&uid) {
            return Verdict::Admitted;
        }
        self.book.expire(now);
        if self.book.tenants.contains_key(&uid) {
            // The earlier instance of the pod must terminate first.
            return self.wait(pod, now);
        }
        // Room that is free now is not withheld for a pod that only waits, which a kubelet would have
        // rejected. Room for which a critical pod preempts others is withheld.
        match self.ask(pod, (Leaving::All, Claims::Critical), now) {
            Ok((decided, _)) if fits(&decided) => self.admit(pod),
            Ok(_) => self.make_room(pod, now),
            Err(rejection) => self.reject(&uid, rejection),
        }
    }

    fn admit(&mut self, pod: &Arc<core::Pod>) -> Verdict {
        self.book.enter(pod, true);
        Verdict::Admitted
    }

    /// Handles a pod without room at present: waits for terminating pods, preempts others, or rejects the
    /// pod.
    fn make_room(&mut self, pod: &Arc<core::Pod>, now: Instant) -> Verdict {
        let uid = uid_of(pod);
        // An overdue pod must not block a critical pod while other pods could make room.
        let (decided, asked) = match self.ask(pod, (Leaving::Overdue, Claims::All), now) {
            Ok(answer) => answer,
            Err(rejection) => return self.reject(&uid, rejection),
        };
        if fits(&decided) {
            return self.wait(pod, now);
        }
        if decided.admitted {
            let victims: Vec<Arc<core::Pod>> =
                decided.victims.iter().filter_map(|i| asked.get(*i).cloned()).collect();
            for victim in &victims {
                self.book.leaving(&uid_of(victim), now, grace_of(victim));
            }
            let resource = decided.reasons.first().map(|r| r.resource.clone()).unwrap_or_default();
            let Verdict::Wait { until } = self.wait(pod, now) else { return Verdict::Admitted };
            return Verdict::Preempt { victims, resource, until };
        }
        match self.ask(pod, (Leaving::None, Claims::All), now) {
            Ok((later, _)) if fits(&later) => self.wait(pod, now),
            Ok((later, _)) => self.reject(&uid, rejection(&later)),
            Err(rejection) => self.reject(&uid, rejection),
        }
    }

    /// Counts an admitted pod with other amounts, if they shrink or there is room. For a pod that is not
    /// admitted yet, only returns whether there would be room; `before` is the pod as it is.
    pub(super) fn resize(
        &mut self,
        pod: &Arc<core::Pod>,
        before: &core::Pod,
        now: Instant,
    ) -> Result<(), ResizeDeferral> {
        let uid = uid_of(pod);
        self.book.expire(now);
        let tenant = self.book.tenants.remove(&uid);
        let had = tenant.as_ref().map_or(before, |tenant| &tenant.pod);
        let room = if resize_order::grows(had, pod) { self.has_room(pod, now) } else { Ok(()) };
        // Other pods may use the difference.
        let gives_back = room.is_ok() && resize_order::grows(pod, had);
        if let Some(Tenant { pod: before, standing, is_new }) = tenant {
            self.book.count_change(gives_back);
            let is_new = is_new && room.is_err();
            let pod = if room.is_ok() { Arc::clone(pod) } else { before };
            self.book.tenants.insert(uid, Tenant { pod, standing, is_new });
        }
        room
    }

    /// Returns an error if the pod does not fit in addition to all others.
    pub(super) fn has_room(&self, pod: &Arc<core::Pod>, now: Instant) -> Result<(), ResizeDeferral> {
        match self.ask(pod, (Leaving::All, Claims::All), now) {
            Ok((decided, _)) if fits(&decided) => Ok(()),
            Ok((decided, _)) => Err(deferral(&decided)),
            Err(rejection) => Err(ResizeDeferral { infeasible: true, message: rejection.message }),
        }
    }

    /// Reserves room for a pod that is not on the node. Returns false if the pod does not fit, not even by
    /// preemption.
    pub(super) fn reserve(&mut self, pod: &Arc<core::Pod>, now: Instant) -> bool {
        self.book.expire(now);
        let uid = uid_of(pod);
        let room = !self.book.tenants.contains_key(&uid)
            && self.ask(pod, (Leaving::All, Claims::All), now).is_ok_and(|(decided, _)| decided.admitted);
        if room {
            self.book.claim(pod, Some(now.after(RESERVED)));
        }
        room
    }

    /// Applies `policy` to `pod` and the pods that count; returns its decision and those pods, in the order
    /// used.
    fn ask(
        &self,
        pod: &Arc<core::Pod>,
        (leaving, claims): (Leaving, Claims),
        now: Instant,
    ) -> Result<(admission::Admission, Vec<Arc<core::Pod>>), AdmissionRejection> {
        let asked = self.book.present(pod, (leaving, claims), now);
        let mut list = self.resources.list();
        // `devices/` assigns devices one by one, since it knows the devices of ended init containers and of
        // each plugin; the scheduler allocates claimed ones. As an amount, enough of them is always available
        // here.
        for name in extended_resources(pod) {
            list.set(name, Quantity::from_units(i64::MAX / 1_000_000));
        }
        admission::admit(pod, &asked, &list, self.policy).map(|decided| (decided, asked)).map_err(|error| {
            AdmissionRejection {
                reason: "UnexpectedAdmissionError".to_owned(),
                message: format!("Pod was rejected: {error}"),
                refusal: Waits::Other,
            }
        })
    }

    fn wait(&mut self, pod: &Arc<core::Pod>, now: Instant) -> Verdict {
        self.book.claim(pod, None);
        Verdict::Wait { until: self.book.next_change(now) }
    }

    fn reject(&mut self, uid: &str, rejection: AdmissionRejection) -> Verdict {
        self.book.withdraw(uid);
        Verdict::Rejected(rejection)
    }
}

/// Returns true if there is room without preemption.
fn fits(decided: &admission::Admission) -> bool {
    decided.admitted && decided.victims.is_empty()
}

/// Converts the first reason to a rejection in the kubelet's words (`pkg/kubelet/lifecycle/predicate.go`).
fn rejection(decided: &admission::Admission) -> AdmissionRejection {
    let sentence = decided.error.clone().unwrap_or_default();
    let refusal = match decided.refusal {
        Some(Refusal::Os) => Waits::Other,
        Some(Refusal::Ports | Refusal::NoVictims) | None => Waits::Room,
    };
    let (reason, message) = match decided.refusal {
        Some(Refusal::Os) => ("PodOSNotSupported".to_owned(), sentence),
        Some(Refusal::Ports) => ("NodePorts".to_owned(), format!("Predicate NodePorts failed: {sentence}")),
        Some(Refusal::NoVictims) => (
            "UnexpectedAdmissionError".to_owned(),
            format!(
                "Unexpected error while attempting to recover from admission failure: preemption: {sentence}"
            ),
        ),
        None => match decided.reasons.first() {
            Some(short) => (
                format!("OutOf{}", short.resource),
                format!(
                    "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
                    short.resource, short.requested, short.used, short.capacity
                ),
            ),
            None => (
                "UnexpectedAdmissionError".to_owned(),
                "the pod does not fit, for an unknown reason".to_owned(),
            ),
        },
    };
    AdmissionRejection { reason, message: format!("{REJECTED}{message}"), refusal }
}

/// Converts the first reason to a deferral, in the words of a rejection.
fn deferral(decided: &admission::Admission) -> ResizeDeferral {
    let infeasible = decided.reasons.iter().any(|short| short.requested > short.capacity);
    let message = match decided.reasons.first() {
        Some(short) => format!(
            "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
            short.resource, short.requested, short.used, short.capacity
        ),
        None => "Node has room for these amounts only if other pods are preempted".to_owned(),
    };
    ResizeDeferral { infeasible, message }
}

/// Returns the resources that admission leaves to others: those of device plugins, and those that a claim of
/// the pod provides to every container that requests them. A DeviceClass without an extended resource name
/// (`deviceclass.resource.kubernetes.io/…`) is not a device plugin's: without a claim the pod is rejected.
fn extended_resources(pod: &core::Pod) -> BTreeSet<&str> {
    let spec = pod.spec.iter();
    let containers = spec.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
    let (mut lifted, mut counted) = (BTreeSet::new(), BTreeSet::new());
    for container in containers {
        let resources = container.resources.iter();
        let lists = resources.flat_map(|resources| resources.limits.iter().chain(&resources.requests));
        for (name, amount) in lists.flatten() {
            if is_extended_resource_name(name) || is_claimed(pod, &container.name, name) {
                lifted.insert(name.as_str());
            } else if Quantity::parse(&amount.0).is_ok_and(|amount| amount.value() != 0) {
                counted.insert(name.as_str());
            }
        }
    }
    lifted.difference(&counted).copied().collect()
}

impl std::fmt::Display for AdmissionRejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}
