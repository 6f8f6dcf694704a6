//! What the tuner is worth: a latency-critical server (Burstable, one CPU requested) under open-loop load,
//! alone, beside a noisy BestEffort neighbour, and beside it with the tuner in the mode `enforce`; real pods
//! on a real containerd. The latency is from when a request should have arrived to its answer, inside the
//! server's pod (`testapp latency`).
//!
//! The warm-up is not measured: it is there for the tuner to find its place, and how long that takes is a row
//! of its own. A neighbour that is short of memory can be held back only where there is a `memory.high`, on
//! cgroup version 2; elsewhere its rows have no bound, and say so. The whole node's cgroup gets the highest
//! weight, so that other work of this machine counts little.

use super::{Row, Statistic};
use crate::progress::Step;
use crate::shell;
use anyhow::{Context as _, Result, bail};
use beelet_tests::agent::{Agent, Options};
use beelet_tests::cgroup_values::pod_path;
use beelet_tests::containerd::Containerd;
use beelet_tests::guards::CgroupRoot;
use beelet_tests::machine::{cpu_seconds_of, memory_kib, stolen_seconds};
use beelet_tests::manifests;
use beelet_tests::workdir::{self, PATIENCE, interrupted};
use plotters::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// With the neighbour and the tuner, the 99th percentile is at most so many times what it is alone.
const WORSE: f64 = 1.3;
/// What of the CPU time that the server leaves idle the neighbour may lose, in percent.
const LOST: f64 = 30.0;
/// Requests per second, and the microseconds of CPU that each takes: three tenths of a CPU.
const LOAD: (&str, &str) = ("300", "1000");

/// A run is made again if a hypervisor took more CPUs than this from it.
const STOLEN: f64 = 0.02;
/// How often it is made at most.
const TRIES: usize = 4;

/// The neighbour of the server.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Neighbour {
    Nobody,
    Busy,
    Memory,
}

/// One run.
struct Run {
    /// Latencies in milliseconds, by percentile (0 to 100), in rising order.
    latencies: Vec<(f64, f64)>,
    requests: usize,
    /// The CPUs that server and neighbour used.
    server: f64,
    neighbour: f64,
    /// The CPUs that a hypervisor had for others meanwhile: nobody here could do anything against that.
    stolen: f64,
    /// Milliseconds from when both the server and its neighbour were seen to run to the tuner's first step.
    reaction: Option<f64>,
}

impl Run {
    fn at(&self, percentile: f64) -> f64 {
        let found = self.latencies.iter().find(|(at, _)| *at >= percentile - 1e-6);
        found.or(self.latencies.last()).map_or(f64::NAN, |(_, latency)| *latency)
    }
}

