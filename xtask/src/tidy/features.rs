//! Checks that all builds use one set of features. `cargo xtask` builds only this package or lab, the tests
//! build all packages, and cargo enables the features that the chosen packages request. If two sets of a
//! library differ, cargo builds and keeps that library, and each library that depends on it, twice.

use super::Violation;
use crate::{shell, test};
use anyhow::{Context as _, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The packages that `cargo run` builds alone, with their manifests.
const PACKAGES: [(&str, &str); 2] = [("xtask", "xtask/Cargo.toml"), ("beelet-lab", "lab/Cargo.toml")];

/// Compares the features of each package's libraries with those of a build of all packages.
pub(super) fn check(repository: &Path) -> Result<Vec<Violation>> {
    let all = tree(repository, &test::selection())?;
    let all = features(&all);
    let mut found = Vec::new();
    for (package, manifest) in PACKAGES {
        // `cargo run` does not build the package's dev-dependencies.
        let own = tree(repository, &["--package", package, "--edges", "normal,build"])?;
        found.extend(compare(manifest, &features(&own), &all));
    }
    Ok(found)
}

/// Returns a line per library with its features.
fn tree(repository: &Path, selection: &[&str]) -> Result<String> {
    let mut cargo = shell::cargo();
    cargo.args(["tree", "--prefix", "none", "--format", "{p} {f}"]).args(selection);
    let output = cargo.current_dir(repository).output().context("could not start cargo")?;
    if !output.status.success() {
        bail!("cargo tree failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the features of each library with its version: the features of all its lines, because cargo prints
/// the library of build scripts separately.
fn features(tree: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut all: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in tree.lines() {
        // `NAME vVERSION (PATH OR KIND) FEATURE,FEATURE`; an empty part is missing. `(*)` follows if an
        // earlier line already listed the library's dependencies.
        let line = line.strip_suffix("(*)").map_or(line, |line| line.strip_suffix(' ').unwrap_or(line));
        let mut blanks = line.match_indices(' ').map(|(at, _)| at);
        let end = blanks.nth(1).unwrap_or(line.len());
        let (library, rest) = line.split_at(end);
        let features = rest.rsplit_once(' ').map_or("", |(_, features)| features);
        all.entry(library).or_default().extend(features.split(',').filter(|name| !name.is_empty()));
    }
    all
}

fn compare(
    manifest: &str,
    own: &BTreeMap<&str, BTreeSet<&str>>,
    all: &BTreeMap<&str, BTreeSet<&str>>,
) -> Vec<Violation> {
    let differ = own.iter().filter_map(|(library, features)| {
        let wanted = all.get(library).filter(|wanted| *wanted != features)?;
        let names: Vec<&str> = wanted.symmetric_difference(features).copied().collect();
        let message = format!(
            "{library} has other features here than in the tests of the workspace, so cargo builds it and its \
             dependents twice: {}",
            names.join(", ")
        );
        Some(Violation { file: manifest.to_owned(), line: 1, message })
    });
    differ.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_with_other_features_is_named_with_them() {
        let all =
            "tokio v1.2.3 fs,net,test-util\nserde_derive v1.0.0 (proc-macro) default\na v0.1.0 (/x y/a) \n";
        let check = |own: &str, expected: &[&str]| {
            let found = compare("xtask/Cargo.toml", &features(own), &features(all));
            let messages: Vec<&str> = found.iter().map(|violation| violation.message.as_str()).collect();
            assert_eq!(messages.len(), expected.len(), "{messages:?}");
            for (message, expected) in messages.iter().zip(expected) {
                let (first, last) = expected.split_once(' ').unwrap();
                assert!(
                    message.starts_with(first) && message.ends_with(&format!("twice: {last}")),
                    "{message}"
                );
            }
        };
        check("tokio v1.2.3 fs,net,test-util\na v0.1.0 (/x y/a) \n", &[]);
        check("tokio v1.2.3 fs,net\n", &["tokio test-util"]);
        check("tokio v1.2.3 fs\ntokio v1.2.3 net,test-util (*)\n", &[]);
        check("serde_derive v1.0.0 (proc-macro) default,more\n", &["serde_derive more"]);
        check("a v0.1.0 (/x y/a) log\n", &["a log"]);
        check("b v0.1.0 log\n", &[]);
    }
}
