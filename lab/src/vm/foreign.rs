//! Finds the programs that a guest needs in an unpacked system for another processor. This machine cannot run
//! the system's programs, so this module finds their libraries as a loader does, by reading the programs.

use anyhow::{Context as _, Result, bail};
use object::read::elf::{ElfFile64, ProgramHeader as _};
use object::{Endianness, elf};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folders of programs and of libraries in an unpacked system. Some are links to others.
const PROGRAMS: &[&str] = &["usr/sbin", "usr/bin", "sbin", "bin"];
const LIBRARIES: &[&str] = &["usr/lib", "lib"];

/// Returns the static busybox of the system in the folder `root`.
pub(super) fn busybox(root: &Path) -> Result<PathBuf> {
    let found = find(root, PROGRAMS, "busybox").context("the system has no busybox")?;
    let needs = needs(&found)?;
    if !needs.libraries.is_empty() {
        bail!("{} is not static", found.display());
    }
    Ok(found)
}

/// Returns the programs `names` and all files that they load, by their paths in a guest.
pub(super) fn programs(root: &Path, names: &[&str]) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut open: Vec<(String, PathBuf)> = names
        .iter()
        .filter_map(|name| Some((format!("usr/bin/{name}"), find(root, PROGRAMS, name)?)))
        .collect();
    while let Some((path, file)) = open.pop() {
        if found.contains_key(&path) {
            continue;
        }
        let needs = needs(&file)?;
        found.insert(path, file);
        for library in needs.libraries {
            let file = library_file(root, &library)?;
            open.push((format!("usr/lib/{library}"), file));
        }
        // A program names its loader by its full path.
        if let Some(loader) = needs.loader {
            let name = loader.rsplit('/').next().unwrap_or_default();
            open.push((loader.trim_start_matches('/').to_owned(), library_file(root, name)?));
        }
    }
    Ok(found)
}

fn library_file(root: &Path, name: &str) -> Result<PathBuf> {
    let found = find(root, LIBRARIES, name);
    found.with_context(|| format!("{} has no library {name}", root.display()))
}

/// Finds a file in one of the folders of `root`, or in a folder directly below (a processor's libraries).
fn find(root: &Path, folders: &[&str], name: &str) -> Option<PathBuf> {
    for folder in folders {
        let folder = root.join(folder);
        let below = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
        for dir in std::iter::once(folder.clone()).chain(below) {
            let file = within(root, &dir.join(name));
            if file.is_file() {
                return Some(file);
            }
        }
    }
    None
}

/// Resolves the last links of a path as that system would: a link to /x is the system's /x.
fn within(root: &Path, path: &Path) -> PathBuf {
    let mut path = path.to_path_buf();
    for _ in 0..8 {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = match target.strip_prefix("/") {
            Ok(absolute) => root.join(absolute),
            Err(_) => path.parent().unwrap_or(root).join(target),
        };
    }
    path
}

/// Files that a program or a library loads.
#[derive(Debug, Default)]
struct Needs {
    /// Path of its loader (PT_INTERP).
    loader: Option<String>,
    /// Names of its libraries (DT_NEEDED).
    libraries: Vec<String>,
}

fn needs(file: &Path) -> Result<Needs> {
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    read_needs(&bytes).with_context(|| format!("cannot parse {} as a program", file.display()))
}

fn read_needs(bytes: &[u8]) -> Result<Needs> {
    let program: ElfFile64<'_, Endianness> = ElfFile64::parse(bytes)?;
    let mut needs = Needs::default();
    for header in program.elf_program_headers() {
        if let Some(path) = header.interpreter(program.endian(), bytes)? {
            needs.loader = Some(String::from_utf8_lossy(path).into_owned());
        }
    }
    let table = program.elf_dynamic_table()?;
    for entry in table.iter().filter(|entry| entry.tag == elf::DT_NEEDED) {
        needs.libraries.push(String::from_utf8_lossy(entry.string(table.strings())?).into_owned());
    }
    Ok(needs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_program_names_its_loader_and_its_libraries() {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let needs = read_needs(&bytes).unwrap();
        assert!(needs.loader.unwrap().contains("/ld-linux"));
        assert!(needs.libraries.iter().any(|name| name == "libc.so.6"), "{:?}", needs.libraries);
        assert!(read_needs(b"#!/bin/sh\n").is_err());
    }

    #[test]
    fn links_are_followed_inside_of_the_system() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let folder = root.join("usr/lib/aarch64-linux-gnu");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("libx.so.1.2"), "x").unwrap();
        symlink("/usr/lib/aarch64-linux-gnu/libx.so.1.2", folder.join("libx.so.1")).unwrap();
        symlink("libx.so.1", folder.join("libx.so")).unwrap();
        assert_eq!(find(root, LIBRARIES, "libx.so"), Some(folder.join("libx.so.1.2")));
        assert_eq!(find(root, LIBRARIES, "liby.so"), None);
        symlink("libz.so", folder.join("libz.so")).unwrap();
        assert_eq!(find(root, LIBRARIES, "libz.so"), None);
    }

    #[test]
    fn programs_come_with_what_they_load_and_those_that_are_missing_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let needs = read_needs(&program).unwrap();
        std::fs::create_dir_all(root.join("sbin")).unwrap();
        std::fs::write(root.join("sbin/tool"), &program).unwrap();
        let missing = programs(root, &["tool", "other"]).unwrap_err().to_string();
        assert!(missing.contains("has no library"), "{missing}");
        // Libraries without dependencies.
        std::fs::create_dir_all(root.join("lib")).unwrap();
        let plain = std::fs::read(needs.loader.as_ref().unwrap()).unwrap();
        let loader = needs.loader.as_deref().unwrap().rsplit('/').next().unwrap();
        for name in needs.libraries.iter().map(String::as_str).chain([loader]) {
            std::fs::write(root.join("lib").join(name), &plain).unwrap();
        }
        let found = programs(root, &["tool", "other"]).unwrap();
        assert_eq!(found["usr/bin/tool"], root.join("sbin/tool"));
        assert_eq!(found["usr/lib/libc.so.6"], root.join("lib/libc.so.6"));
        assert!(found.contains_key(needs.loader.unwrap().trim_start_matches('/')));
    }
}
