//! `cargo xtask vm`: runs the tests that depend on the kernel with other kernels than this machine's. Each
//! kernel is booted once, in a VM under software emulation, with an initramfs that contains only busybox, the
//! static test programs and the agent. All files are created under `vm/` in cargo's target folder; the
//! command does not change the machine.

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

/// Name of this machine's own kernel, which needs no VM.
const HOST: &str = "host";

/// Run the tests that depend on the kernel (the test programs kernel and cgroups) in VMs with other kernels,
/// and print a table of kernels and tests. Kernels come from the folder that BEELET_VM_KERNELS names
/// (KERNEL/vmlinuz, KERNEL/modules.tar.zst), or else from the distribution's own kernel package, downloaded
/// and unpacked, not installed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Kernels: folder names, `debian` without a folder, or `host` for this machine's kernel without a VM.
    /// For arm64: debian-12, debian-13 [default: all]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,

    /// Processor of the guests. For arm64, kernels and programs are Debian's
    #[arg(long, value_name = "ARCH", default_value = "amd64")]
    arch: Arch,

    /// Boot a stock machine with its own systemd instead (debian-12, debian-13, debian-12-v1), install the
    /// agent's package there and check it
    #[arg(long, value_name = "MACHINE", conflicts_with_all = ["kernels", "jobs", "arch"])]
    machine: Option<String>,

    /// Agent for the machine's package, built by `cargo xtask package` [default: a debug build]
    #[arg(long, value_name = "FILE", requires = "machine")]
    agent: Option<PathBuf>,

    /// Run end-to-end tests in the machine instead of its checks: comma-separated prefixes of test names
    /// (`pods::`), or `all`
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', requires = "machine")]
    e2e: Vec<String>,

    /// Run `cargo xtask bench` with these arguments in the machine instead, e.g. 'tuner --scenario memory'.
    /// The machine's clock counts its instructions, so that load on the host does not affect results
    #[arg(long, value_name = "ARGUMENTS", requires = "machine", conflicts_with_all = ["e2e", "write_docs"])]
    bench: Option<String>,

    /// An instruction takes 2^N nanoseconds of the machine's time, for --e2e and --bench: with 2 the machine
    /// has a quarter of the speed, and its minutes pass here in a quarter of the time
    #[arg(long, value_name = "N", requires = "machine", value_parser = clap::value_parser!(u8).range(..=8))]
    pace: Option<u8>,

    /// Use the host's clock, for --bench: processors run in parallel and a minute takes a minute, but results
    /// include all other load on the host
    #[arg(long, requires = "bench", conflicts_with = "pace")]
    host_clock: bool,

    /// Cgroup driver of the tests' (or the bench's) containerd and agents [default: the machine's driver]
    #[arg(long, value_name = "DRIVER", requires = "machine", value_parser = ["cgroupfs", "systemd"])]
    driver: Option<String>,

    /// Update the processor's part of docs/kernels.md from this run, which then includes this machine's
    /// kernel if it has that processor; with --machine, update the machine's columns of docs/machines.md
    #[arg(long)]
    write_docs: bool,

    /// Number of VMs that run at the same time [default: one per CPU]
    #[arg(long, value_name = "N")]
    jobs: Option<std::num::NonZeroUsize>,

    /// Maximum time of a boot with all its tests [default: 1800; with --e2e 600, and 120 per test; with
    /// --bench 14400]
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<u64>,

    /// Do not install anything on this machine
    #[arg(long)]
    no_setup: bool,

    /// For `cargo xtask test`: record that this cannot run here, like a skipped test
    #[arg(long, hide = true)]
    or_skip: bool,
}

/// Options of a run.
#[derive(Clone, Debug)]
struct Options {
    /// Processor of the guests.
    arch: Arch,
    /// Names of the kernels; all if empty.
    kernels: Vec<String>,
    /// Number of VMs that run at the same time; None: one per CPU.
    jobs: Option<usize>,
    /// Maximum time of a boot with all its tests.
    deadline: Duration,
}

impl Options {
    const DEADLINE: Duration = Duration::from_secs(1800);
}

