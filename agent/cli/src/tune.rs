//! `beelet tune`: state and history of the cgroup tuner.

use std::fmt::Write as _;
use std::process::ExitCode;

use beelet_proto::beelet as proto;
use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::args::{Output, ShownArgs};
use super::finish;
use super::get::columns::Columns;
use super::get::pod::age;
use super::print::print;
use super::{plain, waited};
use beelet_client::Client;

/// Arguments of `beelet tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Show the tuner's findings, the settings that it holds with reasons, and the settings that it leaves
    /// alone.
    Status(ShowArgs),
    /// Show the containers that would gain from exclusive CPUs, those that leave theirs idle, and the work of
    /// others on exclusive CPUs.
    Advise(ShowArgs),
    /// Show the steps that the tuner took or advised, latest last, each with its reason.
    History(ShowArgs),
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    shown: ShownArgs,
}

const HELD: &[&str] = &["CGROUP", "SETTING", "VALUE", "OWNER'S", "SINCE", "REASON"];
const STEPS: &[&str] = &["AGE", "CGROUP", "SETTING", "FROM", "TO", "OUTCOME", "REASON"];

/// Prints the state or the history.
#[must_use]
pub fn run(args: &TuneArgs) -> ExitCode {
    finish(show(args))
}

async fn show(args: &TuneArgs) -> anyhow::Result<()> {
    let now = Timestamp::now();
    match &args.what {
        What::Status(args) => {
            let status = Client::connect(&args.shown.agent.socket).await?.tuner.status().await?;
            let text = match args.shown.output {
                Output::Table => status_text(&status, now),
                Output::Json => format!("{}\n", status_json(&status)),
            };
            Ok(print(&text)?)
        }
        What::Advise(args) => {
            let status = Client::connect(&args.shown.agent.socket).await?.tuner.status().await?;
            let mut signals = beelet_client::signals::Client::connect(&args.shown.agent.socket).await?;
            let pinned = pinned(&signals.snapshot("").await?);
            let text = match args.shown.output {
                Output::Table => advice_text(&status.pinning, &pinned),
                Output::Json => format!("{}\n", json!({ "pinned": pinned, "advice": status.pinning })),
            };
            Ok(print(&text)?)
        }
        What::History(args) => {
            let history = Client::connect(&args.shown.agent.socket).await?.tuner.history().await?;
            let text = match args.shown.output {
                Output::Table => history_text(&history, now),
                Output::Json => history.steps.iter().map(|step| format!("{}\n", step_json(step))).collect(),
            };
            Ok(print(&text)?)
        }
    }
}

fn status_text(status: &proto::TunerStatus, now: Timestamp) -> String {
    let mode = if status.mode.is_empty() { "not started yet" } else { &status.mode };
    let looked = if status.looked_ns == 0 {
        String::new()
    } else {
        format!(", last round {} ago", ago(status.looked_ns, now))
    };
    let mut text = format!("Tuner:    {mode}{looked}\n");
    for finding in &status.findings {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "Finding:  {finding}");
    }
    for advice in &status.pinning {
        let _ = writeln!(text, "Advice:   {}", plain::line(advice));
    }
    for lacking in &status.lacking {
        let _ = writeln!(text, "Missing:  {lacking}");
    }
    for blocked in &status.blocked {
        let _ = writeln!(
            text,
            "Blocked:  {} of {} for {} s: {}",
            blocked.setting, blocked.cgroup, blocked.seconds_left, blocked.reason
        );
    }
    if status.held.is_empty() {
        text.push_str("Held:     none\n");
        return text;
    }
    text.push('\n');
    let rows = status.held.iter().map(|held| {
        let since = ago(held.since_ns, now);
        [&held.cgroup, &held.setting, &held.value, &held.owners_value, &since, &held.reason]
            .map(|cell| or_none(cell))
            .to_vec()
    });
    text + &Columns::new(HELD).table(&rows.collect::<Vec<_>>())
}

/// Returns a sentence for each container with CPUs of its own.
fn pinned(snapshot: &proto::SignalSnapshot) -> Vec<String> {
    let of_pod = |pod: &proto::SignalPod| {
        let of_container = |container: &proto::SignalContainer| {
            let name = format!("{}/{}, container {}", pod.namespace, pod.name, container.name);
            Some(format!("{} {}", plain::line(&name), waited::pinned(container)?))
        };
        pod.containers.iter().filter_map(of_container).collect::<Vec<_>>()
    };
    snapshot.pods.iter().flat_map(of_pod).collect()
}

fn advice_text(advice: &[String], pinned: &[String]) -> String {
    let line = |title: &'static str| move |sentence: &String| format!("{title}{}\n", plain::line(sentence));
    let lines = pinned.iter().map(line("Pinned:   ")).chain(advice.iter().map(line("Advice:   ")));
    let text: String = lines.collect();
    if text.is_empty() { "No container would gain from CPUs of its own.\n".to_owned() } else { text }
}

