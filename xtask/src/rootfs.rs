//! Folders of a Debian release with some packages, made by mmdebstrap. Installing the packages takes minutes,
//! so an archive keeps the result.

use crate::{cross::Arch, progress::Step, setup, shell};
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The use that mmdebstrap makes of the packages.
#[derive(Clone, Copy, Debug)]
pub enum Made {
    /// A bootable system: mmdebstrap installs the packages.
    Installed,
    /// The files of the packages only, which works for a foreign architecture too.
    Unpacked(Arch),
}

/// Returns the archive `name` of the packages, from the cache if an earlier call had the same packages.
pub fn packages(work: &Path, name: &str, release: &str, packages: &str, made: Made) -> Result<PathBuf> {
    let tar = work.join(format!("{name}-{release}.tar"));
    let _alone = lock(&tar)?;
    let asked = tar.with_extension("packages");
    if tar.exists() && fs::read_to_string(&asked).is_ok_and(|known| known == packages) {
        return Ok(tar);
    }
    if setup::find("mmdebstrap").is_none() {
        bail!("mmdebstrap is missing: apt-get install mmdebstrap");
    }
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

/// Locks `path` against other runs until the value is dropped; waits for a run that holds the lock.
fn lock(path: &Path) -> Result<fs::File> {
    let file = path.with_extension("lock");
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).with_context(|| format!("could not make {}", folder.display()))?;
    let lock = fs::File::create(&file).with_context(|| format!("could not open {}", file.display()))?;
    lock.lock().with_context(|| format!("could not lock {}", file.display()))?;
    Ok(lock)
}

/// Unpacks the archive into `root` unless `root` exists. `root` is complete or missing, even if another run
/// does the same at this moment or was killed while it did.
pub fn unpack_once(tar: &Path, root: &Path) -> Result<()> {
    let _alone = lock(root)?;
    if root.exists() {
        return Ok(());
    }
    let part = root.with_extension("part");
    unpack(tar, &part)?;
    fs::rename(&part, root).with_context(|| format!("could not make {}", root.display()))
}

/// Unpacks the archive into `root` and removes the earlier content of `root`.
pub fn unpack(tar: &Path, root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root).with_context(|| format!("could not remove {}", root.display()))?;
    }
    fs::create_dir_all(root).with_context(|| format!("could not make {}", root.display()))?;
    shell::run(Command::new("tar").arg("-C").arg(root).arg("-xf").arg(tar))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_that_unpack_at_once_both_see_a_complete_folder() {
        let dir = tempfile::tempdir().unwrap();
        let (from, tar, root) = (dir.path().join("from"), dir.path().join("a.tar"), dir.path().join("root"));
        fs::create_dir(&from).unwrap();
        for name in 0..300 {
            fs::write(from.join(name.to_string()), "x").unwrap();
        }
        shell::run(Command::new("tar").arg("-C").arg(&from).arg("-cf").arg(&tar).arg(".")).unwrap();
        // The rest of a run that was killed while it unpacked.
        fs::create_dir(dir.path().join("root.part")).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    unpack_once(&tar, &root).unwrap();
                    assert_eq!(fs::read_dir(&root).unwrap().count(), 300);
                });
            }
        });
    }
}
