//! `beelet doctor`: checks the kernel, the privileges, the runtime and the configuration. Each problem comes
//! with its effect and a fix. The checks undo every change that they make to try a feature.

mod certificates;
mod kernel;
mod machine;
mod network;
mod node;
mod pods;
mod resources;
mod runtime;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
use serde::Serialize;

use self::kernel::Costs;
use self::runtime::Facts;
use super::args::Output;
use super::{USAGE, failed, plain};
use beelet_config::{Config, DEFAULT_PATH};
use beelet_model::desired::Desired;
use beelet_units::cgroup_driver::CgroupDriver;

/// Arguments of `beelet doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Configuration file of the agent. Default: /etc/beelet/beelet.yaml if it exists, else the built-in
    /// defaults.
    #[arg(long, value_name = "FILE", env = "BEELET_CONFIG")]
    config: Option<PathBuf>,
    /// Kubeconfig of the agent, on a node of a cluster.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Print one line per passed check instead of one per group.
    #[arg(short, long)]
    verbose: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Also print the cost of the BPF programs: instructions, runs and run time within one second, memory.
    #[arg(long)]
    bpf: bool,
}

/// The daemon's own start checks, by setting, so that the doctor cannot miss one. The arguments are the
/// runtime's cgroup driver if the runtime reports it, and whether the node belongs to a cluster.
pub type Preflight = fn(&Config, Option<CgroupDriver>, bool) -> Vec<(&'static str, anyhow::Result<()>)>;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// The check passed.
    Ok,
    /// The agent runs with the limitation that the finding describes.
    Degraded,
    /// The agent cannot run.
    Missing,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    #[serde(skip)]
    group: &'static str,
    check: &'static str,
    state: State,
    detail: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    consequence: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

impl Finding {
    fn ok(check: &'static str, detail: impl Into<String>) -> Self {
        Self {
            group: "",
            check,
            state: State::Ok,
            detail: detail.into(),
            consequence: String::new(),
            remedy: String::new(),
        }
    }

    fn degraded(
        check: &'static str,
        detail: impl Into<String>,
        consequence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (consequence, remedy) = (consequence.into(), remedy.into());
        Self { group: "", check, state: State::Degraded, detail: detail.into(), consequence, remedy }
    }

    fn missing(
        check: &'static str,
        detail: impl Into<String>,
        consequence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { state: State::Missing, ..Self::degraded(check, detail, consequence, remedy) }
    }
}

/// Inputs of the checks, besides the machine itself.
struct Patient {
    config: Config,
    runtime: Facts,
    /// Pods of the manifest directory; None without a directory.
    desired: Option<Desired>,
    /// Results of the daemon's own start checks.
    refused: Vec<(&'static str, anyhow::Result<()>)>,
    /// True if the node belongs to a cluster, or may.
    in_cluster: bool,
}

/// A check, which returns one or more findings.
type Check = fn(&Patient) -> Vec<Finding>;

/// All checks by group, in the order of the report.
const GROUPS: &[(&str, &[Check])] = &[
    (
        "machine",
        &[
            machine::kernel_version,
            machine::btf,
            machine::privileges,
            machine::cgroups,
            machine::pressure,
            resources::memory,
            resources::disks,
            machine::bpffs,
            machine::sock_diag,
            machine::clock,
        ],
    ),
    (
        "runtime",
        &[
            runtime::answers,
            runtime::conditions,
            runtime::cgroup_driver,
            runtime::owner,
            runtime::mounts,
            runtime::sandbox,
            network::plugins,
        ],
    ),
    (
        "node",
        &[
            node::running,
            node::space,
            node::start,
            node::warned,
            node::quotas,
            node::inotify,
            node::processes,
            node::port,
            certificates::expiry,
            node::shutdown,
        ],
    ),
    ("pods", &[node::manifests, pods::rejected, pods::images, pods::deleted_by_force]),
];
/// Group of the BPF programs.
const PROGRAMS: &str = "kernel programs";

/// The full report.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    can_run: bool,
    findings: Vec<Finding>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bpf: Option<Costs>,
}

/// Runs all checks and prints the report.
#[must_use]
pub fn run(args: &DoctorArgs, preflight: Preflight) -> ExitCode {
    let config = match config(args.config.as_deref()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(USAGE);
        }
    };
    let desired = pods::desired(&config);
    let images = desired.as_ref().map(pods::images_of).unwrap_or_default();
    let runtime = match runtime::facts(&config, &images) {
        Ok(facts) => facts,
        Err(error) => return failed(&error),
    };
    // A running agent has an API server if it needs one.
    let in_cluster = args.kubeconfig.is_some() || runtime.has_agent();
    let refused = preflight(&config, runtime.driver(), in_cluster);
    let patient = Patient { config, runtime, desired, refused, in_cluster };
    let of_group = |(group, checks): &(&'static str, &[Check])| {
        let findings: Vec<Finding> = checks.iter().flat_map(|check| check(&patient)).collect();
        findings.into_iter().map(|finding| Finding { group, ..finding }).collect::<Vec<_>>()
    };
    let mut findings: Vec<Finding> = GROUPS.iter().flat_map(of_group).collect();
    let (programs, costs) = kernel::programs(&patient.config, args.bpf);
    findings.extend(programs.into_iter().map(|finding| Finding { group: PROGRAMS, ..finding }));
    let can_run = findings.iter().all(|finding| finding.state != State::Missing);
    let report = Report { can_run, findings, bpf: args.bpf.then_some(costs) };
    let text = match args.output {
        Output::Table => table(&report, args.verbose),
        Output::Json => serde_json::to_string_pretty(&report).unwrap_or_default() + "\n",
    };
    // A closed standard output is not a failure of the machine.
    let _ = io::stdout().lock().write_all(text.as_bytes());
    if report.can_run { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn config(path: Option<&Path>) -> Result<Config, String> {
    let usual = Path::new(DEFAULT_PATH);
    let loaded = match path.or_else(|| usual.exists().then_some(usual)) {
        Some(path) => Config::load(path).map_err(|error| error.to_string())?,
        None => Config::with_defaults().map_err(|error| error.to_string())?,
    };
    let (config, warnings) = loaded;
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    Ok(config)
}

/// Merges the passed checks of each group into one line before the group's other findings.
fn in_short(findings: &[Finding]) -> Vec<Finding> {
    let mut short = Vec::new();
    for group in findings.chunk_by(|a, b| a.group == b.group) {
        let mut well: Vec<&str> = Vec::new();
        for finding in group.iter().filter(|finding| finding.state == State::Ok) {
            if well.last() != Some(&finding.check) {
                well.push(finding.check);
            }
        }
        if !well.is_empty() {
            let what =
                if group[0].group == PROGRAMS { format!("{} attach", well.len()) } else { well.join(", ") };
            short.push(Finding::ok(group[0].group, what));
        }
        short.extend(group.iter().filter(|finding| finding.state != State::Ok).cloned());
    }
    short
}

fn cells(finding: &Finding) -> Vec<Cell> {
    let (word, color) = match finding.state {
        State::Ok => ("ok", Color::Green),
        State::Degraded => ("degraded", Color::Yellow),
        State::Missing => ("MISSING", Color::Red),
    };
    let mut text = finding.detail.clone();
    for (word, part) in [("Effect", &finding.consequence), ("Fix", &finding.remedy)] {
        if !part.is_empty() {
            text += &format!("\n{word}: {part}");
        }
    }
    let state = Cell::new(word).fg(color).add_attribute(Attribute::Bold);
    vec![state, Cell::new(finding.check), Cell::new(plain::lines(&text))]
}

fn table(report: &Report, verbose: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if !io::stdout().is_terminal() {
        table.set_width(110);
    }
    let shown = if verbose { report.findings.clone() } else { in_short(&report.findings) };
    for finding in &shown {
        table.add_row(cells(finding));
    }
    let lines: Vec<String> = table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
    let mut text = lines.join("\n") + "\n";
    if let Some(costs) = &report.bpf {
        for program in &costs.programs {
            text += &format!("  program {program}\n");
        }
        for map in &costs.maps {
            text += &format!("  map {map}\n");
        }
        text += &format!("  {}\n", costs.memory());
    }
    let count = |state| report.findings.iter().filter(|finding| finding.state == state).count();
    let (degraded, missing) = (count(State::Degraded), count(State::Missing));
    text += &match (missing, degraded) {
        (0, 0) => "\nbeelet can run here with all features.\n".to_owned(),
        (0, 1) => "\nbeelet can run here; 1 feature is degraded (see above).\n".to_owned(),
        (0, degraded) => {
            format!("\nbeelet can run here; {degraded} features are degraded (see above).\n")
        }
        (1, _) => "\nbeelet cannot run here: 1 check failed.\n".to_owned(),
        (missing, _) => format!("\nbeelet cannot run here: {missing} checks failed.\n"),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(findings: Vec<Finding>) -> Report {
        Report { can_run: findings.iter().all(|f| f.state != State::Missing), findings, bpf: None }
    }

    #[test]
    fn a_report_says_what_it_means_and_what_to_do() {
        let text = table(
            &report(vec![
                Finding::ok("kernel", "Linux 6.12"),
                Finding::degraded("bpffs", "not mounted", "pins are lost", "mount it"),
            ]),
            true,
        );
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        assert!(lines[0].starts_with("ok") && lines[0].ends_with("Linux 6.12"), "{text}");
        assert!(lines[1].starts_with("degraded") && lines[1].ends_with("not mounted"), "{text}");
        assert_eq!(lines[2..4], ["Effect: pins are lost", "Fix: mount it"]);
        assert!(text.ends_with("beelet can run here; 1 feature is degraded (see above).\n"), "{text}");
    }

    #[test]
    fn what_is_well_is_a_line_per_group() {
        let of = |group: &'static str, finding: Finding| Finding { group, ..finding };
        let report = report(vec![
            of("machine", Finding::ok("kernel", "Linux 6.12")),
            of("machine", Finding::ok("BTF", "there")),
            of("machine", Finding::degraded("bpffs", "not mounted", "pins are lost", "mount it")),
            of("node", Finding::ok("agent", "one is running")),
            of(PROGRAMS, Finding::ok("a", "works")),
            of(PROGRAMS, Finding::ok("b", "works")),
        ]);
        let text = table(&report, false);
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["ok", "machine", "kernel,", "BTF"]);
        assert_eq!(words[1][..3], ["degraded", "bpffs", "not"]);
        assert_eq!(words[4], ["ok", "node", "agent"]);
        assert_eq!(words[5], ["ok", "kernel", "programs", "2", "attach"]);
    }

    #[test]
    fn json_has_the_same_and_leaves_out_what_is_empty() {
        let report = report(vec![Finding::ok("a", "b"), Finding::missing("c", "d", "e", "f")]);
        let json = serde_json::to_value(&report).unwrap();
        let expected = serde_json::json!({"canRun": false, "findings": [
            {"check": "a", "state": "ok", "detail": "b"},
            {"check": "c", "state": "missing", "detail": "d", "consequence": "e", "remedy": "f"}]});
        assert_eq!(json, expected);
    }
}
