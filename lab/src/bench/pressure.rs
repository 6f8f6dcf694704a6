//! Time from the moment at which the pods' memory crosses the hard eviction threshold to the agent's choice
//! of a pod to evict, as a client of its API sees it, on real pods below a small limit of their own.
//!
//! The crossing is observed from outside the agent: a thread reads the pods' cgroup a thousand times per
//! second. A second row counts the rounds in which the kernel's OOM killer acted, whether or not a pod was
//! evicted as well: eviction exists to prevent that.

use super::Row;
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Control, Options, monotonic_ns};
use beelet_tests::containerd::Containerd;
use beelet_tests::machine::memory_kib;
use beelet_tests::manifests::{self, CONTROL};
use beelet_tests::oom::OomWatch;
use beelet_tests::pods::{PodView, Watch};
use beelet_tests::workdir::{self, PATIENCE, interrupted};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use xtask::progress::Step;

/// Bound of the p99, in milliseconds.
const BOUND: f64 = 1000.0;
/// Memory limit of all pods, and the available memory below which a pod is evicted.
const PODS_MIB: u64 = 384;
const THRESHOLD_MIB: u64 = 96;
/// Allocation rate of the hog: MiB per step, and the time between steps.
const BITE_MIB: u64 = 4;
const BITE_PERIOD: Duration = Duration::from_millis(15);

/// Measures `crossing_to_decision` and counts `oom_kills`.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    let rounds = if quick { 12 } else { 60 };
    let step = Step::start("pressure: memory allocated until a pod is evicted");
    let containerd = Containerd::start(&workdir::target_dir().join("bench/node"))?;
    let mut options = Options::on(&containerd)
        .kubelet("systemReserved", json!({ "memory": format!("{}Ki", memory_kib()? - PODS_MIB * 1024) }))
        .kubelet("evictionHard", json!({ "memory.available": format!("{THRESHOLD_MIB}Mi") }));
    options.binary = Some(binary.to_path_buf());
    let agent = Agent::start(options)?;
    let kubepods =
        containerd.cgroup().folder("memory", "/kubepods").context("the memory controller is missing")?;
    let evicted = watch_evictions(&agent)?;
    let (mut samples, mut kills) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        step.detail(&format!("{round} of {rounds} rounds"));
        let (milliseconds, killed) = one_round(&agent, &kubepods, &evicted, round)?;
        samples.extend(milliseconds);
        kills.push(f64::from(u8::from(killed)));
    }
    step.done(&format!("{rounds} rounds"));
    Ok(vec![
        Row::new("pressure", "crossing_to_decision", "ms", samples, BOUND),
        Row::new("pressure", "oom_kills", "per round", kills, 0.0),
    ])
}

