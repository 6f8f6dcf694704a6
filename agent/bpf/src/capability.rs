//! The abilities of this kernel, the agent's privileges and this machine, as data: one table of programs with
//! each program's requirements, state, fallback and remedy. `beelet doctor` shows the table.

use super::KernelError;
use beelet_ebpf_abi::fields::group;

/// A program or facility of the kernel half, and its state on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// The program, or the facility that programs need.
    pub program: &'static str,
    /// Requirements on the kernel and the machine.
    pub needs: &'static str,
    /// `Ok` if the program works, otherwise the reason.
    pub have: Result<(), KernelError>,
    /// Reason for leaving the program out although it would work: the kernel itself does the program's job.
    /// `None` if the program is not left out.
    pub spared: Option<&'static str>,
    /// Replacement while the program does not work.
    pub fallback: &'static str,
    /// Advice to the administrator; empty while the program works.
    pub remedy: String,
}

/// First words of `beelet doctor`'s row for a program that is left out.
pub const NOT_NEEDED: &str = "not needed";

/// Attachment point of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    /// The sock_ops hook of the pods' root cgroup.
    SockOps,
    /// Packets that sockets below the pods' root cgroup receive.
    SkbIngress,
    /// Packets that sockets below the pods' root cgroup send.
    SkbEgress,
    /// The BTF tracepoint of this name.
    Tracepoint(&'static str),
    /// A single run per thread when the programs are loaded. Nothing stays attached.
    TaskWalk,
}

/// A program of the object. A new hook family adds its rows here and its fields to `beelet_ebpf_abi::fields`;
/// nothing else in the loader knows programs by name.
pub(super) struct Program {
    /// Name of the program in the object, and of its link's pin.
    pub(super) name: &'static str,
    pub(super) hook: Hook,
    pub(super) needs: &'static str,
    pub(super) fallback: &'static str,
    /// Fields that the program requires: bits of [`group`].
    pub(super) fields: u32,
    /// Fields whose presence makes the program unnecessary, and the reason.
    pub(super) spared: Option<(u32, &'static str)>,
}

/// The program whose presence `Meta::tracepoint` announces to the others.
pub(super) const LISTENER_STATE: &str = "listener_state";
const POD_SOCKET: &str = "pod_socket";

/// The programs exchange words atomically, which arm64's BPF JIT supports since 5.18
/// (arch/arm64/net/bpf_jit_comp.c).
const TRACING: &str = "Linux 5.15 (arm64: 5.18) with BTF (/sys/kernel/btf/vmlinux); CAP_BPF and CAP_PERFMON";
const ON_CGROUP: &str =
    "Linux 5.15 (arm64: 5.18) with BTF, cgroup2 (also next to v1), CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN";
const NO_WAITS: &str = "CPU time from cpu.stat, waiting from cpu.pressure: averages of 10 s, no histogram";
const NO_RECLAIM: &str = "memory.pressure: averages of 10 s, refaults and throttling included";

const fn tracepoint(name: &'static str, hook: &'static str, fallback: &'static str, fields: u32) -> Program {
    Program { name, hook: Hook::Tracepoint(hook), needs: TRACING, fallback, fields, spared: None }
}

/// Builds the row of a hook that only marks the beginning of waits.
const fn wakeup(name: &'static str) -> Program {
    let spared = Some((group::RUN_DELAY, "this kernel itself counts how long each thread waits"));
    Program { spared, ..tracepoint(name, name, NO_WAITS, group::WAKEUP | group::THREAD) }
}

/// Every program, in the order of attaching. The tracepoint sees every listener of the machine, so it comes
/// first; a thread must be followed from its fork on before the scheduler's hooks ask for it.
pub(super) const PROGRAMS: &[Program] = &[
    tracepoint(
        LISTENER_STATE,
        "inet_sock_set_state",
        "pod_socket sees the listeners of pods; sock_diag finds those opened before the start or passed in from \
         outside, once per probe period",
        group::LISTENER,
    ),
    Program {
        name: POD_SOCKET,
        hook: Hook::SockOps,
        needs: ON_CGROUP,
        fallback: "listener_state sees all listeners but those that listen without bind; sock_diag finds them once per \
                   probe period. Connections, retransmits and round-trip times are not counted",
        fields: group::LISTENER,
        spared: None,
    },
    tracepoint(
        "task_exited",
        "sched_process_exit",
        "container exits are seen by the runtime's events or the next relist",
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
        "run-queue and reclaim times are not counted for threads started later",
        group::FORK | group::THREAD,
    ),
    Program {
        name: "task_walk",
        hook: Hook::TaskWalk,
        needs: TRACING,
        fallback: "run-queue and reclaim times are not counted for threads started before the agent",
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

/// Builds the row of a hook that every packet of a pod passes.
const fn traffic(name: &'static str, hook: Hook) -> Program {
    let fallback = "the counters of the pod's interface, all its containers together";
    Program { name, hook, needs: ON_CGROUP, fallback, fields: 0, spared: None }
}

/// A row of the table without a machine's state, for documentation.
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
    needs: "a bpf file system at the configured path, and no foreign files in beelet's folder there",
    fallback: "the programs run only while the agent does; sock_diag finds changes during its restarts afterwards",
};

/// The row of the program that looks up listeners (check.rs), which is an object of its own.
pub(super) const SOCKET_CHECK: ProgramInfo = ProgramInfo {
    name: "socket_check",
    needs: "Linux 5.15 with BTF (/sys/kernel/btf/vmlinux), no lockdown=confidentiality; CAP_BPF, CAP_PERFMON and \
            CAP_NET_ADMIN",
    fallback: "sock_diag confirms listeners, one call per check; only a full accept queue counts as stalled, and \
               liveness probes send no canary; if sock_diag fails too, probes connect",
};

impl Program {
    /// Returns true if only [`super::Traffic`] attaches the program, while a subscriber reads its counters.
    pub(super) fn is_on_demand(&self) -> bool {
        matches!(self.hook, Hook::SkbIngress | Hook::SkbEgress)
    }

    pub(super) const fn info(&self) -> ProgramInfo {
        ProgramInfo { name: self.name, needs: self.needs, fallback: self.fallback }
    }
}

/// Returns every row that [`Capability`] can have.
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

/// Fallback of every listener program if no program runs at all: the programs cannot replace each other then.
const OFF_FALLBACK: &str = "connect() for TCP probes, sock_diag, relist";

/// Returns the rows of a kernel half that is off as a whole, for one reason.
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
