//! `cargo xtask bench`: measures beelet's promises end to end on a release build, as a client of its API sees
//! them, on a real containerd.
//!
//! Each row is a promise, or a related number without one. A promise names the statistic that its bound
//! applies to: `p99`, the `median` (of differences of two measurements, whose outliers are the machine's and
//! of either sign, and of ratios), or the `value` of a single sample. `--json` prints one object per line:
//! `{"what","row","unit","n","p50","p99","held","bound","ok"}`, the last three null without a bound, plus
//! comparisons and a note, if any. The exit code is 0 if every bound holds. `cargo bench -p bench` measures
//! the decisions alone.

mod bpf;
mod cluster;
mod density;
mod devices;
mod exec;
mod fleet;
mod footprint;
mod lifecycle;
mod observe;
mod owner;
mod podsapi;
mod pressure;
mod probe_edits;
mod probes;
mod simulated;
mod tuner;

use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, monotonic_ns};
use beelet_tests::containerd::block_on;
use beelet_tests::machine::stolen_seconds;
use beelet_tests::pods::Watch;
use beelet_tests::{images, requires, workdir};
use clap::ValueEnum;
use console::style;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Instant;
use xtask::progress::Step;
use xtask::setup::{self, Part};
use xtask::shell;

/// Measure beelet's promises on real pods, and compare them with the bounds.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Measurements to make [default: all]
    #[arg(value_enum)]
    what: Vec<What>,

    /// Agent to measure instead of a release build, e.g. from `cargo xtask package`
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,

    /// Fewer rounds: under a minute each
    #[arg(long)]
    quick: bool,

    /// Scenarios of the tuner to measure: busy, quota, burstable, crowd, memory, mixed (takes an hour, never
    /// by default)
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    scenario: Vec<String>,

    /// Number of agents of `fleet`
    #[arg(long, value_name = "NUMBER")]
    nodes: Option<usize>,

    /// Print one JSON object per row instead of a table
    #[arg(long)]
    json: bool,
}

/// Subject of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Cost of the kernel programs for the scheduler and the sockets
    Bpf,
    /// Node of a cluster, as a client of the API server sees it (KUBE_APISERVER)
    Cluster,
    /// Node of up to 1,000 pods: resources, start rate, and time until a restarted agent is back
    Density,
    /// Choosing devices, and admitting pods with devices
    Devices,
    /// Many agents on one API server: requests, watches and CPU per node, at rest, during an update and after
    /// an outage (KUBE_APISERVER, KUBE_CONTROLLER_MANAGER, KUBE_SCHEDULER; never by default)
    Fleet,
    /// CPU and memory of the agent
    Footprint,
    /// Time from a listener's start or end to the pod's readiness
    Probes,
    /// Only those rows of `probes` that are about exec and HTTP probes, and about changed probes
    Requests,
    /// Time from low memory to the eviction decision
    Pressure,
    /// Time from a container's end to its next start, and from a manifest to a running pod
    Lifecycle,
    /// Node of up to 5,000 pods on an in-memory runtime: growth of the cost with the number of pods
    Simulated,
    /// Latency of a server next to a noisy neighbour, without and with the tuner
    Tuner,
}

/// Statistic that a bound applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Statistic {
    P99,
    Median,
    /// Single sample.
    Value,
}

impl Statistic {
    fn name(self) -> &'static str {
        match self {
            Self::P99 => "p99",
            Self::Median => "median",
            Self::Value => "value",
        }
    }
}

/// Promise and its measurement.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    row: &'static str,
    unit: &'static str,
    n: usize,
    p50: f64,
    p99: f64,
    /// Statistic that must not exceed the bound; None without a bound.
    held: Option<Statistic>,
    bound: Option<f64>,
    ok: Option<bool>,
    /// Results of alternatives.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    compare: BTreeMap<&'static str, f64>,
    /// Information that a reader needs to understand the numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

