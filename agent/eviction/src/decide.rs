//! A decision of eviction: the low signals, the resources to reclaim, the pods to evict. Slow work is started
//! here and ends elsewhere.

use std::{sync::Arc, time::Duration};

use beelet_base::clock::After as _;
use beelet_policy::{
    eviction::{
        Assessment, Candidate, DiskLayout, NodeCondition, Observation, Reclaim, Signal, Threshold, deficit,
        has_come, is_relieved, is_worth_it, rank, reclaim, victims,
    },
    resources::{
        PodDemand,
        critical::{is_critical, priority},
    },
};
use beelet_units::{moment::Moment, quantity::Quantity};
use k8s_openapi::api::core::v1 as core;
use tokio::{sync::mpsc::error::TrySendError, time::Instant};
use tracing::{info, warn};

use super::{
    Eviction, IMMEDIATE, LateRoom, Leaving, ReclaimState, Reclaimed,
    gauges::Seen,
    local_storage::ASKED,
    looks::Looks,
    usage::{ContainerUse, KnownUsage},
};
use beelet_model::{
    pressure::{Conditions, EVICTED},
    request::Request,
    table::{PodEntry, PodName},
};

/// Time beyond the grace period that a pod may take to terminate before others are evicted in its place.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum time of a reclaim before pods are evicted although it has not ended.
const RECLAIM_PATIENCE: Duration = Duration::from_secs(60);
/// Time after a reclaim during which another one cannot help, if the first was not enough: a signal that
/// stays low then leads to evictions.
const RECLAIMED: Duration = Duration::from_secs(30);

/// Time for the runtime to free the space of removed objects before a shortage leads to an eviction.
/// containerd waits fifty times the duration of its last collection; the kubelet decides again after this
/// time.
pub(super) const LATE: Duration = Duration::from_secs(10);

/// Time for which measurements of pods' disk usage stay valid while the disk stays low.
const DISKS: Duration = Duration::from_secs(60);

/// A pod that holds resources, with its known usage.
struct Pod {
    uid: String,
    pod: Arc<core::Pod>,
    known: KnownUsage,
}

impl Pod {
    fn is_deleted(&self) -> bool {
        self.pod.metadata.deletion_timestamp.is_some()
    }

    fn frees(&self, signal: Signal, layout: DiskLayout) -> Quantity {
        self.known.usage.unwrap_or_default().of(signal, layout)
    }
}

impl Eviction {
    /// Evaluates the newest numbers, and acts.
    pub(super) async fn decide(&mut self) {
        let now = self.now();
        let seen = self.board.current();
        self.parts.metrics.seen(&seen.observations);
        let assessment = self.tracker.assess(now, &self.thresholds, &seen.observations);
        self.publish_conditions(now);
        self.forget_what_was_enough(&assessment, &seen);
        self.forget_the_gone();
        for condition in
            [NodeCondition::MemoryPressure, NodeCondition::PidPressure, NodeCondition::DiskPressure]
        {
            if let Some(index) = self.most_urgent(condition, &assessment) {
                self.act(index, &seen).await;
            }
        }
    }

    fn now(&self) -> Moment {
        Moment::after_start(self.began.elapsed())
    }

    /// Returns the most urgent of a condition's actionable thresholds: a hard one, if any, as it acts at once
    /// regardless of a soft one's grace period.
    fn most_urgent(&self, condition: NodeCondition, assessment: &Assessment) -> Option<usize> {
        let actionable = assessment.actionable.iter().filter_map(|i| Some((*i, self.thresholds.get(*i)?)));
        let of_condition = actionable.filter(|(_, threshold)| threshold.signal.condition() == condition);
        of_condition.min_by_key(|(_, threshold)| !threshold.grace.is_zero()).map(|(i, _)| i)
    }

