//! A decision of eviction: the low signals, the resources to reclaim, the pods to evict. Slow work is started
//! here and ends elsewhere.

use std::{sync::Arc, time::Duration};

use beelet_policy::{
    eviction::{
        Assessment, Candidate, NodeCondition, Observation, Signal, Threshold, deficit, is_worth_it, rank,
        victims,
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

use super::{Eviction, IMMEDIATE, gauges::Seen, leaving::Pod, local_storage::ASKED, usage::ContainerUse};
use beelet_model::{
    pressure::{Conditions, EVICTED},
    request::Request,
    table::PodName,
};

impl Eviction {
    /// Evaluates the newest numbers, and acts.
    pub(super) async fn decide(&mut self) {
        let now = self.now();
        let seen = self.board.current();
        self.parts.metrics.seen(&seen.observations);
        let assessment = self.tracker.assess(now, &self.thresholds, &seen.observations);
        self.publish_conditions(now);
        self.reclaims.forget_what_was_enough((self.layout, &self.thresholds), &assessment, &seen);
        let table = Arc::clone(&self.parts.table.borrow_and_update());
        if self.leaving.forget_the_gone(&table, &self.parts.metrics) {
            self.parts.hints.notify();
            self.look_again.notify();
        }
        for condition in
            [NodeCondition::MemoryPressure, NodeCondition::PidPressure, NodeCondition::DiskPressure]
        {
            if let Some(index) = most_urgent(&self.thresholds, condition, &assessment) {
                self.act(index, &seen).await;
            }
        }
    }

    fn now(&self) -> Moment {
        Moment::after_start(self.began.elapsed())
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

    /// Reclaims unused resources, and if that was not enough evicts pods.
    async fn act(&mut self, index: usize, seen: &Seen) {
        let Some(threshold) = self.thresholds.get(index).cloned() else { return };
        let signal = threshold.signal;
        let Some((observation, read_at)) = seen.get(signal) else { return };
        // Requested first of all: the measurement runs in parallel with the reclaim.
        let measured = self.measured_since(index, &threshold);
        if self.reclaims.must_wait((signal, self.layout), read_at, &self.parts) {
            return;
        }
        let since = self.tracker.first_observed.get(&index).map(|since| since.plus(threshold.grace));
        let actionable_for = since.map_or(Duration::ZERO, |since| self.now().since(since));
        if self.swap_outs.must_wait(&threshold, observation, read_at, actionable_for) {
            return;
        }
        // The effect of a terminated pod must be measured first.
        if self.leaving.gone_at.is_some_and(|gone| read_at <= gone) {
            return;
        }
        if self.leaving.must_wait_for_room(&threshold, observation, self.layout) {
            return;
        }
        let waiting = measured.filter(|since| {
            since.elapsed() < ASKED && !self.disks.are_measured(&self.parts.table.borrow(), *since)
        });
        let pods = self.pods(signal, measured).await;
        self.leaving.record_usage(&pods);
        let low = deficit(&threshold, observation);
        self.include_deleted(&pods, &threshold, low);
        let coming = self.leaving.coming(&threshold, read_at, self.layout);
        let missing = low.saturating_sub(coming);
        let anybody = self.leaving.is_any_counted_on(&threshold);
        // If the amount that terminating pods will free is unknown, it must be measured first.
        if anybody && (missing <= Quantity::ZERO || coming.is_zero()) {
            return;
        }
        let candidates: Vec<&Pod> =
            pods.iter().filter(|pod| self.leaving.is_candidate(pod, &threshold, low, self.layout)).collect();
        let leaves = |pod: &Pod| self.leaving.pods.contains_key(&pod.uid);
        let judged: Vec<Candidate<'_>> =
            candidates.iter().filter_map(|pod| candidate(pod, leaves(pod))).collect();
        if judged.len() != candidates.len() {
            // A manifest with invalid amounts is refused long before.
            return;
        }
        let ranked = rank(signal, self.layout, &judged);
        let chosen = victims(signal, self.layout, &ranked, &judged, missing, anybody);
        if let Some(since) = waiting
            && !self.disks.is_evident((&chosen, &candidates), (signal, self.layout), missing, since)
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
                Some(pod) if self.leaving.pods.contains_key(&pod.uid) => {
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
        let met = self.tracker.first_observed.get(&index).map(|since| since.plus(threshold.grace));
        let met = met.and_then(|at| Instant::now().checked_sub(self.now().since(at)));
        Some(self.disks.since(met.max(self.leaving.gone_at)))
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
            if !self.leaving.pods.contains_key(&pod.uid) && is_worth_it(pod.frees(signal, self.layout), low) {
                let before = self.board.current().observations;
                self.leaving.add(pod, signal, beelet_model::pod::grace_period(&pod.pod), before);
            }
        }
    }

    /// Shortens the grace period of a gracefully terminating pod.
    fn hasten(&mut self, pod: &Pod, threshold: &Threshold, observation: &Observation) {
        let signal = threshold.signal;
        if self.fail(pod, threshold, observation, IMMEDIATE).is_none() {
            return;
        }
        info!(pod = %PodName::of(&pod.pod), signal = signal.name(), "shortening the grace period of a terminating pod");
        self.leaving.shorten(&pod.uid, signal);
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
        self.leaving.add(pod, signal, grace, self.board.current().observations);
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
        let largest = self.parts.usage.disk.largest(&pod.uid, self.disks.asked, signal, self.layout);
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
}

/// Returns the most urgent of a condition's actionable thresholds: a hard one, if any, as it acts at once
/// regardless of a soft one's grace period.
fn most_urgent(thresholds: &[Threshold], condition: NodeCondition, assessment: &Assessment) -> Option<usize> {
    let actionable = assessment.actionable.iter().filter_map(|i| Some((*i, thresholds.get(*i)?)));
    let of_condition = actionable.filter(|(_, threshold)| threshold.signal.condition() == condition);
    of_condition.min_by_key(|(_, threshold)| !threshold.grace.is_zero()).map(|(i, _)| i)
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