/// Measures all runs, and draws them into docs/tuner.svg unless `quick`.
pub(super) fn run(binary: &Path, quick: bool) -> Result<Vec<Row>> {
    let (warm_up, seconds) = if quick { (3, 6) } else { (10, 60) };
    let containerd = Containerd::start(&workdir::target_dir().join("bench/tuner"))?;
    outweigh_others(containerd.cgroup())?;
    let measure = |name, neighbour, mode| {
        undisturbed(name, seconds, || one(&containerd, binary, name, neighbour, mode, (warm_up, seconds)))
    };
    let alone = measure("alone", Neighbour::Nobody, "off")?;
    let noisy = measure("noisy", Neighbour::Busy, "off")?;
    let tuned = measure("tuned", Neighbour::Busy, "enforce")?;
    let thirsty = measure("thirsty", Neighbour::Memory, "off")?;
    let watered = measure("watered", Neighbour::Memory, "enforce")?;
    let memory_high = has_memory_high(containerd.cgroup());
    if !quick {
        let file = shell::repository().join("docs/tuner.svg");
        let mut drawn =
            vec![("alone", &alone), ("busy neighbour", &noisy), ("busy neighbour, tuner enforces", &tuned)];
        if memory_high {
            drawn.extend([("memory hog", &thirsty), ("memory hog, tuner enforces", &watered)]);
        }
        draw(&file, &drawn)?;
        eprintln!("wrote {}", file.display());
    }
    let cpus = std::thread::available_parallelism()?.get() as f64;
    let lost = 100.0 - 100.0 * tuned.neighbour / (cpus - tuned.server);
    let bound = Some(WORSE * alone.at(99.0));
    let runs = [
        ("alone", "alone_p99.9", &alone, None),
        ("busy_neighbour_off", "busy_off_p99.9", &noisy, None),
        ("busy_neighbour_enforce", "busy_enforce_p99.9", &tuned, bound),
        ("memory_neighbour_off", "memory_off_p99.9", &thirsty, None),
        ("memory_neighbour_enforce", "memory_enforce_p99.9", &watered, bound.filter(|_| memory_high)),
    ];
    let mut rows: Vec<Row> =
        runs.into_iter().flat_map(|(name, tail, run, bound)| of_run(name, tail, run, bound)).collect();
    if !memory_high {
        for row in rows.iter_mut().filter(|row| row.row.starts_with("memory_") && row.row.contains("enforce"))
        {
            row.note = Some("not bounded: cgroup version 1 has no memory.high to hold the neighbour by");
        }
    }
    rows.push(Row::one("tuner", "idle_cpu_lost", "%", lost, LOST));
    let reaction = Row::unbound("tuner", "first_step_after", "ms", tuned.reaction.into_iter().collect());
    rows.push(if tuned.reaction.is_none() { reaction.noting("the tuner made no step") } else { reaction });
    Ok(rows)
}

/// The run from which the hypervisor stole least: what it takes comes as waits of any length, on which
/// neither neighbour nor tuner have a part. So a run that it took more than [`STOLEN`] from is made again.
fn undisturbed(name: &str, seconds: u32, run: impl Fn() -> Result<Run>) -> Result<Run> {
    let mut runs: Vec<Run> = Vec::new();
    while runs.len() < TRIES && runs.iter().all(|run| run.stolen > STOLEN) {
        let step = Step::start(format!("tuner: {name}, {seconds} s"));
        let run = run()?;
        step.done(&format!(
            "p50 {:.2} p99 {:.2} p99.9 {:.2} ms, server {:.2} neighbour {:.2} stolen {:.2} CPUs",
            run.at(50.0),
            run.at(99.0),
            run.at(99.9),
            run.server,
            run.neighbour,
            run.stolen
        ));
        runs.push(run);
    }
    runs.into_iter().min_by(|one, other| one.stolen.total_cmp(&other.stolen)).context("no run")
}

/// The rows of a run: its median and 99th percentile, which the bound is for, and its 99.9th, one number in
/// both columns.
fn of_run(name: &'static str, tail: &'static str, run: &Run, bound: Option<f64>) -> [Row; 2] {
    let row = |name, p50, p99| Row::of("tuner", name, "ms", run.requests, (p50, p99));
    let (main, p999) = (row(name, run.at(50.0), run.at(99.0)), run.at(99.9));
    let main = match bound {
        Some(bound) => main.within(Statistic::P99, bound),
        None => main,
    };
    [main, row(tail, p999, p999)]
}

/// Returns true if the tuner can hold anybody back from memory here.
fn has_memory_high(root: &CgroupRoot) -> bool {
    root.dir("memory").is_some_and(|dir| dir.join("memory.high").exists())
}

