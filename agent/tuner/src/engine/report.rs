//! The view of the engine: the held settings, and the actions that the node does not support.

use std::time::Instant;

use beelet_cgroups::Version;
use beelet_policy::tuner::{CpuCaps, Supports, TunerMode};
use jiff::Timestamp;

use super::Engine;
use crate::{
    knobs,
    view::{Blocked, HeldSetting, View},
};

/// The reason for having no CPU caps.
const NO_CAPS: &str =
    "cpu.max: before Linux 6.18 a cap stops threads within the kernel, which makes other threads wait longer";

impl Engine {
    pub(super) fn view(&self, findings: Vec<String>, supports: Supports, now: Instant) -> View {
        let held =
            if self.settings.mode == TunerMode::Enforce { &self.holder.state.held } else { &self.advised };
        let held = held.iter().map(|(knob, value)| {
            let file = knobs::settings(&self.holder.cgroups, knob, *value)
                .first()
                .map_or("", |setting| setting.file);
            let why = self.holder.why.get(knob);
            HeldSetting {
                knob: knob.clone(),
                value: knob.kind.show(*value),
                owners: self.holder.journal.owners_of(knob, file).unwrap_or_default().to_owned(),
                since: why.map_or_else(Timestamp::now, |why| why.since),
                reason: why.map(|why| why.reason.clone()).unwrap_or_default(),
            }
        });
        let blocked = self.holder.blocked.iter().map(|(knob, block)| Blocked {
            knob: knob.clone(),
            left: block.until.saturating_duration_since(now),
            reason: block.reason.clone(),
        });
        let lacking = if self.is_guest { self.lacking_as_guest(supports) } else { self.lacking(supports) };
        View {
            mode: Some(self.settings.mode),
            at: Some(Timestamp::now()),
            findings: findings.into_iter().chain(self.cold.findings()).collect(),
            lacking: lacking.into_iter().chain(self.rung.lacking()).chain(self.cold.lacking()).collect(),
            scheduler_lost: self.rung.why_lost().map(str::to_owned),
            held: held.collect(),
            blocked: blocked.collect(),
            history: self.holder.history.shown(),
        }
    }

    /// Returns true if this kernel is the reason for having no CPU caps; where turns can be restricted, no
    /// caps are used anyway.
    fn is_without_caps(&self, supports: Supports) -> bool {
        let would_be_of_use = !supports.idle && !self.rung.is_loaded();
        would_be_of_use && !supports.harmless_caps && self.settings.law.cpu_caps == CpuCaps::Auto
    }

    /// Returns the actions that the tuner omits in a kubelet's cgroups, with reasons.
    fn lacking_as_guest(&self, supports: Supports) -> Vec<String> {
        let mut lacking = vec![
            "cpu.idle, cpu.max.burst: writes of the cgroups' owner (weights, quotas) could fail while they are set".to_owned(),
        ];
        if self.is_without_caps(supports) {
            lacking.push(format!("{NO_CAPS}; `--tuner-cpu-caps always` enables caps"));
        }
        if !supports.memory_high {
            lacking.push(
                "memory.high: cgroup version 1 lacks it, or there are no BestEffort pods yet; on version 1 Burstable pods are \
                 not capped either, as a container's start could fail"
                    .to_owned(),
            );
        }
        lacking
    }

    /// Returns the actions that the node does not support, with reasons.
    fn lacking(&self, supports: Supports) -> Vec<String> {
        let mut lacking = Vec::new();
        if !supports.idle {
            lacking.push(
                "cpu.idle: the kernel is older than 5.15; BestEffort pods get the lowest weight instead"
                    .to_owned(),
            );
        }
        if self.is_without_caps(supports) {
            lacking.push(format!("{NO_CAPS}; `tuner.cpuCaps: always` enables caps"));
        }
        if !supports.memory_high {
            let why = if self.holder.cgroups.paths.version() == Version::V2 {
                "the memory controller is missing"
            } else {
                "cgroup version 1 lacks it"
            };
            lacking.push(format!("memory.high: {why}; the tuner sees memory stalls but cannot act on them"));
        }
        if !supports.disk_weight && self.settings.law.best_effort_disk_weight > 0 {
            lacking.push(
                "io.weight: the kernel has neither iocost (CONFIG_BLK_CGROUP_IOCOST) nor BFQ with cgroups \
                 (CONFIG_BFQ_GROUP_IOSCHED); BestEffort pods use disks like all others"
                    .to_owned(),
            );
        }
        if !supports.burst {
            lacking.push(
                "cpu.max.burst: the kernel is older than 5.14; throttled containers get no burst".to_owned(),
            );
        }
        lacking
    }
}
