//! Folders of a Debian release with some packages, made by mmdebstrap. What takes minutes, the packages,
//! is kept as an archive.

use crate::{cross::Arch, progress::Step, setup, shell};
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What becomes of the packages.
#[derive(Clone, Copy, Debug)]
pub(super) enum Made {
    /// A system that could be started: they are installed.
    Installed,
    /// Their files and no more, which works for a foreign architecture too.
    Unpacked(Arch),
}

/// The archive `name` of what the packages make, from the cache if the same were asked for before.
pub(super) fn packages(
    work: &Path,
    name: &str,
    release: &str,
    packages: &str,
    made: Made,
) -> Result<PathBuf> {
    let tar = work.join(format!("{name}-{release}.tar"));
    let asked = tar.with_extension("packages");
    if tar.exists() && fs::read_to_string(&asked).is_ok_and(|known| known == packages) {
        return Ok(tar);
    }
    if setup::find("mmdebstrap").is_none() {
        bail!("mmdebstrap is missing: apt-get install mmdebstrap");
    }
    fs::create_dir_all(work).with_context(|| format!("could not make {}", work.display()))?;
    let step = Step::start(format!("install {release}'s packages into an archive (some minutes, once)"));
    let part = work.join(format!("{name}-{release}.part.tar"));
    let mut command = Command::new("mmdebstrap");
    command.arg("--quiet").arg(format!("--include={packages}"));
    match made {
        Made::Installed => command.arg("--variant=minbase"),
        Made::Unpacked(arch) => {
            command.arg("--variant=extract").arg(format!("--architectures={}", arch.name()))
        }
    };
    shell::run(command.arg(release).arg(&part))?;
    fs::write(&asked, packages).with_context(|| format!("could not write {}", asked.display()))?;
    fs::rename(&part, &tar).with_context(|| format!("could not make {}", tar.display()))?;
    step.done("kept");
    Ok(tar)
}

/// Unpacks it into `root`. What was there before goes.
pub(super) fn unpack(tar: &Path, root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root).with_context(|| format!("could not remove {}", root.display()))?;
    }
    fs::create_dir_all(root).with_context(|| format!("could not make {}", root.display()))?;
    shell::run(Command::new("tar").arg("-C").arg(root).arg("-xf").arg(tar))
}