impl Row {
    /// Returns the row of these samples; their 99th percentile must not exceed `bound`.
    fn new(what: &'static str, row: &'static str, unit: &'static str, samples: Vec<f64>, bound: f64) -> Row {
        Row::unbound(what, row, unit, samples).within(Statistic::P99, bound)
    }

    /// Returns the row of these samples; their median must not exceed `bound`.
    fn by_median(
        what: &'static str,
        row: &'static str,
        unit: &'static str,
        samples: Vec<f64>,
        bound: f64,
    ) -> Row {
        Row::unbound(what, row, unit, samples).within(Statistic::Median, bound)
    }

    /// Returns the row of one sample, which must not exceed `bound`.
    fn one(what: &'static str, row: &'static str, unit: &'static str, sample: f64, bound: f64) -> Row {
        Row::unbound(what, row, unit, vec![sample]).within(Statistic::Value, bound)
    }

    /// Returns the row of these samples, without a promise.
    fn unbound(what: &'static str, row: &'static str, unit: &'static str, mut samples: Vec<f64>) -> Row {
        samples.sort_by(f64::total_cmp);
        let percentiles = (percentile(&samples, 50), percentile(&samples, 99));
        Row::of(what, row, unit, samples.len(), percentiles)
    }

    /// Returns the row of `n` samples with this median and 99th percentile, without a promise.
    fn of(
        what: &'static str,
        row: &'static str,
        unit: &'static str,
        n: usize,
        (p50, p99): (f64, f64),
    ) -> Row {
        let (held, bound, ok) = (None, None, None);
        Row { what, row, unit, n, p50, p99, held, bound, ok, compare: BTreeMap::new(), note: None }
    }

    /// Adds a promise.
    fn within(self, held: Statistic, bound: f64) -> Row {
        let value = if held == Statistic::Median { self.p50 } else { self.p99 };
        Row { held: Some(held), bound: Some(bound), ok: Some(value <= bound), ..self }
    }

    /// Adds the median of an alternative.
    fn beside(mut self, name: &'static str, mut samples: Vec<f64>) -> Row {
        samples.sort_by(f64::total_cmp);
        self.compare.insert(name, percentile(&samples, 50));
        self
    }

    /// Adds a note about the numbers.
    fn with_note(self, note: &'static str) -> Row {
        Row { note: Some(note), ..self }
    }
}

/// Returns the median of unsorted samples.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, 50)
}

/// Returns the smallest sample that at least `percent` of all do not exceed (nearest rank). `sorted` is in
/// ascending order; NaN if empty.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Runs `cargo xtask bench`.
pub(crate) fn run(args: &Args) -> Result<()> {
    workdir::heed_signals()?;
    let mut whats = args.what.clone();
    if whats.is_empty() {
        let never = [What::Requests, What::Fleet];
        whats.extend(What::value_variants().iter().filter(|what| !never.contains(what)));
    }
    if let Err(missing) = requires::bpf() {
        bail!("cannot run the benches here: {missing}");
    }
    if whats.iter().any(|what| *what != What::Bpf) {
        prepare_pods(args.agent.is_none())?;
    }
    let binary = args.agent.clone().unwrap_or_else(|| workdir::target_dir().join("release/beelet"));
    let mut rows = Vec::new();
    let measured = whats.iter().try_for_each(|what| {
        let (disturbance, first) = (Disturbance::begin()?, rows.len());
        let measured = measure(*what, &binary, args, &mut rows);
        rows.extend(disturbance.row(&rows[first..])?);
        measured
    });
    // Results are printed even if a later measurement failed.
    print(&rows, args.json)?;
    measured?;
    verdict(&rows)
}

/// Returns an error if a bound does not hold.
fn verdict(rows: &[Row]) -> Result<()> {
    let held: Vec<bool> = rows.iter().filter_map(|row| row.ok).collect();
    match held.iter().filter(|ok| !**ok).count() {
        0 => Ok(()),
        broken => bail!("{broken} of {} bounds do not hold", held.len()),
    }
}

