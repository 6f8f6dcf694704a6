//! The list of the binary's components (CycloneDX, JSON), made by cargo-cyclonedx.

use super::version;
use crate::{shell, tools};
use anyhow::{Context as _, Result};
use beelet_tests_base::workdir;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name of the tool's output file, next to agent/Cargo.toml.
const NAME: &str = "beelet.sbom";

/// Makes the list in the folder `out`, with the time `seconds` since 1970.
pub(super) fn build(out: &Path, seconds: u64) -> Result<PathBuf> {
    let tool = tools::CYCLONEDX.ensure()?;
    let manifest = workdir::repository().join("agent/Cargo.toml");
    let mut command = Command::new(&tool);
    command.args([
        "cyclonedx",
        "--quiet",
        "--format",
        "json",
        "--override-filename",
        NAME,
        "--manifest-path",
    ]);
    command.env("SOURCE_DATE_EPOCH", seconds.to_string());
    shell::run(command.arg(&manifest).current_dir(workdir::repository()))?;
    // The tool writes a file next to the manifest of every crate of the workspace.
    let path = out.join(format!("beelet-{}.cdx.json", version()));
    let made = workdir::repository().join("agent").join(format!("{NAME}.json"));
    // The tool names our own crates by their folders.
    let own = format!("path+file://{}/", workdir::repository().display());
    workdir::write(&path, workdir::read(&made)?.replace(&own, "path+file:///"))?;
    sweep()?;
    Ok(path)
}

/// Removes the files that the tool wrote next to the manifests of the workspace's crates.
fn sweep() -> Result<()> {
    let mut command = shell::cargo();
    command.args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(workdir::repository());
    let output = command.output().context("could not start cargo metadata")?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("cargo metadata failed")?;
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    for manifest in packages.iter().filter_map(|package| package["manifest_path"].as_str()) {
        let left = Path::new(manifest).with_file_name(format!("{NAME}.json"));
        if left.exists() {
            std::fs::remove_file(&left).with_context(|| format!("could not remove {}", left.display()))?;
        }
    }
    Ok(())
}
