//! `cargo xtask test`: every test that this machine can run, and a list of those that it can't.

use crate::setup::{self, Part};
use crate::{lab, progress::Step, shell, skips};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::{images, requires, workdir};
use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::process::Command;

/// Runs the tests of every tier that this machine allows, and lists what was left out and why.
#[derive(clap::Args)]
pub struct Args {
    /// The tests that take minutes too
    #[arg(long)]
    long: bool,

    /// Leave the machine as it is: install nothing
    #[arg(long)]
    no_setup: bool,

    /// Fail if anything was left out that this machine could have had: what `xtask/src/skips.rs` doesn't list
    #[arg(long)]
    strict: bool,

    /// Leave out the kernel's tests on other kernels, in VMs
    #[arg(long)]
    no_vm: bool,

    /// The examples in the documentation too, though a filter is given; without one they are always run
    #[arg(long)]
    doc: bool,

    /// For the test runner: a filter, `-p PACKAGE`, …
    #[arg(last = true)]
    runner: Vec<String>,
}

impl Args {
    /// Returns true if arguments of the runner choose packages.
    fn chooses_packages(&self) -> bool {
        self.runner.iter().any(|argument| argument == "-p" || argument.starts_with("--package"))
    }

    /// Returns true if arguments of the runner say how many tests run at a time.
    fn chooses_threads(&self) -> bool {
        let says = |argument: &String| argument.starts_with("-j") || argument.starts_with("--test-threads");
        self.runner.iter().any(says)
    }
}

/// Number of tests that run at a time. Most of them wait, for an agent or a runtime, more than they compute.
fn at_a_time() -> usize {
    2 * std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// What is built and tested where nothing is chosen. The kernel programs and the fuzz programs link only in
/// their own way.
const EVERYTHING: &[&str] = &["--workspace", "--exclude", "beelet-ebpf", "--exclude", "beelet-fuzz"];
/// The second loader of kernel programs, where it can be built.
const LIBBPF: &str = "beelet-libbpf/libbpf";

/// The packages and features of a whole test run, as cargo takes them: with others, all that they share would
/// be built a second time.
pub fn selection() -> Vec<&'static str> {
    let mut selection = EVERYTHING.to_vec();
    if libbpf_headers() {
        selection.extend(["--features", LIBBPF]);
    }
    selection
}

/// The command line's entry.
pub fn run(args: &Args) -> Result<()> {
    let mut left_out = Vec::new();
    // Without an API server, etcd serves nobody.
    let parts =
        if requires::kube_apiserver().is_ok() { &[Part::Test, Part::Cluster][..] } else { &[Part::Test] };
    for part in parts.iter().filter(|_| !args.no_setup) {
        if let Err(error) = setup::ensure(*part) {
            // What is missing costs the tests that need it, not the others.
            eprintln!("{} {error:#}", console::style("warning:").yellow().for_stderr());
            left_out.push(format!("setup: {error:#}"));
        }
    }
    if !libbpf_headers() {
        left_out.push(
            "the libbpf loader: libelf's and zlib's headers are missing (libelf-dev, zlib1g-dev)".into(),
        );
    }
    let step = Step::start("build the agent and the test app");
    let mut build = shell::cargo();
    if args.chooses_packages() {
        build.args(["build", "--package", "beelet", "--package", "beelet-lab"]);
    } else {
        // With the tests: alone, the agent has other features, and all that it shares with them would be
        // built twice.
        build.args(["build", "--bins", "--tests"]).args(selection());
    }
    step.run(&mut build)?;
    let testapp = images::build_testapp()?;
    step.done("");

    let skipped = workdir::target_dir().join("skipped.txt");
    workdir::write(&skipped, "")?;
    let environment = |command: &mut Command| {
        command.env("BEELET_SKIPPED", &skipped).env("BEELET_TESTAPP", &testapp);
        command.env("BEELET_BIN", workdir::target_dir().join("debug/beelet"));
        if args.long {
            command.env("BEELET_LONG", "1");
        }
    };
    let passed = run_tests(args, environment);
    let documented = run_examples(args);
    // Arguments for the runner choose tests, and the VMs know nothing of them.
    let passed_in_vms = if args.no_vm || !args.runner.is_empty() { Ok(()) } else { run_in_vms(&skipped) };
    let skipped = workdir::read(&skipped)?;
    let reasons = reasons(&skipped)?;
    report(&reasons, &left_out);
    let complete = if args.strict { complete(&reasons, &left_out) } else { Ok(()) };
    passed.and(documented).and(passed_in_vms).and(complete)
}