/// Disturbance of the machine by others during a measurement.
struct Disturbance {
    began: Instant,
    stolen: f64,
}

impl Disturbance {
    fn begin() -> Result<Disturbance> {
        Ok(Disturbance { began: Instant::now(), stolen: stolen_seconds()? })
    }

    /// Returns the row of the disturbance, if other rows were measured.
    fn row(&self, measured: &[Row]) -> Result<Option<Row>> {
        let stolen = (stolen_seconds()? - self.stolen) / self.began.elapsed().as_secs_f64();
        let Some(first) = measured.first() else { return Ok(None) };
        let row = Row::unbound(first.what, "stolen", "CPUs", vec![stolen]);
        Ok(Some(
            row.with_note("time stolen by the hypervisor during the measurement: it limits every tail above"),
        ))
    }
}

/// Adds the rows of `what` that can be measured.
fn measure(what: What, binary: &Path, args: &Args, rows: &mut Vec<Row>) -> Result<()> {
    let quick = args.quick;
    match what {
        What::Bpf => rows.extend(bpf::run(quick)?),
        What::Cluster => cluster::run(binary, quick, rows)?,
        What::Density => density::run(binary, quick, rows)?,
        What::Devices => rows.extend(devices::run(quick)?),
        What::Fleet => fleet::run(binary, quick, args.nodes, rows)?,
        What::Footprint => {
            rows.extend(footprint::run(binary, quick)?);
            observe::run(binary, quick, rows)?;
        }
        What::Probes => {
            probes::run(binary, quick, rows)?;
            rows.push(probe_edits::run(binary, quick)?);
        }
        What::Requests => {
            rows.push(probe_edits::run(binary, quick)?);
            probes::connections(binary, quick, rows)?;
        }
        What::Pressure => rows.extend(pressure::run(binary, quick)?),
        What::Lifecycle => lifecycle::run(binary, quick, rows)?,
        What::Simulated => simulated::run(binary, quick, rows)?,
        What::Tuner => rows.extend(tuner::run(binary, quick, &args.scenario)?),
    }
    Ok(())
}

/// Prepares measurements on real pods: installs their requirements, and builds the agent unless one was
/// given.
fn prepare_pods(build: bool) -> Result<()> {
    // If the agent and the test app are given, as in a stock machine, nothing is built or installed.
    if build || std::env::var_os("BEELET_TESTAPP").is_none() {
        setup::ensure(Part::Demo)?;
    }
    if let Err(missing) = requires::containerd() {
        bail!("cannot run the benches here: {missing}");
    }
    let step = Step::start("build beelet, optimised");
    if build {
        step.run(shell::cargo().args([
            "build",
            "--release",
            "--package",
            "beelet",
            "--package",
            "beelet-exec",
        ]))?;
    }
    images::testapp()?;
    step.done("");
    Ok(())
}

fn print(rows: &[Row], json: bool) -> Result<()> {
    if json {
        for row in rows {
            println!("{}", serde_json::to_string(row)?);
        }
        return Ok(());
    }
    println!("{:<10} {:<24} {:>6} {:>10} {:>10} {:>17} unit", "WHAT", "ROW", "N", "P50", "P99", "BOUND");
    rows.iter().for_each(|row| println!("{}", line(row)));
    Ok(())
}

/// Formats a row of the table.
fn line(row: &Row) -> String {
    let mark = match row.ok {
        Some(true) => style("ok").green(),
        Some(false) => style("ABOVE").red().bold(),
        None => style("-"),
    };
    let bound = match row.held.zip(row.bound) {
        Some((held, bound)) => format!("{} {bound:.3}", held.name()),
        None => "-".to_owned(),
    };
    let Row { what, row: name, unit, n, p50, p99, compare, note, .. } = row;
    let beside: String = compare.iter().map(|(name, value)| format!("; {name}: {value:.3}")).collect();
    let note = note.map(|note| format!("; {note}")).unwrap_or_default();
    format!("{what:<10} {name:<24} {n:>6} {p50:>10.3} {p99:>10.3} {bound:>17} {unit} {mark}{beside}{note}")
}

