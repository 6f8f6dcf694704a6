//! `cargo xtask bench`: what beelet promises in numbers, measured end to end on a release build: as a client
//! of its API sees it, on a real containerd.
//!
//! Each row is one promise, or a number beside one that promises nothing by itself. A promise names the
//! statistic that its bound is held against: `p99`, the `median` (of differences of two measurements, whose
//! outliers are the machine's and of either sign, and of ratios), or the `value` where there is one only.
//! `--json` prints one object per line: `{"what","row","unit","n","p50","p99","held","bound","ok"}`, the last
//! three null without a bound, with what it is compared to, and a note, where there are any. The exit code is
//! 0 if every bound holds. The decisions alone are measured by `cargo bench -p bench`.

mod bpf;
mod cluster;
mod density;
mod devices;
mod footprint;
mod lifecycle;
mod observe;
mod owner;
mod podsapi;
mod pressure;
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

/// Measures what beelet promises, on real pods, and compares it with the bounds.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure; everything if nothing is named
    #[arg(value_enum)]
    what: Vec<What>,

    /// Measure this agent instead of a release build: what `cargo xtask package` made, say
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,

    /// Fewer rounds: under a minute each
    #[arg(long)]
    quick: bool,

    /// Of the tuner, measure these only: busy, quota, burstable, crowd, memory, mixed (an hour, and only if
    /// named)
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    scenario: Vec<String>,

    /// One JSON object per row instead of a table
    #[arg(long)]
    json: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// What the kernel programs cost the scheduler and the sockets
    Bpf,
    /// The node of a cluster, as a client of the API server sees it (KUBE_APISERVER)
    Cluster,
    /// A node of up to 1,000 pods: what it takes, how fast it fills, and how soon the agent is back
    Density,
    /// Deciding on devices, and admitting pods with them
    Devices,
    /// What the agent takes of the machine: CPU and memory
    Footprint,
    /// From a listener's coming or going to the pod's readiness
    Probes,
    /// From low memory to the decision who goes
    Pressure,
    /// From a container's end to its next start, and from a manifest to a running pod
    Lifecycle,
    /// A node of up to 5,000 pods on a runtime in memory: what grows with the pods, and how
    Simulated,
    /// A server's latency beside a noisy neighbour, without and with the tuner
    Tuner,
}

/// What of the samples a bound is held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Statistic {
    P99,
    Median,
    /// There is one sample.
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

/// One promise and what was measured.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    row: &'static str,
    unit: &'static str,
    n: usize,
    p50: f64,
    p99: f64,
    /// What must not be above the bound; none without one.
    held: Option<Statistic>,
    bound: Option<f64>,
    ok: Option<bool>,
    /// The same, done otherwise.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    compare: BTreeMap<&'static str, f64>,
    /// What a reader must know to understand the numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

impl Row {
    /// The row of these samples; its 99th percentile must not be above `bound`.
    fn new(what: &'static str, row: &'static str, unit: &'static str, samples: Vec<f64>, bound: f64) -> Row {
        Row::unbound(what, row, unit, samples).within(Statistic::P99, bound)
    }

    /// The row of these samples; half of them must not be above `bound`.
    fn by_median(
        what: &'static str,
        row: &'static str,
        unit: &'static str,
        samples: Vec<f64>,
        bound: f64,
    ) -> Row {
        Row::unbound(what, row, unit, samples).within(Statistic::Median, bound)
    }

    /// The row of one sample, which must not be above `bound`.
    fn one(what: &'static str, row: &'static str, unit: &'static str, sample: f64, bound: f64) -> Row {
        Row::unbound(what, row, unit, vec![sample]).within(Statistic::Value, bound)
    }

    /// The row of these samples, of which nothing is promised.
    fn unbound(what: &'static str, row: &'static str, unit: &'static str, mut samples: Vec<f64>) -> Row {
        samples.sort_by(f64::total_cmp);
        let percentiles = (percentile(&samples, 50), percentile(&samples, 99));
        Row::of(what, row, unit, samples.len(), percentiles)
    }

    /// The row of `n` samples with this median and this 99th percentile, of which nothing is promised.
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

    /// The row, with a promise.
    fn within(self, held: Statistic, bound: f64) -> Row {
        let value = if held == Statistic::Median { self.p50 } else { self.p99 };
        Row { held: Some(held), bound: Some(bound), ok: Some(value <= bound), ..self }
    }

