//! `cargo xtask vm`: the tests that ask the kernel, on other kernels than this machine's. Each kernel is
//! booted once, in a VM under software emulation, with an initramfs that holds nothing but busybox, the
//! static test programs and the agent. Everything made here lives under `vm/` in cargo's target folder;
//! nothing on the machine is changed.

mod boot;
mod doctor;
mod foreign;
mod guest;
mod initramfs;
mod kernels;
mod page;
mod programs;
mod report;
mod results;
mod stock;

use self::boot::{End, Machine};
use self::programs::Programs;
use self::report::Run;
use self::report::Summary;
use self::results::{Event, Test, Transcript, Verdict};
use anyhow::{Context as _, Result, bail};
use beelet_tests::{requires, workdir};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use xtask::cross::Arch;
use xtask::qemu::{self, Qemu};
use xtask::setup::{self, Part};

/// The name of this machine's own kernel, which needs no VM.
const HOST: &str = "host";

/// Runs the tests that ask the kernel (the test programs kernel and cgroups) inside VMs, each with another
/// kernel, and prints a table: kernel by test. Kernels come from the folder that BEELET_VM_KERNELS names
/// (KERNEL/vmlinuz, KERNEL/modules.tar.zst); without it, it is the distribution's own kernel package,
/// downloaded and unpacked, not installed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which kernels: folders' names, `debian` without a folder, or `host`: this machine's kernel, without a
    /// VM. For arm64: debian-12, debian-13 [default: all there are]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,

    /// The guests' processor. arm64's kernels are Debian's, and so are the programs that its tests start
    #[arg(long, value_name = "ARCH", default_value = "amd64")]
    arch: Arch,

    /// Boot a stock machine instead (debian-12, debian-13, debian-12-v1), with systemd as it comes,
    /// install the agent's package there and check it
    #[arg(long, value_name = "MACHINE", conflicts_with_all = ["kernels", "jobs", "arch"])]
    machine: Option<String>,

    /// The agent that the machine's package holds, as `cargo xtask package` made it [default: a debug build]
    #[arg(long, value_name = "FILE", requires = "machine")]
    agent: Option<PathBuf>,

    /// Run end-to-end tests in the machine instead of its checks: those whose names begin so (`pods::`), by
    /// commas; `all` for all
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', requires = "machine")]
    e2e: Vec<String>,

    /// Measure in the machine instead, with these arguments of `cargo xtask bench`: 'tuner --scenario
    /// memory'. Its clock goes by instructions: other work on the host makes nothing in it later
    #[arg(long, value_name = "ARGUMENTS", requires = "machine", conflicts_with_all = ["e2e", "write_docs"])]
    bench: Option<String>,

    /// An instruction of the machine takes 2^N nanoseconds of its time, for --e2e and --bench: at 2 it is a
    /// machine of a quarter of the speed, whose minute is over here in a quarter of the time
    #[arg(long, value_name = "N", requires = "machine", value_parser = clap::value_parser!(u8).range(..=8))]
    pace: Option<u8>,

    /// The machine's clock is the host's, for --bench: its processors run side by side and a minute takes a
    /// minute, but whatever else the host does is measured, too
    #[arg(long, requires = "bench", conflicts_with = "pace")]
    host_clock: bool,

    /// Who drives the cgroups of the tests' (or the bench's) containerd and of the agents on it [default: who
    /// drives the machine's]
    #[arg(long, value_name = "DRIVER", requires = "machine", value_parser = ["cgroupfs", "systemd"])]
    driver: Option<String>,

    /// Write the processor's part of docs/kernels.md from this run, which then includes this machine's kernel
    /// if it has that processor; with --machine, the machine's columns of docs/machines.md
    #[arg(long)]
    write_docs: bool,

    /// How many VMs run at the same time [default: one per CPU]
    #[arg(long, value_name = "N")]
    jobs: Option<std::num::NonZeroUsize>,

    /// How long a boot with all its tests may take [default: 1800; with --e2e 600, and 120 per test; with
    /// --bench 14400]
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u64>,

    /// Leave the machine as it is: install nothing
    #[arg(long)]
    no_setup: bool,

    /// For `cargo xtask test`: write down what can't run here, as a test does that is left out
    #[arg(long, hide = true)]
    or_skip: bool,
}

/// What to run.
#[derive(Clone, Debug)]
struct Options {
    /// The guests' processor.
    arch: Arch,
    /// The kernels' names; none: all there are.
    kernels: Vec<String>,
    /// How many VMs run at the same time; none: one a CPU.
    jobs: Option<usize>,
    /// How long a boot with all its tests may take.
    deadline: Duration,
}