/// Watches the pods on a separate thread, which timestamps every change on arrival. `news` gets the pods at
/// the start (its result is dropped) and after each change.
fn watch_pods<T: Send + 'static, I: IntoIterator<Item = T>>(
    agent: &Agent,
    mut news: impl FnMut(&Watch, u64) -> I + Send + 'static,
) -> Result<mpsc::Receiver<T>> {
    let socket = agent.socket();
    let (sender, receiver) = mpsc::channel();
    let (watching, started) = mpsc::channel();
    std::thread::spawn(move || {
        let watched = block_on(async move {
            let mut watch = Watch::start(&socket).await?;
            drop(news(&watch, monotonic_ns()));
            let _ = watching.send(());
            loop {
                watch.next().await?;
                for one in news(&watch, monotonic_ns()) {
                    if sender.send(one).is_err() {
                        return Ok(());
                    }
                }
            }
        });
        // The stream breaks when the agent ends; an earlier break is reported by the receiver as a missing
        // change.
        watched.unwrap_or_default();
    });
    started.recv().context("cannot watch the pods")?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let check = |count: u32, percent, expected: f64| {
            let sorted: Vec<f64> = (1..=count).map(f64::from).collect();
            assert_eq!(percentile(&sorted, percent), expected, "{percent} of {count}");
        };
        check(1, 50, 1.0);
        check(100, 50, 50.0);
        check(100, 99, 99.0);
        check(200, 99, 198.0);
        check(10, 99, 10.0);
        assert!(percentile(&[], 99).is_nan());
    }

    #[test]
    fn a_bound_holds_up_to_the_bound_itself() {
        let row = |bound| Row::new("probes", "x", "ms", vec![3.0, 1.0, 2.0], bound);
        assert_eq!((row(3.0).ok, row(2.9).ok), (Some(true), Some(false)));
        assert_eq!((row(3.0).p50, row(3.0).n), (2.0, 3));
        let nothing = Row::new("probes", "x", "ms", Vec::new(), 5.0);
        assert_eq!(nothing.ok, Some(false), "no samples prove nothing");
    }

    #[test]
    fn a_row_names_the_statistic_that_its_bound_is_held_against() {
        let samples = || vec![1.0, 2.0, 9.0];
        let check = |row: Row, ok: bool, shown: &str, json: &str| {
            assert_eq!(row.ok, Some(ok), "{row:?}");
            let line = console::strip_ansi_codes(&line(&row)).into_owned();
            assert!(line.contains(shown), "{line}");
            assert_eq!(serde_json::to_value(&row).unwrap()["held"], json);
        };
        check(Row::new("bpf", "x", "ms", samples(), 5.0), false, "p99 5.000 ms ABOVE", "p99");
        check(Row::by_median("bpf", "x", "ms", samples(), 5.0), true, "median 5.000 ms ok", "median");
        check(Row::one("bpf", "x", "ms", 1.0, 5.0), true, "value 5.000 ms ok", "value");
    }

    #[test]
    fn a_row_without_a_bound_neither_holds_nor_breaks() {
        let row = Row::unbound("bpf", "stolen", "CPUs", vec![0.5]);
        let line = console::strip_ansi_codes(&line(&row)).into_owned();
        assert!(line.ends_with(" - CPUs -"), "{line}");
        let json = serde_json::to_value(&row).unwrap();
        assert!(["held", "bound", "ok"].iter().all(|field| json[field].is_null()), "{json}");
        let above = Row::one("bpf", "x", "ms", 2.0, 1.0);
        assert_eq!(verdict(&[row, above]).unwrap_err().to_string(), "1 of 1 bounds do not hold");
        assert!(verdict(&[Row::unbound("bpf", "stolen", "CPUs", vec![0.5])]).is_ok());
    }
}
