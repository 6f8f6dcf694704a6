//! The machine's disks as the kernel and udev show them: the devices of links and the multipath devices over
//! them. Names and texts have a maximum size: a target may offer anything.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use beelet_base::{kernel_file, program::Program};
use tracing::warn;

use crate::{Error, disk};

/// Time limit for a disk to appear.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time between two checks for a disk.
const CHECK_PERIOD: Duration = Duration::from_millis(250);
/// Maximum number of names read from a folder, and of bytes read from a file.
const NAMES: usize = 10_000;
const BYTES: u64 = 4096;

/// The machine, or a simulated one in tests.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) sys: PathBuf,
    pub(crate) dev: PathBuf,
    /// Folder of the programs; None for the `PATH`.
    pub(crate) programs: Option<PathBuf>,
    pub(crate) patience: Duration,
}

impl Machine {
    /// Returns this machine.
    pub(crate) fn own() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into(), programs: None, patience: PATIENCE }
    }

    /// Returns a program of the machine.
    pub(crate) fn program(&self, name: &'static str) -> Program {
        match &self.programs {
            Some(folder) => Program::at(&folder.join(name)),
            None => Program::tool(name),
        }
    }

    /// Returns the names in a folder, sorted; empty if the folder is missing.
    pub(crate) fn names(&self, folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(NAMES);
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Reads a file of the kernel, trimmed.
    pub(crate) fn text(&self, path: &Path) -> Option<String> {
        Some(kernel_file::read_to_string_within(path, BYTES).ok()?.trim().to_owned())
    }

    /// Writes a word to a file of the kernel.
    pub(crate) fn write(&self, path: &Path, word: &str) -> Result<(), Error> {
        kernel_file::write(path, word).map_err(Error::io("write to", path))
    }

    /// Returns the names and paths of the links in `/dev/disk/<by>`.
    pub(crate) fn links(&self, by: &str) -> Vec<(String, PathBuf)> {
        let folder = self.dev.join("disk").join(by);
        self.names(&folder).into_iter().map(|name| (name.clone(), folder.join(name))).collect()
    }

    /// Returns the kernel's name of the device that a path leads to, e.g. `sda`.
    pub(crate) fn name_of(&self, path: &Path) -> Option<String> {
        let real = path.canonicalize().ok()?;
        let name = real.strip_prefix(self.dev.canonicalize().ok()?).ok()?.to_str()?.to_owned();
        (!name.contains('/')).then_some(name)
    }

    /// Returns the multipath device that the device is, or is a path of.
    pub(crate) fn multipath(&self, path: &Path) -> Option<PathBuf> {
        let name = self.name_of(path)?;
        if name.starts_with("dm-") {
            return Some(self.dev.join(name));
        }
        let block = self.sys.join("block");
        let all = self.names(&block).into_iter().filter(|one| one.starts_with("dm-"));
        let mut over =
            all.filter(|one| block.join(one).join("slaves").join(&name).symlink_metadata().is_ok());
        over.next().map(|name| self.dev.join(name))
    }

    /// Waits until `found` returns a value. Returns None if that takes longer than `patience`.
    pub(crate) fn wait_for<T>(&self, patience: Duration, found: impl Fn() -> Option<T>) -> Option<T> {
        let began = Instant::now();
        loop {
            if let Some(found) = found() {
                return Some(found);
            }
            if began.elapsed() >= patience {
                return None;
            }
            std::thread::sleep(CHECK_PERIOD.min(patience));
        }
    }

    /// Deletes multipath devices and their disks from the kernel. Only logs failures: the disks are no longer
    /// mounted, and a new attempt would not find them.
    pub(crate) fn forget(&self, devices: &[String], multipaths: &[PathBuf]) {
        for made in multipaths {
            let flush = self.program("multipath").flag("-f").operand(made);
            if let Err(why) = disk::succeed(&flush, disk::SHORT) {
                warn!("cannot flush multipath device {}: {why}", made.display());
            }
        }
        for name in devices {
            let flush = self.program("blockdev").flag("--flushbufs").operand(self.dev.join(name));
            if let Err(why) = disk::succeed(&flush, disk::SHORT) {
                warn!(device = name, "cannot flush the buffers of a disk: {why}");
            }
            let delete = self.sys.join("block").join(name).join("device/delete");
            if delete.exists()
                && let Err(why) = self.write(&delete, "1")
            {
                warn!(device = name, "cannot delete a disk from the kernel: {why}");
            }
        }
    }
}