/// An error if something was left out that must not be.
fn complete(reasons: &BTreeMap<&str, Vec<&str>>, left_out: &[String]) -> Result<()> {
    let all = reasons.keys().copied().chain(left_out.iter().map(String::as_str));
    let unexpected: Vec<&str> = all.filter(|reason| skips::why(reason).is_none()).collect();
    if unexpected.is_empty() {
        return Ok(());
    }
    bail!(
        "tests were left out that must not be (what may is in xtask/src/skips.rs):\n  {}",
        unexpected.join("\n  ")
    )
}

/// Everything through nextest where it is installed, else through cargo.
fn run_tests(args: &Args, environment: impl Fn(&mut Command)) -> Result<()> {
    let nextest = requires::find_program("cargo-nextest").is_some();
    let mut command = shell::cargo();
    if nextest {
        command.args(["nextest", "run", "--profile", if args.long { "long" } else { "default" }]);
    } else {
        eprintln!("cargo-nextest is not installed: `cargo test` runs the tests");
        command.args(["test", "--no-fail-fast"]);
    }
    if !args.chooses_packages() {
        command.args(selection());
    }
    if nextest && !args.chooses_threads() {
        command.args(["--test-threads", &at_a_time().to_string()]);
    }
    command.args(&args.runner);
    environment(&mut command);
    workdir::outlive_interrupts()?;
    shell::run(&mut command).context("there are tests that failed")
}

/// The examples in the documentation, which nextest doesn't know.
fn run_examples(args: &Args) -> Result<()> {
    let wanted = args.doc || args.runner.is_empty();
    if !wanted || requires::find_program("cargo-nextest").is_none() {
        return Ok(());
    }
    let mut command = shell::cargo();
    command.args(["test", "--doc", "--quiet"]).args(selection());
    shell::run(&mut command).context("there are examples in the documentation that failed")
}

/// The tests that ask the kernel, on other kernels, where the machine can.
fn run_in_vms(skipped: &Path) -> Result<()> {
    let mut command = lab::command_line("vm");
    command.args(["--or-skip", "--no-setup"]);
    command.env("BEELET_SKIPPED", skipped);
    shell::run(&mut command).context("the kernel's tests in VMs failed")
}

fn libbpf_headers() -> bool {
    ["libelf.h", "zlib.h"].iter().all(|header| Path::new("/usr/include").join(header).exists())
        && requires::find_program("pkg-config").is_some()
}

/// The tests that were left out, by their reason.
fn reasons(skipped: &str) -> Result<BTreeMap<&str, Vec<&str>>> {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in skipped.lines() {
        let Some((test, reason)) = line.strip_prefix("SKIPPED ").and_then(|line| line.split_once(": "))
        else {
            bail!("the list of tests that were left out has a line that no test wrote: {line}");
        };
        reasons.entry(reason).or_default().push(test);
    }
    Ok(reasons)
}

/// What was left out, each reason once with its tests.
fn report(reasons: &BTreeMap<&str, Vec<&str>>, left_out: &[String]) {
    if reasons.is_empty() && left_out.is_empty() {
        eprintln!("\nNothing was left out.");
        return;
    }
    eprintln!("\n{}", console::style("LEFT OUT on this machine:").yellow().bold().for_stderr());
    for (reason, tests) in reasons {
        let why = skips::why(reason).map(|why| format!(" [{why}]")).unwrap_or_default();
        eprintln!("  {} test(s): {reason}{why}", tests.len());
        for test in tests {
            eprintln!("    {test}");
        }
    }
    for what in left_out {
        eprintln!("  {what}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strict_run_fails_for_what_could_have_been_had() {
        let check = |skipped: &str, left_out: &[&str], expected: Option<&str>| {
            let left_out: Vec<String> = left_out.iter().map(|what| (*what).to_owned()).collect();
            let result = complete(&reasons(skipped).unwrap(), &left_out);
            let said = result.err().map(|error| error.to_string());
            assert_eq!(said.is_some(), expected.is_some(), "{said:?}");
            assert!(said.unwrap_or_default().contains(expected.unwrap_or_default()));
        };
        let long = "SKIPPED a: the test takes minutes (cargo xtask test --long)\n";
        check("", &[], None);
        check(long, &[], None);
        check(
            &format!("{long}SKIPPED b: root is required (run the tests as root)\n"),
            &[],
            Some("root is required"),
        );
        check(long, &["the libbpf loader: headers are missing"], Some("libbpf"));
        assert!(reasons("nonsense\n").is_err());
    }
}
