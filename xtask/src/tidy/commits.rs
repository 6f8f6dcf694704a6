//! Checks the subjects of commits that the main branch of the remote lacks: `area: imperative subject`, short
//! enough for one line. In a clone without history or without a remote, the check does nothing.

use anyhow::Result;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Maximum length of a subject: lists of commits cut longer ones.
const LONGEST: usize = 72;

/// Areas without a folder.
const MORE: &[&str] = &["build", "cargo", "changelog", "ci", "nextest", "readme", "tidy"];

/// First words that look like verbs by their form.
const NO_VERBS: &[&str] = &[
    "a", "all", "an", "each", "every", "how", "it", "more", "no", "nobody", "nothing", "now", "of", "one",
    "only", "some", "that", "the", "this", "two", "what", "when", "where", "who",
];
/// Imperatives whose form is that of a past tense, a noun or a third person.
const VERBS: &[&str] = &[
    "bring", "embed", "exceed", "feed", "fling", "focus", "heed", "need", "ping", "proceed", "ring", "seed",
    "shed", "speed", "spring", "string", "succeed", "swing", "weed", "alias", "bias",
];

/// A subject that breaks the rule.
pub(super) struct Broken {
    /// The commit's short hash with its subject.
    pub(super) commit: String,
    pub(super) why: String,
}

/// Checks the commits after `since`, by default after the remote's main branch.
pub(super) fn check(repository: &Path, since: Option<&str>, files: &[String]) -> Result<Vec<Broken>> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(repository).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let known = |name: &str| git(&["rev-parse", "--verify", "--quiet", &format!("{name}^{{commit}}")]);
    let base = match since {
        Some(since) => known(since),
        None => known("origin/main").or_else(|| known("main@{upstream}")),
    };
    // In a shallow clone, the whole history seems to come after the base.
    let is_shallow = git(&["rev-parse", "--is-shallow-repository"]).is_none_or(|is| is == "true");
    let Some(base) = base.filter(|_| !is_shallow) else { return Ok(Vec::new()) };
    let log = git(&["log", "--no-merges", "--format=%h %s", &format!("{base}..HEAD")]).unwrap_or_default();
    let areas = areas(files);
    let broken = log.lines().filter_map(|line| {
        let why = wrong(line.split_once(' ')?.1, &areas)?;
        Some(Broken { commit: line.to_owned(), why })
    });
    Ok(broken.collect())
}

/// Returns the areas that a subject may begin with: top folders, crates, and the first folders of their
/// sources.
fn areas(files: &[String]) -> BTreeSet<&str> {
    let folders = files.iter().filter_map(|file| Some(file.rsplit_once('/')?.0)).flat_map(|folder| {
        let top = folder.split('/').next();
        let of_crate = folder.split_once("/src/").and_then(|(_, inner)| inner.split('/').next());
        top.into_iter().chain(of_crate)
    });
    let crates = files.iter().filter_map(|file| file.strip_suffix("/Cargo.toml")?.rsplit('/').next());
    let areas = folders.chain(crates).map(|name| name.trim_start_matches('.'));
    areas.chain(MORE.iter().copied()).collect()
}

/// Returns the reason why a subject breaks the rule; None if it follows the rule.
fn wrong(subject: &str, areas: &BTreeSet<&str>) -> Option<String> {
    if subject.starts_with("Revert \"") {
        return None; // git's own words
    }
    let length = subject.chars().count();
    if length > LONGEST {
        return Some(format!("the subject has {length} characters; the maximum is {LONGEST}"));
    }
    let Some((named, rest)) = subject.split_once(": ") else {
        return Some("a subject begins with an area: `pods: end a pod once`".to_owned());
    };
    if let Some(unknown) = named.split(", ").find(|area| !areas.contains(area)) {
        return Some(format!("`{unknown}` is neither a folder nor a crate, so it cannot be an area"));
    }
    if rest.ends_with('.') {
        return Some("a subject ends without a full stop".to_owned());
    }
    let first = rest.split(|c: char| !c.is_alphanumeric() && c != '-').next().unwrap_or_default();
    (!is_imperative(first)).then(|| format!("`{first}` is not an imperative: state the change to the code"))
}

/// Guesses by its form if a word is an imperative.
fn is_imperative(word: &str) -> bool {
    let has_form = |end: &str| word.ends_with(end);
    let is_third_person = has_form("s") && !has_form("ss") && !has_form("us");
    let is_past_or_noun = has_form("ed") || has_form("ing");
    let is_verb = !NO_VERBS.contains(&word) && word.starts_with(|c: char| c.is_ascii_lowercase());
    VERBS.contains(&word) || is_verb && !is_third_person && !is_past_or_noun
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_have_an_area_and_an_imperative() {
        let files =
            ["agent/pods/Cargo.toml", "agent/src/node/run.rs", "docs/a.md", "lab/src/vm/mod.rs", ".ci/run"];
        let files = files.map(ToOwned::to_owned);
        let areas = areas(&files);
        let check = |subject: &str, expected: Option<&str>| {
            let why = wrong(subject, &areas);
            assert_eq!(why.is_some(), expected.is_some(), "{subject}: {why:?}");
            assert!(why.unwrap_or_default().contains(expected.unwrap_or_default()), "{subject}");
        };
        check("pods: end a pod once", None);
        check("node, docs: process each request", None);
        check("vm: speed a boot up", None);
        check("ci: embed the object", None);
        check("Revert \"Something of old\"", None);
        check("pods: ends a pod once", Some("`ends` is not an imperative"));
        check("pods: ended a pod", Some("`ended`"));
        check("pods: ending pods", Some("`ending`"));
        check("pods: a pod ends once", Some("`a` is not an imperative"));
        check("pods: Ctrl-C ends it", Some("`Ctrl-C`"));
        check("pods: end a pod.", Some("full stop"));
        check("kubelet: end a pod", Some("`kubelet` is neither"));
        check("End a pod once", Some("begins with an area"));
        check(&format!("pods: end {}", "x".repeat(70)), Some("the maximum is 72"));
    }

    #[test]
    fn a_clone_without_the_base_has_nothing_to_check() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check(folder.path(), None, &[]).unwrap().is_empty());
    }
}
