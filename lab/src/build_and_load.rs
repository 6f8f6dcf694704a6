//! `cargo xtask build-and-load` and `unload`: the kernel programs on their own, without the agent, to look at
//! with bpftool. The agent's own loader does the work, so what is looked at is what the agent runs.

use anyhow::{Context as _, Result, bail};
use beelet_bpf::{Kernel, KernelOptions};
use beelet_tests::workdir;
use std::path::{Path, PathBuf};
use xtask::build_ebpf;
use xtask::progress::Step;
use xtask::setup_ebpf;

/// Our cgroup, where none is given.
const CGROUP: &str = "beelet-dev";

/// Builds the kernel programs, loads them, attaches them to a cgroup and pins everything, for bpftool
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The cgroup2 folder to attach to [default: a new cgroup `beelet-dev`]
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
}

/// Takes back what build-and-load did: pins, its cgroup, a bpf file system that it mounted
#[derive(clap::Args)]
pub(crate) struct UnloadArgs {
    #[command(flatten)]
    place: Place,
}

/// Where the pins are.
#[derive(clap::Args)]
struct Place {
    /// The bpf file system; mounted if need be
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf")]
    bpffs: PathBuf,
    /// The folder for pins in it: an agent that runs on this machine has `beelet`
    #[arg(long, value_name = "NAME", default_value = "beelet")]
    pin_name: String,
}

impl Place {
    /// Says that we mounted the bpf file system, across our own runs. Not in it: bpffs holds no files.
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

/// The command line's entry.
///
/// # Errors
/// The programs could not be built, loaded or pinned: the message has each thing that is missing and its
/// remedy.
pub(crate) fn run(args: &Args) -> Result<()> {
    let object = object()?;
    let step = Step::start("load");
    let cgroup = match &args.cgroup {
        Some(cgroup) => cgroup.clone(),
        None => {
            let cgroup = cgroup2()?.join(CGROUP);
            std::fs::create_dir_all(&cgroup).with_context(|| {
                format!("could not make the cgroup {}; run this as root", cgroup.display())
            })?;
            cgroup
        }
    };
    let was_mounted = is_bpffs(&args.place.bpffs);
    let kernel = Kernel::start(&args.place.options(cgroup.clone(), object));
    if !was_mounted && is_bpffs(&args.place.bpffs) {
        let mark = args.place.mark();
        std::fs::write(&mark, "").with_context(|| format!("could not write {}", mark.display()))?;
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
    let adopted = if kernel.adopted() { "; what ran before was taken over" } else { "" };
    step.done(&format!("pinned at {}, attached to {}{adopted}", pins.display(), cgroup.display()));
    for line in &missing {
        eprintln!("{} {line}", console::style("missing:").yellow().for_stderr());
    }
    print_commands(&kernel, &pins);
    kernel.stop(true)?;
    Ok(())
}

/// What to type now.
fn print_commands(kernel: &Kernel, pins: &Path) {
    println!("Look at it:");
    for map in kernel.memory() {
        let what = match map.map {
            "LISTENERS" => "every socket that listens",
            "ADDRESSES" => "how many listen at each address",
            "DROPS" => "what was lost, for each CPU",
            "META" => "whose pins these are",
            "SETTINGS" => "which cgroups are pods', and from what on waiting is told",
            "CONTAINERS" => "what each container used, waited for and moved, for each CPU",
            "HOLDERS" => "who had each CPU while these waited for it",
            "RECLAIMERS" => "whose threads had to free memory, for each CPU",
            "SLOTS" => "which of these is which container's",
            "PRESSURE" => "what the edges about waiting are decided from",
            "RUNNING" => "which container runs on each CPU",
            "ANCESTRY" => "which cgroup belongs to which pod: each CPU's cache",
            "TASKS" => "what each thread waits for, below Linux 6.4",
            "TASK_STORAGE" => "the same from Linux 6.4 on: storage of the threads, bpftool shows its size",
            "EXITED" => "processes whose end was told lately",
            _ => "the ring buffer: its events go to its one reader, bpftool shows its size",
        };
        let verb = if matches!(map.map, "EVENTS" | "TASK_STORAGE") { "show" } else { "dump" };
        println!("  bpftool map {verb} pinned {}/{}    # {what}", pins.display(), map.map);
    }
    println!("  bpftool link show pinned {}/links/pod_socket", pins.display());
    println!("  bpftool prog show name listener_state");
    println!("docs/bpftool.md says how to read this. `cargo xtask unload` takes it all back.");
}

/// The object to load: built here if the sources have changed and the tools are there, else the committed
/// one.
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
        .with_context(|| format!("could not write {}", path.display()))?;
    Ok(Some(path))
}

/// The command line's entry.
///
/// # Errors
/// Something could not be removed.
pub(crate) fn unload(args: &UnloadArgs) -> Result<()> {
    let step = Step::start("unload");
    let mut done = Vec::new();
    if is_bpffs(&args.place.bpffs) {
        if Kernel::remove_pins(&args.place.bpffs, &args.place.pin_name)? {
            done.push("pins");
        }
        let mark = args.place.mark();
        if mark.exists() {
            rustix::mount::unmount(&args.place.bpffs, rustix::mount::UnmountFlags::empty()).with_context(
                || {
                    format!(
                        "could not unmount {}, which build-and-load had mounted",
                        args.place.bpffs.display()
                    )
                },
            )?;
            std::fs::remove_file(&mark).with_context(|| format!("could not remove {}", mark.display()))?;
            done.push("the bpf file system");
        }
    }
    let cgroup = cgroup2()?.join(CGROUP);
    match std::fs::remove_dir(&cgroup) {
        Ok(()) => done.push("the cgroup"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            return Err(error).with_context(|| format!("could not remove the cgroup {}", cgroup.display()));
        }
    }
    step.done(&if done.is_empty() {
        "nothing was there".to_owned()
    } else {
        format!("took back {}", done.join(", "))
    });
    Ok(())
}

/// Where cgroup2 is mounted.
fn cgroup2() -> Result<PathBuf> {
    let found = beelet_tests::guards::hierarchies()?.into_iter().find(|hierarchy| hierarchy.v2);
    found
        .map(|hierarchy| hierarchy.mount)
        .context("no cgroup2 hierarchy is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
}

fn is_bpffs(path: &Path) -> bool {
    const BPF_FS_MAGIC: u64 = 0xcafe_4a11; // include/uapi/linux/magic.h
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 == BPF_FS_MAGIC)
}