impl Options {
    const DEADLINE: Duration = Duration::from_secs(1800);
}

/// The command line's entry.
pub(crate) fn run(args: &Args) -> Result<()> {
    let only_here = !args.kernels.is_empty() && args.kernels.iter().all(|name| name == HOST);
    if !args.no_setup && !only_here {
        setup::ensure(Part::Vm)?;
        if args.arch == Arch::Arm64 {
            setup::ensure(Part::Arm64)?;
        }
    }
    if args.or_skip
        && let Some(why) = unavailable()
    {
        requires::leave_out("the kernel's tests on other kernels (cargo xtask vm)", &why);
        return Ok(());
    }
    if let Some(machine) = &args.machine {
        let (agent, deadline) = (args.agent.as_deref(), args.deadline.map(Duration::from_secs));
        let driver = args.driver.as_deref();
        let clock = match args.host_clock {
            true => stock::Clock::Host,
            false => stock::Clock::Instructions { pace: args.pace.unwrap_or(0) },
        };
        let wanted = stock::Wanted { machine, agent, driver, deadline, clock };
        return match (args.e2e.as_slice(), &args.bench) {
            (_, Some(arguments)) => stock::bench(&wanted, arguments),
            ([], None) if driver.is_some() || args.pace.is_some() => {
                bail!("--driver and --pace are for --e2e and --bench")
            }
            ([], None) => stock::run(machine, agent, deadline.unwrap_or(Options::DEADLINE), args.write_docs),
            (prefixes, None) => stock::end_to_end(&wanted, prefixes, args.write_docs),
        };
    }
    let mut kernels = args.kernels.clone();
    if args.write_docs && kernels.is_empty() {
        kernels =
            kernels::find(&[], &qemu::folder(), args.arch)?.into_iter().map(|kernel| kernel.name).collect();
        if args.arch == Arch::here()? {
            kernels.push(HOST.to_owned());
        }
    }
    let jobs = args.jobs.map(std::num::NonZeroUsize::get);
    let deadline = args.deadline.map_or(Options::DEADLINE, Duration::from_secs);
    let summary = run_all(&Options { arch: args.arch, kernels, jobs, deadline })?;
    if args.write_docs {
        let file = workdir::repository().join("docs/kernels.md");
        let known = std::fs::read_to_string(&file).unwrap_or_default();
        workdir::write(&file, summary.markdown(&known))?;
        eprintln!("wrote {}", file.display());
    }
    if args.or_skip {
        for (test, why) in summary.left_out() {
            requires::leave_out(&test, &why);
        }
    }
    summary.verdict()
}

/// Why no VM can be run here as things are: programs that are missing, no kernel found. A folder of
/// kernels that is named and wrong is no reason: that is a mistake to be told.
fn unavailable() -> Option<String> {
    if let Some(lacking) = setup::lacking(Part::Vm) {
        return Some(format!("{lacking}; `cargo xtask setup --for vm` installs what is missing"));
    }
    if std::env::var_os(kernels::FOLDER).is_some() {
        return None;
    }
    kernels::find(&[], &qemu::folder(), Arch::Amd64).err().map(|error| format!("{error:#}"))
}

/// Runs every test that asks the kernel on each of the kernels, prints the table, and hands back what came
/// out; tests that failed are no error here, see [`Summary::verdict`].
fn run_all(options: &Options) -> Result<Summary> {
    let work = qemu::folder();
    let arch = options.arch;
    let here = options.kernels.iter().any(|name| name == HOST);
    if here && arch != Arch::here()? {
        bail!("this machine's kernel is not {}'s", arch.name());
    }
    let names: Vec<String> = options.kernels.iter().filter(|name| *name != HOST).cloned().collect();
    let kernels = if here && names.is_empty() { Vec::new() } else { kernels::find(&names, &work, arch)? };
    eprintln!(".. build the tests as static programs");
    let programs = programs::build(&work, arch)?;
    let mut machines = Vec::new();
    let qemu = if kernels.is_empty() { None } else { Some(Qemu::ensure(&work, arch)?) };
    for (kernel, qemu) in kernels.iter().zip(qemu.iter().cycle()) {
        machines.push((kernel.name.clone(), guest::machine(kernel, &programs, qemu, &work)?));
    }
    let plan = Arc::new(programs.plan.clone());
    // One thread: QEMU is bound to the life of the thread that starts it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let runs = runtime.block_on(async {
        tokio::select! {
            runs = all(machines, here.then_some(&programs), &plan, options) => runs,
            signal = interrupted() => bail!("{} came: every VM was ended", signal?),
        }
    })?;
    let summary = Summary { arch, plan: programs.plan, runs };
    println!("{}", summary.text());
    Ok(summary)
}

