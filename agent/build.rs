//! Adds the commit to the output of `beelet --version`: from `BEELET_COMMIT` (set by a packager), or else
//! from git for a release build, or else from the file that `git archive` filled in; otherwise the commit is
//! omitted. Builds of the same commit print the same.

use std::path::Path;
use std::process::Command;

/// File whose content `git archive` replaces (`export-subst` in .gitattributes).
const ARCHIVED: &str = "../packaging/commit";

fn main() {
    println!("cargo:rerun-if-env-changed=BEELET_COMMIT");
    println!("cargo:rerun-if-changed={ARCHIVED}");
    let number = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let given = std::env::var("BEELET_COMMIT").ok().filter(|commit| !commit.is_empty());
    // A developer's build must not be repeated for each commit.
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| is_release.then(from_git).flatten()).or_else(from_archive);
    let version = commit.map_or_else(|| number.clone(), |commit| format!("{number} ({commit})"));
    println!("cargo:rustc-env=BEELET_VERSION={version}");
}

/// Returns the checked-out commit and its date.
fn from_git() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    // Ignore an unrelated repository that contains this source's folder.
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
