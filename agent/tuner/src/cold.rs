//! Proactive reclaim: samples the pods, has `policy::tuner::cold` decide, and asks the kernel for the pages.
//!
//! Runs only in ticks in which no container can suffer. A request leaves no setting behind, so that a kill
//! -9 needs no undoing. Must never take longer than a third of a second per tick.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use beelet_base::{kernel_file, machine_memory};
use beelet_policy::tuner::{
    TunerMode,
    cold::{ColdLaw, ColdSample, ColdSeen, ColdState, ColdStep},
};
use beelet_units::{moment::Moment, quantity::Quantity};
use tracing::{info, warn};

use super::{metrics::Metrics, targets::Target};
use beelet_cgroups::{
    Cgroups, Pressure, memory,
    reclaim::{self, Pages},
    search, stats,
};

/// Maximum time of all requests of one tick.
const LONGEST: Duration = Duration::from_millis(300);
/// Maximum number of pods named in a finding.
const NAMED: usize = 5;

/// The reason for having no proactive reclaim.
const NO_FILE: &str =
    "memory.reclaim: cgroup version 1 or a kernel before 5.19 lacks it; the tuner takes no cold memory";
/// The reason for taking nothing while the budget of swap is used up.
const NO_ARGUMENT: &str = "memory.reclaim: before Linux 6.9 the kernel cannot reclaim file pages alone; the tuner takes cold memory only \
     while its budget of writes to swap lasts";

/// Settings of proactive reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdSettings {
    /// Level of intervention; effective is the lower one of this and the tuner's.
    pub mode: TunerMode,
    /// Bounds, step sizes, patience.
    pub law: ColdLaw,
}

impl Default for ColdSettings {
    fn default() -> Self {
        Self { mode: TunerMode::Off, law: ColdLaw::default() }
    }
}

/// Proactive reclaim.
#[derive(Debug)]
pub(super) struct Cold {
    mode: TunerMode,
    law: ColdLaw,
    state: ColdState,
    began: Instant,
    /// Names of pods by their cgroups.
    names: BTreeMap<String, String>,
    /// The steps of the last tick, in the mode `advise`.
    advised: Vec<ColdStep>,
    lacks_file: bool,
    lacks_argument: bool,
    warned: bool,
}

impl Cold {
    /// Returns the effective mode of `settings` under a tuner of this mode: off, or as the lower one.
    pub(super) fn new(settings: ColdSettings, tuner: TunerMode) -> Self {
        let mode = match (settings.mode, tuner) {
            (TunerMode::Off, _) | (_, TunerMode::Off) => TunerMode::Off,
            (TunerMode::Enforce, TunerMode::Enforce) => TunerMode::Enforce,
            _ => TunerMode::Advise,
        };
        Self {
            mode,
            law: settings.law,
            state: ColdState::default(),
            began: Instant::now(),
            names: BTreeMap::new(),
            advised: Vec::new(),
            lacks_file: false,
            lacks_argument: false,
            warned: false,
        }
    }

    /// Takes the next steps if they are due.
    pub(super) fn tick(&mut self, cgroups: &Cgroups, pods: &[Target], metrics: &Metrics, now: Instant) {
        let moment = Moment::after_start(now.saturating_duration_since(self.began));
        if self.mode == TunerMode::Off || pods.is_empty() || !self.state.is_due(&self.law, moment) {
            return;
        }
        let supported = pods.iter().any(|pod| reclaim::is_supported(cgroups, &pod.cgroup));
        self.lacks_file = !supported;
        if !supported {
            return;
        }
        let (seen, has_swap) = seen(cgroups, pods);
        self.names = pods.iter().map(|pod| (pod.cgroup.clone(), pod.name.clone())).collect();
        let steps = self.state.decide(&self.law, moment, &seen);
        if self.mode == TunerMode::Advise {
            self.advised = steps;
            return;
        }
        // A pod whose turn does not come now keeps its place: the next tick decides again.
        let deadline = Instant::now() + LONGEST;
        for step in steps.iter().take_while(|_| Instant::now() < deadline) {
            // A pod that may not swap loses file pages only, and older kernels lack `Pages::File`.
            let stays = || seen.pods.iter().any(|pod| pod.cgroup == step.cgroup && !pod.may_swap);
            let pages = if step.may_swap || !has_swap || stays() { Pages::Any } else { Pages::File };
            let taken = self.reclaim(cgroups, step, pages, deadline);
            metrics.reclaimed(taken);
            self.state.took(&self.law, moment, &step.cgroup, taken);
        }
        metrics.read_again(self.state.effects().map(|(_, effect)| effect.read_again).sum());
    }