/// The signal that asks us to stop, when it comes.
async fn interrupted() -> Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => Ok("SIGTERM"),
        _ = interrupt.recv() => Ok("Ctrl-C"),
    }
}

/// All runs, as many at a time as there are jobs, in the order of the kernels; this machine's own comes last,
/// alone.
async fn all(
    machines: Vec<(String, Machine)>,
    here: Option<&Programs>,
    plan: &Arc<Vec<Test>>,
    options: &Options,
) -> Result<Vec<Run>> {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let slots = Arc::new(Semaphore::new(options.jobs.unwrap_or(cpus)));
    let mut running = JoinSet::new();
    for (position, (kernel, machine)) in machines.into_iter().enumerate() {
        let (slots, plan, deadline) = (Arc::clone(&slots), Arc::clone(plan), options.deadline);
        running.spawn(async move {
            let _slot = slots.acquire_owned().await?;
            Ok::<_, anyhow::Error>((position, boot_twice(kernel, &machine, &plan, deadline).await?))
        });
    }
    let mut runs = Vec::new();
    while let Some(run) = running.join_next().await {
        runs.push(run??);
    }
    runs.sort_by_key(|(position, _)| *position);
    let mut runs: Vec<Run> = runs.into_iter().map(|(_, run)| run).collect();
    if let Some(programs) = here {
        runs.push(on_this_machine(programs, plan, options.deadline).await?);
    }
    Ok(runs)
}

/// Boots a kernel; once more if the machine itself died, which emulators do.
async fn boot_twice(kernel: String, machine: &Machine, plan: &[Test], deadline: Duration) -> Result<Run> {
    let boot = || machine.run(deadline, |event, transcript| show(&kernel, plan, event, transcript));
    tell(&kernel, "boots");
    let (mut transcript, mut end) = boot().await?;
    if let End::Died(why) = &end {
        tell(&kernel, &format!("the VM died ({why}); it is booted once more"));
        (transcript, end) = boot().await?;
    }
    let last_words = if end == End::Done { Vec::new() } else { machine.last_words() };
    match &end {
        End::Done | End::Stopped(_) => {}
        End::Died(_) => transcript.ended_early("the VM died"),
        End::Late(_) => transcript.ended_early("the VM's deadline came"),
    }
    Ok(Run { kernel, transcript, end, last_words })
}

/// The same plan on this machine's kernel.
async fn on_this_machine(programs: &Programs, plan: &[Test], deadline: Duration) -> Result<Run> {
    let work = qemu::folder().join(HOST);
    let script = work.join("run");
    workdir::write(&script, guest::RUN)?;
    let paths = |program: &str| programs.tests.get(program).map(|path| path.display().to_string());
    workdir::write(&work.join("plan"), guest::plan(plan, |program| paths(program).unwrap_or_default()))?;
    let mut command = tokio::process::Command::new("sh");
    command.arg(&script).arg(work.join("plan")).arg(guest::TEST_LIMIT);
    command.env("BEELET_BIN", &programs.agent).env("BEELET_TESTAPP", &programs.testapp);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let child = command.spawn().context("could not start sh")?;
    let event = |event: &Event, transcript: &Transcript| show(HOST, plan, event, transcript);
    let broken = |status: i32| (status > 1).then(|| format!("the script ended with {status}"));
    let (mut transcript, end) = boot::follow(child, deadline, event, broken).await?;
    transcript.ended_early("the run on this machine ended");
    Ok(Run { kernel: HOST.to_owned(), transcript, end, last_words: Vec::new() })
}

/// A line for each test, as it ends, and each that a bench says.
fn show(kernel: &str, plan: &[Test], event: &Event, transcript: &Transcript) {
    let (number, seconds) = match event {
        Event::Ended { number, seconds } => (number, seconds),
        Event::Said(line) => return println!("{line}"),
    };
    let (Some(test), verdict) = (plan.get(*number), transcript.verdicts.get(number)) else { return };
    let word = report::word(verdict);
    let style = match word {
        "ok" => console::style(word).green(),
        "FAIL" => console::style(word).red().bold(),
        _ => console::style(word).yellow(),
    };
    let why = match verdict {
        Some(Verdict::Skipped(why) | Verdict::Failed(why, _)) => format!(": {why}"),
        _ => String::new(),
    };
    tell(kernel, &format!("{:4} {test} ({seconds:.1} s){why}", style.for_stderr()));
}

fn tell(kernel: &str, text: &str) {
    eprintln!("{kernel:>6} | {text}");
}
