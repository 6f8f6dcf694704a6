//! Builds a release twice, in clones of the repository in two folders with names of different lengths, and
//! compares the files.

use super::listed;
use crate::progress::Step;
use crate::shell;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folders of the two builds.
const FOLDERS: [&str; 2] = ["one", "the-other-one"];

/// Builds twice with these arguments of `cargo xtask release`, and compares.
pub(super) fn check(arguments: &[OsString]) -> Result<()> {
    let top = workdir::target_dir().join("reproducible");
    if top.exists() {
        std::fs::remove_dir_all(&top).with_context(|| format!("could not remove {}", top.display()))?;
    }
    let mut outs = Vec::new();
    for name in FOLDERS {
        let clone = top.join(name).join("beelet");
        let out = top.join(name).join("release");
        let mut git = Command::new("git");
        shell::run(git.args(["clone", "--quiet"]).arg(workdir::repository()).arg(&clone))?;
        // The installed programs are the same for both.
        let (target, tools) = (workdir::target_dir(), clone.join("target/tools"));
        std::fs::create_dir_all(target.join("tools"))?;
        // The mark by which a program finds its target folder; cargo makes it only in a folder that it makes
        // itself.
        workdir::write(&clone.join("target/CACHEDIR.TAG"), workdir::read(&target.join("CACHEDIR.TAG"))?)?;
        std::os::unix::fs::symlink(target.join("tools"), &tools)
            .with_context(|| format!("could not make {}", tools.display()))?;
        let step = Step::start(format!("release in {}", clone.display()));
        let mut cargo = shell::cargo();
        cargo.args(["run", "--quiet", "--package", "xtask", "--", "release"]).args(arguments);
        cargo.arg("--out").arg(&out).current_dir(&clone).env("CARGO_TARGET_DIR", clone.join("target"));
        shell::run(&mut cargo)?;
        step.done("built");
        outs.push(out);
    }
    let different = differences(&outs[0], &outs[1])?;
    if !different.is_empty() {
        bail!(
            "the two builds differ in {}; compare {} with {}",
            different.join(", "),
            outs[0].display(),
            outs[1].display()
        );
    }
    println!("{} files are equal in both builds: {}", listed(&outs[0])?.len(), outs[0].display());
    Ok(())
}

/// Returns the names of the files that only one of the folders has, or whose bytes differ.
fn differences(one: &Path, other: &Path) -> Result<Vec<String>> {
    let names = |folder: &Path| -> Result<Vec<PathBuf>> {
        let all = listed(folder)?;
        Ok(all.into_iter().filter_map(|path| Some(path.strip_prefix(folder).ok()?.to_path_buf())).collect())
    };
    let (first, second) = (names(one)?, names(other)?);
    let mut all: Vec<&PathBuf> = first.iter().chain(&second).collect();
    all.sort_unstable();
    all.dedup();
    let differs = |name: &&PathBuf| {
        let read = |folder: &Path| std::fs::read(folder.join(name)).ok();
        read(one).is_none() || read(one) != read(other)
    };
    Ok(all.into_iter().filter(differs).map(|name| name.display().to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_and_another_byte_are_differences() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        for (place, name, text) in [
            (&one, "a/same", "x"),
            (&other, "a/same", "x"),
            (&one, "b", "x"),
            (&other, "b", "y"),
            (&other, "c", ""),
        ] {
            workdir::write(&place.join(name), text).unwrap();
        }
        assert_eq!(differences(&one, &other).unwrap(), ["b", "c"]);
    }
}
