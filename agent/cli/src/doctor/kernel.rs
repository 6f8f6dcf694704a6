//! Loads the BPF programs into a cgroup and a BPF file system of the doctor's own, and removes them again.
//! The pins and programs of a running agent stay untouched.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use serde::Serialize;

use super::Finding;
use beelet_bpf::{Kernel, KernelError, KernelOptions, MapMemory, PinnedProgram, Scheduler};
use beelet_cgroups::{CgroupError, Cgroups, Trial};
use beelet_config::Config;
use beelet_policy::tuner::scheduler::SchedulerKind;
use beelet_units::{bpf_settings::BpfMode, cgroup_driver::CgroupDriver};

/// Kernel memory of one map.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MapSize {
    map: &'static str,
    entries: u64,
    entry_bytes: u64,
    copies: u64,
    bytes: u64,
}

impl From<&MapMemory> for MapSize {
    fn from(memory: &MapMemory) -> Self {
        let MapMemory { map, entries, entry_bytes, copies, bytes } = *memory;
        Self { map, entries, entry_bytes, copies, bytes }
    }
}

impl fmt::Display for MapSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { map, entries, entry_bytes, copies, bytes } = self;
        write!(f, "{map}: {entries} entries × {entry_bytes} bytes × {copies} = {} KiB", bytes / 1024)
    }
}

/// Cost of one program.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ProgramCost {
    program: &'static str,
    verified_instructions: u32,
    code_bytes: u32,
    /// Runs on the whole machine while the doctor counted.
    runs: u64,
    /// Average time of a run, of which the counting itself takes some 20 ns.
    #[serde(skip_serializing_if = "Option::is_none")]
    ns_per_run: Option<u64>,
    /// Runs that the kernel skipped since the program was loaded, because the previous run on that CPU had
    /// not finished.
    #[serde(skip_serializing_if = "Option::is_none")]
    missed: Option<u64>,
}

impl fmt::Display for ProgramCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, verified_instructions, code_bytes, runs, ns_per_run, missed } = self;
        write!(
            f,
            "{program}: {verified_instructions} instructions verified, {code_bytes} bytes of code, {runs} runs"
        )?;
        if let Some(ns) = ns_per_run {
            write!(f, " of {ns} ns")?;
        }
        missed.map_or(Ok(()), |missed| write!(f, ", {missed} skipped by the kernel"))
    }
}

/// The part of the report that `--bpf` adds.
#[derive(Default, Serialize)]
pub(super) struct Costs {
    pub(super) programs: Vec<ProgramCost>,
    pub(super) maps: Vec<MapSize>,
}

impl Costs {
    /// Returns the memory of all maps, per CPU and shared.
    pub(super) fn memory(&self) -> String {
        let of = |several: bool| -> u64 {
            let maps = self.maps.iter().filter(|map| (map.copies > 1) == several);
            maps.map(|map| map.entries * map.entry_bytes).sum::<u64>() / 1024
        };
        format!("maps: {} KiB per CPU and {} KiB shared", of(true), of(false))
    }
}

/// Time for which `--bpf` counts runs.
const COUNTED_FOR: Duration = Duration::from_secs(1);

/// Returns a finding per program, and with `costs` the cost of the running agent's programs, or else of the
/// doctor's own.
pub(super) fn programs(config: &Config, costs: bool) -> (Vec<Finding>, Costs) {
    if config.beelet.bpf == BpfMode::Off {
        return (vec![Finding::ok("BPF", "turned off by the configuration")], Costs::default());
    }
    let sandbox = match Sandbox::new(config) {
        Ok(sandbox) => sandbox,
        Err(error) => {
            let consequence = "the doctor cannot say which BPF programs attach";
            let remedy = error.remedy();
            return (
                vec![Finding::degraded("BPF", error.to_string(), consequence, remedy)],
                Costs::default(),
            );
        }
    };
    let options = sandbox.options();
    let kernel = Kernel::start(&options);
    let mut findings: Vec<Finding> = kernel
        .capabilities()
        .iter()
        .map(|capability| match (&capability.have, capability.spared) {
            (Ok(()), Some(why)) => {
                Finding::ok(capability.program, format!("{}: {why}", beelet_bpf::NOT_NEEDED))
            }
            (Ok(()), None) => {
                Finding::ok(capability.program, format!("attaches (needs {})", capability.needs))
            }
            (Err(why), _) => Finding::degraded(
                capability.program,
                why.to_string(),
                capability.fallback,
                &capability.remedy,
            ),
        })
        .collect();
    findings.extend(scheduler(config));
    let mut found = Costs::default();
    if costs {
        let live = (config.beelet.bpffs.as_path(), config.beelet.pin_name.as_str());
        let own = (options.bpffs.as_path(), options.pin_name.as_str());
        let looked_at = if beelet_bpf::pinned(live.0, live.1).is_ok() { live } else { own };
        match program_costs(looked_at) {
            Ok(programs) => found.programs = programs,
            Err(error) => eprintln!("warning: cannot measure the cost of the programs: {error}"),
        }
        found.maps = kernel.memory().iter().map(MapSize::from).collect();
    }
    if let Err(error) = kernel.stop(false) {
        eprintln!("warning: {error}");
    }
    (findings, found)
}

