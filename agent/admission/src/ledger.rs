//! Who has room, who waits for it, who is on the way out: the arithmetic of admission, with the time as an
//! argument.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use beelet_base::clock::After as _;
use beelet_model::failure::{REJECTED, Refusal as Waits};
use beelet_policy::{
    admission::{self, Refusal, preemption},
    devices::registration::is_extended_resource_name,
    dra::is_claimed,
    resources::{critical::is_critical, resize_order},
};
use beelet_units::quantity::Quantity;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;

use super::{AdmissionRejection, NodeResources, ResizeDeferral, grace_of, patience};

/// How long room is kept for a pod that was asked to come back.
const RESERVED: Duration = Duration::from_secs(60);

/// What was decided about a pod.
#[derive(Debug)]
pub(super) enum Verdict {
    /// It has its room.
    Admitted,
    /// It may not run here.
    Rejected(AdmissionRejection),
    /// There will be room for it. It must ask again when something changed, or at that time.
    Wait {
        /// When one that leaves will have taken too long.
        until: Option<Instant>,
    },
    /// As [`Verdict::Wait`], once these are told to go.
    Preempt {
        /// In eviction order.
        victims: Vec<Arc<core::Pod>>,
        /// What there is too little of, the first if there are several.
        resource: String,
        /// When one that leaves will have taken too long.
        until: Option<Instant>,
    },
}

/// A pod that has room.
#[derive(Debug)]
struct Tenant {
    pod: Arc<core::Pod>,
    /// By when it should be gone, if it is on its way out. Later than that it counts as one that won't go.
    leaves_by: Option<Instant>,
    /// It was let in just now: its amounts may have changed while it waited.
    is_new: bool,
}

/// A pod that waits for room, or for which room is kept.
#[derive(Debug)]
struct Claim {
    pod: Arc<core::Pod>,
    /// Its place in the queue.
    number: u64,
    /// When it is void: it was asked to come back and didn't.
    until: Option<Instant>,
}

/// The room that each admitted pod holds, and the pods that wait for room.
#[derive(Debug)]
pub(super) struct Ledger {
    resources: NodeResources,
    policy: preemption::Policy,
    /// By UID.
    tenants: BTreeMap<String, Tenant>,
    /// By UID.
    claims: BTreeMap<String, Claim>,
    next_number: u64,
    /// Counts what was given back: see [`Self::changes`].
    changes: u64,
}

/// Which of the pods that leave are counted as still there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leaving {
    /// All.
    All,
    /// Those that should be gone by now and aren't.
    Overdue,
    /// None.
    Nobody,
}

/// Which of the claims that were made earlier are counted as if they had their room.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claims {
    /// All.
    All,
    /// Those of critical pods: room is being made for them.
    Critical,
}

impl Ledger {
    pub(super) fn new(resources: NodeResources, policy: preemption::Policy) -> Self {
        let (tenants, claims) = (BTreeMap::new(), BTreeMap::new());
        Self { resources, policy, tenants, claims, next_number: 0, changes: 0 }
    }

    /// Counts what others may have waited for: room that was given back, pods on their way out, claims that
    /// were given up. Whatever takes a tenant or a claim away, or makes it smaller, counts here.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns true if the pod has room that it may keep.
    pub(super) fn has(&self, uid: &str) -> bool {
        self.tenants.get(uid).is_some_and(|tenant| tenant.leaves_by.is_none())
    }

    /// The same of a pod that asks again. The first time after it was let in its amounts are those that it
    /// asks with: they may have changed meanwhile. After that they change by [`Self::resize`] alone.
    pub(super) fn still_has(&mut self, pod: &Arc<core::Pod>, now: Instant) -> bool {
        let tenant = self.tenants.get_mut(&uid_of(pod)).filter(|tenant| tenant.leaves_by.is_none());
        let Some(tenant) = tenant else { return false };
        let known = Arc::clone(&tenant.pod);
        if std::mem::take(&mut tenant.is_new) && !Arc::ptr_eq(&known, pod) {
            // More than there is room for is not counted. The pod was let in, and stays.
            let _ = self.resize(pod, &known, now);
        }
        true
    }

    pub(super) fn adopt(&mut self, pod: &Arc<core::Pod>) {
        let uid = uid_of(pod);
        self.claims.remove(&uid);
        self.tenants.insert(uid, Tenant { pod: Arc::clone(pod), leaves_by: None, is_new: false });
    }

    /// Counts that something was given back, if it was.
    fn count_change(&mut self, changed: bool) {
        self.changes = self.changes.wrapping_add(u64::from(changed));
    }

    /// A pod is on its way out.
    pub(super) fn leaving(&mut self, uid: &str, now: Instant, grace: Duration) {
        self.give_up(uid);
        let Some(tenant) = self.tenants.get_mut(uid) else { return };
        let by = now.after(patience(grace));
        if tenant.leaves_by.is_none_or(|known| by < known) {
            tenant.leaves_by = Some(by);
            self.count_change(true);
        }
    }

