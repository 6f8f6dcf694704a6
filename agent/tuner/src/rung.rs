//! The tuner's top rung: a scheduler of its own in addition to the cgroups (`tuner.scheduler: sched-ext`).
//!
//! The scheduler is loaded once, in the mode `enforce`, with the first pod. If the kernel refuses or unloads
//! it, the next attempt comes with the agent's next start, and the cgroups apply until then. Must never keep
//! the tuner from its other work.

use std::{collections::BTreeMap, fmt, sync::Arc};

use beelet_cgroups::{Cgroups, search};
use beelet_policy::{resources::qos::QosClass, tuner::scheduler::share};
use beelet_units::scheduling::SchedulingShare;
use tracing::{info, warn};

use super::{metrics::Metrics, targets::Target};

/// A failure of the scheduler, with its cause as a text for users.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SchedulerError(pub String);

/// A loaded scheduler. Dropping the value unloads it.
pub trait Scheduling: Send {
    /// Sets the share of each pod, by its cgroup id, and the millicores that each container may use, by its
    /// cgroup id.
    ///
    /// # Errors
    /// The kernel refuses.
    fn share_out(
        &mut self,
        pods: &BTreeMap<u64, SchedulingShare>,
        limits: &BTreeMap<u64, u64>,
    ) -> Result<(), SchedulerError>;

    /// Returns the reason if the kernel has unloaded the scheduler; `None` while it runs.
    ///
    /// # Errors
    /// The kernel refuses.
    fn ended(&self) -> Result<Option<String>, SchedulerError>;
}

/// A function that loads a scheduler.
pub type StartScheduler = Arc<dyn Fn() -> Result<Box<dyn Scheduling>, SchedulerError> + Send + Sync>;

/// State of the rung.
pub(super) enum Rung {
    /// The configuration selects the kernel's own scheduler.
    Unused,
    /// Waiting for the first pod.
    Wanted(StartScheduler),
    Loaded(Box<dyn Scheduling>),
    /// Not loaded, or unloaded; with the reason.
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
    /// Checks that the scheduler still runs, loads it if configured, and sends it the pods.
    pub(super) fn tick(&mut self, cgroups: &Cgroups, pods: &[Target], metrics: &Metrics) {
        if let Self::Wanted(start) = self
            && !pods.is_empty()
        {
            *self = match start() {
                Ok(scheduler) => {
                    info!(
                        "loaded the tuner's scheduler; the kernel's own scheduler returns when the agent ends"
                    );
                    Self::Loaded(scheduler)
                }
                Err(error) => Self::lost("cannot load the scheduler", &error.to_string(), metrics),
            };
        }
        let Self::Loaded(scheduler) = self else { return metrics.scheduler(false) };
        let (shares, limits) = parts(cgroups, pods);
        let failed = match scheduler.ended() {
            Ok(None) => scheduler.share_out(&shares, &limits).err().map(|error| error.to_string()),
            Ok(Some(reason)) => Some(reason),
            Err(error) => Some(error.to_string()),
        };
        if let Some(reason) = failed {
            *self = Self::lost("the kernel unloaded the scheduler", &reason, metrics);
        }
        metrics.scheduler(self.is_loaded());
    }

    fn lost(what: &str, reason: &str, metrics: &Metrics) -> Self {
        warn!(
            reason,
            "running without the tuner's scheduler until the agent restarts, with cgroups alone: {what}"
        );
        metrics.scheduler_lost();
        Self::Lost(format!(
            "sched-ext: {what}: {reason}; the kernel's own scheduler runs until the agent restarts"
        ))
    }

    /// Returns true if the loaded scheduler makes CPU settings of cgroups ineffective.
    pub(super) fn is_loaded(&self) -> bool {
        matches!(self, Self::Loaded(_))
    }

    /// Returns the actions omitted because of the scheduler, or the reason for its absence.
    pub(super) fn lacking(&self) -> Option<String> {
        match self {
            Self::Loaded(_) => Some(
                "cpu.idle, cpu.weight, cpu.max: without effect under the tuner's scheduler (sched-ext)"
                    .to_owned(),
            ),
            Self::Lost(why) => Some(why.clone()),
            Self::Unused | Self::Wanted(_) => None,
        }
    }

    /// Returns the reason for the absence of a configured scheduler.
    pub(super) fn why_lost(&self) -> Option<&str> {
        if let Self::Lost(why) = self { Some(why) } else { None }
    }

    /// Restores the kernel's own scheduler.
    pub(super) fn stop(&mut self) {
        if self.is_loaded() {
            *self = Self::Lost("sched-ext: the tuner has stopped".to_owned());
        }
    }
}

/// Returns every pod's share, and every container's CPU limit as the kernel's own scheduler would enforce it.
fn parts(cgroups: &Cgroups, pods: &[Target]) -> (BTreeMap<u64, SchedulingShare>, BTreeMap<u64, u64>) {
    let (mut shares, mut limits) = (BTreeMap::new(), BTreeMap::new());
    for pod in pods {
        let share = share(pod.class, pod.priority, pod.cpu_request);
        shares.extend(cgroups.paths.cgroup_id(&pod.cgroup).map(|id| (id, share)));
        if pod.class == QosClass::BestEffort || !pod.is_limited {
            continue;
        }
        for container in &pod.containers {
            let Some(path) = search::container(cgroups, &pod.cgroup, &container.id) else {
                continue;
            };
            let limit = cgroups.read(&path, "cpu.max").and_then(|text| millicores(&text));
            limits.extend(cgroups.paths.cgroup_id(&path).zip(limit));
        }
    }
    (shares, limits)
}

/// Returns the limit in `cpu.max` in thousandths of a CPU; `None` without a limit.
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