    fn publish_conditions(&mut self, now: Moment) {
        let reported: Conditions = self.tracker.reported(now, self.parts.transition).into_iter().collect();
        self.parts.metrics.conditions(&reported);
        let before = self.parts.conditions.borrow().clone();
        if reported == before {
            return;
        }
        for condition in reported.symmetric_difference(&before) {
            let set = reported.contains(condition);
            let reason = match (condition, set) {
                (NodeCondition::MemoryPressure, true) => "NodeHasInsufficientMemory",
                (NodeCondition::MemoryPressure, false) => "NodeHasSufficientMemory",
                (NodeCondition::DiskPressure, true) => "NodeHasDiskPressure",
                (NodeCondition::DiskPressure, false) => "NodeHasNoDiskPressure",
                (NodeCondition::PidPressure, true) => "NodeHasInsufficientPID",
                (NodeCondition::PidPressure, false) => "NodeHasSufficientPID",
            };
            self.parts.events.normal(reason, &format!("Node status is now: {reason}"));
        }
        self.parts.conditions.send_replace(reported);
    }

    /// Drops pods that have terminated from the list of leaving pods, and those that have been overdue long
    /// enough for another attempt.
    fn forget_the_gone(&mut self) {
        let table = Arc::clone(&self.parts.table.borrow_and_update());
        let here = |uid: &str| {
            let of_uid = |entry: &&Arc<PodEntry>| entry.pod.metadata.uid.as_deref() == Some(uid);
            table.pods.values().filter(of_uid).any(|entry| !entry.is_gone())
        };
        let gone: Vec<Leaving> = self.leaving.extract_if(|uid, _| !here(uid)).map(|(_, gone)| gone).collect();
        let now = Instant::now();
        self.late.retain(|late| late.since.elapsed() < LATE);
        if !gone.is_empty() {
            let of_disks =
                gone.into_iter().filter(|pod| pod.signal.condition() == NodeCondition::DiskPressure);
            self.late.extend(of_disks.map(|pod| LateRoom {
                since: now,
                before: pod.before,
                usage: pod.looks.first(),
            }));
            self.gone_at = Some(now);
            self.parts.hints.notify();
            self.look_again.notify();
        }
        for (uid, leaving) in &mut self.leaving {
            if leaving.by <= now && !leaving.overdue {
                leaving.overdue = true;
                self.parts.metrics.overdue();
                warn!(
                    uid,
                    "an evicted pod has not terminated in time; others may have to be evicted in its place"
                );
            }
        }
    }

    /// Reclaims unused resources, and if that was not enough evicts pods.
    async fn act(&mut self, index: usize, seen: &Seen) {
        let Some(threshold) = self.thresholds.get(index).cloned() else { return };
        let signal = threshold.signal;
        let Some((observation, read_at)) = seen.get(signal) else { return };
        // Requested first of all: the measurement runs in parallel with the reclaim.
        let measured = self.measured_since(index, &threshold);
        if self.must_wait_for_reclaim(signal, read_at) {
            return;
        }
        // The effect of a terminated pod must be measured first.
        if self.gone_at.is_some_and(|gone| read_at <= gone) {
            return;
        }
        if self.must_wait_for_room(&threshold, observation) {
            return;
        }
        let waiting = measured.filter(|since| since.elapsed() < ASKED && !self.are_measured(*since));
        let pods = self.pods(signal, measured).await;
        self.record_leaving_usage(&pods);
        let low = deficit(&threshold, observation);
        self.include_deleted(&pods, &threshold, low);
        let coming = self.coming(&threshold, read_at);
        let missing = low.saturating_sub(coming);
        let anybody = self.leaving.values().any(|leaving| leaving.is_counted_on(&threshold));
        // If the amount that terminating pods will free is unknown, it must be measured first.
        if anybody && (missing <= Quantity::ZERO || coming.is_zero()) {
            return;
        }
        let candidates: Vec<&Pod> =
            pods.iter().filter(|pod| self.is_candidate(pod, &threshold, low)).collect();
        let leaves = |pod: &Pod| self.leaving.contains_key(&pod.uid);
        let judged: Vec<Candidate<'_>> =
            candidates.iter().filter_map(|pod| candidate(pod, leaves(pod))).collect();
        if judged.len() != candidates.len() {
            // A manifest with invalid amounts is refused long before.
            return;
        }
        let ranked = rank(signal, self.layout, &judged);
        let chosen = victims(signal, self.layout, &ranked, &judged, missing, anybody);
        if let Some(since) = waiting
            && !self.is_evident(&chosen, &candidates, signal, missing, since)
        {
            return;
        }
        if chosen.is_empty() && !anybody && !self.complained {
            self.complained = true;
            let message = format!("Unable to evict any pods from the node, and {} is low", signal.resource());
            self.parts.events.warning("EvictionThresholdMet", &message);
        }
        for index in chosen {
            match candidates.get(index) {
                Some(pod) if self.leaving.contains_key(&pod.uid) => {
                    self.hasten(pod, &threshold, observation);
                }
                Some(pod) => self.evict(pod, &threshold, observation),
                None => {}
            }
        }
    }