/// Returns the milliseconds from the crossing to the decision, if there was one, and true if the kernel
/// killed a process, before or after.
fn one_round(
    agent: &Agent,
    kubepods: &Path,
    evicted: &mpsc::Receiver<Evicted>,
    round: usize,
) -> Result<(Option<f64>, bool)> {
    let (name, file) = (format!("hog-{round}"), format!("hog-{round}.yaml"));
    let pod = manifests::pod(&name, &["/bin/testapp", "serve", "--control", &CONTROL.to_string()]);
    // A request, so that the pod is admitted although memory was short a moment ago.
    let pod = manifests::with_resources(pod, ("10m", "1Mi"), ("", ""));
    agent.apply(&file, pod.to_string())?;
    let running = |watch: &Watch| watch.pod(&name).filter(|pod| pod.ready() && pod.ip().is_some()).cloned();
    let pod = agent.until("the hog to run", running)?;
    let mut control = Control::connect(pod.ip().context("the pod has no address")?, CONTROL)?;
    let crossing = Crossing::watch(kubepods.to_path_buf());
    let mut kills = OomWatch::start(kubepods)?;
    let began = Instant::now();
    let mut biting = true;
    let decided = loop {
        match evicted.recv_timeout(BITE_PERIOD) {
            Ok(seen) if seen.pod == name => break Some(seen.at),
            Ok(_) => continue,
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the agent's event stream broke"),
            Err(mpsc::RecvTimeoutError::Timeout) if interrupted() => bail!("interrupted"),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if biting && control.send(&format!("hold {BITE_MIB}")).is_err() {
            // The pod was killed; if by the agent, the decision will arrive.
            biting = false;
        }
        let killed = |watch: &Watch| watch.pod(&name).and_then(killed_by_the_kernel);
        if !biting && agent.inspect(killed)?.unwrap_or(false) {
            break None;
        }
        if began.elapsed() > PATIENCE {
            bail!("no eviction within {} s", PATIENCE.as_secs());
        }
    };
    let crossed = crossing.end();
    agent.remove(&file)?;
    agent.until("the hog to be gone", |watch| watch.pod(&name).is_none().then_some(()))?;
    let killed = decided.is_none() || kills.count()? > 0;
    match (decided, crossed) {
        (Some(decided), Some(crossed)) => Ok((Some(decided.saturating_sub(crossed) as f64 / 1e6), killed)),
        (Some(_), None) => bail!("a pod was evicted although the threshold was not crossed"),
        (None, _) => Ok((None, killed)),
    }
}

/// Returns true if the container was terminated by the OOM killer.
fn killed_by_the_kernel(pod: &PodView) -> Option<bool> {
    let main = pod.container("main")?;
    let states = [main.state.as_ref(), main.last_state.as_ref()];
    let ends = states.into_iter().flatten().filter_map(|state| state.terminated.as_ref());
    Some(ends.into_iter().any(|end| end.reason.as_deref() == Some("OOMKilled")))
}

/// Time at which the pods' available memory was first below the threshold.
struct Crossing {
    at: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Crossing {
    fn watch(kubepods: PathBuf) -> Crossing {
        let (at, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (first, ended) = (Arc::clone(&at), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                if available(&kubepods).is_some_and(|bytes| bytes < THRESHOLD_MIB << 20) {
                    first.store(monotonic_ns(), Ordering::Relaxed);
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Crossing { at, over, thread }
    }

    /// Returns the time in `CLOCK_MONOTONIC` nanoseconds.
    fn end(self) -> Option<u64> {
        self.over.store(true, Ordering::Relaxed);
        // The thread only reads files.
        let _ = self.thread.join();
        Some(self.at.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }
}

/// Returns the pods' limit less their working set, in bytes.
fn available(kubepods: &Path) -> Option<u64> {
    let number = |file: &str| -> Option<u64> {
        std::fs::read_to_string(kubepods.join(file)).ok()?.trim().parse().ok()
    };
    let stat = std::fs::read_to_string(kubepods.join("memory.stat")).ok()?;
    let line = |name: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    let usage = number("memory.usage_in_bytes").or_else(|| number("memory.current"))?;
    let limit = number("memory.limit_in_bytes").or_else(|| number("memory.max"))?;
    let inactive = line("total_inactive_file").or_else(|| line("inactive_file"))?;
    Some(limit.saturating_sub(usage.saturating_sub(inactive)))
}

/// Pod that the agent decided to evict, with the time at which a client received the decision.
struct Evicted {
    pod: String,
    at: u64,
}

/// Watches the pods on a separate thread, which timestamps every decision on arrival.
fn watch_evictions(agent: &Agent) -> Result<mpsc::Receiver<Evicted>> {
    let mut known = std::collections::BTreeSet::new();
    let suffix = format!("-{}", beelet_tests::agent::NODE);
    super::watch_pods(agent, move |watch, at| {
        let evicted = watch.pods.values().filter(|pod| is_evicted(pod));
        let new = evicted.filter(|pod| known.insert(pod.uid().to_owned()));
        let name = |pod: &PodView| pod.pod.metadata.name.clone().unwrap_or_default();
        new.map(|pod| Evicted { pod: name(pod).trim_end_matches(&suffix).to_owned(), at }).collect::<Vec<_>>()
    })
}

fn is_evicted(pod: &PodView) -> bool {
    pod.pod.status.as_ref().and_then(|status| status.reason.as_deref()) == Some("Evicted")
}
