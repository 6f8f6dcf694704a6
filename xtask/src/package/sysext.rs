//! The image that systemd lays over /usr (systemd-sysext), for distributions whose /usr is read-only.

use super::{tree, version};
use crate::cross::Arch;
use crate::{setup, shell};
use anyhow::{Context as _, Result};
use beelet_tests_base::images::Entry;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The image's name on a machine: `/var/lib/extensions/beelet.raw`. The image contains a file with the same
/// name.
const NAME: &str = "beelet";

/// Makes the image of those files that are below /usr, in the folder `out`; all its times are `seconds` since
/// 1970.
pub(super) fn build(files: &[(String, Entry)], arch: Arch, out: &Path, seconds: u64) -> Result<PathBuf> {
    let mksquashfs =
        setup::find("mksquashfs").context("mksquashfs is missing: cargo xtask setup --for release")?;
    let (root, image) =
        (out.join("sysext"), out.join(format!("beelet-{}-{}.sysext.raw", version(), arch.machine())));
    tree::make(&root, &with_release(files, arch))?;
    if image.exists() {
        std::fs::remove_file(&image).with_context(|| format!("could not remove {}", image.display()))?;
    }
    let mut command = Command::new(mksquashfs);
    command.arg(&root).arg(&image).args(["-all-root", "-noappend", "-no-progress", "-comp", "xz"]);
    let seconds = seconds.to_string();
    command.args(["-mkfs-time", &seconds, "-all-time", &seconds]).env_remove("SOURCE_DATE_EPOCH");
    shell::run(command.stdout(Stdio::null()))?;
    std::fs::remove_dir_all(&root).with_context(|| format!("could not remove {}", root.display()))?;
    Ok(image)
}

/// Returns the files below /usr, with the one that systemd compares with the machine's os-release. A static
/// binary suits every distribution (`_any`).
fn with_release(files: &[(String, Entry)], arch: Arch) -> Vec<(String, Entry)> {
    let processor = arch.machine().replace('_', "-");
    let processor = if arch == Arch::Arm64 { "arm64" } else { processor.as_str() };
    let release = format!("ID=_any\nARCHITECTURE={processor}\n");
    let mut all: Vec<_> = files.iter().filter(|(path, _)| path.starts_with("usr/")).cloned().collect();
    let name = format!("usr/lib/extension-release.d/extension-release.{NAME}");
    all.push((name, Entry::File(release.into_bytes(), 0o644)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_has_only_usr_and_the_file_that_systemd_checks() {
        let files = [
            ("etc/beelet/beelet.yaml".to_owned(), Entry::File(Vec::new(), 0o644)),
            ("usr/bin/beelet".to_owned(), Entry::File(Vec::new(), 0o755)),
        ];
        let all = with_release(&files, Arch::Amd64);
        let names: Vec<&str> = all.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(names, ["usr/bin/beelet", "usr/lib/extension-release.d/extension-release.beelet"]);
        let Entry::File(content, _) = &all[1].1 else { panic!("no file") };
        assert_eq!(content, b"ID=_any\nARCHITECTURE=x86-64\n");
    }
}
