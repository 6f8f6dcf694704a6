//! Runs end-to-end tests or a bench in a stock machine instead of its checks: on its kernel, its systemd and
//! its containerd, with either cgroup driver.

use super::{
    CHECK_UNIT, Clock, FSTAB, Machine, NETWORK, Stock, agent_config, containerd_config, known, unpacked, want,
};
use crate::vm::boot::{self, End};
use crate::vm::report::{Run, Summary};
use crate::vm::results::{Event, Test, Transcript};
use crate::vm::{doctor, guest, page, programs};
use anyhow::{Context as _, Result, bail};
use beelet_tests::{images, workdir};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use xtask::{cross::Arch, shell};

pub(super) const SCRIPT: &str = include_str!("e2e.sh");

/// Time limit of a test in seconds of a real machine, as in .config/nextest.toml.
const LIMIT: u32 = 300;
/// Factor of a test's waiting times relative to a real machine, unless BEELET_PATIENCE is set.
const PATIENCE: u32 = 4;
/// Maximum times of a boot and of each of its tests, by the host's clock. Half of that is usual next to other
/// work.
const BOOT: Duration = Duration::from_secs(600);
const TEST: Duration = Duration::from_secs(120);
/// Maximum time of a bench by the host's clock, for one that lasts ten minutes by the machine's.
const BENCH: Duration = Duration::from_secs(14_400);
/// Maximum number of boots if the emulator dies each time.
const BOOTS: u32 = 3;
/// Target folder of the tests in the machine, and the program in it.
const TARGET: &str = "check/e2e";
const PROGRAM: &str = "check/e2e/deps/e2e";

/// Files of the repository that tests read, each at its path.
const READ: &[&str] = &[
    "agent/proto/proto/beelet/signals.proto",
    "docs/tour.md",
    "examples/python/signals.py",
    "examples/redis.yaml",
    "packaging/beelet-observe.service",
    "packaging/beelet.service",
    "packaging/grafana/beelet.json",
    "packaging/prometheus/beelet.rules.yaml",
    "tests/plugins/device_plugin.py",
    "tests/tests/e2e/data/kubernetes-mixin.rules.yaml",
];

/// Machine and options for a run.
pub(crate) struct Wanted<'a> {
    /// Name of the machine.
    pub(crate) machine: &'a str,
    /// Agent; None: a debug build.
    pub(crate) agent: Option<&'a Path>,
    /// Cgroup driver of the tests' own containerd and agents; None: the machine's.
    pub(crate) driver: Option<&'a str>,
    /// Maximum time of a boot with everything that runs there; None: long enough for a busy host.
    pub(crate) deadline: Option<Duration>,
    /// Clock of the machine.
    pub(crate) clock: Clock,
}

impl Wanted<'_> {
    /// Returns the machine and the cgroup driver.
    fn stock(&self) -> Result<(&'static Stock, &str)> {
        let stock = known(self.machine)?;
        let driver = self.driver.unwrap_or(stock.driver);
        if driver == "systemd" && stock.cgroups != "v2" {
            bail!("{} has cgroup v1, which the systemd driver does not support", stock.name);
        }
        Ok((stock, driver))
    }
}

/// Boots a machine and runs end-to-end tests there: those whose names begin with one of the prefixes, or all
/// for `all`. With `write_docs`, writes the results to docs/machines.md.
///
/// # Errors
/// A test failed, the doctor found that the agent cannot run on the machine's own containerd, or the machine
/// could not be built or did not complete.
pub(crate) fn end_to_end(wanted: &Wanted<'_>, prefixes: &[String], write_docs: bool) -> Result<()> {
    let began = Instant::now();
    let (stock, driver) = wanted.stock()?;
    let (work, root, _lock) = unpacked(stock)?;
    let test = install(&root, stock, wanted, driver)?;
    let (plan, all) = plan_tests(&root, &test, prefixes)?;
    let machine = Machine { clock: wanted.clock, ..Machine::new(stock, &work, root)? };
    machine.make_disks()?;
    let made = began.elapsed();
    let title = format!("{}, {driver}", stock.name);
    let tests = u32::try_from(plan.len()).unwrap_or(u32::MAX);
    let deadline = wanted.deadline.unwrap_or_else(|| BOOT.saturating_add(TEST.saturating_mul(tests)));
    let (transcript, end) = boots(&machine, &work, &title, &plan, deadline)?;
    let last_words = if end == End::Done { Vec::new() } else { boot::last_lines(&console(&work)) };
    let up = transcript.facts.get("up").cloned().unwrap_or_default();
    let can_run = doctor::can_run(&transcript.doctor_json);
    let run = Run { kernel: title.clone(), transcript, end, last_words };
    let summary = Summary { arch: Arch::Amd64, plan, runs: vec![run] };
    println!("{}", summary.text());
    let (made, whole) = (made.as_secs(), began.elapsed().as_secs());
    println!("# built in {made} s, up after {up} s of its own clock, done after {whole} s");
    let verdict = summary.verdict().and_then(|()| match can_run {
        true => Ok(()),
        false => bail!("the doctor found that beelet cannot run on {title}; see its output above"),
    });
    if verdict.is_err() {
        keep_logs(&machine, &work);
    }
    for run in summary.runs.iter().filter(|_| write_docs) {
        let ended = run.transcript.verdicts.len();
        let known = [
            format!("{made} s"),
            format!("{up} s"),
            format!("{ended} tests, {} s by the host's clock", whole.saturating_sub(made)),
        ];
        let facts = page::TESTS_FACTS.iter().map(|row| (*row).to_owned()).zip(known).collect();
        let tests = summary.found(run);
        page::write_tests(&page::Tests { column: title.clone(), facts, tests, all: all.clone() })?;
    }
    verdict
}

