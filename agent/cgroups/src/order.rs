//! The order of writing several limits, and the meaning of a value as a limit.
//!
//! During a change no cgroup may be limited more tightly than by both the old and the new values, and the
//! kernel's rule that a child's CPU share fits into its parent's must hold after every write. So raised
//! limits are written first, parents before children, and lowered limits last, children before parents.

use std::cmp::Ordering;

use beelet_policy::resources::cgroups::OOM_GROUP;

/// Change of a file of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The cgroup, below the cgroup root.
    pub cgroup: String,
    /// The file.
    pub file: String,
    /// Current content.
    pub from: String,
    /// New content.
    pub to: String,
}

/// Sorts `changes` into the required order of writing. Stable among equals.
pub fn sort(changes: &mut [Change]) {
    changes.sort_by_cached_key(|change| {
        let depth = change.cgroup.split('/').filter(|part| !part.is_empty()).count();
        let depth = i64::try_from(depth).unwrap_or(i64::MAX);
        if tightens(change) { (1, -depth) } else { (0, depth) }
    });
}

/// Returns true if `change` lowers a limit.
#[must_use]
pub fn tightens(change: &Change) -> bool {
    compare(&change.file, &change.to, &change.from) == Ordering::Less
}

/// Returns true if two contents of `file` mean the same to the kernel, which rounds memory down to multiples
/// of `page`.
#[must_use]
pub fn same(file: &str, a: &str, b: &str, page: u64) -> bool {
    let bytes = |limit: Limit| match limit {
        // "No limit" of memory reads back on version 1 as the largest multiple of a page.
        Limit::Amount(amount) if amount >= (i64::MAX as u64 / page) * page => Limit::None,
        Limit::Amount(amount) => Limit::Amount(amount / page * page),
        Limit::None => Limit::None,
    };
    match (limit(a), limit(b)) {
        (Some(a), Some(b)) if file.starts_with("memory.") && file != OOM_GROUP => bytes(a) == bytes(b),
        (Some(a), Some(b)) => a == b,
        _ => a.split_whitespace().eq(b.split_whitespace()),
    }
}

/// Compares two contents of `file` as limits.
fn compare(file: &str, a: &str, b: &str) -> Ordering {
    if file == "cpu.max" {
        // quota/period, compared without division
        let share = |text: &str| {
            let mut parts = text.split_whitespace();
            (parts.next().and_then(limit), parts.next().and_then(|p| p.parse().ok()).unwrap_or(100_000u64))
        };
        return match (share(a), share(b)) {
            ((Some(Limit::Amount(qa)), pa), (Some(Limit::Amount(qb)), pb)) => {
                (u128::from(qa) * u128::from(pb)).cmp(&(u128::from(qb) * u128::from(pa)))
            }
            ((qa, _), (qb, _)) => qa.cmp(&qb),
        };
    }
    limit(a).cmp(&limit(b))
}

/// An amount, or no limit, which is greater than any amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    Amount(u64),
    None,
}

fn limit(text: &str) -> Option<Limit> {
    match text.trim() {
        "max" | "-1" => Some(Limit::None),
        digits => digits.parse().ok().map(Limit::Amount),
    }
}

/// Returns the bytes of a memory limit; `None` for no limit.
#[must_use]
pub fn bytes(text: &str) -> Option<u64> {
    match limit(text) {
        Some(Limit::Amount(bytes)) => Some(bytes),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(cgroup: &str, file: &str, from: &str, to: &str) -> Change {
        Change { cgroup: cgroup.into(), file: file.into(), from: from.into(), to: to.into() }
    }

    #[track_caller]
    fn check(changes: &[(&str, &str, &str, &str)], expected: &[&str]) {
        let mut changes: Vec<Change> = changes.iter().map(|(c, f, a, b)| change(c, f, a, b)).collect();
        sort(&mut changes);
        assert_eq!(changes.iter().map(|c| c.cgroup.as_str()).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn raised_limits_are_written_from_the_top_and_lowered_ones_from_the_bottom() {
        check(&[("/k/p", "memory.max", "1", "2"), ("/k", "memory.max", "1", "2")], &["/k", "/k/p"]);
        check(&[("/k", "memory.max", "2", "1"), ("/k/p", "memory.max", "2", "1")], &["/k/p", "/k"]);
        check(&[("/k/a", "memory.max", "2", "1"), ("/k/b", "memory.max", "1", "2")], &["/k/b", "/k/a"]);
        check(
            &[
                ("/k", "memory.max", "9", "8"),
                ("/k/a", "memory.max", "max", "4"),
                ("/k/b", "memory.max", "4", "max"),
            ],
            &["/k/b", "/k/a", "/k"],
        );
    }

    #[test]
    fn no_limit_is_wider_than_any() {
        for (file, none) in [("memory.limit_in_bytes", "-1"), ("cpu.max", "max 100000"), ("pids.max", "max")]
        {
            check(&[("/k/p", file, "5", none), ("/k", file, none, "5")], &["/k/p", "/k"]);
        }
    }

    #[test]
    fn cpu_is_compared_as_a_share_of_its_period() {
        check(
            &[
                ("/a", "cpu.max", "50000 100000", "10000 10000"),
                ("/b", "cpu.max", "1000 1000", "60000 100000"),
            ],
            &["/a", "/b"],
        );
    }

    #[track_caller]
    fn check_same(file: &str, a: &str, b: &str, expected: bool) {
        assert_eq!(same(file, a, b, 4096), expected, "{file}: {a:?} and {b:?}");
    }

    #[test]
    fn values_that_the_kernel_rounds_are_recognized() {
        check_same("memory.limit_in_bytes", "-1", "9223372036854771712", true);
        check_same("memory.max", "max", "max", true);
        check_same("memory.max", "8191", "4096", true);
        check_same("memory.max", "8192", "4096", false);
        check_same("memory.max", "4096", "max", false);
        check_same("memory.oom.group", "0", "1", false);
        check_same("pids.max", "8191", "4096", false);
        check_same("cpu.max", "max 100000", "max  100000", true);
        check_same("cpu.max", "50000 100000", "50000 10000", false);
        check_same("cpu.cfs_quota_us", "-1", "-1", true);
        check_same("cpu.shares", "1024", "1024", true);
        check_same("cpuset.cpus", "0-1", "0-1", true);
        check_same("cpuset.cpus", "0-1", "0", false);
    }

    proptest::proptest! {
        /// Written in this order, no child is ever wider than a parent that was and will be at least as wide.
        #[test]
        fn a_child_fits_its_parent_after_every_write(
            parent in (1u64..20, 1u64..20), child in (1u64..20, 1u64..20)
        ) {
            let fit = |child: u64, parent: u64| child.min(parent);
            let (old, new) = ((parent.0, fit(child.0, parent.0)), (parent.1, fit(child.1, parent.1)));
            let mut changes = vec![
                change("/k", "pids.max", &old.0.to_string(), &new.0.to_string()),
                change("/k/p", "pids.max", &old.1.to_string(), &new.1.to_string()),
            ];
            sort(&mut changes);
            let mut now = old;
            for change in changes {
                let value = change.to.parse().unwrap();
                if change.cgroup == "/k" { now.0 = value } else { now.1 = value }
                proptest::prop_assert!(now.1 <= now.0, "{:?} -> {:?} via {:?}", old, new, now);
            }
        }
    }
}
