//! Benefit of the tuner: a latency-critical server (Burstable) under open-loop load, alone, under
//! interference, and under the same interference with the tuner in the mode `enforce`; real pods on a real
//! containerd. The latency is measured from the scheduled arrival of a request to its answer, inside the
//! server's pod (`testapp latency`).
//!
//! The kinds of interference are in `scenarios`. Each is measured in several rounds, with a run without the
//! tuner directly followed by one with it, so that other load on the machine affects both alike; a row is the
//! 99th percentile of each run. All pods run before the interference starts. The warm-up, in which the tuner
//! settles, is not measured. The scenario `pinned` compares a server without and with a
//! CPU of its own instead. A memory shortage can be fought only with `memory.high`, on cgroup version 2;
//! elsewhere its row has no bound and a note. That row is also measured with `cpuCaps: always`. The whole
//! node's cgroup gets the highest weight, so that other work of this machine counts little.

mod draw;
mod node;
mod scenarios;

use super::{Row, Statistic, median};
use anyhow::{Context as _, Result};
use beelet_tests::containerd::Containerd;
use beelet_tests::guards::CgroupRoot;
use beelet_tests::workdir;
use node::{Lengths, Mode, Run};
use scenarios::{SCENARIOS, Scenario};
use std::path::Path;
use xtask::progress::Step;

/// Bound of the 99th percentile under interference with the tuner, relative to the server alone.
const WORSE: f64 = 1.3;
/// Bound of the CPU time that the tuner may take from the others, in percent of their time without it.
const LOST: f64 = 30.0;
/// Bound of the 99th percentile of a server throttled by its own quota, once it may burst, relative to that
/// without bursts: better than the published reduction of 37 % by the kernel's burst ("CPU burst: getting rid
/// of unnecessary throttling", Chang and Cheng, 2021).
const BURST: f64 = 0.63;
/// Bound of the time in which a squeezed neighbour is stalled on memory, in percent.
const STOOD_STILL: f64 = 50.0;

/// Stolen CPUs above which a run is repeated.
const STOLEN: f64 = 0.02;
/// Maximum number of tries of a run.
const TRIES: usize = 4;

/// Port of hogs and server; a connection starts their work.
const HOG: u16 = 9000;

/// Measurements of a scenario.
#[derive(Default)]
struct Measured {
    off: Vec<Run>,
    enforce: Vec<Run>,
    capped: Vec<Run>,
}

/// Measures the scenarios of these names, or all except those that take an hour; draws them into
/// docs/tuner.svg after each round, unless `quick`.
pub(super) fn run(binary: &Path, quick: bool, names: &[String]) -> Result<Vec<Row>> {
    let chosen = choose(names)?;
    let lengths =
        if quick { Lengths { warm_up: 3, measured: 6 } } else { Lengths { warm_up: 10, measured: 60 } };
    let containerd = Containerd::start(&workdir::target_dir().join("bench/tuner"))?;
    outweigh_others(containerd.cgroup())?;
    let node = node::Node { containerd: &containerd, binary, lengths };
    let (mut alone, mut all) = (Vec::new(), Vec::new());
    all.resize_with(chosen.len(), Measured::default);
    for round in 1..=if quick { 1 } else { 3 } {
        let measure = |name: &str, scenario: Option<&Scenario>, mode| {
            undisturbed(&format!("{name}, round {round}"), || node.measure(scenario, mode))
        };
        alone.push(measure("alone", None, Mode::Off)?);
        for (scenario, measured) in chosen.iter().zip(&mut all) {
            measured.off.push(measure(scenario.name, Some(scenario), Mode::Off)?);
            let mode = if scenario.pins { Mode::Pinned } else { Mode::Enforce };
            measured.enforce.push(measure(scenario.name, Some(scenario), mode)?);
            if !scenario.capped.is_empty() {
                measured.capped.push(measure(scenario.capped, Some(scenario), Mode::Capped)?);
            }
        }
        if !quick {
            draw::draw(&workdir::repository().join("docs"), &alone, &chosen, &all)?;
            eprintln!("wrote docs/tuner.json and docs/tuner.svg, with the runs of round {round}");
        }
    }
    let memory_high = has_memory_high(containerd.cgroup());
    let mut rows = vec![Row::unbound("tuner", "alone", "ms", p99(&alone))];
    for (scenario, measured) in chosen.iter().zip(&all) {
        rows.extend(rows_of(scenario, measured, &alone, memory_high));
    }
    Ok(rows)
}