/// Boots a machine and runs `cargo xtask bench` there with these arguments; prints its output as it arrives.
///
/// # Errors
/// A bound does not hold, or the machine could not be built or did not complete.
pub(crate) fn bench(wanted: &Wanted<'_>, arguments: &str) -> Result<()> {
    let (stock, driver) = wanted.stock()?;
    let (work, root, _lock) = unpacked(stock)?;
    install(&root, stock, wanted, driver)?;
    strip(&std::env::current_exe().context("cannot find this program")?, &root.join(TARGET).join("lab"))?;
    workdir::write(&root.join("check/bench"), format!("{arguments}\n"))?;
    workdir::write(&root.join("check/plan"), "")?;
    let machine = Machine { clock: wanted.clock, ..Machine::new(stock, &work, root)? };
    machine.make_disks()?;
    let title = format!("{}, {driver}", stock.name);
    let (transcript, end) = boots(&machine, &work, &title, &[], wanted.deadline.unwrap_or(BENCH))?;
    if let Some(trouble) = end.trouble() {
        bail!("{title}: {trouble}; see {}", console(&work).display());
    }
    match transcript.facts.get("status").map(String::as_str) {
        Some("0") => Ok(()),
        status => bail!("the bench exited with status {}", status.unwrap_or("unknown")),
    }
}

/// Runs the plan. If the emulator dies, the remaining tests run in another boot.
fn boots(
    machine: &Machine,
    work: &Path,
    title: &str,
    plan: &[Test],
    deadline: Duration,
) -> Result<(Transcript, End)> {
    // A single thread: QEMU is killed when the thread that started it ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut whole = Transcript::default();
    let mut boot = 1;
    loop {
        match plan.len() - whole.verdicts.len() {
            0 => eprintln!(".. booting {title}"),
            tests => eprintln!(".. booting {title} for {tests} tests"),
        }
        let (transcript, end) = runtime.block_on(async {
            let mut command = machine.command(&console(work));
            command.args(["-serial", "stdio"]).stdout(Stdio::piped()).stderr(Stdio::piped());
            let child = command.spawn().context("cannot start QEMU")?;
            let known = RefCell::new(Transcript::default());
            let event = |event: &Event, transcript: &Transcript| {
                crate::vm::show(title, plan, event, transcript);
                known.replace(transcript.clone());
            };
            let broken = |status: i32| (status != 0).then(|| format!("QEMU exited with {status}"));
            tokio::select! {
                followed = boot::follow(child, deadline, event, broken) => followed,
                // Results until then are kept: tests take minutes.
                signal = crate::vm::interrupted() => Ok((known.take(), End::Stopped(signal?))),
            }
        })?;
        whole.append(transcript);
        match &end {
            End::Died(why) if boot < BOOTS => eprintln!(".. the VM died ({why})"),
            End::Died(_) => whole.ended_early("the VM died"),
            End::Late(_) => cut_short(&mut whole, plan),
            End::Done | End::Stopped(_) => {}
        }
        if boot == BOOTS || !matches!(end, End::Died(_)) {
            return Ok((whole, end));
        }
        boot += 1;
        let rest = plan_of(plan, |number| !whole.verdicts.contains_key(&number));
        workdir::write(&machine.root.join("check/plan"), rest)?;
        machine.make_disks()?;
    }
}