fn history_text(history: &proto::TunerHistory, now: Timestamp) -> String {
    if history.steps.is_empty() {
        return "No steps so far.\n".to_owned();
    }
    let rows = history.steps.iter().map(|step| {
        let owners = || "owner's".to_owned();
        let reason = if step.detail.is_empty() {
            step.reason.clone()
        } else {
            format!("{} ({})", step.reason, step.detail)
        };
        vec![
            ago(step.at_ns, now),
            step.cgroup.clone(),
            step.setting.clone(),
            step.from.clone().unwrap_or_else(owners),
            step.to.clone().unwrap_or_else(owners),
            step.outcome.clone(),
            reason,
        ]
    });
    Columns::new(STEPS).table(&rows.collect::<Vec<_>>())
}

fn or_none(cell: &str) -> String {
    if cell.is_empty() { "-".to_owned() } else { cell.to_owned() }
}

fn ago(at_ns: i64, now: Timestamp) -> String {
    Timestamp::from_nanosecond(at_ns.into()).map_or_else(|_| "?".to_owned(), |at| age(at, now))
}

fn time(at_ns: i64) -> Option<String> {
    Timestamp::from_nanosecond(at_ns.into()).ok().map(|at| at.to_string())
}

fn status_json(status: &proto::TunerStatus) -> Value {
    let held = status.held.iter().map(|held| {
        json!({
            "cgroup": held.cgroup, "setting": held.setting, "value": held.value,
            "ownersValue": held.owners_value, "since": time(held.since_ns), "reason": held.reason,
        })
    });
    let blocked = status.blocked.iter().map(|blocked| {
        json!({
            "cgroup": blocked.cgroup, "setting": blocked.setting, "secondsLeft": blocked.seconds_left,
            "reason": blocked.reason,
        })
    });
    json!({
        "mode": status.mode,
        "looked": (status.looked_ns != 0).then(|| time(status.looked_ns)).flatten(),
        "findings": status.findings,
        "lacking": status.lacking,
        "pinning": status.pinning,
        "held": held.collect::<Vec<_>>(),
        "blocked": blocked.collect::<Vec<_>>(),
    })
}

fn step_json(step: &proto::TunerStep) -> Value {
    json!({
        "at": time(step.at_ns), "cgroup": step.cgroup, "setting": step.setting, "from": step.from, "to": step.to,
        "reason": step.reason, "outcome": step.outcome, "detail": step.detail,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> proto::TunerStatus {
        proto::TunerStatus {
            mode: "enforce".to_owned(),
            looked_ns: 9_000_000_000,
            findings: vec!["no protected pod waits for a CPU".to_owned()],
            held: vec![proto::HeldSetting {
                cgroup: "/kubepods/besteffort".to_owned(),
                setting: "cpu.idle".to_owned(),
                value: "1".to_owned(),
                owners_value: "0".to_owned(),
                since_ns: 4_000_000_000,
                reason: "default/web waits".to_owned(),
            }],
            ..proto::TunerStatus::default()
        }
    }

    #[test]
    fn advice_names_the_pinned_containers_and_those_that_wait() {
        assert_eq!(advice_text(&[], &[]), "No container would gain from CPUs of its own.\n");
        let disturber = proto::SignalDisturber { name: "24 disk".to_owned(), thread: false, per_second: 2.0 };
        let use_of_cpus = proto::SignalPinned {
            cpus: "2-3".to_owned(),
            idle: 0.12,
            disturbances_per_second: 2.5,
            disturbers: vec![disturber],
        };
        let main = proto::SignalContainer {
            name: "main".to_owned(),
            pinned: Some(use_of_cpus),
            ..proto::SignalContainer::default()
        };
        let side = proto::SignalContainer { name: "side".to_owned(), ..proto::SignalContainer::default() };
        let pod = proto::SignalPod {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            containers: vec![main, side],
            ..proto::SignalPod::default()
        };
        let snapshot = proto::SignalSnapshot { pods: vec![pod], ..proto::SignalSnapshot::default() };
        assert_eq!(
            advice_text(&["default/slow, container main: waited".to_owned()], &pinned(&snapshot)),
            "Pinned:   default/web, container main has the CPUs 2-3 for itself, idle for 12 % of the last minute, \
             disturbed 2.5 times per second: 24 disk (2.0/s)\nAdvice:   default/slow, container main: waited\n"
        );
    }

    #[test]
    fn the_status_says_what_is_held_and_why() {
        let now = Timestamp::from_second(10).unwrap();
        let text = status_text(&held(), now);
        assert!(
            text.starts_with(
                "Tuner:    enforce, last round 1s ago\nFinding:  no protected pod waits for a CPU\n"
            ),
            "{text}"
        );
        let line = text.lines().last().unwrap();
        for word in ["/kubepods/besteffort", "cpu.idle", "6s", "default/web waits"] {
            assert!(line.contains(word), "{word}: {line}");
        }
        let nothing = proto::TunerStatus { held: Vec::new(), ..held() };
        assert!(status_text(&nothing, now).ends_with("Held:     none\n"));
    }

    #[test]
    fn a_step_back_is_to_the_owners_value() {
        let step = proto::TunerStep {
            setting: "cpu.max".to_owned(),
            from: Some("0.5 CPUs".to_owned()),
            outcome: "done".to_owned(),
            ..proto::TunerStep::default()
        };
        let text = history_text(&proto::TunerHistory { steps: vec![step] }, Timestamp::UNIX_EPOCH);
        let line = text.lines().last().unwrap();
        assert!(line.contains("0.5 CPUs") && line.contains("owner's"), "{line}");
    }
}