    /// A pod is gone.
    pub(super) fn released(&mut self, uid: &str) {
        let removed = self.tenants.remove(uid).is_some();
        self.count_change(removed);
    }

    /// A pod waits no longer.
    pub(super) fn give_up(&mut self, uid: &str) {
        let removed = self.claims.remove(uid).is_some();
        self.count_change(removed);
    }

    /// Gives up the room that was kept for pods which did not come back.
    pub(super) fn expire(&mut self, now: Instant) {
        let before = self.claims.len();
        self.claims.retain(|_, claim| claim.until.is_none_or(|until| until > now));
        self.count_change(self.claims.len() < before);
    }

    /// When room that is kept for a pod is given up next.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.claims.values().filter_map(|claim| claim.until).min()
    }

    /// Finds room for `pod`, or decides how it comes to some.
    pub(super) fn decide(&mut self, pod: &Arc<core::Pod>, now: Instant) -> Verdict {
        let uid = uid_of(pod);
        if self.has(&uid) {
            return Verdict::Admitted;
        }
        self.expire(now);
        if self.tenants.contains_key(&uid) {
            // Its own end comes first.
            return self.wait(pod, now);
        }
        match self.ask(pod, (Leaving::All, Claims::All), now) {
            Ok((decided, _)) if fits(&decided) => self.admit(pod),
            Ok(_) => self.make_room(pod, now),
            Err(rejection) => self.reject(&uid, rejection),
        }
    }

    fn admit(&mut self, pod: &Arc<core::Pod>) -> Verdict {
        let uid = uid_of(pod);
        self.claims.remove(&uid);
        self.tenants.insert(uid, Tenant { pod: Arc::clone(pod), leaves_by: None, is_new: true });
        Verdict::Admitted
    }

    /// There is no room now. There may be when those that leave are gone, or when others leave too.
    fn make_room(&mut self, pod: &Arc<core::Pod>, now: Instant) -> Verdict {
        let uid = uid_of(pod);
        // One that won't go must not hold a critical pod while others could make room.
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
                self.leaving(&uid_of(victim), now, grace_of(victim));
            }
            let resource = decided.reasons.first().map(|r| r.resource.clone()).unwrap_or_default();
            let Verdict::Wait { until } = self.wait(pod, now) else { return Verdict::Admitted };
            return Verdict::Preempt { victims, resource, until };
        }
        let later = match self.ask(pod, (Leaving::Nobody, Claims::All), now) {
            Ok((later, _)) if fits(&later) => return self.wait(pod, now),
            Ok((later, _)) => later,
            Err(rejection) => return self.reject(&uid, rejection),
        };
        // Room that is free now is not refused for a pod that only waits, which a kubelet would have refused.
        // A critical one has pods ended for its room: that is nobody else's.
        match self.ask(pod, (Leaving::All, Claims::Critical), now) {
            Ok((decided, _)) if fits(&decided) => self.admit(pod),
            _ => self.reject(&uid, rejection(&later)),
        }
    }

    /// Counts a pod that is here with other amounts, if it asks for less or there is room for them. One that
    /// has no room yet is only told whether there would be some: `before` is that pod as it is.
    pub(super) fn resize(
        &mut self,
        pod: &Arc<core::Pod>,
        before: &core::Pod,
        now: Instant,
    ) -> Result<(), ResizeDeferral> {
        let uid = uid_of(pod);
        self.expire(now);
        let tenant = self.tenants.remove(&uid);
        let had = tenant.as_ref().map_or(before, |tenant| &tenant.pod);
        let room = if resize_order::grows(had, pod) { self.has_room(pod, now) } else { Ok(()) };
        // Others may have the difference.
        let gives_back = room.is_ok() && resize_order::grows(pod, had);
        if let Some(Tenant { pod: before, leaves_by, is_new }) = tenant {
            self.count_change(gives_back);
            let is_new = is_new && room.is_err();
            let pod = if room.is_ok() { Arc::clone(pod) } else { before };
            self.tenants.insert(uid, Tenant { pod, leaves_by, is_new });
        }
        room
    }

    /// Returns why there is no room for such a pod beside all others, if there is none.
    pub(super) fn has_room(&self, pod: &Arc<core::Pod>, now: Instant) -> Result<(), ResizeDeferral> {
        match self.ask(pod, (Leaving::All, Claims::All), now) {
            Ok((decided, _)) if fits(&decided) => Ok(()),
            Ok((decided, _)) => Err(deferral(&decided)),
            Err(rejection) => Err(ResizeDeferral { infeasible: true, message: rejection.message }),
        }
    }

    /// Keeps room for a pod that isn't here. Returns false if there is none, nor any that others would have
    /// to make for it.
    pub(super) fn reserve(&mut self, pod: &Arc<core::Pod>, now: Instant) -> bool {
        self.expire(now);
        let uid = uid_of(pod);
        let room = !self.tenants.contains_key(&uid)
            && self.ask(pod, (Leaving::All, Claims::All), now).is_ok_and(|(decided, _)| decided.admitted);
        if room {
            self.claim(pod, Some(now.after(RESERVED)));
        }
        room
    }

    /// What `policy` says of `pod` beside those that are counted, and those in the order in which it was
    /// asked.
    fn ask(
        &self,
        pod: &Arc<core::Pod>,
        (leaving, claims): (Leaving, Claims),
        now: Instant,
    ) -> Result<(admission::Admission, Vec<Arc<core::Pod>>), AdmissionRejection> {
        let mut asked = Vec::with_capacity(self.tenants.len());
        for tenant in self.tenants.values() {
            match tenant.leaves_by {
                None => asked.push(Arc::clone(&tenant.pod)),
                Some(_) if leaving == Leaving::All => asked.push(unmovable(&tenant.pod)),
                Some(by) if leaving == Leaving::Overdue && by <= now => asked.push(unmovable(&tenant.pod)),
                Some(_) => {}
            }
        }
        let counts = |claim: &&Claim| match claims {
            Claims::All => true,
            Claims::Critical => is_critical(&claim.pod),
        };
        asked.extend(self.before(pod).filter(counts).map(|claim| unmovable(&claim.pod)));
        let mut list = self.resources.list();
        // Devices are given out one by one, by `devices/`, which knows what an ended init container has left
        // and what a plugin has, or by a claim that the scheduler has allocated: as an amount there is always
        // enough of them here.
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

    /// The claims that go before the pod's: those that came earlier. A critical pod yields to critical ones
    /// only.
    fn before(&self, pod: &Arc<core::Pod>) -> impl Iterator<Item = &Claim> {
        let own = self.claims.get(&uid_of(pod)).map_or(u64::MAX, |claim| claim.number);
        let critical = is_critical(pod);
        self.claims.values().filter(move |claim| claim.number < own && (!critical || is_critical(&claim.pod)))
    }

    fn wait(&mut self, pod: &Arc<core::Pod>, now: Instant) -> Verdict {
        self.claim(pod, None);
        let leave = self.tenants.values().filter_map(|tenant| tenant.leaves_by).filter(|by| *by > now);
        Verdict::Wait { until: leave.chain(self.next_expiry()).min() }
    }

    /// A pod keeps the place that it has, and has the amounts that it asks with now.
    fn claim(&mut self, pod: &Arc<core::Pod>, until: Option<Instant>) {
        let number = self.next_number;
        let claim = self.claims.entry(uid_of(pod)).or_insert(Claim { pod: Arc::clone(pod), number, until });
        // Of fewer amounts the difference is nobody's any more.
        let differs = !Arc::ptr_eq(&claim.pod, pod) && claim.pod.spec != pod.spec;
        (claim.pod, claim.until) = (Arc::clone(pod), until);
        self.next_number = number.saturating_add(u64::from(claim.number == number));
        self.count_change(differs);
    }

    fn reject(&mut self, uid: &str, rejection: AdmissionRejection) -> Verdict {
        self.give_up(uid);
        Verdict::Rejected(rejection)
    }
}