/// Handles a run that reached its deadline: the running test has no result and counts as not reached, like
/// those after it.
fn cut_short(transcript: &mut Transcript, plan: &[Test]) {
    if let Some(test) = transcript.forget_running().and_then(|number| plan.get(number)) {
        eprintln!(".. the deadline passed during {test}; --deadline sets it");
    }
}

fn console(work: &Path) -> PathBuf {
    work.join("console-e2e")
}

/// Formats the plan with the tests whose numbers are wanted.
fn plan_of(plan: &[Test], wanted: impl Fn(usize) -> bool) -> String {
    let text = guest::plan(plan, |_| format!("/{PROGRAM}"));
    let lines = text.lines().enumerate().filter(|(number, _)| wanted(*number));
    lines.map(|(_, line)| format!("{line}\n")).collect()
}

/// Environment variables that name programs for tests, and the files required next to each.
const GIVEN: &[(&str, &[&str])] = &[
    ("CONTAINERD", &["ctr", "containerd-shim-runc-v2"]),
    ("DEVICE_PLUGIN", &[]),
    ("ETCD", &[]),
    ("KUBECTL", &[]),
    ("KUBELET", &[]),
    ("KUBE_APISERVER", &[]),
    ("METRICS_SERVER", &[]),
    ("PROMETHEUS", &[]),
    ("PROMTOOL", &[]),
];

/// Copies the programs that the environment names, according to `named`; returns the lines that name them in
/// the machine.
fn given(root: &Path, named: impl Fn(&str) -> Option<PathBuf>) -> Result<String> {
    let mut lines = String::new();
    for (variable, beside) in GIVEN {
        let Some(program) = named(variable) else { continue };
        if !program.is_file() {
            bail!("{variable} names {}, which is not a file", program.display());
        }
        let place = Path::new("check/given").join(variable.to_lowercase());
        fs::create_dir_all(root.join(&place))?;
        let all =
            std::iter::once(program.clone()).chain(beside.iter().map(|name| program.with_file_name(name)));
        for file in all {
            let name = file.file_name().context("a program has no name")?;
            fs::copy(&file, root.join(&place).join(name))
                .with_context(|| format!("cannot copy {}, needed for {variable}", file.display()))?;
        }
        let name = program.file_name().unwrap_or_default();
        lines.push_str(&format!("{variable}=/{}\n", place.join(name).display()));
    }
    Ok(lines)
}

/// Parses the patience in `text`; by default, returns that of an emulated machine.
fn patience(text: Option<&str>) -> Result<u32> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(PATIENCE) };
    let factor = text.parse().ok().filter(|factor| *factor > 0);
    factor.with_context(|| format!("BEELET_PATIENCE is {text:?}, not a whole number above 0"))
}

/// Copies the logs of failed tests from the disk.
fn keep_logs(machine: &Machine, work: &Path) {
    let logs = work.join("test-logs");
    let _ = fs::remove_dir_all(&logs); // usually it does not exist
    let mut command = Command::new("debugfs");
    command.arg("-R").arg(format!("rdump /{TARGET}/test-logs {}", work.display())).arg(&machine.disk);
    let dumped = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if dumped.is_ok_and(|status| status.success()) && logs.is_dir() {
        eprintln!("logs of failed tests: {}", logs.display());
    }
}

/// Copies the program without debug information.
fn strip(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(to))?;
    shell::run(Command::new("strip").arg("-o").arg(to).arg(from))
}

/// Writes the selected tests into the machine's plan; returns them and the names of all tests.
fn plan_tests(root: &Path, program: &Path, prefixes: &[String]) -> Result<(Vec<Test>, BTreeSet<String>)> {
    let chosen = |test: &Test| prefixes.iter().any(|prefix| prefix == "all" || test.name.starts_with(prefix));
    let tests = programs::tests("e2e", program)?;
    let all = tests.iter().map(Test::to_string).collect();
    let plan: Vec<Test> = tests.into_iter().filter(chosen).collect();
    if plan.is_empty() {
        bail!("no end-to-end test's name begins with {}", prefixes.join(" or "));
    }
    workdir::write(&root.join("check/plan"), plan_of(&plan, |_| true))?;
    Ok((plan, all))
}

