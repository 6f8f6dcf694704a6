//! What `beelet --version` says beside the number: the commit. It comes from `BEELET_COMMIT` (a
//! packager's word), else from git where a release is built, else from the file that `git archive` filled
//! in; where none knows, it is left out. Builds of the same commit say the same.

use std::path::Path;
use std::process::Command;

/// `git archive` replaces what stands in it (`export-subst` in .gitattributes).
const ARCHIVED: &str = "../packaging/commit";

fn main() {
    println!("cargo:rerun-if-env-changed=BEELET_COMMIT");
    println!("cargo:rerun-if-changed={ARCHIVED}");
    let number = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let told = std::env::var("BEELET_COMMIT").ok().filter(|commit| !commit.is_empty());
    // A developer's build is not made anew for each commit.
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = told.or_else(|| is_release.then(from_git).flatten()).or_else(from_archive);
    let version = commit.map_or_else(|| number.clone(), |commit| format!("{number} ({commit})"));
    println!("cargo:rustc-env=BEELET_VERSION={version}");
}

/// The commit that is checked out, and its date.
fn from_git() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    // Not the repository of somebody in whose folder this source lies.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // The log of HEAD grows with every commit and checkout.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists());
    println!("cargo:rerun-if-changed={}", log?);
    git(&["log", "-1", "--abbrev=12", "--format=%h %cs"])
}

fn from_archive() -> Option<String> {
    let text = std::fs::read_to_string(ARCHIVED).ok()?;
    let text = text.trim();
    (!text.is_empty() && !text.starts_with('$')).then(|| text.to_owned())
}
