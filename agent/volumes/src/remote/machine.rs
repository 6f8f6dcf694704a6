//! The machine's disks as the kernel and udev show them: which device a link leads to, and what is made of
//! it. Names and texts are bounded: a target may offer anything.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use beelet_base::{kernel_file, program::Program};
use tracing::warn;

use crate::{Error, disk};

/// How long a disk may take to show itself.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked for meanwhile.
const LOOK: Duration = Duration::from_millis(250);
/// The most names that are read of a folder, and bytes of a file.
const NAMES: usize = 10_000;
const BYTES: u64 = 4096;

/// The machine; another one in tests.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) sys: PathBuf,
    pub(crate) dev: PathBuf,
    /// Where programs are; None: in the PATH.
    pub(crate) programs: Option<PathBuf>,
    pub(crate) patience: Duration,
}

impl Machine {
    /// This machine.
    pub(crate) fn own() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into(), programs: None, patience: PATIENCE }
    }

    /// A program of the machine's.
    pub(crate) fn program(&self, name: &'static str) -> Program {
        match &self.programs {
            Some(folder) => Program::at(&folder.join(name)),
            None => Program::tool(name),
        }
    }

    /// The names in a folder, sorted; none if it isn't there.
    pub(crate) fn names(&self, folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(NAMES);
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The text of a file of the kernel's, without blanks around it.
    pub(crate) fn text(&self, path: &Path) -> Option<String> {
        Some(kernel_file::read_to_string_within(path, BYTES).ok()?.trim().to_owned())
    }

    /// Writes a word into a file of the kernel's.
    pub(crate) fn tell(&self, path: &Path, word: &str) -> Result<(), Error> {
        kernel_file::write(path, word).map_err(Error::io("write to", path))
    }

    /// The links in `/dev/disk/<by>`, with where they are.
    pub(crate) fn links(&self, by: &str) -> Vec<(String, PathBuf)> {
        let folder = self.dev.join("disk").join(by);
        self.names(&folder).into_iter().map(|name| (name.clone(), folder.join(name))).collect()
    }

    /// The kernel's name of the device that a path leads to, such as `sda`.
    pub(crate) fn name_of(&self, path: &Path) -> Option<String> {
        let real = path.canonicalize().ok()?;
        let name = real.strip_prefix(self.dev.canonicalize().ok()?).ok()?.to_str()?.to_owned();
        (!name.contains('/')).then_some(name)
    }

    /// The multipath device that a device is a part of, or is.
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

    /// Waits until there is such a thing; None if it doesn't come.
    pub(crate) fn wait_for<T>(&self, patience: Duration, found: impl Fn() -> Option<T>) -> Option<T> {
        let began = Instant::now();
        loop {
            if let Some(found) = found() {
                return Some(found);
            }
            if began.elapsed() >= patience {
                return None;
            }
            std::thread::sleep(LOOK.min(patience));
        }
    }

    /// Has the kernel forget devices, and what multipath made of them. What fails is told: nobody has them
    /// mounted any more, and a new try has nothing to go by.
    pub(crate) fn forget(&self, devices: &[String], multipaths: &[PathBuf]) {
        for made in multipaths {
            let flush = self.program("multipath").flag("-f").operand(made);
            if let Err(why) = disk::succeed(&flush, disk::SHORT) {
                warn!("a multipath device stays: {why}");
            }
        }
        for name in devices {
            let flush = self.program("blockdev").flag("--flushbufs").operand(self.dev.join(name));
            if let Err(why) = disk::succeed(&flush, disk::SHORT) {
                warn!(device = name, "a disk's buffers can't be written: {why}");
            }
            let delete = self.sys.join("block").join(name).join("device/delete");
            if delete.exists()
                && let Err(why) = self.tell(&delete, "1")
            {
                warn!(device = name, "a disk can't be taken from the kernel: {why}");
            }
        }
    }
}
