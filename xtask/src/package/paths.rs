//! Hides the folders of the build from the compiled code, so that builds in different folders have the same
//! bytes.
//!
//! Panic messages contain paths of generated sources in cargo's target folder, and of dependencies in cargo's
//! home. rustc's `--remap-path-prefix` replaces them. cargo hashes the flags of RUSTFLAGS into the names of
//! all symbols, so the flags come from a wrapper of rustc.

use anyhow::{Context as _, Result};
use beelet_tests_base::workdir;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

/// Adds the flags after those of cargo. The last matching prefix counts.
const WRAPPER: &str = "\
#!/bin/sh
exec \"$@\" --remap-path-prefix=\"$BEELET_CARGO_HOME=/cargo\" --remap-path-prefix=\"$BEELET_SOURCES=/beelet\" \\
  --remap-path-prefix=\"$BEELET_TARGET=/beelet/target\"
";

/// Makes `cargo` compile with the folders replaced by `/cargo`, `/beelet` and `/beelet/target`.
pub(super) fn hide(cargo: &mut Command) -> Result<()> {
    let wrapper = workdir::target_dir().join("packing/rustc");
    workdir::write(&wrapper, WRAPPER)?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("could not set the mode of {}", wrapper.display()))?;
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    cargo
        .env("RUSTC_WRAPPER", &wrapper)
        .env("BEELET_CARGO_HOME", home.context("neither CARGO_HOME nor HOME is set")?)
        .env("BEELET_SOURCES", workdir::repository())
        .env("BEELET_TARGET", workdir::target_dir());
    // Paths of C sources, in the code of one dependency.
    let map = format!(
        "-ffile-prefix-map={}=/beelet -ffile-prefix-map={}=/beelet/target",
        workdir::repository().display(),
        workdir::target_dir().display()
    );
    cargo.env("CFLAGS", map);
    Ok(())
}
