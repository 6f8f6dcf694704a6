//! `cargo xtask test`: runs all tests that this machine can run, and lists the others.

use crate::setup::{self, Part};
use crate::{lab, progress::Step, shell, skips};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::{images, requires, workdir};
use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::process::Command;

/// Runs the tests of every tier that this machine allows, and lists the skipped tests with the reasons
#[derive(clap::Args)]
pub struct Args {
    /// Also run the tests that take minutes
    #[arg(long)]
    long: bool,

    /// Leave the machine as it is: install nothing
    #[arg(long)]
    no_setup: bool,

    /// Fail if a test was skipped for a reason that `xtask/src/skips.rs` doesn't list
    #[arg(long)]
    strict: bool,

    /// Skip the kernel's tests on other kernels, in VMs
    #[arg(long)]
    no_vm: bool,

    /// Run the examples in the documentation even with a filter; without a filter they always run
    #[arg(long)]
    doc: bool,

    /// Arguments for the test runner: a filter, `-p PACKAGE`, …
    #[arg(last = true)]
    runner: Vec<String>,
}

impl Args {
    /// Returns true if arguments of the runner choose packages.
    fn chooses_packages(&self) -> bool {
        self.runner.iter().any(|argument| argument == "-p" || argument.starts_with("--package"))
    }

    /// Returns true if arguments of the runner set the number of tests that run at a time.
    fn chooses_threads(&self) -> bool {
        let says = |argument: &String| argument.starts_with("-j") || argument.starts_with("--test-threads");
        self.runner.iter().any(says)
    }
}

/// Returns the number of tests that run at a time. Most tests wait for an agent or a runtime more than they
/// compute.
fn at_a_time() -> usize {
    2 * std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// The packages that are built and tested if the arguments choose none. The kernel programs and the fuzz
/// programs are excluded because each has its own way to link.
const EVERYTHING: &[&str] = &["--workspace", "--exclude", "beelet-ebpf", "--exclude", "beelet-fuzz"];
/// The feature of the second loader of kernel programs, for machines that can build it.
const LIBBPF: &str = "beelet-libbpf/libbpf";

/// Returns the packages and features of a whole test run as arguments of cargo. With other packages or
/// features, cargo would build the shared libraries a second time.
pub fn selection() -> Vec<&'static str> {
    let mut selection = EVERYTHING.to_vec();
    if libbpf_headers() {
        selection.extend(["--features", LIBBPF]);
    }
    selection
}

/// Runs `cargo xtask test`.
pub fn run(args: &Args) -> Result<()> {
    let mut left_out = Vec::new();
    // Without an API server, etcd has no client.
    let parts =
        if requires::kube_apiserver().is_ok() { &[Part::Test, Part::Cluster][..] } else { &[Part::Test] };
    for part in parts.iter().filter(|_| !args.no_setup) {
        if let Err(error) = setup::ensure(*part) {
            // A missing program affects only the tests that need it.
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
        // Built alone, the agent has other features, so cargo would build the libraries that it shares with
        // the tests twice.
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
    // Arguments for the runner choose tests, but the VMs do not know these arguments.
    let passed_in_vms = if args.no_vm || !args.runner.is_empty() { Ok(()) } else { run_in_vms(&skipped) };
    let skipped = workdir::read(&skipped)?;
    let reasons = reasons(&skipped)?;
    report(&reasons, &left_out);
    let complete = if args.strict { complete(&reasons, &left_out) } else { Ok(()) };
    passed.and(documented).and(passed_in_vms).and(complete)
}

/// Checks that no test was skipped for an unaccepted reason.
fn complete(reasons: &BTreeMap<&str, Vec<&str>>, left_out: &[String]) -> Result<()> {
    let all = reasons.keys().copied().chain(left_out.iter().map(String::as_str));
    let unexpected: Vec<&str> = all.filter(|reason| skips::why(reason).is_none()).collect();
    if unexpected.is_empty() {
        return Ok(());
    }
    bail!(
        "tests were skipped for reasons that xtask/src/skips.rs does not accept:\n  {}",
        unexpected.join("\n  ")
    )
}

/// Runs all tests with nextest where it is installed, otherwise with cargo.
fn run_tests(args: &Args, environment: impl Fn(&mut Command)) -> Result<()> {
    let nextest = requires::find_program("cargo-nextest").is_some();
    let mut command = shell::cargo();
    if nextest {
        command.args(["nextest", "run", "--profile", if args.long { "long" } else { "default" }]);
    } else {
        eprintln!("cargo-nextest is not installed, so `cargo test` runs the tests");
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
    shell::run(&mut command).context("some tests failed")
}

/// Runs the examples in the documentation, which nextest doesn't run.
fn run_examples(args: &Args) -> Result<()> {
    let wanted = args.doc || args.runner.is_empty();
    if !wanted || requires::find_program("cargo-nextest").is_none() {
        return Ok(());
    }
    let mut command = shell::cargo();
    command.args(["test", "--doc", "--quiet"]).args(selection());
    shell::run(&mut command).context("some examples in the documentation failed")
}

/// Runs the tests that ask the kernel on other kernels, if the machine can.
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

/// Returns the skipped tests by their reason.
fn reasons(skipped: &str) -> Result<BTreeMap<&str, Vec<&str>>> {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in skipped.lines() {
        let Some((test, reason)) = line.strip_prefix("SKIPPED ").and_then(|line| line.split_once(": "))
        else {
            bail!("the list of skipped tests contains an unknown line: {line}");
        };
        reasons.entry(reason).or_default().push(test);
    }
    Ok(reasons)
}

/// Prints each reason for skipped tests once, with the tests.
fn report(reasons: &BTreeMap<&str, Vec<&str>>, left_out: &[String]) {
    if reasons.is_empty() && left_out.is_empty() {
        eprintln!("\nno test was skipped");
        return;
    }
    eprintln!("\n{}", console::style("SKIPPED on this machine:").yellow().bold().for_stderr());
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
    fn a_strict_run_fails_for_an_unaccepted_reason() {
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
