//! Positions in this kernel of the fields and arguments that the programs read ([`beelet_ebpf_abi::fields`]).
//!
//! Each position sets one read-only global of an object. A missing field keeps its default,
//! [`beelet_ebpf_abi::ABSENT`], and the programs work without it.

use super::btf::{Argument, Btf, BtfError};
use beelet_ebpf_abi::fields::{ATTACHED, CHECK, KernelField, SCHEDULER, Shape, Source};

/// First release with usable task storage; earlier kernels may deadlock when programs use it under the
/// run-queue lock.
const TASK_STORAGE_SINCE: (u32, u32) = (6, 4);

/// The fields of this kernel.
#[derive(Debug, Default)]
pub struct Offsets {
    /// The values of the read-only globals.
    pub globals: Vec<(&'static str, u32)>,
    /// Missing fields, each with the reason.
    missing: Vec<(&'static KernelField, BtfError)>,
}

impl Offsets {
    /// Looks up all fields that the attached programs read. `release` is the kernel's: major and minor.
    #[must_use]
    pub fn resolve(btf: &Btf, release: (u32, u32)) -> Offsets {
        let mut offsets = Offsets::of(btf, ATTACHED);
        offsets.globals.push(("USE_TASK_STORAGE", u32::from(has_task_storage(release))));
        offsets
    }

    /// Looks up all fields that `socket_check` reads.
    pub(super) fn of_check(btf: &Btf) -> Offsets {
        Offsets::of(btf, CHECK)
    }

    /// Looks up all fields that the scheduler reads.
    pub(super) fn of_scheduler(btf: &Btf) -> Offsets {
        Offsets::of(btf, SCHEDULER)
    }

    fn of(btf: &Btf, fields: &'static [KernelField]) -> Offsets {
        let mut offsets = Offsets::default();
        for field in fields {
            match value_of(btf, &field.source) {
                Ok(value) => offsets.globals.push((field.global, value)),
                Err(error) => offsets.missing.push((field, error)),
            }
        }
        offsets
    }

    /// Removes some fields, as if this kernel lacked them.
    pub(super) fn without(mut self, globals: &[&'static str]) -> Offsets {
        self.globals.retain(|(global, _)| !globals.contains(global));
        let left_out = ATTACHED
            .iter()
            .filter(|field| globals.contains(&field.global))
            .map(|field| (field, BtfError::NoField(format!("{} that may be used", field.global))));
        self.missing.extend(left_out);
        self
    }

    /// Fails with the first field of these groups ([`beelet_ebpf_abi::fields::group`]) that this kernel
    /// lacks.
    pub(super) fn require(&self, groups: u32) -> Result<(), BtfError> {
        let has = |global: &str| self.globals.iter().any(|(name, _)| *name == global);
        let lacks = |field: &KernelField| field.groups & groups != 0 && !field.or.is_some_and(has);
        match self.missing.iter().find(|(field, _)| lacks(field)) {
            Some((_, error)) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Returns the missing fields, one error each.
    pub(super) fn missing(&self) -> impl Iterator<Item = &BtfError> {
        self.missing.iter().map(|(_, error)| error)
    }
}

fn value_of(btf: &Btf, source: &Source) -> Result<u32, BtfError> {
    match *source {
        Source::Field { structure, path } => btf.field(structure, path).map(|found| found.offset),
        Source::Mask { structure, path } => btf.field(structure, path).map(|found| 1 << found.bit),
        Source::RssCounter { index } => rss_counter(btf, index),
        Source::Argument { tracepoint, name, shape, nth } => position(btf, tracepoint, name, shape, nth),
    }
}

/// Returns the offset of an RSS counter. Linux 6.2 turned the plain numbers into per-CPU counters, which keep
/// the bulk of their sum in one place.
fn rss_counter(btf: &Btf, index: u32) -> Result<u32, BtfError> {
    let too_large = || BtfError::NoField("mm_struct.rss_stat at an offset below 4 GiB".to_owned());
    let (offset, stride) = match btf.field("mm_struct", "rss_stat.count") {
        Ok(field) => (field.offset, 8),
        Err(_) => {
            let array = btf.array("mm_struct", "rss_stat")?;
            let count = btf.field("percpu_counter", "count")?;
            if array.element != "percpu_counter" {
                return Err(BtfError::NoField("mm_struct.rss_stat of percpu_counters".to_owned()));
            }
            (array.offset.checked_add(count.offset).ok_or_else(too_large)?, array.element_bytes)
        }
    };
    index.checked_mul(stride).and_then(|more| offset.checked_add(more)).ok_or_else(too_large)
}

/// Returns the position of a tracepoint's argument: by name, or, if the BTF has no names, by its rank among
/// the arguments of its shape. Positions have changed between kernels.
fn position(btf: &Btf, tracepoint: &str, name: &str, shape: Shape, nth: usize) -> Result<u32, BtfError> {
    let fits = |argument: &Argument| match shape {
        Shape::Task => argument.points_to.as_deref() == Some("task_struct"),
        Shape::Integer => argument.integer,
    };
    let arguments = btf.tracepoint(tracepoint)?;
    let fitting = || arguments.iter().enumerate().filter(|(_, argument)| fits(argument));
    fitting()
        .find(|(_, argument)| argument.name.as_deref() == Some(name))
        .or_else(|| fitting().nth(nth))
        .and_then(|(index, _)| u32::try_from(index).ok())
        .ok_or_else(|| BtfError::NoField(format!("{name} of tracepoint {tracepoint}")))
}

/// Returns every name that is looked up, for fuzzing.
pub fn names() -> impl Iterator<Item = String> {
    let mut names: Vec<String> =
        ["mm_struct", "rss_stat", "count", "percpu_counter"].map(str::to_owned).to_vec();
    let hooks =
        |tracepoint: &str| ["btf_trace_", "__traceiter_"].map(|prefix| format!("{prefix}{tracepoint}"));
    names.extend(hooks("inet_sock_set_state"));
    for field in ATTACHED.iter().chain(CHECK).chain(SCHEDULER) {
        match field.source {
            Source::Field { structure, path } | Source::Mask { structure, path } => {
                names.extend(std::iter::once(structure).chain(path.split('.')).map(str::to_owned));
            }
            Source::RssCounter { .. } => {}
            Source::Argument { tracepoint, .. } => names.extend(hooks(tracepoint)),
        }
    }
    names.sort_unstable();
    names.dedup();
    names.into_iter()
}

/// Returns true if this kernel has usable task storage, so that the hash of threads is not needed.
pub(super) fn has_task_storage(release: (u32, u32)) -> bool {
    release >= TASK_STORAGE_SINCE
}

/// Checks that `inet_sock_set_state` still passes (sk, oldstate, newstate), by name if the BTF has names,
/// otherwise by type: the program reads them by position.
///
/// # Errors
/// The arguments differ, or the kernel lacks the tracepoint.
pub fn check_set_state(btf: &Btf) -> Result<(), BtfError> {
    const TRACEPOINT: &str = "inet_sock_set_state";
    let arguments = btf.tracepoint(TRACEPOINT)?;
    let fits = |argument: &Argument, name: &str| argument.name.as_deref().is_none_or(|found| found == name);
    match arguments.as_slice() {
        [sk, old, new, ..]
            if sk.points_to.as_deref() == Some("sock")
                && old.integer
                && new.integer
                && fits(sk, "sk")
                && fits(old, "oldstate")
                && fits(new, "newstate") =>
        {
            Ok(())
        }
        _ => Err(BtfError::OtherArguments { tracepoint: TRACEPOINT, expected: "(sk, oldstate, newstate)" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_ebpf_abi::fields::group;

    /// Fields that some kernels lack; the programs use another way then.
    const OPTIONAL: &[&str] = &["POS_SWITCH_STATE", "POS_OOM_TASK", "POS_OOM_PID"];
    const EITHER: [&str; 2] = ["OFF_CGROUP_ANCESTORS", "OFF_CGROUP_ANCESTOR_IDS"];
    const ALL: u32 = u32::MAX;

    fn running_kernel() -> Option<Btf> {
        std::fs::read("/sys/kernel/btf/vmlinux").ok().map(|bytes| Btf::parse(bytes).unwrap())
    }

    #[test]
    fn the_running_kernel_has_every_field() {
        // Every kernel with BTF since 5.15 has them; without BTF the test is skipped.
        let Some(btf) = running_kernel() else {
            eprintln!(
                "SKIPPED the_running_kernel_has_every_field: this kernel has no /sys/kernel/btf/vmlinux"
            );
            return;
        };
        let offsets = Offsets::resolve(&btf, (6, 4));
        let known = |field: &KernelField| OPTIONAL.contains(&field.global) || EITHER.contains(&field.global);
        let missing: Vec<_> = offsets.missing.iter().filter(|(field, _)| !known(field)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(offsets.require(ALL), Ok(()));
        assert_eq!(Offsets::of_check(&btf).missing, []);
        assert_eq!(check_set_state(&btf), Ok(()));
        let value = |name: &str| offsets.globals.iter().find(|(global, _)| *global == name).map(|(_, v)| *v);
        assert_ne!(value("POS_SWITCH_PREV"), value("POS_SWITCH_NEXT"));
        assert!(value("POS_OOM_TASK").or(value("POS_OOM_PID")).is_some());
        assert!(EITHER.iter().any(|one| value(one).is_some()));
        assert_eq!(value("USE_TASK_STORAGE"), Some(1));
    }

    #[test]
    fn task_storage_is_used_where_it_cannot_deadlock() {
        for (release, expected) in
            [((5, 15), false), ((6, 1), false), ((6, 3), false), ((6, 4), true), ((7, 0), true)]
        {
            assert_eq!(has_task_storage(release), expected, "{release:?}");
        }
    }

    #[test]
    fn an_ignored_field_counts_as_missing() {
        let offsets = Offsets { globals: vec![("OFF_RQ_CLOCK", 8), ("OFF_SKC_NUM", 4)], missing: Vec::new() };
        let offsets = offsets.without(&["OFF_RQ_CLOCK"]);
        assert_eq!(offsets.globals, [("OFF_SKC_NUM", 4)]);
        let why = offsets.require(group::RUN_DELAY).unwrap_err().to_string();
        assert!(why.contains("OFF_RQ_CLOCK"), "{why}");
        assert_eq!(offsets.require(group::LISTENER), Ok(()));
    }

    fn lacking(global: &str) -> Offsets {
        let field = ATTACHED.iter().find(|field| field.global == global).unwrap();
        Offsets { globals: Vec::new(), missing: vec![(field, BtfError::NoField("x.y".to_owned()))] }
    }

    #[test]
    fn a_missing_field_is_named_where_a_program_needs_it() {
        let lacks = |global, groups| lacking(global).require(groups).is_err();
        assert!(lacks("OFF_NET_COOKIE", group::LISTENER) && !lacks("OFF_NET_COOKIE", group::CGROUP));
        assert!(lacks("OFF_TASK_PID", group::CGROUP) && lacks("OFF_TASK_PID", group::THREAD));
        assert!(!lacks("OFF_TASK_MM", ALL));
        let why = lacking("OFF_NET_COOKIE").require(group::LISTENER).unwrap_err().to_string();
        assert_eq!(why, "the kernel's BTF has no field x.y");
    }

    #[test]
    fn a_field_that_moved_is_missing_only_if_both_places_are() {
        let mut offsets = lacking(EITHER[0]);
        assert!(offsets.require(group::CGROUP).is_err());
        offsets.globals.push((EITHER[1], 8));
        assert_eq!(offsets.require(group::CGROUP), Ok(()));
    }
}
