//! `cargo xtask simulate`: runs the whole agent in a simulated world, from seeds, and judges each trace.

mod api_server;
mod cable;
mod disturbances;
mod machine;
mod node;
mod plan;
mod seam;
mod shapes;
mod shrink;
#[cfg(test)]
mod tests;
mod trial;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

use crate::plan::{Plan, Scenario};
use crate::trial::Trial;

/// Runs the whole agent in a simulated world, and judges it by a model.
#[derive(Debug, Parser)]
#[command(name = "simulate")]
#[allow(clippy::struct_excessive_bools)] // each is a flag of its own
struct Args {
    /// Seed of a single simulation.
    #[arg(long, value_name = "N", conflicts_with_all = ["seeds", "real_hours"])]
    seed: Option<u64>,
    /// Range of seeds, without its end.
    #[arg(long, value_name = "A..B", value_parser = range)]
    seeds: Option<std::ops::Range<u64>>,
    /// Continue with the next seeds for this many real hours.
    #[arg(long = "hours", value_name = "H")]
    real_hours: Option<f64>,
    /// Run one scenario only; by default the seeds take turns.
    #[arg(long, value_enum)]
    only: Option<Scenario>,
    /// Simulated seconds with disturbances per seed; a quiet period follows.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    length: u64,
    /// Maximum number of pods at the same time.
    #[arg(long, default_value_t = 30)]
    pods: usize,
    /// Print the whole trace.
    #[arg(long)]
    trace: bool,
    /// Cut a failing plan down to a short one, and print its timeline.
    #[arg(long)]
    shrink: bool,
    /// Stop at the first seed that fails.
    #[arg(long)]
    first: bool,
    /// Run each seed twice and compare the traces.
    #[arg(long)]
    twice: bool,
    /// Print the agent's log (RUST_LOG selects the lines).
    #[arg(long)]
    log: bool,
}

fn range(text: &str) -> Result<std::ops::Range<u64>, String> {
    let (start, end) = text.split_once("..").ok_or("a range is written like 0..100")?;
    let number = |text: &str| text.parse().map_err(|_| format!("{text:?} is not a number"));
    Ok(number(start)?..number(end)?)
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.log {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    } else {
        std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
    }
    let started = Instant::now();
    let seeds = match (args.seed, &args.seeds, args.real_hours) {
        (Some(seed), ..) => seed..seed + 1,
        (None, Some(seeds), _) => seeds.clone(),
        (None, None, Some(_)) => 0..u64::MAX,
        (None, None, None) => 0..10,
    };
    let limit = args.real_hours.map(|hours| Duration::from_secs_f64(hours * 3600.0));
    let (mut count, mut simulated, mut failed) = (0_u64, Duration::ZERO, Vec::new());
    for seed in seeds {
        if limit.is_some_and(|limit| started.elapsed() >= limit) {
            break;
        }
        let turns = [Scenario::Standalone, Scenario::Cluster, Scenario::Mixed];
        let turn = turns[usize::try_from(seed % 3).unwrap_or(0)];
        let plan = Plan::of(seed, args.only.unwrap_or(turn), Duration::from_secs(args.length), args.pods);
        let trial = Trial::run(&plan);
        if args.trace {
            print!("{}", trial.text());
        }
        if args.twice && Trial::run(&plan).text() != trial.text() {
            println!("seed {seed}: the same seed has two traces");
            failed.push(seed);
        }
        (count, simulated) = (count + 1, simulated + plan.end);
        if !trial.violations.is_empty() {
            failed.push(seed);
            println!("seed {seed} ({:?}): {} broken rules", plan.scenario, trial.violations.len());
            trial.violations.iter().take(5).for_each(|violation| println!("  {violation}"));
            if args.shrink {
                shrink::shrink(&plan, &trial);
            }
            if args.first {
                break;
            }
        }
    }
    let real = started.elapsed();
    println!(
        "{count} seeds, {:.1} simulated hours in {:.1} s ({:.0} simulated seconds per second); {} seeds failed {:?}",
        simulated.as_secs_f64() / 3600.0,
        real.as_secs_f64(),
        simulated.as_secs_f64() / real.as_secs_f64(),
        failed.len(),
        failed
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
