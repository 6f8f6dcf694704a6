//! Whose growth made a container wait for memory.
//!
//! A thread that needs memory where none is free frees some itself, about as much as it needs
//! (`try_to_free_pages` and `try_to_free_mem_cgroup_pages` in mm/vmscan.c). So those that grow are those
//! whose threads free most, and the kernel programs count who freed how many pages. What is to be decided is
//! whose count concerns whom: memory may be short on the machine, or only below a limit.

use std::collections::BTreeMap;

/// A cgroup that uses this much of its own limit, in percent, is at it.
const AT_LIMIT_PERCENT: u64 = 95;

/// Returns true if a cgroup that uses so many bytes is at its limit, and reclaims for its own sake.
#[must_use]
pub fn is_at_limit(usage: u64, limit: Option<u64>) -> bool {
    limit.is_some_and(|limit| usage >= limit / 100 * AT_LIMIT_PERCENT)
}

/// Below which limit a container's memory is short, if it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortBelow {
    /// Its own.
    Container,
    /// Its pod's.
    Pod,
    /// That of a class of pods, or of all.
    Pods,
}

/// A container, as far as it may make others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// The UID of its pod.
    pub pod: &'a str,
    /// Where its memory is short.
    pub short: ShortBelow,
}

/// Pages that the threads of each cgroup freed lately, by cgroup2 id.
#[derive(Clone, Copy, Debug, Default)]
pub struct Freed<'a> {
    /// While the machine was short of memory.
    pub machine: &'a [(u64, u64)],
    /// While a cgroup was at its limit: their own, or one above.
    pub limits: &'a [(u64, u64)],
}

/// Those whose growth made the container `of` wait for memory: their cgroup2 ids, and their shares (0 to 1)
/// of what was freed, the largest first. The container itself is among them if it grew. `places` are the
/// node's containers by cgroup2 id; of one that is not among them nothing is known.
#[must_use]
pub fn growers(of: u64, freed: Freed<'_>, places: &BTreeMap<u64, Place<'_>>) -> Vec<(u64, f64)> {
    let Some(own) = places.get(&of) else { return Vec::new() };
    // A limit concerns only what is below it, so a cgroup outside of pods is none of theirs.
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
    fn on_a_short_machine_all_that_grow_count() {
        let places = [(WEB, "w", Pods), (BATCH, "b", Pods)];
        let machine = &[(DAEMON, 100), (BATCH, 250), (WEB, 50), (BATCH, 100)];
        let freed = Freed { machine, limits: &[] };
        check(&places, freed, WEB, &[(BATCH, 0.7), (DAEMON, 0.2), (WEB, 0.1)]);
        check(&places, freed, DAEMON, &[]);
        check(&places, Freed::default(), WEB, &[]);
    }

    #[test]
    fn what_is_at_a_limit_of_its_own_squeezes_nobody_else() {
        let places = [(WEB, "w", Pods), (BATCH, "b", Pods), (HOG, "h", Container)];
        let freed = Freed { machine: &[], limits: &[(HOG, 9000), (BATCH, 90), (WEB, 10), (DAEMON, 500)] };
        check(&places, freed, WEB, &[(BATCH, 0.9), (WEB, 0.1)]);
        check(&places, freed, HOG, &[(HOG, 1.0)]);
    }

    #[test]
    fn a_pods_limit_concerns_its_containers_alone() {
        let places = [(WEB, "w", Pod), (SIDECAR, "w", Pod), (BATCH, "b", Pods), (HOG, "w", Container)];
        let limits = &[(SIDECAR, 75), (WEB, 25), (BATCH, 1000), (HOG, 1000)];
        check(&places, Freed { machine: &[], limits }, WEB, &[(SIDECAR, 0.75), (WEB, 0.25)]);
        check(&places, Freed { machine: &[], limits }, BATCH, &[(BATCH, 1.0)]);
        let both = Freed { machine: &[(BATCH, 100)], limits };
        check(&places, both, WEB, &[(BATCH, 0.5), (SIDECAR, 0.375), (WEB, 0.125)]);
    }

    #[test]
    fn a_cgroup_is_at_its_limit_shortly_before_it() {
        assert!(is_at_limit(95, Some(100)) && is_at_limit(100, Some(100)) && is_at_limit(0, Some(0)));
        assert!(!is_at_limit(94, Some(100)) && !is_at_limit(u64::MAX, None));
        assert!(!is_at_limit(u64::MAX - (1 << 62), Some(u64::MAX)));
    }
}
