//! CPU bursts: lends them to throttled containers, and ends those without a point.

use std::collections::{BTreeMap, BTreeSet};

use super::{Hand, Node, ratio};
use crate::resources::qos::QosClass;
use crate::tuner::{ContainerSample, Heat, Knob, KnobKind, Ladder, Law, PodSample, ladder::Move, words};

/// The bursts of one tick.
pub(super) struct Bursts<'r, 'a> {
    pub(super) node: Node<'a>,
    pub(super) hand: &'r mut Hand<'a>,
    /// Progress of each container's throttling, by its cgroup.
    pub(super) ladders: &'r mut BTreeMap<String, Ladder>,
}

impl Bursts<'_, '_> {
    /// Lends a burst to each protected container that its own quota throttles: the container, and its pod,
    /// may then use the quota saved in earlier periods.
    pub(super) fn lend(&mut self) {
        self.end_pointless_bursts();
        if !self.node.seen.supports.burst || self.node.law.burst_percent == 0 {
            return;
        }
        for pod in self.node.seen.pods.iter().filter(|pod| pod.class != QosClass::BestEffort) {
            for container in &pod.containers {
                self.lend_burst(pod, container);
            }
            self.let_the_pod_burst(pod);
        }
    }

    /// Raises the pod's own burst, so that its quota does not hold back its containers' bursts.
    fn let_the_pod_burst(&mut self, pod: &PodSample) {
        let lent: u64 =
            pod.containers.iter().filter_map(|c| self.hand.held(&c.cgroup, KnobKind::Burst)).sum();
        let to = pod.quota_us.map(|quota| lent.min(quota)).filter(|burst| *burst > 0);
        if self.hand.held(&pod.cgroup, KnobKind::Burst) == to {
            return;
        }
        let knob = Knob { cgroup: pod.cgroup.clone(), kind: KnobKind::Burst };
        match to {
            Some(_) if self.hand.blocked.contains(&knob) => {}
            Some(_) => self.hand.set(&knob, to, &format!("containers of {} may burst", pod.name)),
            None => self.hand.set(&knob, None, &format!("no container of {} bursts any more", pod.name)),
        }
    }

    /// Ends bursts without a quota, and those of pods that are not protected (any more).
    fn end_pointless_bursts(&mut self) {
        let seen = self.node.seen;
        let protected = seen.pods.iter().filter(|pod| pod.class != QosClass::BestEffort);
        let quotas = protected.flat_map(|pod| {
            let containers = pod.containers.iter().map(|container| (&container.cgroup, container.quota_us));
            containers.chain([(&pod.cgroup, pod.quota_us)])
        });
        let limited: BTreeSet<&str> =
            quotas.filter(|(_, quota)| quota.is_some()).map(|(cgroup, _)| cgroup.as_str()).collect();
        let may = seen.supports.burst && self.node.law.burst_percent > 0;
        let is_burst = |knob: &&Knob| knob.kind == KnobKind::Burst;
        let all: Vec<Knob> = self.hand.held.keys().filter(is_burst).cloned().collect();
        for knob in all.iter().filter(|knob| !may || !limited.contains(knob.cgroup.as_str())) {
            self.hand.set(knob, None, "the quota to exceed no longer exists");
        }
    }

    fn lend_burst(&mut self, pod: &PodSample, container: &ContainerSample) {
        let (Some(quota), Some(throttled)) = (container.quota_us, container.throttled_permille) else {
            return;
        };
        let burst = quota * u64::from(self.node.law.burst_percent.min(100)) / 100;
        let knob = Knob { cgroup: container.cgroup.clone(), kind: KnobKind::Burst };
        let held = self.hand.held.get(&knob).copied();
        if held.is_some_and(|held| held > quota) {
            // The kernel refuses a burst above the quota, which has been lowered.
            self.hand.set(
                &knob,
                Some(burst),
                &format!("the quota of {} ({}) is lower now", pod.name, container.name),
            );
        }
        let heat = match ratio(throttled.into(), self.node.law.throttled_permille.into()) {
            1001.. => Heat::Hot,
            calm if calm < self.node.law.release_percent * 10 => Heat::Calm,
            _ => Heat::Warm,
        };
        // Saved quota costs other pods nothing until it is needed, and then it is needed at once.
        let patient = Law { calm_ticks: self.node.law.retry_ticks, ..*self.node.law };
        let ladder = self.ladders.entry(container.cgroup.clone()).or_default();
        match ladder.tick(&patient, heat) {
            Move::Tighten => {
                // The kernel adds up the CPUs' throttled times.
                let part = words::percent(throttled.min(1000));
                let words = format!(
                    "{} ({}) is throttled by its own quota {part} of the time: it may burst by {}",
                    pod.name,
                    container.name,
                    KnobKind::Burst.show(burst)
                );
                self.hand.hold(&container.cgroup, KnobKind::Burst, burst, &words);
            }
            Move::GiveBack if held.is_some() => {
                let words = format!("{} ({}) keeps within its quota", pod.name, container.name);
                self.hand.set(&knob, None, &words);
            }
            Move::GiveBack | Move::Stay => {}
        }
    }
}
