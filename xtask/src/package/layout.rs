//! The installed files and their paths: the binary and its helper, their units and configuration, the manual
//! pages and completions that the binary itself writes, and the documentation.

use crate::shell;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::{images::Entry, workdir};
use flate2::{Compression, GzBuilder};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

/// Files of the repository and their installed paths, with mode 644.
const COPIED: &[(&str, &str)] = &[
    ("packaging/beelet.service", "usr/lib/systemd/system/beelet.service"),
    ("packaging/beelet-observe.service", "usr/lib/systemd/system/beelet-observe.service"),
    ("packaging/beelet-exec.service", "usr/lib/systemd/system/beelet-exec.service"),
    ("packaging/beelet.yaml", "etc/beelet/beelet.yaml"),
    ("packaging/grafana/beelet.json", "usr/share/doc/beelet/grafana/beelet.json"),
    ("packaging/kubernetes/observe.yaml", "usr/share/doc/beelet/kubernetes/observe.yaml"),
    ("README.md", "usr/share/doc/beelet/README.md"),
    ("LICENSE", "usr/share/doc/beelet/copyright"),
];
/// The configuration files (dpkg conffiles): dpkg keeps an administrator's changes to them.
pub(super) const CONFIGURATION: &[&str] = &["etc/beelet/beelet.yaml"];
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/beelet"),
    ("zsh", "usr/share/zsh/vendor-completions/_beelet"),
    ("fish", "usr/share/fish/vendor_completions.d/beelet.fish"),
];

/// Name of the program that runs the commands of exec probes. Expected next to the agent's binary.
pub(super) const HELPER: &str = "beelet-exec";

/// Returns all files by their paths from the root, sorted. `start` returns the command that starts `binary`
/// on this machine, without arguments.
pub fn files(binary: &Path, start: impl Fn() -> Result<Command>) -> Result<Vec<(String, Entry)>> {
    let mut all = vec![
        ("usr/bin/beelet".to_owned(), Entry::File(read(binary)?, 0o755)),
        (format!("usr/bin/{HELPER}"), Entry::File(read(&binary.with_file_name(HELPER))?, 0o755)),
        ("etc/beelet/manifests".to_owned(), Entry::Folder(0o755)),
    ];
    let mut add = |path: String, content: Vec<u8>| all.push((path, Entry::File(content, 0o644)));
    for (from, to) in COPIED {
        add((*to).to_owned(), read(&workdir::repository().join(from))?);
    }
    add(
        "usr/share/doc/beelet/changelog.gz".to_owned(),
        gzip(&read(&workdir::repository().join("CHANGELOG.md"))?)?,
    );
    for (name, content) in in_folder(&workdir::repository().join("docs"), ".md")? {
        add(format!("usr/share/doc/beelet/{name}"), content);
    }
    for (shell, path) in COMPLETIONS {
        add((*path).to_owned(), printed(start()?, &["completions", shell])?);
    }
    let pages = tempfile::tempdir().context("could not make a folder for the manual pages")?;
    printed(start()?, &["man", &pages.path().display().to_string()])?;
    for (name, content) in in_folder(pages.path(), ".1")? {
        add(format!("usr/share/man/man1/{name}.gz"), gzip(&content)?);
    }
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(all)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("could not read {}", path.display()))
}

/// Returns the files of a folder, without those in its subfolders, whose names end with `end`.
fn in_folder(folder: &Path, end: &str) -> Result<Vec<(String, Vec<u8>)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("could not list {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && name.ends_with(end) {
            found.push((name, read(&path)?));
        }
    }
    Ok(found)
}

/// Returns the standard output of a program.
fn printed(mut program: Command, arguments: &[&str]) -> Result<Vec<u8>> {
    program.args(arguments);
    let shown = shell::display(&program);
    let output = program.output().with_context(|| format!("could not start `{shown}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("`{shown}` ended with {}: {said}", output.status);
    }
    Ok(output.stdout)
}

/// Compresses without a name and a time, so the same content makes the same bytes.
fn gzip(content: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    encoder.write_all(content)?;
    encoder.finish().context("could not compress")
}