    /// Returns the time from which measurements of pods' disk usage count, for a signal that concerns a disk:
    /// not before the threshold became actionable, nor before the last evicted pod terminated. Requests new
    /// measurements.
    fn measured_since(&mut self, index: usize, threshold: &Threshold) -> Option<Instant> {
        if threshold.signal.condition() != NodeCondition::DiskPressure {
            return None;
        }
        let now = Instant::now();
        let met = self.tracker.first_observed.get(&index).map(|since| since.plus(threshold.grace));
        let called = met.and_then(|at| now.checked_sub(self.now().since(at))).max(self.gone_at);
        let holds = |asked: &Instant| called.is_none_or(|called| *asked >= called) && asked.elapsed() < DISKS;
        Some(self.disks_asked.filter(holds).unwrap_or_else(|| {
            self.parts.usage.disk.ask(now);
            *self.disks_asked.insert(now)
        }))
    }

    /// Returns true if every pod's disk usage was measured since then.
    fn are_measured(&self, since: Instant) -> bool {
        let table = Arc::clone(&self.parts.table.borrow());
        let mut holding = table.pods.values().filter(|entry| !entry.is_gone());
        holding.all(|entry| {
            let uid = entry.pod.metadata.uid.as_deref();
            uid.is_none_or(|uid| self.parts.usage.disk.is_measured(uid, since))
        })
    }

    /// Returns true if no further measurement is needed: a single pod accounts for the missing amount by its
    /// growth since the last measurement before `since`.
    fn is_evident(
        &self,
        chosen: &[usize],
        candidates: &[&Pod],
        signal: Signal,
        missing: Quantity,
        since: Instant,
    ) -> bool {
        let [chosen] = chosen else { return false };
        let Some(pod) = candidates.get(*chosen) else { return false };
        let Some(before) = self.parts.usage.disk.before(&pod.uid, since) else { return false };
        let gained = pod.frees(signal, self.layout).saturating_sub(before.of(signal, self.layout));
        gained > Quantity::ZERO && gained >= missing
    }

    /// Drops sufficient reclaims: the next shortage of the disk may be reclaimable, too.
    fn forget_what_was_enough(&mut self, assessment: &Assessment, seen: &Seen) {
        let (layout, thresholds) = (self.layout, &self.thresholds);
        self.reclaims.retain(|steps, state| {
            let ReclaimState::Done { at, .. } = *state else { return true };
            let read_since = |signal| seen.get(signal).map(|(_, read_at)| at < read_at);
            !is_relieved(steps, layout, thresholds, &assessment.met, read_since)
        });
    }

