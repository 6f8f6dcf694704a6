//! What this kernel, these privileges and this machine allow, as data: one table of programs, and for each
//! what it needs, whether it is there, what stands in for it and what a person can do about it. Read by
//! `beelet doctor`.

use super::KernelError;
use beelet_ebpf_abi::fields::group;

/// Something the kernel half wants to do, and whether it can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// The program, or the facility that programs need.
    pub program: &'static str,
    /// What it needs from the kernel and the machine.
    pub needs: &'static str,
    /// Whether it works; if not, why.
    pub have: Result<(), KernelError>,
    /// Why it is left out although it would work: the kernel itself does what it is for. `None` where it
    /// isn't.
    pub spared: Option<&'static str>,
    /// What stands in when it doesn't.
    pub fallback: &'static str,
    /// What a person can do about it; empty while it works.
    pub remedy: String,
}

/// The words with which `beelet doctor` begins the row of a program that is spared.
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

/// A program of the object. A new hook family adds its rows here and its fields to `beelet_ebpf_abi::fields`;
/// nothing else in the loader knows programs by name.
pub(super) struct Program {
    /// Its name in the object, and that of its link's pin.
    pub(super) name: &'static str,
    pub(super) hook: Hook,
    pub(super) needs: &'static str,
    pub(super) fallback: &'static str,
    /// The fields that it can't do without: bits of [`group`].
    pub(super) fields: u32,
    /// The fields with which it is spared, and why.
    pub(super) spared: Option<(u32, &'static str)>,
}

/// The program whose presence `Meta::tracepoint` says to the others.
pub(super) const LISTENER_STATE: &str = "listener_state";
const POD_SOCKET: &str = "pod_socket";

/// The programs exchange words atomically, which arm64's BPF JIT can since 5.18
/// (arch/arm64/net/bpf_jit_comp.c).
const TRACING: &str = "Linux 5.15 (arm64: 5.18) with BTF (/sys/kernel/btf/vmlinux); CAP_BPF and CAP_PERFMON";
const ON_CGROUP: &str =
    "Linux 5.15 (arm64: 5.18) with BTF, cgroup2 (also beside v1), CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN";
const NO_WAITS: &str = "CPU time from cpu.stat, waiting from cpu.pressure: averages of 10 s, no histogram";
const NO_RECLAIM: &str = "memory.pressure: averages of 10 s, refaults and throttling included";

const fn tracepoint(name: &'static str, hook: &'static str, fallback: &'static str, fields: u32) -> Program {
    Program { name, hook: Hook::Tracepoint(hook), needs: TRACING, fallback, fields, spared: None }
}

/// A hook that is for nothing but the beginning of waits.
const fn wakeup(name: &'static str) -> Program {
    let spared = Some((group::RUN_DELAY, "this kernel counts itself how long each thread waits"));
    Program { spared, ..tracepoint(name, name, NO_WAITS, group::WAKEUP | group::THREAD) }
}

/// Every program, in the order of attaching. The tracepoint sees every listener of the machine, so it comes
/// first; a thread must be followed from its fork on before the scheduler's hooks ask for it.
pub(super) const PROGRAMS: &[Program] = &[
    tracepoint(
        LISTENER_STATE,
        "inet_sock_set_state",
        "pod_socket sees the listeners of pods; those opened before the start or passed in from outside are found \
         by sock_diag, once a probe period",
        group::LISTENER,
    ),
    Program {
        name: POD_SOCKET,
        hook: Hook::SockOps,
        needs: ON_CGROUP,
        fallback: "listener_state sees all listeners but those that listen without bind; sock_diag finds them once a \
                   probe period. Connections, retransmits and round-trip times are not counted",
        fields: group::LISTENER,
        spared: None,
    },
    tracepoint(
        "task_exited",
        "sched_process_exit",
        "containers that exit are seen when the runtime tells, or by the relist",
        group::CGROUP | group::EXIT_TASK | group::EXIT,
    ),
    tracepoint(
        "oom_victim",
        "mark_victim",
        "oom_kill in memory.events (v1: memory.oom_control), and the runtime's OOMKilled",
        group::CGROUP,
    ),
    tracepoint(
        "task_forked",
        "sched_process_fork",
        "run-queue and reclaim times are not counted for threads that begin later",
        group::FORK | group::THREAD,
    ),
    Program {
        name: "task_walk",
        hook: Hook::TaskWalk,
        needs: TRACING,
        fallback: "run-queue and reclaim times are not counted for threads that were there before",
        fields: group::THREAD,
        spared: None,
    },
    wakeup("sched_wakeup"),
    wakeup("sched_wakeup_new"),
    tracepoint("sched_switch", "sched_switch", NO_WAITS, group::CGROUP | group::SWITCH),
    tracepoint("memcg_reclaim_begin", "mm_vmscan_memcg_reclaim_begin", NO_RECLAIM, group::CGROUP),
    tracepoint("memcg_reclaim_end", "mm_vmscan_memcg_reclaim_end", NO_RECLAIM, group::CGROUP),
    tracepoint("direct_reclaim_begin", "mm_vmscan_direct_reclaim_begin", NO_RECLAIM, group::CGROUP),
    tracepoint("direct_reclaim_end", "mm_vmscan_direct_reclaim_end", NO_RECLAIM, group::CGROUP),
    traffic("traffic_in", Hook::SkbIngress),
    traffic("traffic_out", Hook::SkbEgress),
];

/// A hook that every packet of a pod passes.
const fn traffic(name: &'static str, hook: Hook) -> Program {
    let fallback = "the counters of the pod's interface, all its containers together";
    Program { name, hook, needs: ON_CGROUP, fallback, fields: 0, spared: None }
}

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

/// The row of the pins.
pub(super) const PINS: ProgramInfo = ProgramInfo {
    name: "pins",
    needs: "a bpf file system at the configured place, and nothing foreign at our folder in it",
    fallback: "the programs run while the agent does: what happens while it is restarted is found by sock_diag afterwards",
};

/// The row of the program that looks listeners up (check.rs), an object of its own.
pub(super) const SOCKET_CHECK: ProgramInfo = ProgramInfo {
    name: "socket_check",
    needs: "Linux 5.15 with BTF (/sys/kernel/btf/vmlinux), no lockdown=confidentiality; CAP_BPF, CAP_PERFMON and \
            CAP_NET_ADMIN",
    fallback: "sock_diag confirms listeners, one call per look; only a full accept queue counts as stalled, and liveness \
               probes send no canary; where that fails too, probes connect",
};

impl Program {
    /// Returns true if it is attached by [`super::Traffic`] alone, while somebody reads what it counts.
    pub(super) fn is_on_demand(&self) -> bool {
        matches!(self.hook, Hook::SkbIngress | Hook::SkbEgress)
    }

