//! `beelet probe`: lists probes and their results, and runs one on demand.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use beelet_proto::beelet as proto;
use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::args::{Output, ShownArgs, pod_name};
use super::get::columns::Columns;
use super::get::pod::age;
use super::print::print;
use super::{complete, finish, plain};
use beelet_client::Client;

const TITLES: &[&str] =
    &["NAMESPACE", "POD", "CONTAINER", "KIND", "TARGET", "MODE", "RESULT", "SINCE", "LATENCY", "LAST RUN"];
/// Maximum characters of a run's detail in a table cell.
const WORDS: usize = 80;

/// Arguments of `beelet probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List all probes with target, mode, result, time of the last change, and last run.
    Ls(LsArgs),
    /// Run one probe now and explain its result. Does not affect the pod; exit code 1 unless the probe
    /// succeeds.
    Run(RunArgs),
}

#[derive(Debug, Args)]
struct LsArgs {
    /// Show only probes of these pods; a name may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods())]
    pods: Vec<String>,
    /// Show only probes of pods in this namespace.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    #[command(flatten)]
    shown: ShownArgs,
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Name of the pod; may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods())]
    pod: String,
    /// Name of the container.
    #[arg(value_name = "CONTAINER", add = complete::containers())]
    container: String,
    /// Kind of the probe.
    #[arg(value_name = "KIND", value_enum)]
    kind: Kind,
    /// Namespace of the pod. Required only if two pods have the same name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    #[command(flatten)]
    shown: ShownArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Restarts a container that has stopped working.
    Liveness,
    /// Decides whether a container receives traffic.
    Readiness,
    /// Delays the other two probes until the container has started.
    Startup,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Liveness => "liveness",
            Self::Readiness => "readiness",
            Self::Startup => "startup",
        }
    }
}

/// Runs the subcommand.
#[must_use]
pub fn run(args: &ProbeArgs) -> ExitCode {
    finish(async {
        match &args.what {
            What::Ls(args) => ls(args).await,
            What::Run(args) => run_one(args).await,
        }
    })
}

