//! `cargo xtask conformance`: runs Kubernetes' own end-to-end tests (docs/conformance.md).
//!
//! The suites are built from Kubernetes' sources; this repository contains no part of them. `E2E_TEST` names
//! the cluster suite (`e2e.test`), which tests a cluster whose node runs beelet; `E2E_NODE_TEST` names the
//! node suite (`e2e_node.test`), which starts the agent itself. Results are recorded in the ledger, and the
//! page is generated from it: neither is written by hand.

mod junit;
mod ledger;
mod page;
mod submission;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use beelet_tests::workdir;

use self::ledger::{Ledger, Outcome, Row};
use xtask::progress::Step;

/// Run Kubernetes' own tests against a node, and record the results
#[derive(clap::Args)]
#[command(after_help = "\
Environment:
  E2E_TEST       binary of the cluster suite, e2e.test
  E2E_NODE_TEST  binary of the node suite, e2e_node.test
  GINKGO         ginkgo command, needed to run tests in parallel (--procs)
  KUBECONFIG     kubeconfig of the cluster for the cluster suite, without --cluster
  E2E_IMAGES     with --cluster: OCI archive of the suite's images, which the machines import
  and, with --cluster, the programs that `cargo xtask cluster --help` lists

Examples:
  E2E_TEST=./e2e.test cargo xtask conformance --cluster   # all of Kubernetes' conformance tests
  KUBECONFIG=admin.conf E2E_TEST=./e2e.test cargo xtask conformance '\\[NodeConformance\\]'
  E2E_NODE_TEST=./e2e_node.test cargo xtask conformance --suite node 'Containers Lifecycle'
  cargo xtask conformance --results run/junit.xml   # results of a run elsewhere")]
pub(crate) struct Args {
    /// Tests to run, as a regular expression on their names [default: those of a node; with --cluster, all
    /// conformance tests]
    focus: Option<String>,
    /// Tests to skip, as a regular expression on their names [default: flaky tests and features; with
    /// --cluster, none]
    #[arg(long)]
    skip: Option<String>,
    /// Run the cluster suite on a cluster of several nodes, which `cargo xtask cluster` builds unless there
    /// is one, and write the files of a submission to the CNCF
    #[arg(long, conflicts_with_all = ["suite", "results"])]
    cluster: bool,
    /// Suite to run
    #[arg(long, value_enum, default_value_t = Suite::Cluster)]
    suite: Suite,
    /// Number of parallel tests (needs GINKGO)
    #[arg(long, default_value_t = 1)]
    procs: u32,
    /// Time limit in minutes; the results so far are kept
    #[arg(long, default_value_t = 60)]
    minutes: u32,
    /// Additional argument for the suite
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    suite_arg: Vec<String>,
    /// Run nothing; read the results from these JUnit files instead, in this order
    #[arg(long, value_name = "FILE", num_args = 1..)]
    results: Vec<PathBuf>,
}

/// Suite of Kubernetes' tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Suite {
    /// e2e.test, against a cluster
    Cluster,
    /// e2e_node.test, which starts the agent
    Node,
}

impl Suite {
    fn name(self) -> &'static str {
        match self {
            Self::Cluster => "cluster",
            Self::Node => "node",
        }
    }

    fn variable(self) -> &'static str {
        match self {
            Self::Cluster => "E2E_TEST",
            Self::Node => "E2E_NODE_TEST",
        }
    }
}

impl Args {
    fn focus(&self) -> &str {
        let default = if self.cluster {
            r"\[Conformance\]"
        } else {
            r"\[NodeConformance\]|\[sig-node\].*\[Conformance\]"
        };
        self.focus.as_deref().unwrap_or(default)
    }

    fn skip(&self) -> &str {
        let default = if self.cluster { "" } else { r"\[Flaky\]|\[LinuxOnly:false\]|\[Feature:" };
        self.skip.as_deref().unwrap_or(default)
    }
}

/// Runs `cargo xtask conformance`.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.cluster {
        return submission::run(args);
    }
    let results = if args.results.is_empty() { vec![run_suite(args)?] } else { args.results.clone() };
    let mut rows = Vec::new();
    for file in &results {
        let text = workdir::read(file)?;
        rows.extend(junit::read(&text).with_context(|| format!("cannot read {}", file.display()))?);
    }
    if rows.is_empty() {
        bail!("no test ran; does the focus match any? `{}`", args.focus());
    }
    keep(args.suite, rows)
}

