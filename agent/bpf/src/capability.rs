//! What this kernel, these privileges and this machine allow, as data: one table of programs, and for each what it
//! needs, whether it is there, what stands in for it and what a person can do about it. Read by `beelet doctor`.

use super::{check, offsets};

/// Something the kernel half wants to do, and whether it can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// The program, or the facility that programs need.
    pub program: &'static str,
    /// What it needs from the kernel and the machine.
    pub needs: &'static str,
    /// Whether it works; if not, why.
    pub have: Result<(), String>,
    /// Why it is left out although it would work: the kernel itself does what it is for. `None` where it isn't.
    pub spared: Option<&'static str>,
    /// What stands in when it doesn't.
    pub fallback: &'static str,
    /// What a person can do about it; empty while it works.
    pub remedy: String,
}

/// How `beelet doctor` begins its word on a program that is spared.
pub const NOT_NEEDED: &str = "not needed";

/// How a program gets its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    /// sock_ops, on the pods' root cgroup.
    SockOps,
    /// Packets that sockets below the pods' root cgroup receive.
    SkbIngress,
    /// Packets that they send.
    SkbEgress,
    /// A BTF tracepoint of that name.
    Tracepoint(&'static str),
    /// Run once for each thread, when the programs are loaded. Nothing stays attached.
    TaskWalk,
}

/// A program of the object. A new hook family adds its rows here and its fields to `offsets.rs`; nothing else in the
/// loader knows programs by name.
pub(super) struct Program {
    /// Its name in the object, and that of its link's pin.
    pub(super) name: &'static str,
    pub(super) hook: Hook,
    pub(super) needs: &'static str,
    pub(super) fallback: &'static str,
    /// The read-only globals it can't do without.
    pub(super) fields: &'static [&'static [&'static str]],
    /// With which read-only globals it is spared, and why.
    pub(super) spared: Option<(&'static [&'static str], &'static str)>,
}

/// The program whose presence `Meta::tracepoint` tells to the others.
pub(super) const LISTENER_STATE: &str = "listener_state";

const TRACING: &str = "Linux 5.15 with BTF (/sys/kernel/btf/vmlinux); CAP_BPF and CAP_PERFMON";
const ON_CGROUP: &str =
    "Linux 5.15 with BTF, cgroup2 (also beside v1), CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN";
const NO_WAITS: &str = "CPU time from cpu.stat, waiting from cpu.pressure: averages of 10 s, no histogram";
const NO_RECLAIM: &str = "memory.pressure: averages of 10 s, refaults and throttling included";

const fn tracepoint(
    name: &'static str,
    hook: &'static str,
    fallback: &'static str,
    fields: &'static [&'static [&'static str]],
) -> Program {
    Program { name, hook: Hook::Tracepoint(hook), needs: TRACING, fallback, fields, spared: None }
}

/// A hook that is for nothing but the beginning of waits.
const fn wakeup(name: &'static str) -> Program {
    let spared = Some((offsets::RUN_DELAY_FIELDS, "this kernel counts itself how long each thread waits"));
    Program { spared, ..tracepoint(name, name, NO_WAITS, &[&["POS_WAKEUP_TASK", "OFF_TASK_PID"]]) }
}

/// Every program, in the order of attaching. The tracepoint sees every listener of the machine, so it comes first; a
/// thread must be followed from its fork on before the scheduler's hooks ask for it.
pub(super) const PROGRAMS: &[Program] = &[
    tracepoint(
        LISTENER_STATE,
        "inet_sock_set_state",
        "pod_socket sees the listeners of pods; those opened before the start or passed in from outside are found \
         by sock_diag, once a probe period",
        &[offsets::LISTENER_FIELDS],
    ),
    Program {
        name: "pod_socket",
        hook: Hook::SockOps,
        needs: ON_CGROUP,
        fallback: "listener_state sees all listeners but those that listen without bind; sock_diag finds them once a \
                   probe period. Connections, retransmits and round-trip times are not counted",
        fields: &[offsets::LISTENER_FIELDS],
        spared: None,
    },
    tracepoint(
        "task_exited",
        "sched_process_exit",
        "containers that exit are seen when the runtime tells, or by the relist",
        &[
            offsets::CGROUP_FIELDS,
            &[
                "POS_EXIT_TASK",
                "OFF_TASK_TGID",
                "OFF_TASK_SIGNAL",
                "OFF_TASK_LEADER",
                "OFF_TASK_EXIT_CODE",
                "OFF_SIGNAL_FLAGS",
                "OFF_SIGNAL_EXIT_CODE",
                "OFF_SIGNAL_LIVE",
                "OFF_TASK_START",
            ],
        ],
    ),
    tracepoint(
        "oom_victim",
        "mark_victim",
        "oom_kill in memory.events (v1: memory.oom_control), and the runtime's OOMKilled",
        &[offsets::CGROUP_FIELDS],
    ),
    tracepoint(
        "task_forked",
        "sched_process_fork",
        "run-queue and reclaim times are not counted for threads that begin later",
        &[&["POS_FORK_CHILD", "OFF_TASK_PID"]],
    ),
    Program {
        name: "task_walk",
        hook: Hook::TaskWalk,
        needs: TRACING,
        fallback: "run-queue and reclaim times are not counted for threads that were there before",
        fields: &[&["OFF_TASK_PID"]],
        spared: None,
    },
    wakeup("sched_wakeup"),
    wakeup("sched_wakeup_new"),
    tracepoint(
        "sched_switch",
        "sched_switch",
        NO_WAITS,
        &[offsets::CGROUP_FIELDS, &["POS_SWITCH_PREV", "POS_SWITCH_NEXT"]],
    ),
    tracepoint("memcg_reclaim_begin", "mm_vmscan_memcg_reclaim_begin", NO_RECLAIM, &[offsets::CGROUP_FIELDS]),
    tracepoint("memcg_reclaim_end", "mm_vmscan_memcg_reclaim_end", NO_RECLAIM, &[offsets::CGROUP_FIELDS]),
    tracepoint(
        "direct_reclaim_begin",
        "mm_vmscan_direct_reclaim_begin",
        NO_RECLAIM,
        &[offsets::CGROUP_FIELDS],
    ),
    tracepoint("direct_reclaim_end", "mm_vmscan_direct_reclaim_end", NO_RECLAIM, &[offsets::CGROUP_FIELDS]),
    Program {
        name: "traffic_in",
        hook: Hook::SkbIngress,
        needs: ON_CGROUP,
        fallback: "the counters of the pod's interface, all its containers together",
        fields: &[],
        spared: None,
    },
    Program {
        name: "traffic_out",
        hook: Hook::SkbEgress,
        needs: ON_CGROUP,
        fallback: "the counters of the pod's interface, all its containers together",
        fields: &[],
        spared: None,
    },
];

/// The rows that aren't programs.
pub(super) const PINS: &str = "pins";
pub(super) const PINS_NEED: &str =
    "a bpf file system at the configured place, and nothing foreign at our folder in it";
pub(super) const PINS_FALLBACK: &str = "the programs run while the agent does: what happens while it is restarted is found by sock_diag afterwards";

/// A row of the table without a machine: for documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramInfo {
    /// As in [`Capability::program`].
    pub name: &'static str,
    /// As in [`Capability::needs`].
    pub needs: &'static str,
    /// As in [`Capability::fallback`].
    pub fallback: &'static str,
}

/// Every row that [`Capability`] can have.
pub fn programs() -> impl Iterator<Item = ProgramInfo> {
    let pins = ProgramInfo { name: PINS, needs: PINS_NEED, fallback: PINS_FALLBACK };
    let check = ProgramInfo { name: check::NAME, needs: check::NEEDS, fallback: check::FALLBACK };
    let info = |one: &Program| ProgramInfo { name: one.name, needs: one.needs, fallback: one.fallback };
    PROGRAMS.iter().map(info).chain([pins, check])
}

/// What stands in for all that knows of listeners.
const OFF_FALLBACK: &str = "connect() for TCP probes, sock_diag, relist";

/// What stands in when no program is there at all: those that stand in for each other don't.
fn off_fallback(program: &Program) -> &'static str {
    match program.name {
        LISTENER_STATE | "pod_socket" => OFF_FALLBACK,
        _ => program.fallback,
    }
}