async fn ls(args: &LsArgs) -> anyhow::Result<ExitCode> {
    let mut client = Client::connect(&args.shown.agent.socket).await?;
    let all = client.probes.list().await?;
    let wanted: Vec<&proto::Probe> = all.iter().filter(|probe| args.wants(probe)).collect();
    if args.shown.output == Output::Json {
        let list: Vec<Value> = wanted.iter().map(|probe| probe_json(probe)).collect();
        print(&format!("{}\n", serde_json::to_string_pretty(&list)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    if wanted.is_empty() {
        eprintln!("No probes found.");
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = wanted.iter().map(|probe| row(probe, Timestamp::now())).collect();
    print(&Columns::new(TITLES).table(&rows))?;
    print_notes(&wanted);
    Ok(ExitCode::SUCCESS)
}

impl LsArgs {
    fn wants(&self, probe: &proto::Probe) -> bool {
        let named = |pod: &String| {
            probe.pod == *pod
                || probe.pod.strip_prefix(pod.as_str()).is_some_and(|rest| rest.starts_with('-'))
        };
        self.namespace.as_ref().is_none_or(|namespace| *namespace == probe.namespace)
            && (self.pods.is_empty() || self.pods.iter().any(named))
    }
}

/// Prints fallbacks and problems to standard error.
fn print_notes(probes: &[&proto::Probe]) {
    let style = console::Style::new().for_stderr().yellow();
    let style = if io::stderr().is_terminal() { style } else { console::Style::new() };
    for probe in probes {
        let name = format!("{}/{} {} {}", probe.namespace, probe.pod, probe.container, probe.kind);
        if !probe.fallback.is_empty() {
            eprintln!(
                "{} {name} connects instead: {}",
                style.apply_to("note:"),
                plain::line(&probe.fallback)
            );
        }
        if let Some(tolerated) = &probe.tolerated {
            eprintln!("{} {name}: {}", style.apply_to("note:"), tolerated_text(tolerated));
        }
        for problem in &probe.problems {
            eprintln!("{} {name}: {}", style.apply_to("note:"), plain::line(problem));
        }
    }
}

/// Returns the effect that the stricter rule for stalled listeners would have had.
fn tolerated_text(tolerated: &proto::Tolerated) -> String {
    let last = stamp(tolerated.last_unix_ms).unwrap_or_else(|| "unknown".to_owned());
    format!(
        "connections waited longer than the timeout at {} checks (last: {last}); `stalled=fail` would have failed \
         the container {} times",
        tolerated.checks, tolerated.failures
    )
}

fn row(probe: &proto::Probe, now: Timestamp) -> Vec<String> {
    let since = Timestamp::from_millisecond(probe.since_unix_ms).ok().filter(|_| probe.since_unix_ms != 0);
    let latency = probe.last.as_ref().map(|check| time(Duration::from_micros(check.latency_us)));
    let last = match (&probe.held[..], &probe.last) {
        ("", None) => "none yet".to_owned(),
        ("", Some(check)) => one_line(&format!("{}: {}", check.outcome, check.detail)),
        (held, _) => format!("({held})"),
    };
    let mode = if probe.fallback.is_empty() { probe.mode.clone() } else { format!("{}*", probe.mode) };
    vec![
        probe.namespace.clone(),
        probe.pod.clone(),
        probe.container.clone(),
        probe.kind.clone(),
        one_line(&probe.target),
        mode,
        probe.result.clone(),
        since.map_or_else(|| "-".to_owned(), |since| age(since, now)),
        latency.unwrap_or_else(|| "-".to_owned()),
        last,
    ]
}

/// Returns the text on one line, truncated to [`WORDS`] characters.
fn one_line(text: &str) -> String {
    let line: String =
        text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(WORDS).collect();
    if text.trim().chars().nth(WORDS).is_some() { line + "…" } else { line }
}

/// Returns a short human-readable time.
fn time(time: Duration) -> String {
    match time.as_micros() {
        micros @ 0..1000 => format!("{micros}µs"),
        micros @ 1000..1_000_000 => format!("{:.1}ms", micros as f64 / 1e3),
        micros => format!("{:.1}s", micros as f64 / 1e6),
    }
}

async fn run_one(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let mut client = Client::connect(&args.shown.agent.socket).await?;
    let wanted = proto::RunProbeRequest {
        namespace: args.namespace.clone().unwrap_or_default(),
        pod: args.pod.clone(),
        container: args.container.clone(),
        kind: args.kind.name().to_owned(),
    };
    let answer = client.probes.run(wanted).await?;
    let (probe, check) = (answer.probe.unwrap_or_default(), answer.check.unwrap_or_default());
    if args.shown.output == Output::Json {
        let document = json!({
            "probe": probe_json(&probe),
            "check": run_json(&check),
            "explanation": answer.explanation,
        });
        print(&format!("{}\n", serde_json::to_string_pretty(&document)?))?;
    } else {
        let mut text = format!(
            "{} probe of container {} in pod {}/{}: {} ({})\n",
            probe.kind, probe.container, probe.namespace, probe.pod, probe.target, probe.mode
        );
        for line in &answer.explanation {
            text += &format!("  {line}\n");
        }
        text += &format!(
            "{} in {}: {}\n",
            check.outcome,
            time(Duration::from_micros(check.latency_us)),
            check.detail
        );
        text += &format!("Current result: {}", probe.result);
        text += &match &probe.held[..] {
            "" => ", probed every ".to_owned() + &time(Duration::from_millis(probe.period_ms)) + ".\n",
            held => format!("; runs do not count at present: {held}.\n"),
        };
        print(&plain::lines(&text))?;
    }
    Ok(if check.outcome == "success" { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn probe_json(probe: &proto::Probe) -> Value {
    let text = |text: &str| if text.is_empty() { Value::Null } else { text.into() };
    json!({
        "namespace": probe.namespace,
        "pod": probe.pod,
        "container": probe.container,
        "kind": probe.kind,
        "target": probe.target,
        "mode": probe.mode,
        "fallback": text(&probe.fallback),
        "result": probe.result,
        "since": stamp(probe.since_unix_ms),
        "last": probe.last.as_ref().map(run_json),
        "periodMilliseconds": probe.period_ms,
        "timeoutMilliseconds": probe.timeout_ms,
        "held": text(&probe.held),
        "problems": probe.problems,
        "tolerated": probe.tolerated.as_ref().map(|tolerated| json!({
            "checks": tolerated.checks,
            "failures": tolerated.failures,
            "last": stamp(tolerated.last_unix_ms),
        })),
    })
}

fn run_json(check: &proto::ProbeCheck) -> Value {
    json!({
        "outcome": check.outcome,
        "detail": check.detail,
        "latencyMicroseconds": check.latency_us,
        "at": stamp(check.at_unix_ms),
    })
}

/// Returns the time in RFC 3339, or None for zero.
fn stamp(unix_ms: i64) -> Option<String> {
    (unix_ms != 0).then(|| Timestamp::from_millisecond(unix_ms).ok().map(|at| at.to_string())).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe() -> proto::Probe {
        proto::Probe {
            namespace: "shop".into(),
            pod: "web-n1".into(),
            container: "main".into(),
            kind: "readiness".into(),
            target: "tcp pod:80".into(),
            mode: "kernel".into(),
            result: "success".into(),
            since_unix_ms: 1_000_000,
            last: Some(proto::ProbeCheck {
                outcome: "success".into(),
                detail: "the kernel has\na listener".into(),
                latency_us: 1,
                at_unix_ms: 1_000_500,
            }),
            ..Default::default()
        }
    }

    #[test]
    fn a_probe_is_one_line() {
        let now = Timestamp::from_millisecond(1_060_000).unwrap();
        let row = row(&probe(), now);
        assert_eq!(row[4..9], ["tcp pod:80", "kernel", "success", "60s", "1µs"]);
        assert_eq!(row[9], "success: the kernel has a listener");
        let held = proto::Probe { held: "settled".into(), fallback: "no BPF".into(), ..probe() };
        let row = super::row(&held, now);
        assert_eq!((row[5].as_str(), row[9].as_str()), ("kernel*", "(settled)"));
    }

    #[test]
    fn json_says_nothing_as_null() {
        let json = probe_json(&proto::Probe::default());
        assert_eq!(
            (&json["last"], &json["since"], &json["held"]),
            (&Value::Null, &Value::Null, &Value::Null)
        );
        let json = probe_json(&probe());
        assert_eq!(json["since"], "1970-01-01T00:16:40Z");
        assert_eq!(json["last"]["latencyMicroseconds"], 1);
    }

    #[test]
    fn the_effect_of_the_stricter_rule_is_a_note_and_a_field() {
        let tolerated = proto::Tolerated { checks: 7, failures: 2, last_unix_ms: 1_000_000 };
        let expected = "connections waited longer than the timeout at 7 checks (last: 1970-01-01T00:16:40Z); \
                        `stalled=fail` would have failed the container 2 times";
        assert_eq!(tolerated_text(&tolerated), expected);
        assert_eq!(probe_json(&probe())["tolerated"], Value::Null);
        let json = probe_json(&proto::Probe { tolerated: Some(tolerated), ..probe() });
        assert_eq!(json["tolerated"], json!({"checks": 7, "failures": 2, "last": "1970-01-01T00:16:40Z"}));
    }

    #[test]
    fn times_are_short() {
        let check = |micros, expect: &str| assert_eq!(time(Duration::from_micros(micros)), expect);
        check(999, "999µs");
        check(1500, "1.5ms");
        check(2_500_000, "2.5s");
    }
}