/// Records results in the ledger, regenerates the page and prints a summary.
fn keep(suite: Suite, rows: Vec<Row>) -> Result<()> {
    let path = workdir::repository().join("tests/conformance/ledger.tsv");
    let mut ledger = if path.exists() { Ledger::parse(&workdir::read(&path)?)? } else { Ledger::default() };
    let failed: Vec<Row> = rows.iter().filter(|row| row.outcome == Outcome::Fail).cloned().collect();
    println!("{}", ledger::counts(rows.iter()));
    for row in rows {
        ledger.record(suite.name(), row);
    }
    write(&path, &ledger.to_string())?;
    let beside = workdir::read(&path.with_file_name("beside.tsv"))?;
    write(&workdir::repository().join("docs/conformance.md"), &page::of(&ledger, &beside))?;
    for row in &failed {
        println!("failed: {}\n        {}", row.test, row.reason);
    }
    if failed.is_empty() { Ok(()) } else { bail!("{} tests failed", failed.len()) }
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Runs the suite; returns its JUnit file.
fn run_suite(args: &Args) -> Result<PathBuf> {
    let binary = named(args.suite.variable())?;
    let folder = workdir::target_dir().join("conformance").join(args.suite.name());
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let junit = folder.join("junit.xml");
    // Results of an earlier run must not be mistaken for those of this one.
    if junit.exists() {
        std::fs::remove_file(&junit).with_context(|| format!("cannot remove {}", junit.display()))?;
    }
    let step = Step::start(format!("{} against {}", binary.display(), args.focus()));
    let ended = command(args, &binary, &folder)?.current_dir(&folder).status();
    let ended = ended.context("cannot start the suite")?;
    step.done(&ended.to_string());
    if !junit.exists() {
        bail!("the suite ended with {ended} and left no results: see its output above");
    }
    Ok(junit)
}

/// Returns the suite's binary, which a variable names.
fn named(variable: &str) -> Result<PathBuf> {
    let Some(binary) = std::env::var_os(variable).map(PathBuf::from) else {
        bail!(
            "{variable} must name the suite's binary, built from Kubernetes' sources (docs/conformance.md)"
        );
    };
    binary.canonicalize().with_context(|| format!("{variable}: {}", binary.display()))
}

/// Returns the suite's command line; through ginkgo if it is given.
fn command(args: &Args, binary: &Path, folder: &Path) -> Result<Command> {
    let ginkgo = std::env::var_os("GINKGO");
    if args.procs > 1 && ginkgo.is_none() {
        bail!("--procs needs ginkgo; set GINKGO to its command");
    }
    let flag = |name: &str, value: &str| match ginkgo {
        Some(_) => format!("--{name}={value}"),
        None => format!("--ginkgo.{name}={value}"),
    };
    let mut command = Command::new(ginkgo.as_deref().unwrap_or(binary.as_os_str()));
    command.arg(flag("focus", args.focus())).arg(flag("skip", args.skip()));
    command.arg(flag("timeout", &format!("{}m", args.minutes)));
    command.arg(if ginkgo.is_some() { "--no-color" } else { "--ginkgo.no-color" });
    if ginkgo.is_some() {
        command.arg("--keep-going").arg(format!("--procs={}", args.procs));
        command.arg(format!("--output-dir={}", folder.display())).arg("--junit-report=junit.xml");
        command.arg(binary).arg("--");
    } else {
        command.arg(flag("junit-report", &folder.join("junit.xml").display().to_string()));
    }
    match args.suite {
        Suite::Cluster => {
            let Some(kubeconfig) = std::env::var_os("KUBECONFIG") else {
                bail!("KUBECONFIG must name a kubeconfig with administrator access to the cluster");
            };
            let kubeconfig = Path::new(&kubeconfig).canonicalize().context("KUBECONFIG")?;
            command.arg(format!("--kubeconfig={}", kubeconfig.display()));
            command.args(["--provider=skeleton", "--allowed-not-ready-nodes=0", "--minStartupPods=0"]);
        }
        Suite::Node => {
            let programs = programs(folder)?;
            command.arg(format!("--k8s-bin-dir={}", programs.display())).arg("--prepull-images=false");
        }
    }
    command.args(&args.suite_arg);
    Ok(command)
}

/// Returns the folder in which the node suite finds `kubelet`: beelet under that name.
fn programs(folder: &Path) -> Result<PathBuf> {
    let programs = folder.join("bin");
    std::fs::create_dir_all(&programs).with_context(|| format!("cannot create {}", programs.display()))?;
    let link = programs.join("kubelet");
    if link.symlink_metadata().is_ok() {
        std::fs::remove_file(&link).with_context(|| format!("cannot replace {}", link.display()))?;
    }
    let beelet = workdir::target_dir().join("release/beelet");
    if !beelet.exists() {
        bail!("{} does not exist; run cargo build --release", beelet.display());
    }
    std::os::unix::fs::symlink(&beelet, &link)
        .with_context(|| format!("cannot create {}", link.display()))?;
    Ok(programs)
}