/// There is room, and nobody has to go for it.
fn fits(decided: &admission::Admission) -> bool {
    decided.admitted && decided.victims.is_empty()
}

/// In the kubelet's words (`pkg/kubelet/lifecycle/predicate.go`), of the first thing that stands against it.
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
            None => {
                ("UnexpectedAdmissionError".to_owned(), "it does not fit, for no reason known".to_owned())
            }
        },
    };
    AdmissionRejection { reason, message: format!("{REJECTED}{message}"), refusal }
}

/// Why amounts can't be had, in the words of a rejection.
fn deferral(decided: &admission::Admission) -> ResizeDeferral {
    let infeasible = decided.reasons.iter().any(|short| short.requested > short.capacity);
    let message = match decided.reasons.first() {
        Some(short) => format!(
            "Node didn't have enough resource: {}, requested: {}, used: {}, capacity: {}",
            short.resource, short.requested, short.used, short.capacity
        ),
        None => "Node has room for these amounts only where other pods go".to_owned(),
    };
    ResizeDeferral { infeasible, message }
}

/// The resources that admission leaves to others: those of device plugins, and those that a claim of the pod
/// gives to every container that asks for them. What a DeviceClass stands behind without a name of its own
/// (`deviceclass.resource.kubernetes.io/…`) is no device plugin's: without a claim the pod is refused.
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

fn uid_of(pod: &core::Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

/// The pod as one whose room nobody can take: it goes already, or has not come yet.
fn unmovable(pod: &Arc<core::Pod>) -> Arc<core::Pod> {
    let mut pod = core::Pod::clone(pod);
    if let Some(spec) = &mut pod.spec {
        spec.priority = Some(i32::MAX);
    }
    Arc::new(pod)
}

impl std::fmt::Display for AdmissionRejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}
