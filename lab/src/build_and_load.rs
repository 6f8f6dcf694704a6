//! `cargo xtask build-and-load` and `unload`: loads the kernel programs without the agent, for inspection
//! with bpftool. Uses the agent's own loader, so that the programs are those that the agent runs.

use anyhow::{Context as _, Result, bail};
use beelet_bpf::{Kernel, KernelOptions};
use beelet_tests::workdir;
use std::path::{Path, PathBuf};
use xtask::build_ebpf;
use xtask::progress::Step;
use xtask::setup_ebpf;

/// Default cgroup.
const CGROUP: &str = "beelet-dev";

/// Build the kernel programs, load them, attach them to a cgroup and pin everything, for bpftool
#[derive(clap::Args)]
pub(crate) struct Args {
    /// cgroup2 folder to attach to [default: a new cgroup `beelet-dev`]
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

/// Undo build-and-load: remove the pins, its cgroup and a bpf file system that it mounted
#[derive(clap::Args)]
pub(crate) struct UnloadArgs {
    #[command(flatten)]
    place: Place,
}

/// Location of the pins.
#[derive(clap::Args)]
struct Place {
    /// bpf file system; mounted if needed
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf")]
    bpffs: PathBuf,
    /// Folder for the pins in the bpf file system; an agent on this machine uses `beelet`
    #[arg(long, value_name = "NAME", default_value = "beelet")]
    pin_name: String,
}

impl Place {
    /// Returns the file that records, across runs, that this command mounted the bpf file system. The file is
    /// outside of that file system, because bpffs cannot contain regular files.
    fn mark(&self) -> PathBuf {
        let name: String = self
            .bpffs
            .to_string_lossy()
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        workdir::repository().join("target").join(format!("bpffs-mounted{name}"))
    }

