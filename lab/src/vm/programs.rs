//! Programs of a guest: the tests and the agent as static programs, and a few programs of this machine with
//! their libraries.

use super::results::Test;
use anyhow::{Context as _, Result, bail};
use beelet_tests::images;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xtask::cross::{self, Arch};
use xtask::qemu::Qemu;
use xtask::{setup, shell};

/// Test programs of `beelet-tests` that depend on the kernel.
const INTEGRATION: &[&str] = &["kernel", "cgroups"];

/// Unit tests that depend on the kernel: a package, its library, and a module of it (empty: all).
const UNIT: &[(&str, &str, &str)] =
    &[("beelet-bpf", "beelet_bpf", ""), ("beelet-tests", "beelet_tests", "guards::")];

/// Programs that tests start, in addition to busybox's. A test that needs a missing program reports it.
pub(super) const BORROWED: &[&str] = &["ip", "bpftool", "runc", "mkfs.ext4"];

/// Programs built for the guests.
#[derive(Debug)]
pub(super) struct Programs {
    /// Their processor.
    pub(super) arch: Arch,
    /// The agent.
    pub(super) agent: PathBuf,
    /// App that tests start in cgroups and namespaces.
    pub(super) testapp: PathBuf,
    /// Other programs that tests start, by the path that cargo compiled into the tests.
    pub(super) helpers: Vec<PathBuf>,
    /// Test programs by name.
    pub(super) tests: BTreeMap<String, PathBuf>,
    /// Tests to run, in this order; the index of a test is its number.
    pub(super) plan: Vec<Test>,
}

/// Executable built by cargo.
#[derive(Debug, PartialEq, Eq)]
struct Artifact {
    target: String,
    kind: String,
    is_test: bool,
    executable: PathBuf,
}

/// Builds all programs in a target folder of their own: with the usual one, the flags would make cargo
/// rebuild everything again and again.
pub(super) fn build(work: &Path, arch: Arch) -> Result<Programs> {
    if Arch::here()? != Arch::Amd64 {
        bail!("the tests for guests are built for x86_64; run this on x86_64");
    }
    // With the tests' targets cargo selects the same features for the agent as for its unit tests: one build
    // instead of two.
    let mut build = vec!["build", "--bins"];
    build.extend(
        ["beelet", "beelet-exec", "beelet-tests", "beelet-testapp"]
            .iter()
            .flat_map(|name| ["--package", name]),
    );
    build.extend(INTEGRATION.iter().flat_map(|name| ["--test", name]));
    let mut artifacts = cargo(work, arch, &build)?;
    let mut unit = vec!["test", "--no-run", "--lib"];
    unit.extend(UNIT.iter().flat_map(|(package, ..)| ["--package", package]));
    artifacts.extend(cargo(work, arch, &unit)?);
    let emulator = if arch == Arch::here()? { None } else { Some(Qemu::user(work, arch)?) };
    programs(artifacts, arch, emulator.as_ref())
}

/// Agent and test program built by this machine's cargo, for a machine with the same libraries.
pub(super) struct Dynamic {
    pub(super) agent: PathBuf,
    pub(super) test: PathBuf,
    /// Other programs that the test starts, by the path that cargo compiled into it.
    pub(super) helpers: Vec<PathBuf>,
}

/// Builds the test program `test`, and the agent unless `agent` names a built one.
pub(super) fn dynamic(test: &str, agent: Option<&Path>) -> Result<Dynamic> {
    if let Some(agent) = agent.filter(|agent| !agent.is_file()) {
        bail!("{} is not a file; --agent needs an agent built by `cargo xtask package`", agent.display());
    }
    let made = artifacts(&mut dynamic_build(test, agent.is_none()))?;
    let find = |name: &str, is_test: bool| {
        let found = made.iter().find(|made| made.is_test == is_test && made.target == name);
        found.map(|made| made.executable.clone()).with_context(|| format!("cargo built no program {name}"))
    };
    let helpers = made.iter().filter(|made| !made.is_test && made.target != "beelet");
    Ok(Dynamic {
        agent: agent.map_or_else(|| find("beelet", false), |agent| Ok(agent.to_owned()))?,
        test: find(test, true)?,
        helpers: helpers.map(|made| made.executable.clone()).collect(),
    })
}