/// Rows for a kernel half that is off as a whole, for one reason.
pub(super) fn all_missing(why: &str, remedy: &str) -> Vec<Capability> {
    let program = |program: &Program| Capability {
        program: program.name,
        needs: program.needs,
        have: Err(why.to_owned()),
        spared: None,
        fallback: off_fallback(program),
        remedy: remedy.to_owned(),
    };
    let other = |program, needs, fallback| Capability {
        program,
        needs,
        have: Err(why.to_owned()),
        spared: None,
        fallback,
        remedy: remedy.to_owned(),
    };
    let check = other(check::NAME, check::NEEDS, OFF_FALLBACK);
    PROGRAMS.iter().map(program).chain([other(PINS, PINS_NEED, PINS_FALLBACK), check]).collect()
}

/// What to do about a refusal, by what the kernel answered.
pub(super) fn remedy(error: &str, kind: Option<std::io::ErrorKind>) -> String {
    use std::io::ErrorKind;
    match kind {
        Some(ErrorKind::PermissionDenied) => {
            "run as root with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN; in a container also allow bpf(2) in its seccomp \
             profile; see /sys/kernel/security/lockdown and the sysctl kernel.unprivileged_bpf_disabled"
        }
        Some(ErrorKind::NotFound) => "use a kernel built with CONFIG_DEBUG_INFO_BTF and CONFIG_BPF_SYSCALL",
        _ if error.contains("cgroup") => {
            "mount cgroup2 (beside v1: mount -t cgroup2 none /sys/fs/cgroup/unified) and check cgroupRoot"
        }
        _ if error.contains("BTF has no") => "use a kernel from 5.15 on, built with CONFIG_DEBUG_INFO_BTF",
        _ => "please report it with the kernel's version and this message",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_says_what_it_needs_and_what_stands_in() {
        for row in all_missing("BPF is off", "set bpf: Auto") {
            assert!(!row.needs.is_empty() && !row.fallback.is_empty() && !row.remedy.is_empty(), "{row:?}");
            assert_eq!(row.have, Err("BPF is off".to_owned()));
        }
    }
}