    fn options(&self, cgroup: PathBuf, object: Option<PathBuf>) -> KernelOptions {
        KernelOptions {
            bpffs: self.bpffs.clone(),
            pin_name: self.pin_name.clone(),
            cgroup,
            object,
            ..KernelOptions::default()
        }
    }
}

/// Runs `build-and-load`.
///
/// # Errors
/// The programs cannot be built, loaded or pinned: the message lists each missing part with its remedy.
pub(crate) fn run(args: &Args) -> Result<()> {
    let object = object()?;
    let step = Step::start("load");
    let cgroup = match &args.cgroup {
        Some(cgroup) => cgroup.clone(),
        None => {
            let cgroup = cgroup2()?.join(CGROUP);
            std::fs::create_dir_all(&cgroup).with_context(|| {
                format!("cannot create the cgroup {}; run this as root", cgroup.display())
            })?;
            cgroup
        }
    };
    let was_mounted = is_bpffs(&args.place.bpffs);
    let kernel = Kernel::start(&args.place.options(cgroup.clone(), object));
    if !was_mounted && is_bpffs(&args.place.bpffs) {
        let mark = args.place.mark();
        std::fs::write(&mark, "").with_context(|| format!("cannot write {}", mark.display()))?;
    }
    let missing: Vec<String> = kernel
        .capabilities()
        .iter()
        .filter_map(|row| {
            let why = row.have.as_ref().err()?;
            Some(format!("{}: {why}\n  to do: {}", row.program, row.remedy))
        })
        .collect();
    let Some(pins) = kernel.pins().map(Path::to_path_buf).filter(|_| kernel.listeners().is_some()) else {
        bail!("nothing was loaded:\n{}", missing.join("\n"));
    };
    let adopted = if kernel.adopted() { "; took over from an earlier instance" } else { "" };
    step.done(&format!("pinned at {}, attached to {}{adopted}", pins.display(), cgroup.display()));
    for line in &missing {
        eprintln!("{} {line}", console::style("missing:").yellow().for_stderr());
    }
    print_commands(&kernel, &pins);
    kernel.stop(true)?;
    Ok(())
}

/// Prints the commands for an inspection.
fn print_commands(kernel: &Kernel, pins: &Path) {
    println!("Inspect the programs and maps:");
    for map in kernel.memory() {
        let what = match map.map {
            "LISTENERS" => "listening sockets",
            "ADDRESSES" => "number of listeners per address",
            "DROPS" => "lost events, per CPU",
            "META" => "owner of the pins",
            "SETTINGS" => "cgroups of pods, and the thresholds for events about waiting",
            "CONTAINERS" => "usage, waiting times and traffic of each container, per CPU",
            "HOLDERS" => "containers that held each CPU while others waited for it",
            "RECLAIMERS" => "containers whose threads had to reclaim memory, per CPU",
            "SLOTS" => "slot of each container",
            "PRESSURE" => "inputs of the edges about waiting",
            "RUNNING" => "container running on each CPU",
            "ANCESTRY" => "pod of each cgroup: a cache per CPU",
            "TASKS" => "resource that each thread waits for, below Linux 6.4",
            "TASK_STORAGE" => "the same from Linux 6.4 on, in thread storage; bpftool shows its size",
            "EXITED" => "processes whose exit was reported recently",
            _ => "ring buffer with a single reader; bpftool shows its size",
        };
        let verb = if matches!(map.map, "EVENTS" | "TASK_STORAGE") { "show" } else { "dump" };
        println!("  bpftool map {verb} pinned {}/{}    # {what}", pins.display(), map.map);
    }
    println!("  bpftool link show pinned {}/links/pod_socket", pins.display());
    println!("  bpftool prog show name listener_state");
    println!("docs/bpftool.md explains the output. `cargo xtask unload` undoes everything.");
}

/// Returns the object to load: built here if the sources have changed and the tools are installed, otherwise
/// the committed one.
fn object() -> Result<Option<PathBuf>> {
    if build_ebpf::is_current()? {
        return Ok(None); // built into the agent's library
    }
    let Some(toolchain) = setup_ebpf::find()? else {
        eprintln!(
            "{} the kernel programs have changed, but the tools to build them are missing (`cargo xtask setup --for \
             ebpf`): loading the committed object",
            console::style("note:").yellow().for_stderr()
        );
        return Ok(None);
    };
    let path = workdir::repository().join("target/bpf/beelet.bpf.o");
    std::fs::write(&path, build_ebpf::object(&build_ebpf::build(&toolchain, false)?, build_ebpf::ATTACHED)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Some(path))
}

/// Runs `unload`.
///
/// # Errors
/// A part could not be removed.
pub(crate) fn unload(args: &UnloadArgs) -> Result<()> {
    let step = Step::start("unload");
    let mut done = Vec::new();
    if is_bpffs(&args.place.bpffs) {
        if beelet_bpf::remove_pins(&args.place.bpffs, &args.place.pin_name)? {
            done.push("pins");
        }
        let mark = args.place.mark();
        if mark.exists() {
            rustix::mount::unmount(&args.place.bpffs, rustix::mount::UnmountFlags::empty()).with_context(
                || format!("cannot unmount {}, which build-and-load had mounted", args.place.bpffs.display()),
            )?;
            std::fs::remove_file(&mark).with_context(|| format!("cannot remove {}", mark.display()))?;
            done.push("the bpf file system");
        }
    }
    let cgroup = cgroup2()?.join(CGROUP);
    match std::fs::remove_dir(&cgroup) {
        Ok(()) => done.push("the cgroup"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            return Err(error).with_context(|| format!("cannot remove the cgroup {}", cgroup.display()));
        }
    }
    step.done(&if done.is_empty() {
        "nothing to remove".to_owned()
    } else {
        format!("removed {}", done.join(", "))
    });
    Ok(())
}

/// Returns the mount point of cgroup2.
fn cgroup2() -> Result<PathBuf> {
    let found = beelet_tests::guards::hierarchies()?.into_iter().find(|hierarchy| hierarchy.v2);
    found
        .map(|hierarchy| hierarchy.mount)
        .context("no cgroup2 hierarchy is mounted; run mount -t cgroup2 none /sys/fs/cgroup/unified")
}

fn is_bpffs(path: &Path) -> bool {
    const BPF_FS_MAGIC: u64 = 0xcafe_4a11; // include/uapi/linux/magic.h
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 == BPF_FS_MAGIC)
}