    /// Starts a reclaim if that can help; returns true if evictions must wait until it has ended.
    fn must_wait_for_reclaim(&mut self, signal: Signal, read_at: Instant) -> bool {
        let wanted = reclaim(signal, self.layout);
        if wanted.is_empty() {
            return false;
        }
        match self.reclaims.get(wanted) {
            Some(ReclaimState::Running { since }) => return since.elapsed() < RECLAIM_PATIENCE,
            Some(ReclaimState::Done { at, settled }) if at.elapsed() < RECLAIMED => {
                // The effect of the reclaim must be measured first.
                return read_at <= *settled;
            }
            Some(ReclaimState::Done { .. }) | None => {}
        }
        self.reclaims.insert(wanted, ReclaimState::Running { since: Instant::now() });
        self.parts.metrics.reclaimed();
        self.parts
            .events
            .warning("EvictionThresholdMet", &format!("Attempting to reclaim {}", signal.resource()));
        let (reclaimer, done) = (Arc::clone(&self.parts.reclaimer), self.reclaimed_out.clone());
        tokio::spawn(async move {
            let mut reclaimed = Reclaimed::Now;
            for step in wanted {
                match reclaimer(*step).await {
                    Ok(Reclaimed::Now) => {}
                    Ok(Reclaimed::Later) => reclaimed = Reclaimed::Later,
                    Err(error) => {
                        let what = match step {
                            Reclaim::DeleteUnusedContainers => "unused containers",
                            Reclaim::DeleteUnusedImages => "unused images",
                        };
                        warn!(%error, "cannot remove {what}");
                    }
                }
            }
            // Sending fails only after eviction has ended.
            let _ = done.send((wanted, reclaimed)).await;
        });
        true
    }

    /// Returns true while the space of pods evicted for a disk may still become free and has not been seen.
    fn must_wait_for_room(&mut self, threshold: &Threshold, observation: &Observation) -> bool {
        let signal = threshold.signal;
        let Some(first) = self.late.first() else { return false };
        if signal.condition() != NodeCondition::DiskPressure {
            return false;
        }
        let expected = self.late.iter().map(|late| late.usage.of(signal, self.layout)).sum();
        let before = first.before.get(&signal).map_or(observation.available, |before| before.available);
        let come = has_come(expected, before, observation.available, deficit(threshold, observation));
        if come {
            self.late.clear();
        }
        !come
    }

    /// Returns the pods that hold resources, with their current usage, or the last known one if reading takes
    /// too long. Includes leaving pods: their remaining usage will become free.
    async fn pods(&mut self, signal: Signal, measured: Option<Instant>) -> Vec<Pod> {
        let table = Arc::clone(&self.parts.table.borrow());
        let pods: Vec<(String, Arc<core::Pod>)> = table
            .pods
            .values()
            .filter(|entry| !entry.is_gone())
            .map(|entry| &entry.pod)
            .filter_map(|pod| Some((pod.metadata.uid.clone()?, Arc::new(pod.clone()))))
            .collect();
        let mut known = self.survey.read(&pods, signal, measured).await;
        pods.into_iter()
            .map(|(uid, pod)| Pod { known: known.remove(&uid).unwrap_or_default(), uid, pod })
            .collect()
    }

    /// Adds pods that others have deleted to the leaving ones, if their end helps. A critical pod keeps its
    /// grace period, and eviction does not wait for it.
    fn include_deleted(&mut self, pods: &[Pod], threshold: &Threshold, low: Quantity) {
        let signal = threshold.signal;
        for pod in pods.iter().filter(|pod| pod.is_deleted() && !is_critical(&pod.pod)) {
            if !self.leaving.contains_key(&pod.uid) && is_worth_it(pod.frees(signal, self.layout), low) {
                self.leaves(pod, signal, beelet_model::pod::grace_period(&pod.pod));
            }
        }
    }

    /// Returns true if the pod may be chosen. Under a hard threshold that includes gracefully terminating
    /// pods whose end helps; their usage does not count as soon free.
    fn is_candidate(&self, pod: &Pod, threshold: &Threshold, low: Quantity) -> bool {
        let Some(leaving) = self.leaving.get(&pod.uid) else { return !pod.is_deleted() };
        let frees = pod.frees(threshold.signal, self.layout);
        threshold.grace.is_zero() && leaving.is_gentle() && !leaving.overdue && is_worth_it(frees, low)
    }

    /// Shortens the grace period of a gracefully terminating pod.
    fn hasten(&mut self, pod: &Pod, threshold: &Threshold, observation: &Observation) {
        let signal = threshold.signal;
        if self.fail(pod, threshold, observation, IMMEDIATE).is_none() {
            return;
        }
        info!(pod = %PodName::of(&pod.pod), signal = signal.name(), "shortening the grace period of a terminating pod");
        if let Some(leaving) = self.leaving.get_mut(&pod.uid) {
            (leaving.signal, leaving.grace) = (signal, IMMEDIATE);
            leaving.by = Instant::now() + IMMEDIATE + PATIENCE;
        }
    }

