//! Checks counts that may only fall. A rule that the tree breaks in many places cannot forbid them at once,
//! so the file `xtask/ratchet.toml` has the current count per crate and pattern. A higher count is a
//! violation. A lower count is a violation too, until `cargo xtask tidy --lower` has written it, so that no
//! count rises again.

use super::Violation;
use anyhow::{Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::SystemTime;

/// The file of counts, from the repository's top folder.
const FILE: &str = "xtask/ratchet.toml";
/// The head of that file.
const HEAD: &str = "\
# Counts that may only fall (docs/style.md), one line per crate and pattern; a missing line means zero.
# `cargo xtask tidy --lower` writes this file. If text moves to another crate, move its count by hand.

";
/// The pseudo-crate of all pages.
const PAGES: &str = "docs";
/// Maximum number of places in a violation's message.
const SHOWN: usize = 8;

/// A place that a pattern matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) file: String,
    pub(super) line: usize,
    pub(super) words: String,
}

/// All places by crate and pattern.
pub(super) type Counted = BTreeMap<(String, &'static str), Vec<Place>>;
/// The counts of `xtask/ratchet.toml`.
type Allowed = BTreeMap<(String, String), usize>;

/// Returns the name of a file's crate, which is the nearest folder with a Cargo.toml: `pods`, `tests-base`,
/// `docs`.
pub(super) fn crate_of(file: &str, crates: &BTreeSet<String>) -> Option<String> {
    if file.ends_with(".md") {
        return Some(PAGES.to_owned());
    }
    let ancestors = std::iter::successors(file.rsplit_once('/'), |(folder, _)| folder.rsplit_once('/'));
    let found = ancestors.map(|(folder, _)| folder).find(|folder| crates.contains(*folder))?;
    Some(found.strip_prefix("agent/").unwrap_or(found).replace('/', "-"))
}

/// Returns the folders with a Cargo.toml.
pub(super) fn crates(files: &[String]) -> BTreeSet<String> {
    files.iter().filter_map(|file| file.strip_suffix("/Cargo.toml")).map(ToOwned::to_owned).collect()
}

/// Compares the counts with those of the file. `lower` first writes the lower counts to the file.
pub(super) fn check(repository: &Path, counted: &Counted, lower: bool) -> Result<Vec<Violation>> {
    let path = repository.join(FILE);
    let text = path.exists().then(|| std::fs::read_to_string(&path)).transpose();
    let text = text.with_context(|| format!("could not read {}", path.display()))?;
    let allowed = text.as_deref().map(parse).transpose()?;
    if lower {
        let lowered = lowered(counted, allowed.as_ref());
        std::fs::write(&path, format(&lowered))
            .with_context(|| format!("could not write {}", path.display()))?;
        eprintln!("tidy: wrote {FILE}");
        return Ok(compare(counted, &lowered, repository));
    }
    Ok(compare(counted, &allowed.unwrap_or_default(), repository))
}

/// Parses lines of the form `crate.pattern = count`.
fn parse(text: &str) -> Result<Allowed> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entry = |line: &str| {
        let (key, count) = line.split_once(" = ")?;
        let (name, pattern) = key.split_once('.')?;
        Some(((name.to_owned(), pattern.to_owned()), count.parse().ok()?))
    };
    lines
        .map(|line| entry(line).with_context(|| format!("{FILE} has a line that is not a count: `{line}`")))
        .collect()
}

fn format(allowed: &Allowed) -> String {
    let line =
        |((name, pattern), count): (&(String, String), &usize)| format!("{name}.{pattern} = {count}\n");
    HEAD.to_owned() + &allowed.iter().map(line).collect::<String>()
}