/// One server with its neighbour, under an agent of its own.
fn one(
    containerd: &Containerd,
    binary: &Path,
    name: &str,
    neighbour: Neighbour,
    mode: &str,
    (warm_up, seconds): (u32, u32),
) -> Result<Run> {
    let mut options = Options::named(containerd, name)
        .beelet("tuner", json!({ "mode": mode, "cpuWaitPerMille": 20 }))
        .beelet("stopPodsOnExit", true);
    if neighbour == Neighbour::Memory {
        // Pods together have 512 MiB, less than the neighbour wants. Nobody is evicted: that would end what
        // is measured.
        let reserved = format!("{}Ki", memory_kib()? - 512 * 1024);
        options = options.kubelet("systemReserved", json!({ "memory": reserved }));
        options = options.kubelet("evictionHard", json!({ "memory.available": "0%" }));
    }
    options.binary = Some(binary.to_path_buf());
    let logs = PathBuf::from(options.kubelet["podLogsDir"].as_str().unwrap_or_default());
    let mut agent = Agent::start(options)?;
    let mut hog = None;
    if let Some(manifest) = manifest_of(neighbour)? {
        agent.apply("neighbour.yaml", manifest.to_string())?;
        hog = Some(running(&agent, "neighbour")?);
    }
    let (warm_up, seconds) = (warm_up.to_string(), seconds.to_string());
    let command = [
        "/bin/testapp",
        "latency",
        "--rate",
        LOAD.0,
        "--work",
        LOAD.1,
        "--warm-up",
        &warm_up,
        "--seconds",
        &seconds,
    ];
    let mut server = manifests::with_resources(manifests::pod("server", &command), ("1", "64Mi"), ("", ""));
    server["spec"]["restartPolicy"] = json!("Never");
    agent.apply("server.yaml", server.to_string())?;
    let server = running(&agent, "server")?;
    // The neighbour was there before: from now on the server may have to wait.
    let both_run = jiff::Timestamp::now();
    let log = Log { folder: logs, uid: server.clone() };
    log.wait_for("measuring")?;
    let cpu = |qos: &str, uid: &str| cpu_seconds_of(containerd.cgroup(), &pod_path(qos, uid));
    let used = || -> Result<[f64; 3]> {
        let hog = hog.as_deref().map_or(Ok(0.0), |uid| cpu("BestEffort", uid))?;
        Ok([cpu("Burstable", &server)?, hog, stolen_seconds()?])
    };
    let (before, began) = (used()?, Instant::now());
    // The pod's cgroup goes with the server, so the last look is a moment before.
    std::thread::sleep(
        Duration::from_secs(seconds.parse::<u64>()?).mul_f64(0.95).saturating_sub(began.elapsed()),
    );
    let (after, took) = (used()?, began.elapsed().as_secs_f64());
    let result = log.wait_for("result ")?;
    let reaction = first_step(&agent, both_run)?;
    agent.terminate()?;
    let (requests, latencies) = parse(&result)?;
    let [server, neighbour, stolen] = std::array::from_fn(|i| (after[i] - before[i]) / took);
    Ok(Run { latencies, requests, server, neighbour, stolen, reaction })
}

fn manifest_of(neighbour: Neighbour) -> Result<Option<Value>> {
    let threads = (2 * std::thread::available_parallelism()?.get()).to_string();
    Ok(match neighbour {
        Neighbour::Nobody => None,
        Neighbour::Busy => Some(manifests::pod("neighbour", &["/bin/testapp", "hog", "busy", &threads])),
        Neighbour::Memory => Some(manifests::pod("neighbour", &["/bin/testapp", "hog", "memory", "1024"])),
    })
}

/// Waits until the pod runs; its UID.
fn running(agent: &Agent, name: &str) -> Result<String> {
    agent.until(&format!("{name} to run"), |watch| {
        let pod = watch.pod(name)?;
        (pod.phase() == "Running").then(|| pod.uid().to_owned())
    })
}

/// The server's log, as the runtime writes it: `TIME STREAM TAG TEXT` a line.
struct Log {
    folder: PathBuf,
    uid: String,
}