/// Returns the command that builds the test program `test` with the programs of its package, and the agent if
/// requested.
fn dynamic_build(test: &str, with_agent: bool) -> Command {
    let mut command = shell::cargo();
    command.args(["build", "--test", test]);
    if with_agent {
        command.args(["--bin", "beelet", "--bin", "beelet-exec"]);
    }
    command.args(xtask::test::selection()).args(["--message-format", "json-render-diagnostics"]);
    command
}

/// Returns the tests of a program of this machine, in order.
pub(super) fn tests(program: &str, path: &Path) -> Result<Vec<Test>> {
    list(program, path, None)
}

/// Runs cargo with static linking; returns the executables that it built or had built.
fn cargo(work: &Path, arch: Arch, arguments: &[&str]) -> Result<Vec<Artifact>> {
    let mut command = shell::cargo();
    command.args(arguments).args(["--message-format", "json-render-diagnostics", "--target-dir"]);
    command.arg(work.join("build"));
    match arch {
        Arch::Amd64 => {
            let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
            command.args(["--target", "x86_64-unknown-linux-gnu"]);
            command.env_remove("CARGO_ENCODED_RUSTFLAGS"); // it takes precedence over RUSTFLAGS
            command.env("RUSTFLAGS", format!("{flags} -C target-feature=+crt-static").trim());
        }
        // No glibc for that processor is installed, and a guest needs only some libc.
        Arch::Arm64 => drop(cross::target_musl(&mut command, arch)?),
    }
    // A guest has its programs in memory.
    command.env("CARGO_PROFILE_DEV_DEBUG", "false").env("CARGO_PROFILE_DEV_STRIP", "debuginfo");
    // The processor is emulated: without this, parsing the kernel's types takes minutes instead of a second.
    command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "1");
    artifacts(&mut command)
}

