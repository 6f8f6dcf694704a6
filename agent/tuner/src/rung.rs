//! The tuner's top rung: a scheduler of its own beside the cgroups (`tuner.scheduler: sched-ext`).
//!
//! It is loaded once, in the mode `enforce`, with the first pod. What the kernel refuses, or takes away, is
//! not tried again before the agent starts anew: the cgroups hold from then on. Must never keep the tuner
//! from doing what it does without.

use std::{collections::BTreeMap, fmt, sync::Arc};

use beelet_cgroups::Cgroups;
use beelet_policy::{resources::qos::QosClass, tuner::scheduler::share};
use beelet_units::scheduling::SchedulingShare;
use tracing::{info, warn};

use super::{metrics::Metrics, targets::Target};

/// A scheduler that is loaded. It goes when this value does.
pub trait Scheduling: Send {
    /// Sets who gets which part, by the cgroup ids of pods, and the millicores that containers may use, by
    /// theirs.
    ///
    /// # Errors
    /// In words.
    fn share_out(
        &mut self,
        pods: &BTreeMap<u64, SchedulingShare>,
        limits: &BTreeMap<u64, u64>,
    ) -> Result<(), String>;

    /// Why the kernel has taken it away; `None` while it runs.
    ///
    /// # Errors
    /// In words.
    fn ended(&self) -> Result<Option<String>, String>;
}

/// Loads a scheduler.
pub type StartScheduler = Arc<dyn Fn() -> Result<Box<dyn Scheduling>, String> + Send + Sync>;

/// How the rung stands.
pub(super) enum Rung {
    /// The kernel's own scheduler is wanted.
    Unused,
    /// There were no pods yet.
    Wanted(StartScheduler),
    Loaded(Box<dyn Scheduling>),
    /// Not loaded, or no longer, and why.
    Lost(String),
}

impl fmt::Debug for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unused => "Unused",
            Self::Wanted(_) => "Wanted",
            Self::Loaded(_) => "Loaded",
            Self::Lost(_) => "Lost",
        })
    }
}

impl Rung {
    /// Looks whether the scheduler still runs, loads it where it is wanted, and tells it of the pods.
    pub(super) fn tick(&mut self, cgroups: &Cgroups, pods: &[Target], metrics: &Metrics) {
        if let Self::Wanted(start) = self
            && !pods.is_empty()
        {
            *self = match start() {
                Ok(scheduler) => {
                    info!("the tuner's scheduler is loaded; the kernel has its own back when the agent ends");
                    Self::Loaded(scheduler)
                }
                Err(reason) => Self::lost("it could not be loaded", &reason, metrics),
            };
        }
        let Self::Loaded(scheduler) = self else { return metrics.scheduler(false) };
        let (shares, limits) = parts(cgroups, pods);
        let failed = match scheduler.ended() {
            Ok(None) => scheduler.share_out(&shares, &limits).err(),
            Ok(Some(reason)) => Some(reason),
            Err(reason) => Some(reason),
        };
        if let Some(reason) = failed {
            *self = Self::lost("it was taken away", &reason, metrics);
        }
        metrics.scheduler(self.is_loaded());
    }

    fn lost(what: &str, reason: &str, metrics: &Metrics) -> Self {
        warn!(
            reason,
            "the tuner's scheduler is not used: {what}; the tuner goes on with cgroups alone until the agent starts anew"
        );
        metrics.scheduler_lost();
        Self::Lost(format!(
            "sched-ext: {what}: {reason}; the kernel's own scheduler runs, until the agent starts anew"
        ))
    }

    /// Returns true if CPU settings of cgroups have no effect: the scheduler decides.
    pub(super) fn is_loaded(&self) -> bool {
        matches!(self, Self::Loaded(_))
    }

    /// What is not done for it, or why it is not there though it is wanted.
    pub(super) fn lacking(&self) -> Option<String> {
        match self {
            Self::Loaded(_) => Some(
                "cpu.idle, cpu.weight, cpu.max: the tuner's scheduler (sched-ext) decides instead of them"
                    .to_owned(),
            ),
            Self::Lost(why) => Some(why.clone()),
            Self::Unused | Self::Wanted(_) => None,
        }
    }

    /// Why it is not there though it is wanted.
    pub(super) fn why_lost(&self) -> Option<&str> {
        if let Self::Lost(why) = self { Some(why) } else { None }
    }

    /// Gives the kernel its own scheduler back.
    pub(super) fn stop(&mut self) {
        if self.is_loaded() {
            *self = Self::Lost("sched-ext: the tuner has stopped".to_owned());
        }
    }
}

/// Every pod's share, and every container's CPU limit, as the kernel's own scheduler would keep it.
fn parts(cgroups: &Cgroups, pods: &[Target]) -> (BTreeMap<u64, SchedulingShare>, BTreeMap<u64, u64>) {
    let (mut shares, mut limits) = (BTreeMap::new(), BTreeMap::new());
    for pod in pods {
        let share = share(pod.class, pod.priority, pod.cpu_request);
        shares.extend(cgroups.cgroup_id(&pod.cgroup).map(|id| (id, share)));
        if pod.class == QosClass::BestEffort || !pod.is_limited {
            continue;
        }
        for container in &pod.containers {
            let Some(path) = cgroups.container_path(&pod.cgroup, &container.id) else { continue };
            let limit = cgroups.read(&path, "cpu.max").and_then(|text| millicores(&text));
            limits.extend(cgroups.cgroup_id(&path).zip(limit));
        }
    }
    (shares, limits)
}

/// What `cpu.max` allows, in thousandths of a CPU; `None`: all.
fn millicores(cpu_max: &str) -> Option<u64> {
    let mut words = cpu_max.split_whitespace().map(str::parse::<u64>);
    let (quota, period) = (words.next()?.ok()?, words.next()?.ok()?);
    quota.checked_mul(1000)?.checked_div(period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_limit_is_read_from_cpu_max() {
        let check = |text, expected| assert_eq!(millicores(text), expected, "{text}");
        check("25000 100000\n", Some(250));
        check("400000 100000", Some(4000));
        check("max 100000", None);
        check("100 0", None);
        check("", None);
    }
}
