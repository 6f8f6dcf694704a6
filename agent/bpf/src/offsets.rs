//! Which fields of which kernel structures the programs read, and which arguments of which tracepoints, as data; and
//! where this kernel has them.
//!
//! Each entry sets one read-only global of the object (`ebpf/src/kernel.rs` has the same names). What a kernel lacks
//! keeps its default, [`beelet_ebpf_abi::ABSENT`], and the programs do without.

use super::btf::{Argument, Btf, BtfError};

/// Task storage serves from this release on; before, the kernel may deadlock when it is used under the run-queue lock.
const TASK_STORAGE_SINCE: (u32, u32) = (6, 4);

/// A field that the programs want to read.
pub(super) struct Wanted {
    /// The read-only global that gets its offset.
    global: &'static str,
    /// The read-only global that gets its bit mask, for a bit field.
    mask: Option<&'static str>,
    structure: &'static str,
    path: &'static str,
}

const fn field(global: &'static str, structure: &'static str, path: &'static str) -> Wanted {
    Wanted { global, mask: None, structure, path }
}

/// Every field, of every hook family.
pub(super) const FIELDS: &[Wanted] = &[
    field("OFF_SOCK_CGROUP", "sock", "sk_cgrp_data.cgroup"),
    field("OFF_SOCK_PROTOCOL", "sock", "sk_protocol"),
    field("OFF_CGROUP_KN", "cgroup", "kn"),
    field("OFF_KERNFS_ID", "kernfs_node", "id"),
    field("OFF_SKC_NET", "sock_common", "skc_net.net"),
    field("OFF_NET_COOKIE", "net", "net_cookie"),
    field("OFF_SKC_FAMILY", "sock_common", "skc_family"),
    field("OFF_SKC_NUM", "sock_common", "skc_num"),
    field("OFF_SKC_RCV_SADDR", "sock_common", "skc_rcv_saddr"),
    field("OFF_SKC_V6_RCV_SADDR", "sock_common", "skc_v6_rcv_saddr"),
    Wanted {
        global: "OFF_SKC_IPV6ONLY",
        mask: Some("MASK_SKC_IPV6ONLY"),
        structure: "sock_common",
        path: "skc_ipv6only",
    },
    field("OFF_CGROUP_LEVEL", "cgroup", "level"),
    field("OFF_TASK_CGROUPS", "task_struct", "cgroups"),
    field("OFF_CSS_SET_CGROUP", "css_set", "dfl_cgrp"),
    field("OFF_TASK_PID", "task_struct", "pid"),
    field("OFF_TASK_TGID", "task_struct", "tgid"),
    field("OFF_TASK_FLAGS", "task_struct", "flags"),
    field("OFF_TASK_STATE", "task_struct", "__state"),
    field("OFF_TASK_CFS_RQ", "task_struct", "se.cfs_rq"),
    field("OFF_CFS_RQ_RQ", "cfs_rq", "rq"),
    field("OFF_RQ_CLOCK", "rq", "clock"),
    field("OFF_TASK_RUN_DELAY", "task_struct", "sched_info.run_delay"),
    field("OFF_TASK_LAST_ARRIVAL", "task_struct", "sched_info.last_arrival"),
    field("OFF_TASK_LAST_QUEUED", "task_struct", "sched_info.last_queued"),
    field("OFF_TASK_EXIT_CODE", "task_struct", "exit_code"),
    field("OFF_TASK_LEADER", "task_struct", "group_leader"),
    field("OFF_TASK_SIGNAL", "task_struct", "signal"),
    field("OFF_TASK_START", "task_struct", "start_time"),
    field("OFF_TASK_THREAD_PID", "task_struct", "thread_pid"),
    field("OFF_TASK_MM", "task_struct", "mm"),
    field("OFF_SIGNAL_LIVE", "signal_struct", "live"),
    field("OFF_SIGNAL_FLAGS", "signal_struct", "flags"),
    field("OFF_SIGNAL_EXIT_CODE", "signal_struct", "group_exit_code"),
    field("OFF_PID_LEVEL", "pid", "level"),
    field("OFF_PID_NUMBERS", "pid", "numbers"),
    field("OFF_MM_TOTAL_VM", "mm_struct", "total_vm"),
];