/// Runs cargo; returns the executables that it built or had built.
fn artifacts(command: &mut Command) -> Result<Vec<Artifact>> {
    let shown = shell::display(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{shown}`"))?;
    let mut artifacts = Vec::new();
    for line in BufReader::new(child.stdout.take().context("cargo has no output")?).lines() {
        artifacts.extend(artifact(&line.context("cannot read cargo's output")?));
    }
    let status = child.wait().with_context(|| format!("cannot wait for `{shown}`"))?;
    if !status.success() {
        bail!("building the test programs failed: `{shown}` exited with {status}");
    }
    Ok(artifacts)
}

/// Parses a line of cargo's messages, if it is about an executable.
fn artifact(line: &str) -> Option<Artifact> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    Some(Artifact {
        // Some releases of cargo name a library's target like its package, others like its crate.
        target: message["target"]["name"].as_str()?.to_owned(),
        kind: message["target"]["kind"][0].as_str()?.to_owned(),
        is_test: message["profile"]["test"].as_bool()?,
        executable: PathBuf::from(message["executable"].as_str()?),
    })
}

fn programs(artifacts: Vec<Artifact>, arch: Arch, emulator: Option<&Qemu>) -> Result<Programs> {
    let mut tests = BTreeMap::new();
    let mut binaries = BTreeMap::new();
    for artifact in artifacts {
        let unit = UNIT.iter().any(|(_, library, _)| *library == artifact.target);
        match (artifact.is_test, artifact.kind.as_str()) {
            (true, "test") if INTEGRATION.contains(&artifact.target.as_str()) => {
                tests.insert(artifact.target, artifact.executable);
            }
            (true, "lib") if unit => {
                tests.insert(artifact.target, artifact.executable);
            }
            (false, "bin") => {
                binaries.insert(artifact.target, artifact.executable);
            }
            _ => {}
        }
    }
    let mut binary =
        |name: &str| binaries.remove(name).with_context(|| format!("cargo built no program {name}"));
    let (agent, testapp) = (binary("beelet")?, binary("beelet-testapp")?);
    let helpers: Vec<PathBuf> = binaries.into_values().collect();
    for program in tests.values().chain(&helpers).chain([&agent, &testapp]) {
        if !images::is_static(program)? {
            bail!(
                "{} is dynamically linked; is libc's static archive (libc6-dev) installed?",
                program.display()
            );
        }
    }
    let mut plan = Vec::new();
    for (name, path) in &tests {
        plan.extend(list(name, path, emulator)?);
    }
    // Without this check, tests of a moved module would be skipped silently.
    for name in INTEGRATION.iter().chain(UNIT.iter().map(|(_, library, _)| library)) {
        if !plan.iter().any(|test| test.program == *name) {
            bail!("{name} has no test for a guest; does lab/src/vm/programs.rs name its module?");
        }
    }
    Ok(Programs { arch, agent, testapp, helpers, tests, plan })
}

/// Returns the tests of a program that are for a guest.
fn list(program: &str, path: &Path, emulator: Option<&Qemu>) -> Result<Vec<Test>> {
    let mut command = emulator.map_or_else(|| Command::new(path), Qemu::command);
    if emulator.is_some() {
        command.arg(path);
    }
    let output = command
        .args(["--list", "--format", "terse"])
        .output()
        .with_context(|| format!("cannot start {}", path.display()))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("`{} --list` exited with {}: {}", path.display(), output.status, stderr.trim());
    }
    Ok(listed(program, &String::from_utf8_lossy(&output.stdout)))
}

fn listed(program: &str, text: &str) -> Vec<Test> {
    let unit = UNIT.iter().find(|(_, library, _)| *library == program);
    let module = unit.map_or("", |(_, _, module)| module);
    text.lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .filter(|name| name.starts_with(module))
        .map(|name| Test { program: program.to_owned(), name: name.to_owned() })
        .collect()
}

/// Returns [`BORROWED`] and the libraries they load, each by its path, which is the same in the guest.
pub(super) fn from_here() -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for program in BORROWED.iter().filter_map(|name| setup::find(name)) {
        files.extend(images::shared_libraries(&program)?);
        files.push(program);
    }
    files.sort();
    files.dedup();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargos_messages_name_the_executables() {
        let line = r#"{"reason":"compiler-artifact","target":{"kind":["test"],"name":"kernel"},
            "profile":{"test":true},"executable":"/t/kernel-1"}"#;
        let expected = Artifact {
            target: "kernel".into(),
            kind: "test".into(),
            is_test: true,
            executable: "/t/kernel-1".into(),
        };
        assert_eq!(artifact(line), Some(expected));
        assert_eq!(artifact(&line.replace("\"/t/kernel-1\"", "null")), None);
        assert_eq!(artifact(&line.replace("compiler-artifact", "build-finished")), None);
        assert_eq!(artifact("warning: not JSON"), None);
    }

    #[test]
    fn an_agent_is_built_only_if_none_is_named() {
        let builds_agent =
            |with_agent| shell::display(&dynamic_build("e2e", with_agent)).contains("--bin beelet");
        assert!(builds_agent(true));
        assert!(!builds_agent(false));
        let error = dynamic("e2e", Some(Path::new("/no/such/agent"))).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("/no/such/agent is not a file"), "{error}");
    }

    #[test]
    fn a_librarys_tests_are_chosen_by_their_module() {
        let text = "guards::a: test\nguards::b::c: test\nimages::d: test\nguards::bench: benchmark\n";
        let names = |program| listed(program, text).into_iter().map(|test| test.name).collect::<Vec<_>>();
        assert_eq!(names("beelet_tests"), ["guards::a", "guards::b::c"]);
        assert_eq!(names("kernel"), ["guards::a", "guards::b::c", "images::d"]);
    }
}