    fn reclaim(&mut self, cgroups: &Cgroups, step: &ColdStep, pages: Pages, deadline: Instant) -> u64 {
        let before = memory::of(cgroups, &step.cgroup).map_or(0, |memory| memory.usage);
        match reclaim::reclaim_pages(cgroups, &step.cgroup, step.bytes, pages, deadline) {
            Ok(_) => {
                let after = memory::of(cgroups, &step.cgroup).map_or(before, |memory| memory.usage);
                before.saturating_sub(after)
            }
            Err(error) if error.is_gone() => 0,
            Err(error) => {
                self.lacks_argument |= error.is_unsupported_reclaim();
                if !std::mem::replace(&mut self.warned, true) {
                    warn!(%error, cgroup = step.cgroup, "cannot take cold memory of a pod");
                }
                0
            }
        }
    }

    /// Returns sentences for users: the memory given back so far and its price, or the advice.
    pub(super) fn findings(&self) -> Vec<String> {
        let binary = |bytes: u64| Quantity::from_units(i64::try_from(bytes).unwrap_or(i64::MAX)).binary();
        let name = |cgroup: &str| self.names.get(cgroup).map_or(cgroup.to_owned(), Clone::clone);
        match self.mode {
            TunerMode::Off => Vec::new(),
            TunerMode::Advise if self.advised.is_empty() => Vec::new(),
            TunerMode::Advise => {
                let bytes: u64 = self.advised.iter().map(|step| step.bytes).sum();
                let pods = self.advised.len();
                vec![format!(
                    "cold memory: the tuner would reclaim {} in all from {pods} pods (allow it with `tuner.reclaim: enforce`)",
                    binary(bytes)
                )]
            }
            TunerMode::Enforce => {
                let mut effects: Vec<_> = self.state.effects().collect();
                effects.sort_by_key(|(_, effect)| std::cmp::Reverse(effect.given_back));
                let given: u64 = effects.iter().map(|(_, effect)| effect.given_back).sum();
                let again: u64 = effects.iter().map(|(_, effect)| effect.read_again).sum();
                let named = effects.iter().take(NAMED).map(|(cgroup, effect)| {
                    let (given, again) = (binary(effect.given_back), binary(effect.read_again));
                    format!("{} {given}, of which {again} were read again", name(cgroup))
                });
                let named: Vec<String> = named.collect();
                let (given, again) = (binary(given), binary(again));
                let all =
                    format!("cold memory: {} pods gave back {given}, {again} were read again", effects.len());
                vec![if named.is_empty() { all } else { format!("{all}: {}", named.join("; ")) }]
            }
        }
    }

    /// Returns the actions that the node does not support, with reasons.
    pub(super) fn lacking(&self) -> impl Iterator<Item = String> {
        let lacks = [(self.lacks_file, NO_FILE), (self.lacks_argument, NO_ARGUMENT)];
        lacks.into_iter().filter(|(lacks, _)| *lacks).map(|(_, why)| why.to_owned())
    }

    /// Logs the effect at the end.
    pub(super) fn end(&self) {
        let given: u64 = self.state.effects().map(|(_, effect)| effect.given_back).sum();
        if given > 0 {
            info!(bytes = given, "pods gave back cold memory; they get it again as they need it");
        }
    }
}

/// Samples the pods and the swap. Returns true as the second value if the machine has swap.
fn seen(cgroups: &Cgroups, pods: &[Target]) -> (ColdSeen, bool) {
    let read = |file| kernel_file::read_to_string(file).unwrap_or_default();
    let (meminfo, vmstat) = (read("/proc/meminfo"), read("/proc/vmstat"));
    let swap = |name| machine_memory::meminfo(&meminfo, name).unwrap_or(0);
    let pages = machine_memory::memory_stat(&vmstat, "pswpout").unwrap_or(0);
    let seen = ColdSeen {
        pods: pods.iter().filter_map(|pod| sample(cgroups, pod)).collect(),
        free_swap: swap("SwapFree"),
        swapped_out: pages.saturating_mul(rustix::param::page_size() as u64),
    };
    (seen, swap("SwapTotal") > 0)
}