/// The counters of `mm_struct.rss_stat` and their indexes (include/linux/mm_types_task.h).
const RSS: &[(&str, u32)] = &[("OFF_MM_FILE", 0), ("OFF_MM_ANON", 1), ("OFF_MM_SHMEM", 3)];

/// What a tracepoint's argument is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// A pointer to a `task_struct`.
    Task,
    /// A plain integer.
    Integer,
}

impl Shape {
    fn fits(self, argument: &Argument) -> bool {
        match self {
            Shape::Task => argument.points_to.as_deref() == Some("task_struct"),
            Shape::Integer => argument.integer,
        }
    }
}

/// An argument that the programs want to read, by its name; where the BTF has no names, by its place among those of its
/// shape. Positions have changed between kernels.
struct WantedArgument {
    global: &'static str,
    tracepoint: &'static str,
    name: &'static str,
    shape: Shape,
    nth: usize,
}

const fn argument(
    global: &'static str,
    tracepoint: &'static str,
    name: &'static str,
    shape: Shape,
    nth: usize,
) -> WantedArgument {
    WantedArgument { global, tracepoint, name, shape, nth }
}

const ARGUMENTS: &[WantedArgument] = &[
    argument("POS_SWITCH_PREEMPT", "sched_switch", "preempt", Shape::Integer, 0),
    argument("POS_SWITCH_PREV", "sched_switch", "prev", Shape::Task, 0),
    argument("POS_SWITCH_NEXT", "sched_switch", "next", Shape::Task, 1),
    argument("POS_SWITCH_STATE", "sched_switch", "prev_state", Shape::Integer, 1),
    argument("POS_WAKEUP_TASK", "sched_wakeup", "p", Shape::Task, 0),
    argument("POS_FORK_CHILD", "sched_process_fork", "child", Shape::Task, 1),
    argument("POS_EXIT_TASK", "sched_process_exit", "p", Shape::Task, 0),
    argument("POS_OOM_TASK", "mark_victim", "task", Shape::Task, 0),
    argument("POS_OOM_PID", "mark_victim", "pid", Shape::Integer, 0),
];

/// The globals without which the listener programs stay idle (`socket_offsets_known` in ebpf/src/kernel.rs).
pub(super) const LISTENER_FIELDS: &[&str] = &[
    "OFF_SOCK_PROTOCOL",
    "OFF_SKC_NET",
    "OFF_NET_COOKIE",
    "OFF_SKC_FAMILY",
    "OFF_SKC_NUM",
    "OFF_SKC_RCV_SADDR",
];

/// The globals without which nothing can be said of a thread's cgroup (`cgroup_offsets_known` in ebpf/src/kernel.rs).
pub(super) const CGROUP_FIELDS: &[&str] = &[
    "OFF_TASK_PID",
    "OFF_TASK_CGROUPS",
    "OFF_CSS_SET_CGROUP",
    "OFF_CGROUP_KN",
    "OFF_KERNFS_ID",
    "OFF_CGROUP_LEVEL",
    "OFF_CGROUP_ANCESTORS",
];

/// The globals with which the kernel itself says how long threads wait (`kernel_counts_waits` in ebpf/src/kernel.rs).
pub(super) const RUN_DELAY_FIELDS: &[&str] = &[
    "OFF_TASK_CFS_RQ",
    "OFF_CFS_RQ_RQ",
    "OFF_RQ_CLOCK",
    "OFF_TASK_RUN_DELAY",
    "OFF_TASK_LAST_ARRIVAL",
    "OFF_TASK_LAST_QUEUED",
];