impl Log {
    fn wait_for(&self, start: &str) -> Result<String> {
        let mut waited = Duration::ZERO;
        loop {
            let text = self.read().unwrap_or_default();
            let found = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
            if let Some(line) = found.into_iter().find(|line| line.starts_with(start)) {
                return Ok(line.to_owned());
            }
            if interrupted() || waited > PATIENCE {
                bail!("the server never said {start:?}; its log:\n{text}");
            }
            // A log can't be waited for.
            std::thread::sleep(Duration::from_millis(20));
            waited += Duration::from_millis(20);
        }
    }

    fn read(&self) -> Result<String> {
        let folders = std::fs::read_dir(&self.folder)?.flatten();
        let mine = folders.map(|entry| entry.path()).find(|path| path.to_string_lossy().ends_with(&self.uid));
        workdir::read(&mine.context("no log yet")?.join("main/0.log"))
    }
}

/// `result N PERCENTILE:MICROSECONDS …`
fn parse(result: &str) -> Result<(usize, Vec<(f64, f64)>)> {
    let mut words = result.split(' ').skip(1);
    let requests = words.next().context("no number of requests")?.parse()?;
    let latencies = words
        .map(|word| {
            let (percentile, micros) =
                word.split_once(':').with_context(|| format!("{word:?} is no percentile"))?;
            Ok((percentile.parse()?, micros.parse::<f64>()? / 1000.0))
        })
        .collect::<Result<Vec<_>>>()?;
    Ok((requests, latencies))
}

/// When the tuner did something first, in milliseconds after `since`: not before, if it was so quick that the
/// API told of the pods later. None if it did nothing.
fn first_step(agent: &Agent, since: jiff::Timestamp) -> Result<Option<f64>> {
    let output = agent.cli(&["tune", "history", "-o", "json"]).output().context("could not ask the tuner")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Some(line) = text.lines().next() else { return Ok(None) };
    let step: Value = serde_json::from_str(line)?;
    let at: jiff::Timestamp = step["at"].as_str().context("a step without a time")?.parse()?;
    Ok(Some((at.duration_since(since).as_secs_f64() * 1000.0).max(0.0)))
}

fn outweigh_others(root: &CgroupRoot) -> Result<()> {
    let dir = root.dir("cpu").context("no cpu controller")?;
    let (file, most) =
        if dir.join("cpu.shares").exists() { ("cpu.shares", "262144") } else { ("cpu.weight", "10000") };
    workdir::write(&dir.join(file), most)
}

/// Latency by percentile, both axes logarithmic: the further right, the rarer.
fn draw(file: &Path, runs: &[(&str, &Run)]) -> Result<()> {
    let most = runs.iter().map(|(_, run)| run.at(99.99)).fold(1.0, f64::max) * 1.5;
    let area = SVGBackend::new(file, (760, 420)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .margin_right(32)
        .x_label_area_size(42)
        .y_label_area_size(56)
        .build_cartesian_2d((1.0..10_000.0).log_scale(), (0.5..most).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("one request in")
        .y_desc("latency, ms")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y}"))
        .draw()?;
    let colours = [(70, 130, 60), (200, 60, 40), (40, 90, 180), (200, 140, 40), (120, 60, 160)];
    for ((name, run), (red, green, blue)) in runs.iter().zip(colours) {
        let colour = RGBColor(red, green, blue);
        let points = run
            .latencies
            .iter()
            .map(|(percentile, latency)| (100.0 / (100.0 - percentile).max(0.01), *latency));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present().context("could not write the plot")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_back() {
        let (requests, latencies) = parse("result 3 0.0000:1000 50.0000:2500 99.0000:4000").unwrap();
        assert_eq!((requests, latencies.len()), (3, 3));
        let run = Run { latencies, requests, server: 0.0, neighbour: 0.0, stolen: 0.0, reaction: None };
        assert_eq!((run.at(50.0), run.at(99.0), run.at(99.9)), (2.5, 4.0, 4.0));
        assert!(parse("result 3 50").is_err());
    }
}
