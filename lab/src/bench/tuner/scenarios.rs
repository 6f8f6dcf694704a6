//! Interference with the server.

use super::HOG;
use anyhow::Result;
use beelet_tests::manifests;
use serde_json::Value;

/// Kind of interference.
#[derive(Debug)]
pub(super) struct Scenario {
    /// Name for `--scenario`.
    pub(super) name: &'static str,
    /// Rows: the server's 99th percentile without the tuner and with `enforce`, and the cost for the others:
    /// CPU time, or their stalls in a scenario that is short of memory.
    pub(super) rows: [&'static str; 3],
    /// CPU limit of the server; none if empty.
    pub(super) limit: &'static str,
    /// Row with caps on any kernel, which the tuner by itself uses only where they harm no other pod; none if
    /// empty.
    pub(super) capped: &'static str,
    /// Neighbours of the server.
    pub(super) neighbours: &'static [Neighbour],
    /// All pods together have less memory than the neighbours want, and the server reads its answers from a
    /// file, which stays in memory unless it is reclaimed.
    pub(super) short_of_memory: bool,
    /// The server is a Guaranteed pod with one CPU: once in the shared pool, and once with the CPU for
    /// itself. The tuner is off.
    pub(super) pins: bool,
    /// Factor of the measuring time; a scenario with more than 1 runs only on request.
    pub(super) times: u32,
}

/// Workload next to the server.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) name: &'static str,
    /// Requests of CPU and memory; without them the pod is BestEffort.
    pub(super) requests: (&'static str, &'static str),
    pub(super) work: Work,
}

/// Work of a neighbour.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// Busy threads per CPU.
    Busy(usize),
    /// A job per CPU, each running short processes in sequence.
    Build,
    /// Reads a file of this many MiB repeatedly.
    Read(usize),
    /// Allocates this many MiB, frees them, and repeats.
    Grow(usize),
    /// No pod: uses this many thousandths of a CPU, in a cgroup of the node next to the pods'.
    Daemon(usize),
}

impl Work {
    /// Returns the arguments of `testapp hog`.
    pub(super) fn words(self) -> Result<[String; 2]> {
        let cpus = std::thread::available_parallelism()?.get();
        let (kind, number) = match self {
            Work::Busy(per_cpu) => ("busy", per_cpu * cpus),
            Work::Build => ("build", cpus),
            Work::Read(mebibytes) => ("memory", mebibytes),
            Work::Grow(mebibytes) => ("grow", mebibytes),
            Work::Daemon(permille) => ("duty", permille),
        };
        Ok([kind.to_owned(), number.to_string()])
    }
}

impl Neighbour {
    pub(super) fn qos(&self) -> &'static str {
        if self.requests == ("", "") { "BestEffort" } else { "Burstable" }
    }

    /// Returns its pod, which is idle until a connection to [`HOG`].
    pub(super) fn manifest(&self) -> Result<Value> {
        let [kind, number] = self.work.words()?;
        let command = ["/bin/testapp", "hog", "--on", &HOG.to_string(), &kind, &number];
        Ok(manifests::with_resources(manifests::pod(self.name, &command), self.requests, ("", "")))
    }
}

const fn best_effort(name: &'static str, work: Work) -> Neighbour {
    Neighbour { name, requests: ("", ""), work }
}

const fn scenario(name: &'static str, rows: [&'static str; 3], neighbours: &'static [Neighbour]) -> Scenario {
    Scenario { name, rows, limit: "", capped: "", neighbours, short_of_memory: false, pins: false, times: 1 }
}

/// All scenarios.
pub(super) const SCENARIOS: [Scenario; 7] = [
    scenario("busy", ["busy_off", "busy_enforce", "busy_cpu_lost"], &[best_effort("batch", Work::Busy(2))]),
    Scenario {
        // A tenth of a second of its average use is 30 ms, and its requests arrive at random.
        limit: "350m",
        ..scenario("quota", ["quota_off", "quota_enforce", "quota_cpu_lost"], &[])
    },
    scenario(
        "burstable",
        ["burstable_off", "burstable_enforce", "burstable_cpu_lost"],
        // The same requests as the server's, so their weights are equal.
        &[Neighbour { name: "greedy", requests: ("300m", "64Mi"), work: Work::Busy(2) }],
    ),
    scenario(
        "crowd",
        ["crowd_off", "crowd_enforce", "crowd_cpu_lost"],
        &[best_effort("crowd", Work::Busy(20))],
    ),
    Scenario {
        capped: "memory_capped",
        short_of_memory: true,
        ..scenario(
            "memory",
            ["memory_off", "memory_enforce", "memory_stood_still"],
            &[best_effort("reader", Work::Read(1024)), best_effort("grower", Work::Grow(256))],
        )
    },
    Scenario {
        pins: true,
        times: 2,
        ..scenario(
            "pinned",
            ["pinned_off", "pinned_on", "pinned_cpu_lost"],
            // Of two CPUs one is reserved, and the server requests the other.
            &[best_effort("batch", Work::Busy(2)), best_effort("crowd", Work::Busy(20))],
        )
    },
    Scenario {
        times: 10,
        ..scenario(
            "mixed",
            ["mixed_off", "mixed_enforce", "mixed_cpu_lost"],
            &[
                best_effort("batch", Work::Busy(2)),
                Neighbour { name: "build", requests: ("250m", "128Mi"), work: Work::Build },
                best_effort("daemon", Work::Daemon(100)),
            ],
        )
    },
];