/// Installs the test program, which it returns, and all programs that tests and benches start.
fn install(root: &Path, stock: &Stock, wanted: &Wanted<'_>, driver: &str) -> Result<PathBuf> {
    let at = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    eprintln!(".. building the agent and the tests");
    let built = programs::dynamic("e2e", wanted.agent)?;
    strip(&built.agent, &root.join(TARGET).join("beelet"))?;
    strip(&built.test, &root.join(PROGRAM))?;
    // Tests expect the helper next to the agent.
    let helper = match wanted.agent {
        Some(agent) => Some(agent.with_file_name("beelet-exec")),
        None => built.helpers.iter().find(|helper| helper.ends_with("beelet-exec")).cloned(),
    };
    if let Some(helper) = helper.filter(|helper| helper.is_file()) {
        strip(&helper, &root.join(TARGET).join("beelet-exec"))?;
    }
    for helper in &built.helpers {
        strip(helper, &at(helper))?;
    }
    for file in READ {
        let file = workdir::repository().join(file);
        fs::create_dir_all(at(file.parent().unwrap_or(&file)))?;
        fs::copy(&file, at(&file)).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    fs::copy(images::busybox()?, root.join("bin/busybox")).context("cannot copy busybox")?;
    fs::copy(images::testapp()?, root.join("check/testapp")).context("cannot copy the test app")?;
    let patience = patience(std::env::var("BEELET_PATIENCE").ok().as_deref())?;
    let mut environment = format!("BEELET_CGROUP_DRIVER={driver}\nBEELET_PATIENCE={patience}\n");
    let named =
        |variable: &str| std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from);
    environment.push_str(&given(root, named)?);
    for (path, text) in [
        ("check/check.sh", SCRIPT.to_owned()),
        ("check/run", guest::RUN.to_owned()),
        ("check/limit", format!("{}\n", LIMIT.saturating_mul(patience))),
        ("check/environment", environment),
        // Marks the folder as a target folder, into which tests write.
        ("check/e2e/CACHEDIR.TAG", String::new()),
        // Files that the doctor examines.
        ("etc/containerd/config.toml", containerd_config(driver)),
        ("etc/cni/net.d/10-pods.conflist", NETWORK.to_owned()),
        ("etc/beelet/beelet.yaml", agent_config(stock, driver)),
        ("etc/fstab", FSTAB.to_owned()),
        ("etc/modules-load.d/check.conf", "quota_v2\ntcp_diag\n".to_owned()),
        ("etc/systemd/system/check.service", CHECK_UNIT.to_owned()),
    ] {
        workdir::write(&root.join(path), text)?;
    }
    for folder in ["srv/pods", "etc/beelet/manifests", "check/images"] {
        fs::create_dir_all(root.join(folder))?;
    }
    for image in images::standard()?.into_iter().filter(|image| image.name == images::PAUSE) {
        let name = image.path.file_name().context("an image file has no name")?.to_owned();
        fs::copy(&image.path, root.join("check/images").join(name))?;
    }
    want(root, "check.service")?;
    Ok(built.test)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_are_given_are_named_by_their_place_in_the_machine() {
        let dir = tempfile::tempdir().unwrap();
        let (here, root) = (dir.path().join("here"), dir.path().join("root"));
        for name in ["kubelet", "containerd", "ctr", "containerd-shim-runc-v2"] {
            workdir::write(&here.join(name), name).unwrap();
        }
        let named = |variable: &str| match variable {
            "KUBELET" | "CONTAINERD" => Some(here.join(variable.to_lowercase())),
            _ => None,
        };
        let lines = given(&root, named).unwrap();
        assert_eq!(
            lines,
            "CONTAINERD=/check/given/containerd/containerd\nKUBELET=/check/given/kubelet/kubelet\n"
        );
        for file in ["containerd/ctr", "containerd/containerd-shim-runc-v2", "kubelet/kubelet"] {
            assert!(root.join("check/given").join(file).is_file(), "{file}");
        }
        let gone = given(&root, |variable| (variable == "KUBECTL").then(|| here.join("kubectl")));
        assert!(gone.unwrap_err().to_string().starts_with("KUBECTL names "));
    }

    #[test]
    fn a_patience_is_a_number_above_zero() {
        let said = |said| patience(said).map_err(|error| error.to_string());
        assert_eq!([None, Some(""), Some("1"), Some("10")].map(said), [PATIENCE, PATIENCE, 1, 10].map(Ok));
        for wrong in ["0", "-1", "1.5", "much"] {
            let why = format!("BEELET_PATIENCE is {wrong:?}, not a whole number above 0");
            assert_eq!(said(Some(wrong)), Err(why));
        }
    }

    #[test]
    fn what_tests_read_of_the_repository_is_there() {
        let missing = READ.iter().find(|file| !workdir::repository().join(file).is_file());
        assert_eq!(missing, None);
    }
}
