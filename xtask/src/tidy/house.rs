//! Checks the walls of the house. ARCHITECTURE.md draws each crate below `agent/` with its floor; this module
//! compares the drawing with the crates on disk and with every Cargo.toml. A crate uses only crates on lower
//! floors.

use super::Violation;
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Libraries that only the named crates may use, because these crates are the doors to the libraries'
/// subjects.
const DOORS: &[(&str, &str)] = &[
    ("aya", "bpf"),
    ("aya-log", "bpf"),
    ("aya-obj", "bpf"),
    ("libbpf-rs", "tests only, and no crate of the agent"),
    ("serde-saphyr", "codec"),
    ("serde_path_to_error", "codec"),
    ("zbus", "systemd, testing"),
];

/// Libraries that decisions may use: data types and their text forms, but nothing that waits, reads, measures
/// or uses randomness.
const OF_POLICY: &[&str] = &[
    "base64",
    "beelet-units",
    "jiff",
    "k8s-openapi",
    "kube_quantity",
    "num-traits",
    "pem",
    "serde",
    "serde_json",
    "sha2",
    "thiserror",
];

/// Compares the drawing, the crates on disk and their Cargo.toml files.
pub(super) fn check(repository: &Path) -> Result<Vec<Violation>> {
    let page = repository.join("ARCHITECTURE.md");
    let page =
        std::fs::read_to_string(&page).with_context(|| format!("could not read {}", page.display()))?;
    let floors = drawn(&page);
    let mut found = Vec::new();
    let folder = repository.join("agent");
    let entries =
        std::fs::read_dir(&folder).with_context(|| format!("could not list {}", folder.display()))?;
    let mut on_disk = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.path().join("Cargo.toml").exists() {
            on_disk.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    for name in on_disk.iter().filter(|name| !floors.contains_key(name.as_str())) {
        let message =
            format!("agent/{name}/ is a crate, but the drawing of the house lacks the crate or its floor");
        found.push(Violation { file: "ARCHITECTURE.md".to_owned(), line: 1, message });
    }
    for (name, (_, line)) in &floors {
        let exists = name == "src" || on_disk.contains(name);
        if !exists {
            let message = format!("the drawing of the house has agent/{name}/, but no crate is there");
            found.push(Violation { file: "ARCHITECTURE.md".to_owned(), line: *line, message });
        }
    }
    for name in on_disk.iter().map(String::as_str).chain(["src"]) {
        let file =
            if name == "src" { "agent/Cargo.toml".to_owned() } else { format!("agent/{name}/Cargo.toml") };
        let text = std::fs::read_to_string(repository.join(&file))?;
        found.extend(check_dependencies(&file, name, &text, &floors));
    }
    Ok(found)
}

/// Parses the crates of the drawing (`api/ purpose floor 5`) with their floors and lines. The daemon's own
/// folder is `src`.
fn drawn(page: &str) -> BTreeMap<String, (u32, usize)> {
    let mut all = BTreeMap::new();
    let mut open: Option<String> = None;
    for (index, line) in page.lines().enumerate() {
        let name = line
            .strip_prefix("      ")
            .and_then(|rest| rest.split_once('/'))
            .map(|(name, _)| name)
            .filter(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '-'));
        if let Some(name) = name {
            open = Some(name.to_owned());
        }
        // The floor of a long line is on the next line.
        let floor = line.rsplit_once(" floor ").and_then(|(_, n)| n.trim().parse().ok());
        if let (Some(floor), Some(name)) = (floor, open.take_if(|_| line.contains(" floor "))) {
            all.insert(name, (floor, index + 1));
        }
    }
    all
}

/// Checks one crate's dependencies.
fn check_dependencies(
    file: &str,
    name: &str,
    text: &str,
    floors: &BTreeMap<String, (u32, usize)>,
) -> Vec<Violation> {
    let mut found = Vec::new();
    let floor_of = |name: &str| floors.get(name).map(|(floor, _)| *floor);
    for (line, dependency) in dependencies(text) {
        let mut say = |message| found.push(Violation { file: file.to_owned(), line, message });
        if let Some(other) = dependency.strip_prefix("beelet-")
            && let (Some(own), Some(below)) = (floor_of(name), floor_of(other))
            && below >= own
        {
            say(format!(
                "{name} is on floor {own} and must not use {other} on floor {below} (ARCHITECTURE.md)"
            ));
        }
        if let Some((_, door)) = DOORS.iter().find(|(library, _)| *library == dependency)
            && !door.split(", ").any(|door| door == name)
        {
            say(format!("{dependency} is for {door}"));
        }
        if name == "policy" && !OF_POLICY.contains(&dependency) {
            say(format!("policy must not use {dependency}: a decision is a pure function"));
        }
    }
    found
}

/// Returns the names in `[dependencies]`, with their lines.
fn dependencies(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut section = "";
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.starts_with('[') {
            section = line.trim();
        }
        let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
        let is_name = section == "[dependencies]" && !name.is_empty() && !name.starts_with(['#', '[']);
        is_name.then_some((index + 1, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floors() -> BTreeMap<String, (u32, usize)> {
        drawn(
            "      pods/     the manager    floor 5\n      probes/   when    floor 4\n      images/  pulls   floor 4\n      bpf/  door floor 2\n",
        )
    }

    #[test]
    fn a_floor_is_parsed_from_the_crates_line_or_the_next() {
        let all = drawn(
            "      src/   much text\n              floor 6\n      pods/  x   floor 5\n    ebpf/  no crate of the agent\n",
        );
        assert_eq!(all, BTreeMap::from([("src".to_owned(), (6, 2)), ("pods".to_owned(), (5, 3))]));
    }

    #[test]
    fn a_crate_uses_only_lower_floors_and_the_doors() {
        let check = |name: &str, dependency: &str, expected: usize| {
            let text = format!("[package]\nname = \"x\"\n\n[dependencies]\n{dependency}.workspace = true\n");
            let found = check_dependencies("Cargo.toml", name, &text, &floors());
            assert_eq!(found.len(), expected, "{name} -> {dependency}: {found:?}");
        };
        check("pods", "beelet-probes", 0);
        check("probes", "beelet-pods", 1);
        check("probes", "beelet-images", 1);
        check("bpf", "aya", 0);
        check("probes", "aya", 1);
        check("policy", "tokio", 1);
        check("policy", "serde", 0);
    }

    #[test]
    fn only_the_crates_own_dependencies_count() {
        let text = "[dependencies]\na.workspace = true\n# b\n\n[dev-dependencies]\nc = \"1\"\n";
        assert_eq!(dependencies(text).map(|(_, name)| name).collect::<Vec<_>>(), ["a"]);
    }
}
