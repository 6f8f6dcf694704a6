//! Hides the folders of the build from the compiled code, so that builds in different folders have the same
//! bytes.
//!
//! Panic messages contain paths of generated sources in cargo's target folder, and of dependencies in cargo's
//! home. rustc's `--remap-path-prefix` replaces them. cargo hashes the flags of RUSTFLAGS into the names of
//! all symbols, so the flags come from a wrapper of rustc.

use crate::shell;
use anyhow::{Context as _, Result};
use beelet_tests_base::workdir;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Makes `cargo` compile with the folders replaced by `/cargo`, `/rust/library`, `/beelet` and
/// `/beelet/target`. `library` has the sources of the standard library, if the build compiles it. The wrapper
/// adds the flags after those of cargo, and the last matching prefix counts.
pub(super) fn hide(cargo: &mut Command, library: Option<PathBuf>) -> Result<()> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let home = home.context("neither CARGO_HOME nor HOME is set")?;
    let mut folders = vec![(home.clone(), "/cargo")];
    // The registry's address names the folder below, and some machines use a mirror.
    let registries = fs::read_dir(home.join("registry/src"));
    folders.extend(registries.into_iter().flatten().flatten().map(|one| (one.path(), "/cargo/registry")));
    folders.extend(library.map(|library| (library, "/rust/library")));
    folders.extend([(workdir::repository(), "/beelet"), (workdir::target_dir(), "/beelet/target")]);
    let flag = |option: &str, (from, to): &(PathBuf, &str)| format!("{option}={}={to}", from.display());
    let flags = folders.iter().map(|folder| format!(" '{}'", flag("--remap-path-prefix", folder)));
    let text = format!("#!/bin/sh\nexec \"$@\"{}\n", flags.collect::<String>());
    let wrapper = shell::script(&workdir::target_dir().join("packing"), "rustc", &text)?;
    cargo.env("RUSTC_WRAPPER", wrapper);
    // Paths of C sources, in the code of one dependency.
    let maps: Vec<String> = folders.iter().map(|folder| flag("-ffile-prefix-map", folder)).collect();
    cargo.env("CFLAGS", maps.join(" "));
    Ok(())
}
