//! The texts that a new version changes.

use anyhow::{Context as _, Result, bail};

/// The heading of changes that no version has yet.
const UNRELEASED: &str = "## Unreleased\n";

/// Returns the manifest of the workspace with another version.
pub(super) fn in_manifest(text: &str, version: &str) -> Result<String> {
    let start = text.find("[workspace.package]\n").context("Cargo.toml has no [workspace.package]")?;
    let from = text[start..].find("\nversion = \"").context("[workspace.package] has no version")?;
    let from = start + from + "\nversion = \"".len();
    let to = from + text[from..].find('"').context("the version in Cargo.toml has no end")?;
    Ok(format!("{}{version}{}", &text[..from], &text[to..]))
}

/// Returns the DaemonSet's file with the image of another version.
pub(super) fn in_daemon_set(text: &str, version: &str) -> Result<String> {
    let name = "image: localhost/beelet:";
    let from = text.find(name).context("observe.yaml has no image localhost/beelet")? + name.len();
    let to = from + text[from..].find('\n').context("observe.yaml ends with the image")?;
    Ok(format!("{}{version}{}", &text[..from], &text[to..]))
}

/// Returns the changelog with the unreleased changes as those of a version of this day.
pub(super) fn in_changelog(text: &str, version: &str, day: &str) -> Result<String> {
    let (before, after) = text.split_once(UNRELEASED).context("CHANGELOG.md has no section `Unreleased`")?;
    let changes = after.split("\n## ").next().unwrap_or_default();
    if changes.trim().is_empty() {
        bail!("CHANGELOG.md has no changes below `Unreleased`");
    }
    if section(text, version).is_some() {
        bail!("CHANGELOG.md has a section of version {version} already");
    }
    Ok(format!("{before}{UNRELEASED}\n## {version} ({day})\n{after}"))
}

/// Returns the changes of a version, without the heading.
pub(super) fn section<'a>(changelog: &'a str, version: &str) -> Option<&'a str> {
    let sections = changelog.split("\n## ").skip(1);
    let of_version = |one: &&str| one.split([' ', '\n']).next() == Some(version);
    let (_, text) = sections.into_iter().find(of_version)?.split_once('\n')?;
    Some(text.trim_matches('\n'))
}

/// Returns true for `MAJOR.MINOR.PATCH`, with `-PRE` or without.
pub(super) fn is_version(text: &str) -> bool {
    let (numbers, pre) = text.split_once('-').unwrap_or((text, "pre"));
    let is_number = |part: &str| part.parse::<u32>().is_ok_and(|number| number.to_string() == part);
    let is_word = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric());
    numbers.split('.').count() == 3 && numbers.split('.').all(is_number) && pre.split('.').all(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_tests_base::workdir;

    #[test]
    fn the_version_of_the_workspace_changes_and_no_other() {
        let text = "[workspace.dependencies]\nx = \"1\"\n[workspace.package]\nversion = \"0.1.0\"\n[x]\nversion = \"0.1.0\"\n";
        let expected = text.replacen("version = \"0.1.0\"", "version = \"0.2.0\"", 1);
        assert_eq!(in_manifest(text, "0.2.0").unwrap(), expected);
    }

    #[test]
    fn the_unreleased_changes_become_those_of_the_version() {
        let text = "# Changelog\n\n## Unreleased\n\n### Fixed\n\n- x\n\n## 0.1.0\n\n- y\n";
        let cut = in_changelog(text, "0.2.0", "2026-12-01").unwrap();
        assert_eq!(
            cut,
            "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n\n### Fixed\n\n- x\n\n## 0.1.0\n\n- y\n"
        );
        assert_eq!(section(&cut, "0.2.0"), Some("### Fixed\n\n- x"));
        assert_eq!(section(&cut, "0.1.0"), Some("- y"));
        assert_eq!(section(&cut, "0.1"), None);
        assert!(in_changelog(&cut, "0.3.0", "2026-12-02").is_err());
        assert!(in_changelog(text, "0.1.0", "2026-12-02").is_err());
    }

    #[test]
    fn the_repositorys_own_files_can_be_changed() {
        let read = |file: &str| workdir::read(&workdir::repository().join(file)).unwrap();
        assert!(in_manifest(&read("Cargo.toml"), "9.9.9").unwrap().contains("\nversion = \"9.9.9\"\n"));
        let set = in_daemon_set(&read("packaging/kubernetes/observe.yaml"), "9.9.9").unwrap();
        assert!(set.contains("image: localhost/beelet:9.9.9\n"));
    }

    #[test]
    fn a_version_has_three_numbers() {
        for good in ["0.2.0", "1.10.3", "1.0.0-rc.1"] {
            assert!(is_version(good), "{good}");
        }
        for bad in ["", "v1.0.0", "1.0", "1.0.0.0", "01.0.0", "1.0.0-", "1.0.0 x"] {
            assert!(!is_version(bad), "{bad}");
        }
    }
}
