//! `cargo xtask bench`: what beelet promises in numbers, measured end to end on a release build: as a client of its
//! API sees it, on a real containerd.
//!
//! Each row is one promise. `--json` prints one object a line: `{"what","row","unit","n","p50","p99","bound","ok"}`,
//! with what it is compared to, and a note, where there are any.
//! The exit code is 0 if every bound holds. The decisions alone are measured by `cargo bench -p bench`.

mod bpf;
mod devices;
mod footprint;
mod lifecycle;
mod observe;
mod pressure;
mod probes;
mod tuner;

use crate::progress::Step;
use crate::setup::{self, Part};
use crate::shell;
use anyhow::{Result, bail};
use beelet_tests::machine::stolen_seconds;
use beelet_tests::{images, requires, workdir};
use clap::ValueEnum;
use console::style;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;

/// Measures what beelet promises, on real pods, and compares it with the bounds.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure; everything if nothing is named
    #[arg(value_enum)]
    what: Vec<What>,

    /// Fewer rounds: under a minute each
    #[arg(long)]
    quick: bool,

    /// One JSON object a row instead of a table
    #[arg(long)]
    json: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// What the kernel programs cost the scheduler and the sockets
    Bpf,
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
    /// A server's latency beside a noisy neighbour, without and with the tuner
    Tuner,
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
    bound: f64,
    ok: bool,
    /// The same, done otherwise.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    compare: BTreeMap<&'static str, f64>,
    /// What a reader must know to understand the numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

impl Row {
    /// The row of these samples; its 99th percentile must not be above `bound`.
    fn new(
        what: &'static str,
        row: &'static str,
        unit: &'static str,
        mut samples: Vec<f64>,
        bound: f64,
    ) -> Row {
        samples.sort_by(f64::total_cmp);
        let percentiles = (percentile(&samples, 50), percentile(&samples, 99));
        Row::of(what, row, unit, (samples.len(), percentiles), bound)
    }

    /// The row of so many samples with this median and this 99th percentile, which must not be above `bound`.
    fn of(
        what: &'static str,
        row: &'static str,
        unit: &'static str,
        (n, (p50, p99)): (usize, (f64, f64)),
        bound: f64,
    ) -> Row {
        Row { what, row, unit, n, p50, p99, bound, ok: p99 <= bound, compare: BTreeMap::new(), note: None }
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

    /// The row of these samples; half of them must not be above `bound`. For differences of two measurements, whose
    /// outliers are the machine's and of either sign.
    fn by_median(
        what: &'static str,
        row: &'static str,
        unit: &'static str,
        samples: Vec<f64>,
        bound: f64,
    ) -> Row {
        let row = Row::new(what, row, unit, samples, bound);
        Row { ok: row.p50 <= bound, ..row }
    }
}

/// The median of samples in any order.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, 50)
}

/// The smallest sample that `percent` of all are not above (nearest rank). `sorted` in rising order; of none: NaN.
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
        prepare_pods()?;
    }
    let mut rows = Vec::new();
    let measured = whats.iter().try_for_each(|what| {
        let (disturbance, first) = (Disturbance::begin()?, rows.len());
        let measured = measure(*what, args.quick, &mut rows);
        rows.extend(disturbance.row(&rows[first..])?);
        measured
    });
    // What was measured in many minutes counts, whatever came after it.
    print(&rows, args.json)?;
    measured?;
    match rows.iter().filter(|row| !row.ok).count() {
        0 => Ok(()),
        broken => bail!("{broken} of {} bounds do not hold", rows.len()),
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
        let row = Row::new(first.what, "stolen", "CPUs", vec![stolen], f64::INFINITY);
        Ok(Some(row.noting("a hypervisor had them for others meanwhile: no tail above is better than that")))
    }
}

/// Adds the rows of `what`, as far as they can be had.
fn measure(what: What, quick: bool, rows: &mut Vec<Row>) -> Result<()> {
    let binary = workdir::target_dir().join("release/beelet");
    match what {
        What::Bpf => rows.extend(bpf::run(quick)?),
        What::Devices => rows.extend(devices::run(quick)?),
        What::Footprint => {
            rows.extend(footprint::run(&binary, quick)?);
            rows.extend(observe::run(&binary, quick)?);
        }
        What::Probes => probes::run(&binary, quick, rows)?,
        What::Pressure => rows.extend(pressure::run(&binary, quick)?),
        What::Lifecycle => lifecycle::run(&binary, quick, rows)?,
        What::Tuner => rows.extend(tuner::run(&binary, quick)?),
    }
    Ok(())
}

/// What is measured on real pods needs them, and an agent as it is shipped.
fn prepare_pods() -> Result<()> {
    setup::ensure(Part::Demo)?;
    if let Err(missing) = requires::containerd() {
        bail!("the benches can't run here: {missing}");
    }
    let step = Step::start("build beelet, optimised");
    step.run(shell::cargo().args(["build", "--release", "--package", "beelet"]))?;
    images::build_testapp()?;
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
    println!("{:<10} {:<22} {:>6} {:>10} {:>10} {:>10} unit", "WHAT", "ROW", "N", "P50", "P99", "BOUND");
    for row in rows {
        let mark = if row.ok { style("ok").green() } else { style("ABOVE").red().bold() };
        let Row { what, row, unit, n, p50, p99, bound, compare, note, .. } = row;
        let beside: String = compare.iter().map(|(name, value)| format!("; {name}: {value:.3}")).collect();
        let note = note.map(|note| format!("; {note}")).unwrap_or_default();
        println!(
            "{what:<10} {row:<22} {n:>6} {p50:>10.3} {p99:>10.3} {bound:>10.3} {unit} {mark}{beside}{note}"
        );
    }
    Ok(())
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
        assert!(row(3.0).ok && !row(2.9).ok);
        assert_eq!((row(3.0).p50, row(3.0).n), (2.0, 3));
        assert!(!Row::new("probes", "x", "ms", Vec::new(), 5.0).ok, "nothing measured is nothing proved");
    }
}
