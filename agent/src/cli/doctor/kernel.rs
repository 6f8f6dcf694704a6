//! The BPF programs: loaded for real, into a cgroup and a bpf file system of the doctor's own, and taken away again. The
//! pins and programs of an agent that runs are not touched.

use std::fmt;
use std::fs;
use std::path::PathBuf;

use rustix::mount::{UnmountFlags, unmount};
use serde::Serialize;

use super::Finding;
use crate::cgroups::{Cgroups, Files};
use crate::config::{BpfMode, CgroupDriver, Config};
use crate::kernel::{Kernel, KernelOptions, MapMemory, Mode};

/// What one map takes of the kernel's memory.
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

/// Which programs attach, and what their maps take.
pub(super) fn programs(config: &Config) -> (Vec<Finding>, Vec<MapSize>) {
    if config.beelet.bpf == BpfMode::Off {
        return (vec![Finding::ok("BPF", "turned off by the configuration")], Vec::new());
    }
    let sandbox = match Sandbox::new(config) {
        Ok(sandbox) => sandbox,
        Err(error) => {
            let consequence = "whether BPF programs attach is not known";
            return (
                vec![Finding::degraded("BPF", error, consequence, "run the doctor as root")],
                Vec::new(),
            );
        }
    };
    let kernel = Kernel::start(&sandbox.options());
    let findings = kernel
        .capabilities()
        .iter()
        .map(|capability| match &capability.have {
            Ok(()) => Finding::ok(capability.program, format!("works (it needs {})", capability.needs)),
            Err(why) => Finding::degraded(capability.program, why, capability.fallback, &capability.remedy),
        })
        .collect();
    let sizes = kernel.memory().iter().map(MapSize::from).collect();
    if let Err(error) = kernel.stop(false) {
        eprintln!("warning: {error}");
    }
    (findings, sizes)
}

/// A cgroup and a mount point that go when the value does.
struct Sandbox {
    cgroups: Cgroups,
    cgroup: String,
    cgroup2: PathBuf,
    bpffs: PathBuf,
}

impl Sandbox {
    fn new(config: &Config) -> Result<Self, String> {
        let name = format!("beelet-doctor-{}", std::process::id());
        let cgroups = Cgroups::discover(&config.cgroup_root, CgroupDriver::Cgroupfs)
            .map_err(|error| error.to_string())?;
        let cgroup = format!("/{name}");
        let cgroup2 =
            cgroups.cgroup2_path(&cgroup).ok_or("there is no cgroup2 hierarchy to attach programs to")?;
        let bpffs = std::env::temp_dir().join(&name);
        let sandbox = Self { cgroups, cgroup, cgroup2, bpffs };
        sandbox.cgroups.ensure(&sandbox.cgroup, &Files::new()).map_err(|error| error.to_string())?;
        fs::create_dir(&sandbox.bpffs).map_err(|error| format!("{}: {error}", sandbox.bpffs.display()))?;
        Ok(sandbox)
    }

    fn options(&self) -> KernelOptions {
        KernelOptions {
            bpffs: self.bpffs.clone(),
            pin_name: "beelet".to_owned(),
            cgroup: self.cgroup2.clone(),
            mode: Mode::Auto,
            object: None,
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Not mounted, if the kernel half could not do it.
        let _ = unmount(&self.bpffs, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.bpffs);
        if let Err(error) = self.cgroups.remove(&self.cgroup) {
            eprintln!("warning: {error}");
        }
    }
}
