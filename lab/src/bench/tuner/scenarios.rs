//! What goes on beside the server.

use super::HOG;
use anyhow::Result;
use beelet_tests::manifests;
use serde_json::Value;

/// One kind of trouble for the server.
#[derive(Debug)]
pub(super) struct Scenario {
    /// What `--scenario` calls it.
    pub(super) name: &'static str,
    /// Its rows: the server's 99th percentile with the tuner off and with `enforce`, and what that costs the
    /// others: CPU time, or where memory is short how long they stand still.
    pub(super) rows: [&'static str; 3],
    /// The server's own CPU limit in trouble; none where it is empty.
    pub(super) limit: &'static str,
    /// Its row with caps on any kernel, which by themselves come only where they harm nobody else; none where
    /// it is empty.
    pub(super) capped: &'static str,
    /// Who is beside it.
    pub(super) neighbours: &'static [Neighbour],
    /// All pods together have less memory than the neighbours want, and the server reads its answers from a
    /// file, which is in memory as long as nobody takes that.
    pub(super) short_of_memory: bool,
    /// How many times as long as others it is measured: if it is more than once, only where it is asked for.
    pub(super) times: u32,
}

/// Somebody beside the server.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub(super) name: &'static str,
    /// Requests of CPU and memory: without them it is BestEffort.
    pub(super) requests: (&'static str, &'static str),
    pub(super) work: Work,
}

/// What a neighbour does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// So many busy threads per CPU.
    Busy(usize),
    /// One job per CPU, each a short process after another.
    Build,
    /// Reads a file of so many MiB again and again.
    Read(usize),
    /// Takes so many MiB, gives them back, and begins again.
    Grow(usize),
    /// No pod: so many thousandths of a CPU, in a cgroup of the node's beside the pods'.
    Daemon(usize),
}

impl Work {
    /// The arguments of `testapp hog`.
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

    /// Its pod, quiet until somebody connects to [`HOG`].
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
    Scenario { name, rows, limit: "", capped: "", neighbours, short_of_memory: false, times: 1 }
}

/// Every kind of trouble.
pub(super) const SCENARIOS: [Scenario; 6] = [
    scenario("busy", ["busy_off", "busy_enforce", "busy_cpu_lost"], &[best_effort("batch", Work::Busy(2))]),
    Scenario {
        // A tenth of a second of what it takes on average is 30 ms, and its requests come as they like.
        limit: "350m",
        ..scenario("quota", ["quota_off", "quota_enforce", "quota_cpu_lost"], &[])
    },
    scenario(
        "burstable",
        ["burstable_off", "burstable_enforce", "burstable_cpu_lost"],
        // As much as the server requests, so their weights are the same.
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