/// Samples a pod; `None` if a number is missing, without which no sign could be seen.
fn sample(cgroups: &Cgroups, pod: &Target) -> Option<ColdSample> {
    let memory = memory::of(cgroups, &pod.cgroup)?;
    let parts = memory.parts;
    let stalled = stats::stalled(cgroups, &pod.cgroup, Pressure::Memory)?;
    // The limit of a container is on the container's own cgroup.
    let is_kept_from_swap = |id: &str| {
        let path = search::container(cgroups, &pod.cgroup, id);
        path.and_then(|path| cgroups.read(&path, "memory.swap.max")).is_some_and(|limit| limit == "0")
    };
    let may_swap =
        pod.containers.is_empty() || !pod.containers.iter().all(|container| is_kept_from_swap(&container.id));
    Some(ColdSample {
        cgroup: pod.cgroup.clone(),
        class: pod.class,
        usage: memory.usage,
        clean_file: parts
            .active_file
            .saturating_add(parts.inactive_file)
            .saturating_sub(parts.unwritten_file),
        anon: parts.anon,
        may_swap,
        refaulted: parts.refaulted_file?.saturating_add(parts.refaulted_anon.unwrap_or(0)),
        stalled: Duration::from_micros(stalled.some_us),
    })
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use beelet_cgroups::{Hierarchy, Layout, Version};

    use super::*;

    const POD: &str = "/kubepods/burstable/podweb";

    fn cgroups(dir: &Path) -> Cgroups {
        let hierarchies = vec![Hierarchy { mount: dir.into(), is_v2: true, controllers: [].into() }];
        let pod = dir.join(&POD[1..]);
        fs::create_dir_all(&pod).unwrap();
        fs::write(dir.join("cgroup.controllers"), "cpu memory").unwrap();
        for (file, text) in [
            ("memory.current", "1073741824"),
            ("memory.max", "max"),
            (
                "memory.stat",
                "anon 0\nactive_file 800000000\ninactive_file 200000000\nworkingset_refault_file 0\n",
            ),
            ("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"),
        ] {
            fs::write(pod.join(file), text).unwrap();
        }
        Cgroups::over_folders(Layout { version: Version::V2, hierarchies }, "/").unwrap()
    }

    /// Runs ten minutes of ticks; returns the request in the pod's file.
    fn run(dir: &Path, mode: TunerMode, tuner: TunerMode) -> (Cold, String) {
        let cgroups = cgroups(dir);
        let (settings, metrics) = (ColdSettings { mode, ..ColdSettings::default() }, Metrics::default());
        let mut cold = Cold::new(settings, tuner);
        let pods = [Target::burstable(POD)];
        for tick in 0..60 {
            cold.tick(&cgroups, &pods, &metrics, cold.began + tick * settings.law.interval);
        }
        (cold, fs::read_to_string(dir.join(&POD[1..]).join("memory.reclaim")).unwrap_or_default())
    }

    #[test]
    fn only_the_mode_enforce_of_both_takes_memory() {
        use TunerMode::{Advise, Enforce, Off};
        for (mode, tuner, takes, findings) in [
            (Off, Enforce, false, 0),
            (Enforce, Off, false, 0),
            (Advise, Enforce, false, 1),
            (Enforce, Advise, false, 1),
            (Enforce, Enforce, true, 1),
        ] {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join(&POD[1..])).unwrap();
            fs::write(dir.path().join(&POD[1..]).join("memory.reclaim"), "").unwrap();
            let (cold, request) = run(dir.path(), mode, tuner);
            let found = cold.findings();
            assert_eq!((!request.is_empty(), found.len()), (takes, findings), "{mode:?} {tuner:?} {found:?}");
        }
    }

    #[test]
    fn a_kernel_without_the_file_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (cold, request) = run(dir.path(), TunerMode::Enforce, TunerMode::Enforce);
        assert_eq!(request, "");
        assert_eq!(cold.lacking().collect::<Vec<_>>(), [NO_FILE]);
        cold.end();
    }
}