/// Checks the kernel's support for the tuner's own scheduler, if configured.
fn scheduler(config: &Config) -> Option<Finding> {
    if config.beelet.tuner.scheduler != SchedulerKind::SchedExt {
        return None;
    }
    let remedy = "use a kernel with CONFIG_SCHED_CLASS_EXT (Linux 6.12), or set `tuner.scheduler: cgroups`";
    Some(match Scheduler::supported() {
        Ok(()) => Finding::ok("tuner.scheduler", "this kernel has sched_ext"),
        Err(error) => {
            Finding::degraded("tuner.scheduler", error.to_string(), "the tuner uses cgroups alone", remedy)
        }
    })
}

/// Counts runs for [`COUNTED_FOR`].
fn program_costs((bpffs, pin_name): (&Path, &str)) -> Result<Vec<ProgramCost>, KernelError> {
    let statistics = beelet_bpf::count_runs()?;
    let before = beelet_bpf::pinned(bpffs, pin_name)?.programs;
    std::thread::sleep(COUNTED_FOR);
    let after = beelet_bpf::pinned(bpffs, pin_name)?.programs;
    drop(statistics);
    let cost = |program: &PinnedProgram| {
        // An agent may have replaced the program in between; all its runs are new in that case.
        let before = before.iter().find(|earlier| earlier.id == program.id);
        let (runs, ns) = before.map_or((0, 0), |earlier| (earlier.runs, earlier.run_ns));
        let (runs, ns) = (program.runs - runs, program.run_ns - ns);
        ProgramCost {
            program: program.name,
            verified_instructions: program.verified_instructions,
            code_bytes: program.jitted_bytes,
            runs,
            ns_per_run: ns.checked_div(runs),
            missed: Some(program.misses).filter(|missed| *missed > 0),
        }
    };
    Ok(after.iter().map(cost).collect())
}

/// A cgroup and a mount point, removed when the value is dropped.
struct Sandbox {
    /// None after its removal.
    cgroup: Option<Trial>,
    cgroup2: PathBuf,
    bpffs: PathBuf,
}

/// Reason why the programs cannot be tried.
#[derive(Debug, thiserror::Error)]
enum SandboxError {
    #[error("cannot create a cgroup to try programs in: {0}")]
    NoCgroup(#[from] CgroupError),
    #[error("no cgroup2 hierarchy to attach programs to")]
    NoCgroup2,
    #[error("{}: {error}", .folder.display())]
    Folder { folder: PathBuf, error: io::Error },
}

impl SandboxError {
    fn remedy(&self) -> &'static str {
        match self {
            _ if !rustix::process::geteuid().is_root() => "run the doctor as root",
            Self::NoCgroup(_) => "see the finding about cgroups above",
            Self::NoCgroup2 => "mount -t cgroup2 none /sys/fs/cgroup/unified",
            Self::Folder { .. } => "make that directory writable, or set `TMPDIR` to a writable one",
        }
    }
}

impl Sandbox {
    fn new(config: &Config) -> Result<Self, SandboxError> {
        let name = format!("beelet-doctor-{}", std::process::id());
        let cgroups = Cgroups::discover(&config.cgroup_root, CgroupDriver::Cgroupfs)?;
        let cgroup = Trial::make(&cgroups, &name)?;
        let cgroup2 = cgroup.cgroup2().ok_or(SandboxError::NoCgroup2)?;
        let bpffs = std::env::temp_dir().join(&name);
        fs::create_dir(&bpffs).map_err(|error| SandboxError::Folder { folder: bpffs.clone(), error })?;
        Ok(Self { cgroup: Some(cgroup), cgroup2, bpffs })
    }

    fn options(&self) -> KernelOptions {
        KernelOptions { bpffs: self.bpffs.clone(), cgroup: self.cgroup2.clone(), ..KernelOptions::default() }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The BPF file system may not be mounted if the programs could not start.
        let _ = unmount(&self.bpffs, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.bpffs);
        if let Some(Err(error)) = self.cgroup.take().map(Trial::remove) {
            eprintln!("warning: {error}");
        }
    }
}