    pub(super) const fn info(&self) -> ProgramInfo {
        ProgramInfo { name: self.name, needs: self.needs, fallback: self.fallback }
    }
}

/// Every row that [`Capability`] can have.
pub fn programs() -> impl Iterator<Item = ProgramInfo> {
    PROGRAMS.iter().map(Program::info).chain([PINS, SOCKET_CHECK])
}

impl Capability {
    pub(super) fn new(
        row: &ProgramInfo,
        spared: Option<&'static str>,
        have: Result<(), KernelError>,
    ) -> Capability {
        let remedy = have.as_ref().err().map(KernelError::remedy).unwrap_or_default();
        Capability { program: row.name, needs: row.needs, have, spared, fallback: row.fallback, remedy }
    }
}

/// What stands in for all that knows of listeners when no program is there at all: they don't stand in for
/// each other then.
const OFF_FALLBACK: &str = "connect() for TCP probes, sock_diag, relist";

/// Rows for a kernel half that is off as a whole, for one reason.
pub(super) fn all_missing(why: &KernelError) -> Vec<Capability> {
    programs()
        .map(|row| {
            let of_listeners = [LISTENER_STATE, POD_SOCKET, SOCKET_CHECK.name].contains(&row.name);
            let fallback = if of_listeners { OFF_FALLBACK } else { row.fallback };
            Capability::new(&ProgramInfo { fallback, ..row }, None, Err(why.clone()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_says_what_it_needs_and_what_stands_in() {
        for row in all_missing(&KernelError::Off) {
            assert!(!row.needs.is_empty() && !row.fallback.is_empty() && !row.remedy.is_empty(), "{row:?}");
            assert_eq!(row.have, Err(KernelError::Off));
        }
    }
}
