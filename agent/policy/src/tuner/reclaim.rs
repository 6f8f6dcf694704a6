//! Attribution of a container's memory waits to growing cgroups.
//!
//! A thread that needs memory when none is free frees some itself, about as much as it needs
//! (`try_to_free_pages` and `try_to_free_mem_cgroup_pages` in mm/vmscan.c). So the growing cgroups are those
//! whose threads free most, and the kernel programs count the pages freed by each. This module decides whose
//! count affects whom: memory may be short on the machine, or only below a limit.

use std::collections::BTreeMap;

/// Usage in percent of its own limit from which a cgroup is at that limit.
const AT_LIMIT_PERCENT: u64 = 95;

/// Returns true if a cgroup with this usage is at its limit, and reclaims for its own sake.
#[must_use]
pub fn is_at_limit(usage: u64, limit: Option<u64>) -> bool {
    limit.is_some_and(|limit| usage >= limit / 100 * AT_LIMIT_PERCENT)
}

/// The limit below which a container's memory may be short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortBelow {
    /// The container's own limit.
    Container,
    /// Its pod's limit.
    Pod,
    /// The limit of a class of pods, or of all.
    Pods,
}

/// A container's position among those that may make others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// The pod's UID.
    pub pod: &'a str,
    /// The limit below which its memory is short.
    pub short: ShortBelow,
}

/// Pages that the threads of each cgroup freed recently, by cgroup2 id.
#[derive(Clone, Copy, Debug, Default)]
pub struct Freed<'a> {
    /// Pages freed while the machine was short of memory.
    pub machine: &'a [(u64, u64)],
    /// Pages freed while a cgroup was at its limit: their own, or a parent.
    pub limits: &'a [(u64, u64)],
}

/// Returns the containers whose growth made the container `of` wait for memory: their cgroup2 ids, and their
/// shares (0 to 1) of the freed pages, the largest first. Includes the container itself if it grew. `places`
/// has the node's containers by cgroup2 id; others are unknown.
#[must_use]
pub fn growers(of: u64, freed: Freed<'_>, places: &BTreeMap<u64, Place<'_>>) -> Vec<(u64, f64)> {
    let Some(own) = places.get(&of) else { return Vec::new() };
    // A limit affects only cgroups below it, so a cgroup outside of pods cannot have reached one of theirs.
    let concerns = |(id, _): &&(u64, u64)| match (own.short, places.get(id)) {
        (_, None) => false,
        (ShortBelow::Container, Some(_)) => *id == of,
        (ShortBelow::Pod, Some(other)) => other.short == ShortBelow::Pod && other.pod == own.pod,
        (ShortBelow::Pods, Some(other)) => other.short == ShortBelow::Pods,
    };
    let mut pages: BTreeMap<u64, u64> = BTreeMap::new();
    for (id, freed) in freed.machine.iter().chain(freed.limits.iter().filter(concerns)) {
        let sum = pages.entry(*id).or_default();
        *sum = sum.saturating_add(*freed);
    }
    let all = pages.values().fold(0_u64, |sum, pages| sum.saturating_add(*pages)).max(1);
    let mut shares: Vec<(u64, f64)> =
        pages.into_iter().map(|(id, pages)| (id, pages as f64 / all as f64)).collect();
    shares.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use ShortBelow::{Container, Pod, Pods};

    const WEB: u64 = 1;
    const BATCH: u64 = 2;
    const SIDECAR: u64 = 3;
    const HOG: u64 = 4;
    const DAEMON: u64 = 9;

    #[track_caller]
    fn check(places: &[(u64, &str, ShortBelow)], freed: Freed<'_>, of: u64, expected: &[(u64, f64)]) {
        let places = places.iter().map(|(id, pod, short)| (*id, Place { pod, short: *short })).collect();
        assert_eq!(growers(of, freed, &places), expected);
    }

    #[test]
    fn on_a_short_machine_all_growing_cgroups_count() {
        let places = [(WEB, "w", Pods), (BATCH, "b", Pods)];
        let machine = &[(DAEMON, 100), (BATCH, 250), (WEB, 50), (BATCH, 100)];
        let freed = Freed { machine, limits: &[] };
        check(&places, freed, WEB, &[(BATCH, 0.7), (DAEMON, 0.2), (WEB, 0.1)]);
        check(&places, freed, DAEMON, &[]);
        check(&places, Freed::default(), WEB, &[]);
    }

    #[test]
    fn a_container_at_its_own_limit_affects_no_other() {
        let places = [(WEB, "w", Pods), (BATCH, "b", Pods), (HOG, "h", Container)];
        let freed = Freed { machine: &[], limits: &[(HOG, 9000), (BATCH, 90), (WEB, 10), (DAEMON, 500)] };
        check(&places, freed, WEB, &[(BATCH, 0.9), (WEB, 0.1)]);
        check(&places, freed, HOG, &[(HOG, 1.0)]);
    }

    #[test]
    fn a_pods_limit_affects_only_its_containers() {
        let places = [(WEB, "w", Pod), (SIDECAR, "w", Pod), (BATCH, "b", Pods), (HOG, "w", Container)];
        let limits = &[(SIDECAR, 75), (WEB, 25), (BATCH, 1000), (HOG, 1000)];
        check(&places, Freed { machine: &[], limits }, WEB, &[(SIDECAR, 0.75), (WEB, 0.25)]);
        check(&places, Freed { machine: &[], limits }, BATCH, &[(BATCH, 1.0)]);
        let both = Freed { machine: &[(BATCH, 100)], limits };
        check(&places, both, WEB, &[(BATCH, 0.5), (SIDECAR, 0.375), (WEB, 0.125)]);
    }

    #[test]
    fn a_cgroup_is_at_its_limit_shortly_before_reaching_it() {
        assert!(is_at_limit(95, Some(100)) && is_at_limit(100, Some(100)) && is_at_limit(0, Some(0)));
        assert!(!is_at_limit(94, Some(100)) && !is_at_limit(u64::MAX, None));
        assert!(!is_at_limit(u64::MAX - (1 << 62), Some(u64::MAX)));
    }
}
