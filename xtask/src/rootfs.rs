//! Folders of a Debian release with some packages, made by mmdebstrap. What takes minutes, the packages,
//! is kept as an archive.

use crate::{cross::Arch, progress::Step, setup, shell};
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What becomes of the packages.
#[derive(Clone, Copy, Debug)]
pub enum Made {
    /// A system that could be started: they are installed.
    Installed,
    /// Their files and no more, which works for a foreign architecture too.
    Unpacked(Arch),
}

/// The archive `name` of what the packages make, from the cache if the same were asked for before.
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

/// Waits for other runs that make what is at `path`, until the value is dropped.
fn lock(path: &Path) -> Result<fs::File> {
    let file = path.with_extension("lock");
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).with_context(|| format!("could not make {}", folder.display()))?;
    let lock = fs::File::create(&file).with_context(|| format!("could not open {}", file.display()))?;
    lock.lock().with_context(|| format!("could not lock {}", file.display()))?;
    Ok(lock)
}

/// Unpacks it into `root` unless that is there: whole or not at all, whoever else does the same at this
/// moment or was ended in the midst of it.
pub fn unpack_once(tar: &Path, root: &Path) -> Result<()> {
    let _alone = lock(root)?;
    if root.exists() {
        return Ok(());
    }
    let part = root.with_extension("part");
    unpack(tar, &part)?;
    fs::rename(&part, root).with_context(|| format!("could not make {}", root.display()))
}

/// Unpacks it into `root`. What was there before goes.
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
    fn what_two_runs_unpack_at_once_is_whole_for_both() {
        let dir = tempfile::tempdir().unwrap();
        let (from, tar, root) = (dir.path().join("from"), dir.path().join("a.tar"), dir.path().join("root"));
        fs::create_dir(&from).unwrap();
        for name in 0..300 {
            fs::write(from.join(name.to_string()), "x").unwrap();
        }
        shell::run(Command::new("tar").arg("-C").arg(&from).arg("-cf").arg(&tar).arg(".")).unwrap();
        // What a run left that was ended in the midst of it.
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