    /// Records the usage of leaving pods.
    fn record_leaving_usage(&mut self, pods: &[Pod]) {
        for (uid, leaving) in self.leaving.iter_mut().filter(|(_, leaving)| !leaving.overdue) {
            let known = pods.iter().find(|pod| pod.uid == *uid).map(|pod| &pod.known);
            if let Some((at, usage)) = known.and_then(|known| known.read_at.zip(known.usage)) {
                leaving.looks.add(at, usage);
            }
        }
    }

    /// Returns the amount that the pods counted on will free, relative to a number that was read at
    /// `read_at`.
    fn coming(&self, threshold: &Threshold, read_at: Instant) -> Quantity {
        let leaving = self.leaving.values().filter(|leaving| leaving.is_counted_on(threshold));
        leaving.map(|leaving| leaving.looks.by(read_at).of(threshold.signal, self.layout)).sum()
    }

    /// Requests the eviction from the pods' manager, and records it.
    fn evict(&mut self, pod: &Pod, threshold: &Threshold, observation: &Observation) {
        let own = beelet_model::pod::grace_period(&pod.pod);
        let grace = if threshold.grace.is_zero() {
            IMMEDIATE
        } else {
            self.parts.max_pod_grace.map_or(own, |most| most.min(own))
        };
        let signal = threshold.signal;
        let Some(message) = self.fail(pod, threshold, observation, grace) else { return };
        info!(pod = %PodName::of(&pod.pod), signal = signal.name(), "evicting pod: {message}");
        self.complained = false;
        self.parts.metrics.evicted(signal.name(), pod.known.read_at.map(|at| at.elapsed()));
        self.leaves(pod, signal, grace);
    }

    /// Asks the pods' manager to terminate the pod; returns the message if the request was accepted.
    fn fail(
        &self,
        pod: &Pod,
        threshold: &Threshold,
        observation: &Observation,
        grace: Duration,
    ) -> Option<String> {
        let signal = threshold.signal;
        let largest = self.parts.usage.disk.largest(&pod.uid, self.disks_asked, signal, self.layout);
        let message = message(threshold, observation, pod.known.containers(signal), &largest);
        let request = Request::Fail {
            uid: pod.uid.clone(),
            reason: EVICTED.to_owned(),
            message: message.clone(),
            grace: Some(grace),
        };
        match self.parts.requests.try_send(request) {
            Ok(()) => Some(message),
            // Never waits: the next decision comes soon, with newer numbers.
            Err(TrySendError::Full(_)) => {
                warn!("the pods' manager is busy; retrying the eviction shortly");
                None
            }
            Err(TrySendError::Closed(_)) => None,
        }
    }

    /// Adds the pod to the leaving ones.
    fn leaves(&mut self, pod: &Pod, signal: Signal, grace: Duration) {
        let now = Instant::now();
        let looks = Looks::new(pod.known.read_at.unwrap_or(now), pod.known.usage.unwrap_or_default());
        let by = now.after(grace).after(PATIENCE);
        let before = self.board.current().observations;
        self.leaving.insert(pod.uid.clone(), Leaving { signal, grace, by, looks, overdue: false, before });
    }
}

impl Leaving {
    /// Returns true if the pod's end will free some of the low resource, and soon enough: a hard threshold
    /// does not wait for a gracefully terminating pod. An overdue pod frees nothing.
    fn is_counted_on(&self, threshold: &Threshold) -> bool {
        let in_time = !threshold.grace.is_zero() || !self.is_gentle();
        in_time && !self.overdue && self.signal.condition() == threshold.signal.condition()
    }

    /// Returns true if the pod has more time than a hard threshold grants.
    fn is_gentle(&self) -> bool {
        self.grace > IMMEDIATE
    }
}

