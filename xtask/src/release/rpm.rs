//! The RPM repository: the packages and their metadata, made by createrepo_c and signed.

use super::sign::Gpg;
use crate::{setup, shell};
use anyhow::{Context as _, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes the repository in the folder `root` from these packages; its times are `seconds` since 1970.
pub(super) fn build(root: &Path, packages: &[PathBuf], seconds: u64, key: Option<&Gpg>) -> Result<()> {
    let program =
        setup::find("createrepo_c").context("createrepo_c is missing: cargo xtask setup --for release")?;
    std::fs::create_dir_all(root).with_context(|| format!("could not make {}", root.display()))?;
    for package in packages {
        let copy = root.join(package.file_name().unwrap_or_default());
        std::fs::copy(package, &copy).with_context(|| format!("could not write {}", copy.display()))?;
        // createrepo_c writes the files' times into the metadata.
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        let file = std::fs::File::options().write(true).open(&copy);
        file.and_then(|file| file.set_modified(time))
            .with_context(|| format!("could not set the time of {}", copy.display()))?;
    }
    let seconds = seconds.to_string();
    let mut command = Command::new(program);
    command.args(["--quiet", "--no-database", "--simple-md-filenames", "--revision", &seconds]);
    command.args(["--set-timestamp-to-revision", "--general-compress-type", "gz", "--workers", "1"]);
    shell::run(command.env("SOURCE_DATE_EPOCH", &seconds).arg(root))?;
    if let Some(key) = key {
        let metadata = root.join("repodata/repomd.xml");
        key.detach_sign(&metadata, &root.join("repodata/repomd.xml.asc"))?;
    }
    Ok(())
}