/// Returns the lower of both counts for each crate and pattern; the current counts if the file is missing.
fn lowered(counted: &Counted, allowed: Option<&Allowed>) -> Allowed {
    let of = |((name, pattern), places): (&(String, &'static str), &Vec<Place>)| {
        let key = (name.clone(), (*pattern).to_owned());
        let count = match allowed {
            Some(allowed) => places.len().min(allowed.get(&key).copied().unwrap_or(0)),
            None => places.len(),
        };
        (count > 0).then_some((key, count))
    };
    counted.iter().filter_map(of).collect()
}

/// Returns a violation per count that differs from the file's.
fn compare(counted: &Counted, allowed: &Allowed, repository: &Path) -> Vec<Violation> {
    let mut found = Vec::new();
    for ((name, pattern), places) in counted {
        let limit = allowed.get(&(name.clone(), (*pattern).to_owned())).copied().unwrap_or(0);
        if places.len() > limit {
            found.push(too_many(name, pattern, places, limit, repository));
        }
    }
    let count = |name: &str, pattern: &str| {
        counted.iter().find(|((a, b), _)| a == name && *b == pattern).map_or(0, |(_, places)| places.len())
    };
    for ((name, pattern), limit) in allowed {
        let count = count(name, pattern);
        if count < *limit {
            let message = format!(
                "{name} has {pattern} {count} times, fewer than {limit}: `cargo xtask tidy --lower` records this"
            );
            found.push(Violation { file: FILE.to_owned(), line: 1, message });
        }
    }
    found
}

/// Returns the violation for a risen count. Places in recently changed files come first: new places are
/// there.
fn too_many(name: &str, pattern: &str, places: &[Place], limit: usize, repository: &Path) -> Violation {
    let changed = |file: &str| {
        let modified = std::fs::metadata(repository.join(file)).and_then(|found| found.modified());
        std::cmp::Reverse(modified.unwrap_or(SystemTime::UNIX_EPOCH))
    };
    let mut sorted: Vec<&Place> = places.iter().collect();
    sorted.sort_by_cached_key(|place| changed(&place.file));
    let shown = sorted.iter().take(SHOWN).map(|place| {
        let Place { file, line, words } = place;
        format!("\n    {file}:{line}: {words}")
    });
    let shown: String = shown.collect();
    let count = places.len();
    let message = format!(
        "{name} has {pattern} {count} times, more than {limit} (docs/style.md); most recently changed files first:{shown}"
    );
    let first = sorted.first();
    Violation {
        file: first.map_or(FILE.to_owned(), |place| place.file.clone()),
        line: first.map_or(1, |place| place.line),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(name: &str, lines: &[usize]) -> Counted {
        let place = |line: &usize| Place { file: "a.rs".to_owned(), line: *line, words: "it".to_owned() };
        Counted::from([((name.to_owned(), "tell"), lines.iter().map(place).collect())])
    }

    #[test]
    fn a_count_may_fall_and_never_rise() {
        let check = |lines: &[usize], limit: usize, expected: &[&str]| {
            let allowed = Allowed::from([(("pods".to_owned(), "tell".to_owned()), limit)]);
            let found = compare(&counted("pods", lines), &allowed, Path::new("/nowhere"));
            let messages: Vec<&str> = found.iter().map(|violation| violation.message.as_str()).collect();
            assert_eq!(messages.len(), expected.len(), "{messages:?}");
            assert!(
                messages.iter().zip(expected).all(|(message, part)| message.contains(part)),
                "{messages:?}"
            );
        };
        check(&[7, 9], 2, &[]);
        check(&[7, 9], 1, &["pods has tell 2 times, more than 1"]);
        check(&[7, 9], 1, &["a.rs:9: it"]);
        check(&[7], 2, &["pods has tell 1 times, fewer than 2: `cargo xtask tidy --lower`"]);
        check(&[], 2, &["pods has tell 0 times, fewer than 2"]);
    }

    #[test]
    fn lowering_raises_no_count() {
        let check = |lines: &[usize], before: Option<usize>, expected: &str| {
            let before = before.map(|limit| Allowed::from([(("pods".to_owned(), "tell".to_owned()), limit)]));
            let text = format(&lowered(&counted("pods", lines), before.as_ref()));
            assert_eq!(text.strip_prefix(HEAD), Some(expected));
            assert_eq!(format(&parse(&text).unwrap()), text);
        };
        check(&[7, 9], Some(3), "pods.tell = 2\n");
        check(&[7, 9], Some(1), "pods.tell = 1\n");
        check(&[], Some(1), "");
        check(&[7, 9], None, "pods.tell = 2\n");
        assert!(parse("pods.tell = many\n").is_err());
    }

    #[test]
    fn a_file_belongs_to_the_nearest_crate() {
        let files = ["agent/Cargo.toml", "agent/pods/Cargo.toml", "tests/base/Cargo.toml"];
        let crates = crates(&files.map(ToOwned::to_owned));
        let check = |file: &str, expected: Option<&str>| {
            assert_eq!(crate_of(file, &crates).as_deref(), expected, "{file}");
        };
        check("agent/pods/src/a/b.rs", Some("pods"));
        check("agent/src/main.rs", Some("agent"));
        check("tests/base/src/lib.rs", Some("tests-base"));
        check("docs/decisions/0001.md", Some("docs"));
        check("Cargo.toml", None);
    }
}