fn candidate(pod: &Pod, leaving: bool) -> Option<Candidate<'_>> {
    Some(Candidate {
        demand: PodDemand::read(&pod.pod).ok()?,
        priority: priority(&pod.pod),
        critical: is_critical(&pod.pod),
        leaving,
        usage: pod.known.usage,
    })
}

/// Returns the kubelet's message (`pkg/kubelet/eviction/helpers.go`, `evictionMessage`), which covers
/// containers only, followed for a disk by the names and amounts that decided.
fn message(
    threshold: &Threshold,
    observation: &Observation,
    containers: &[ContainerUse],
    largest: &[(String, Quantity)],
) -> String {
    /// Maximum number of named items.
    const NAMED: usize = 5;
    let resource = threshold.signal.resource();
    let mut text = format!(
        "The node was low on resource: {resource}. Threshold quantity: {}, available: {}. ",
        threshold.value.of(observation.capacity).binary(),
        observation.available.binary()
    );
    let (named, others) = largest.split_at(largest.len().min(NAMED));
    let mut parts: Vec<String> =
        named.iter().map(|(name, amount)| format!("{name} {}", amount.binary())).collect();
    if !others.is_empty() {
        let amount: Quantity = others.iter().map(|(_, amount)| *amount).sum();
        parts.push(format!("{} others {}", others.len(), amount.binary()));
    }
    for (name, usage, request) in containers {
        if usage > request {
            text += &format!(
                "Container {name} was using {}, request is {}, has larger consumption of {resource}. ",
                usage.binary(),
                request.binary()
            );
        }
    }
    if !parts.is_empty() {
        text += &format!("The pod's use of {resource} was: {}. ", parts.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use beelet_policy::eviction::ThresholdValue;

    use super::*;

    #[test]
    fn the_message_names_what_a_pod_has_on_a_disk() {
        let value = ThresholdValue::threshold("20Mi").unwrap().unwrap();
        let threshold =
            Threshold { signal: Signal::NodeFsAvailable, value, grace: Duration::ZERO, min_reclaim: None };
        let kib = |n: i64| Quantity::from_units(n * 1024);
        let seen = Observation { available: kib(14_328), capacity: kib(65_536) };
        let containers = [("main".to_owned(), kib(8), kib(0))];
        let volume = |n: i64| (format!("volume v{n}"), kib(n));
        let check = |largest: &[(String, Quantity)], expected: &str| {
            let words = "The node was low on resource: ephemeral-storage. Threshold quantity: 20Mi, available: 14328Ki. \
                         Container main was using 8Ki, request is 0, has larger consumption of ephemeral-storage. ";
            assert_eq!(message(&threshold, &seen, &containers, largest), format!("{words}{expected}"));
        };
        check(&[], "");
        let largest = [("volume scratch".to_owned(), kib(50 << 10)), ("/etc/hosts".to_owned(), kib(4))];
        check(&largest, "The pod's use of ephemeral-storage was: volume scratch 50Mi, /etc/hosts 4Ki. ");
        check(
            &[volume(9), volume(8), volume(7), volume(6), volume(5), volume(4), volume(3)],
            "The pod's use of ephemeral-storage was: volume v9 9Ki, volume v8 8Ki, volume v7 7Ki, volume v6 6Ki, \
             volume v5 5Ki, 2 others 7Ki. ",
        );
    }

    #[test]
    fn the_message_is_the_kubelets() {
        let value = ThresholdValue::threshold("100Mi").unwrap().unwrap();
        let threshold =
            Threshold { signal: Signal::MemoryAvailable, value, grace: Duration::ZERO, min_reclaim: None };
        let kib = |n: i64| Quantity::from_units(n * 1024);
        let seen = Observation { available: kib(51_200), capacity: kib(1 << 20) };
        let containers = [("hog".to_owned(), kib(300_001), kib(0)), ("small".to_owned(), kib(10), kib(20))];
        assert_eq!(
            message(&threshold, &seen, &containers, &[]),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. Container hog was using \
             300001Ki, request is 0, has larger consumption of memory. "
        );
    }
}