/// What this kernel has.
#[derive(Debug, Default)]
pub struct Offsets {
    /// The values of the read-only globals.
    pub globals: Vec<(&'static str, u32)>,
    /// What is missing: the global, and why.
    missing: Vec<(&'static str, BtfError)>,
}

impl Offsets {
    /// Looks everything up. `release` is the kernel's: major and minor.
    pub fn resolve(btf: &Btf, release: (u32, u32)) -> Offsets {
        let mut offsets = Offsets::default();
        for wanted in FIELDS {
            match btf.field(wanted.structure, wanted.path) {
                Ok(found) => {
                    offsets.globals.push((wanted.global, found.offset));
                    if let Some(mask) = wanted.mask {
                        offsets.globals.push((mask, 1 << found.bit));
                    }
                }
                Err(error) => offsets.missing.push((wanted.global, error)),
            }
        }
        offsets.ancestors(btf);
        offsets.rss(btf);
        for wanted in ARGUMENTS {
            match position(btf, wanted) {
                Ok(position) => offsets.globals.push((wanted.global, position)),
                Err(error) => offsets.missing.push((wanted.global, error)),
            }
        }
        offsets.globals.push(("USE_TASK_STORAGE", u32::from(has_task_storage(release))));
        offsets
    }

    /// Linux 6.1 turned the ids of a cgroup's ancestors into pointers.
    fn ancestors(&mut self, btf: &Btf) {
        let ids = btf.field("cgroup", "ancestor_ids");
        match (btf.field("cgroup", "ancestors"), ids) {
            (Ok(found), _) => self.globals.push(("OFF_CGROUP_ANCESTORS", found.offset)),
            (_, Ok(found)) => self.globals.push(("OFF_CGROUP_ANCESTOR_IDS", found.offset)),
            (Err(error), _) => self.missing.push(("OFF_CGROUP_ANCESTORS", error)),
        }
    }

    /// Linux 6.2 turned the numbers into per-CPU counters, which keep the bulk of their sum in one place.
    fn rss(&mut self, btf: &Btf) {
        let too_large = || BtfError::NoField("mm_struct.rss_stat at an offset below 4 GiB".to_owned());
        let plain = btf.field("mm_struct", "rss_stat.count").map(|field| (field.offset, 8));
        let place = plain.or_else(|_| {
            let array = btf.array("mm_struct", "rss_stat")?;
            let count = btf.field("percpu_counter", "count")?;
            if array.element != "percpu_counter" {
                return Err(BtfError::NoField("mm_struct.rss_stat of percpu_counters".to_owned()));
            }
            let offset = array.offset.checked_add(count.offset);
            Ok((offset.ok_or_else(too_large)?, array.element_bytes))
        });
        for (global, index) in RSS {
            let offset = place.clone().and_then(|(offset, stride)| {
                index.checked_mul(stride).and_then(|more| offset.checked_add(more)).ok_or_else(too_large)
            });
            match offset {
                Ok(offset) => self.globals.push((global, offset)),
                Err(error) => self.missing.push((global, error)),
            }
        }
    }

    /// As if this kernel lacked some of them.
    pub(super) fn without(mut self, globals: &[&'static str]) -> Offsets {
        self.globals.retain(|(global, _)| !globals.contains(global));
        let left_out =
            |global: &&'static str| (*global, BtfError::NoField(format!("{global} that may be used")));
        self.missing.extend(globals.iter().map(left_out));
        self
    }

    /// Fails with the first of `globals` that this kernel lacks.
    pub(super) fn require(&self, globals: &[&str]) -> Result<(), String> {
        match self.missing.iter().find(|(global, _)| globals.contains(global)) {
            Some((_, error)) => Err(error.to_string()),
            None => Ok(()),
        }
    }
}

/// For fuzzing: every name that is looked for.
pub fn names() -> impl Iterator<Item = String> {
    let fields =
        FIELDS.iter().flat_map(|wanted| std::iter::once(wanted.structure).chain(wanted.path.split('.')));
    let others =
        ["ancestors", "ancestor_ids", "rss_stat", "count", "percpu_counter"].into_iter().chain(fields);
    let tracepoints = ARGUMENTS.iter().map(|wanted| wanted.tracepoint).chain(["inet_sock_set_state"]);
    let of = |tracepoint: &str| ["btf_trace_", "__traceiter_"].map(|prefix| format!("{prefix}{tracepoint}"));
    let mut names: Vec<String> = others.map(str::to_owned).chain(tracepoints.flat_map(of)).collect();
    names.sort_unstable();
    names.dedup();
    names.into_iter()
}

/// Whether threads have task storage on this kernel, not the hash.
pub(super) fn has_task_storage(release: (u32, u32)) -> bool {
    release >= TASK_STORAGE_SINCE
}

/// Which argument of its tracepoint this is.
fn position(btf: &Btf, wanted: &WantedArgument) -> Result<u32, BtfError> {
    let arguments = btf.tracepoint(wanted.tracepoint)?;
    let fitting = || arguments.iter().enumerate().filter(|(_, argument)| wanted.shape.fits(argument));
    let named = fitting().find(|(_, argument)| argument.name.as_deref() == Some(wanted.name));
    named
        .or_else(|| fitting().nth(wanted.nth))
        .and_then(|(index, _)| u32::try_from(index).ok())
        .ok_or_else(|| BtfError::NoField(format!("{} of tracepoint {}", wanted.name, wanted.tracepoint)))
}

/// Checks that `inet_sock_set_state` still passes (sk, oldstate, newstate), by name where the BTF has names, by type
/// where not: the program reads them by position.
pub fn check_set_state(btf: &Btf) -> Result<(), String> {
    let arguments = btf.tracepoint("inet_sock_set_state").map_err(|error| error.to_string())?;
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
        _ => Err(
            "the tracepoint inet_sock_set_state does not begin with (sk, oldstate, newstate) in this kernel"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What not every kernel has; the programs have another way then.
    const OPTIONAL: &[&str] = &["POS_SWITCH_STATE", "POS_OOM_TASK", "POS_OOM_PID"];

    #[test]
    fn the_running_kernel_has_every_field() {
        // Any kernel with BTF at all since 5.15 has them; without BTF there is nothing to check.
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            eprintln!(
                "SKIPPED the_running_kernel_has_every_field: this kernel has no /sys/kernel/btf/vmlinux"
            );
            return;
        };
        let btf = Btf::parse(bytes).unwrap();
        let offsets = Offsets::resolve(&btf, (6, 4));
        let missing: Vec<_> =
            offsets.missing.iter().filter(|(global, _)| !OPTIONAL.contains(global)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(offsets.require(LISTENER_FIELDS), Ok(()));
        assert_eq!(offsets.require(CGROUP_FIELDS), Ok(()));
        assert_eq!(offsets.require(RUN_DELAY_FIELDS), Ok(()));
        assert_eq!(check_set_state(&btf), Ok(()));
        let value = |name: &str| offsets.globals.iter().find(|(global, _)| *global == name).map(|(_, v)| *v);
        assert_ne!(value("POS_SWITCH_PREV"), value("POS_SWITCH_NEXT"));
        assert!(value("POS_OOM_TASK").or(value("POS_OOM_PID")).is_some());
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
    fn a_field_can_be_done_without() {
        let offsets = Offsets { globals: vec![("OFF_RQ_CLOCK", 8), ("OFF_SKC_NUM", 4)], missing: Vec::new() };
        let offsets = offsets.without(&["OFF_RQ_CLOCK"]);
        assert_eq!(offsets.globals, [("OFF_SKC_NUM", 4)]);
        let why = offsets.require(RUN_DELAY_FIELDS).unwrap_err();
        assert!(why.contains("OFF_RQ_CLOCK"), "{why}");
    }

    #[test]
    fn a_missing_field_is_named() {
        let offsets = Offsets {
            globals: Vec::new(),
            missing: vec![("OFF_NET_COOKIE", BtfError::NoField("net.net_cookie".to_owned()))],
        };
        assert_eq!(offsets.require(&["OFF_SKC_NUM"]), Ok(()));
        assert_eq!(
            offsets.require(LISTENER_FIELDS),
            Err("the kernel's BTF has no field net.net_cookie".to_owned())
        );
    }
}