/// Runs `cargo xtask vm`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let only_here = !args.kernels.is_empty() && args.kernels.iter().all(|name| name == HOST);
    if !args.no_setup && !only_here {
        setup::ensure(Part::Vm)?;
        if args.arch == Arch::Arm64 {
            setup::ensure(Part::Static)?;
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

/// Returns why no VM can run here: missing programs, or no kernel. An invalid folder of kernels is not a
/// reason but a mistake, reported elsewhere.
fn unavailable() -> Option<String> {
    if let Some(lacking) = setup::lacking(Part::Vm) {
        return Some(format!("{lacking}; run cargo xtask setup --for vm"));
    }
    if std::env::var_os(kernels::FOLDER).is_some() {
        return None;
    }
    kernels::find(&[], &qemu::folder(), Arch::Amd64).err().map(|error| format!("{error:#}"))
}

/// Runs every test that depends on the kernel on each of the kernels, prints the table, and returns the
/// results. Failed tests are not an error here, see [`Summary::verdict`].
fn run_all(options: &Options) -> Result<Summary> {
    let work = qemu::folder();
    let arch = options.arch;
    let here = options.kernels.iter().any(|name| name == HOST);
    if here && arch != Arch::here()? {
        bail!("this machine's processor is not {}", arch.name());
    }
    let names: Vec<String> = options.kernels.iter().filter(|name| *name != HOST).cloned().collect();
    let kernels = if here && names.is_empty() { Vec::new() } else { kernels::find(&names, &work, arch)? };
    eprintln!(".. building the tests as static programs");
    let programs = programs::build(&work, arch)?;
    let mut machines = Vec::new();
    let qemu = if kernels.is_empty() { None } else { Some(Qemu::ensure(&work, arch)?) };
    for (kernel, qemu) in kernels.iter().zip(qemu.iter().cycle()) {
        machines.push((kernel.name.clone(), guest::machine(kernel, &programs, qemu, &work)?));
    }
    let plan = Arc::new(programs.plan.clone());
    // A single thread: QEMU is killed when the thread that started it ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let runs = runtime.block_on(async {
        tokio::select! {
            runs = all(machines, here.then_some(&programs), &plan, options) => runs,
            signal = interrupted() => bail!("interrupted by {}; every VM was stopped", signal?),
        }
    })?;
    let summary = Summary { arch, plan: programs.plan, runs };
    println!("{}", summary.text());
    Ok(summary)
}

/// Waits for a signal that interrupts the run; returns its name.
async fn interrupted() -> Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => Ok("SIGTERM"),
        _ = interrupt.recv() => Ok("Ctrl-C"),
    }
}

/// Runs all kernels, limited by the number of jobs, and returns the results in the order of the kernels; this
/// machine's own kernel runs last, alone.
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

/// Boots a kernel; boots again if the machine itself died, as emulators sometimes do.
async fn boot_twice(kernel: String, machine: &Machine, plan: &[Test], deadline: Duration) -> Result<Run> {
    let boot = || machine.run(deadline, |event, transcript| show(&kernel, plan, event, transcript));
    print_line(&kernel, "booting");
    let (mut transcript, mut end) = boot().await?;
    if let End::Died(why) = &end {
        print_line(&kernel, &format!("the VM died ({why}); booting again"));
        (transcript, end) = boot().await?;
    }
    let last_words = if end == End::Done { Vec::new() } else { machine.last_words() };
    match &end {
        End::Done | End::Stopped(_) => {}
        End::Died(_) => transcript.ended_early("the VM died"),
        End::Late(_) => transcript.ended_early("the VM reached its deadline"),
    }
    Ok(Run { kernel, transcript, end, last_words })
}

/// Runs the same plan on this machine's kernel.
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
    let child = command.spawn().context("cannot start sh")?;
    let event = |event: &Event, transcript: &Transcript| show(HOST, plan, event, transcript);
    let broken = |status: i32| (status > 1).then(|| format!("the script exited with {status}"));
    let (mut transcript, end) = boot::follow(child, deadline, event, broken).await?;
    transcript.ended_early("the run on this machine ended");
    Ok(Run { kernel: HOST.to_owned(), transcript, end, last_words: Vec::new() })
}

/// Prints a line for each test that ends, and each line of a bench.
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
    print_line(kernel, &format!("{:4} {test} ({seconds:.1} s){why}", style.for_stderr()));
}

fn print_line(kernel: &str, text: &str) {
    eprintln!("{kernel:>6} | {text}");
}