fn choose(names: &[String]) -> Result<Vec<&'static Scenario>> {
    if names.is_empty() {
        return Ok(SCENARIOS.iter().filter(|scenario| scenario.times == 1).collect());
    }
    let find = |name: &String| {
        SCENARIOS.iter().find(|scenario| scenario.name == name).with_context(|| {
            let names: Vec<&str> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
            format!("unknown scenario {name:?}; known: {}", names.join(", "))
        })
    };
    names.iter().map(find).collect()
}

/// Returns the run from which the hypervisor stole least. Stolen time appears as waits of any length,
/// unrelated to neighbour and tuner, so a run that lost more than [`STOLEN`] is repeated.
fn undisturbed(name: &str, run: impl Fn() -> Result<Run>) -> Result<Run> {
    let mut runs: Vec<Run> = Vec::new();
    while runs.len() < TRIES && runs.iter().all(|run| run.stolen > STOLEN) {
        let step = Step::start(format!("tuner: {name}"));
        let run = run()?;
        step.done(&run.to_string());
        runs.push(run);
    }
    runs.into_iter().min_by(|one, other| one.stolen.total_cmp(&other.stolen)).context("no run")
}

fn p99(runs: &[Run]) -> Vec<f64> {
    runs.iter().map(|run| run.at(99.0)).collect()
}

/// Returns the rows of a scenario: the 99th percentiles without and with the tuner, and the cost for the
/// others.
fn rows_of(scenario: &Scenario, measured: &Measured, alone: &[Run], memory_high: bool) -> Vec<Row> {
    let [off_name, enforce_name, cost_name] = scenario.rows;
    let Measured { off, enforce, capped } = measured;
    let off_row = Row::unbound("tuner", off_name, "ms", p99(off)).beside("alone", p99(alone));
    let bound = match scenario.limit {
        "" => WORSE * median(&p99(alone)),
        _ => BURST * median(&p99(off)),
    };
    let mut row = Row::unbound("tuner", enforce_name, "ms", p99(enforce)).beside("off", p99(off));
    let reactions: Vec<f64> = enforce.iter().filter_map(|run| run.reaction).collect();
    row = match reactions.is_empty() {
        _ if scenario.pins => row.with_note("the server has a CPU for itself; the tuner is off"),
        true => row.with_note("the tuner made no step"),
        false => row.beside("first_step_after_ms", reactions),
    };
    let bounded = memory_high || !scenario.short_of_memory;
    row = match bounded {
        true => row.within(Statistic::Median, bound),
        false => row.with_note("not bounded: cgroup version 1 has no memory.high to limit the neighbour"),
    };
    let mut rows = vec![off_row, row];
    if !capped.is_empty() {
        rows.push(Row::unbound("tuner", scenario.capped, "ms", p99(capped)).beside("off", p99(off)));
    }
    let stood_still = |runs: &[Run]| runs.iter().map(|run| run.stood_still).collect::<Vec<f64>>();
    if scenario.short_of_memory {
        let row = Row::unbound("tuner", cost_name, "%", stood_still(enforce)).beside("off", stood_still(off));
        rows.push(if bounded { row.within(Statistic::Median, STOOD_STILL) } else { row });
    } else if !scenario.neighbours.is_empty() {
        let had = median(&off.iter().map(|run| run.others).collect::<Vec<f64>>());
        let lost = |run: &Run| (100.0 - 100.0 * run.others / had).max(0.0);
        rows.push(Row::by_median("tuner", cost_name, "%", enforce.iter().map(lost).collect(), LOST));
    }
    rows
}

/// Returns true if the tuner can limit memory on this machine.
fn has_memory_high(root: &CgroupRoot) -> bool {
    root.dir("memory").is_some_and(|dir| dir.join("memory.high").exists())
}

fn outweigh_others(root: &CgroupRoot) -> Result<()> {
    let dir = root.dir("cpu").context("no cpu controller")?;
    let (file, most) =
        if dir.join("cpu.shares").exists() { ("cpu.shares", "262144") } else { ("cpu.weight", "10000") };
    workdir::write(&dir.join(file), most)
}