    /// The row, with the same thing done otherwise beside it (its median).
    fn beside(mut self, name: &'static str, mut samples: Vec<f64>) -> Row {
        samples.sort_by(f64::total_cmp);
        self.compare.insert(name, percentile(&samples, 50));
        self
    }

    /// The row, with a sentence about its numbers.
    fn noting(self, note: &'static str) -> Row {
        Row { note: Some(note), ..self }
    }
}

/// The median of samples in any order.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, 50)
}

/// The smallest sample that `percent` of all are not above (nearest rank). `sorted` in rising order; of none:
/// NaN.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// The command line's entry.
pub(crate) fn run(args: &Args) -> Result<()> {
    workdir::heed_signals()?;
    let whats = if args.what.is_empty() { What::value_variants() } else { &args.what };
    if let Err(missing) = requires::bpf() {
        bail!("the benches can't run here: {missing}");
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
    // What was measured in many minutes counts, whatever came after it.
    print(&rows, args.json)?;
    measured?;
    verdict(&rows)
}

/// An error if a bound doesn't hold.
fn verdict(rows: &[Row]) -> Result<()> {
    let held: Vec<bool> = rows.iter().filter_map(|row| row.ok).collect();
    match held.iter().filter(|ok| !**ok).count() {
        0 => Ok(()),
        broken => bail!("{broken} of {} bounds do not hold", held.len()),
    }
}

/// What others did to the machine while something was measured.
struct Disturbance {
    began: Instant,
    stolen: f64,
}

impl Disturbance {
    fn begin() -> Result<Disturbance> {
        Ok(Disturbance { began: Instant::now(), stolen: stolen_seconds()? })
    }

    /// The row of it beside those that were measured meanwhile, if there are any.
    fn row(&self, measured: &[Row]) -> Result<Option<Row>> {
        let stolen = (stolen_seconds()? - self.stolen) / self.began.elapsed().as_secs_f64();
        let Some(first) = measured.first() else { return Ok(None) };
        let row = Row::unbound(first.what, "stolen", "CPUs", vec![stolen]);
        Ok(Some(row.noting("a hypervisor had them for others meanwhile: no tail above is better than that")))
    }
}

/// Adds the rows of `what`, as far as they can be had.
fn measure(what: What, binary: &Path, args: &Args, rows: &mut Vec<Row>) -> Result<()> {
    let quick = args.quick;
    match what {
        What::Bpf => rows.extend(bpf::run(quick)?),
        What::Cluster => cluster::run(binary, quick, rows)?,
        What::Density => density::run(binary, quick, rows)?,
        What::Devices => rows.extend(devices::run(quick)?),
        What::Footprint => {
            rows.extend(footprint::run(binary, quick)?);
            observe::run(binary, quick, rows)?;
        }
        What::Probes => probes::run(binary, quick, rows)?,
        What::Pressure => rows.extend(pressure::run(binary, quick)?),
        What::Lifecycle => lifecycle::run(binary, quick, rows)?,
        What::Simulated => simulated::run(binary, quick, rows)?,
        What::Tuner => rows.extend(tuner::run(binary, quick, &args.scenario)?),
    }
    Ok(())
}

/// What is measured on real pods needs them, and an agent as it is shipped, unless one was given.
fn prepare_pods(build: bool) -> Result<()> {
    // Where the agent and the test app are given, as in a stock machine, nothing is built, and nothing
    // installed for it.
    if build || std::env::var_os("BEELET_TESTAPP").is_none() {
        setup::ensure(Part::Demo)?;
    }
    if let Err(missing) = requires::containerd() {
        bail!("the benches can't run here: {missing}");
    }
    let step = Step::start("build beelet, optimised");
    if build {
        step.run(shell::cargo().args(["build", "--release", "--package", "beelet"]))?;
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

/// A row of the table.
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

/// Watches the pods on a thread of its own, which stamps every change as it arrives. `news` gets the pods at
/// the start, whose news is dropped, and after each change.
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
        // The stream breaks when the agent ends; before that, whoever waits for news says what is missing.
        watched.unwrap_or_default();
    });
    started.recv().context("could not watch the pods")?;
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
        assert_eq!(nothing.ok, Some(false), "nothing measured is nothing proved");
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
