//! The archive for any distribution: the files of the package with the static binary, to be unpacked at the
//! root.

use super::version;
use crate::cross::Arch;
use anyhow::{Context as _, Result};
use beelet_tests_base::images::Entry;
use flate2::{Compression, GzBuilder};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Makes the archive in the folder `out`; all its times are `seconds` since 1970.
pub(super) fn build(files: &[(String, Entry)], arch: Arch, out: &Path, seconds: u64) -> Result<PathBuf> {
    let path = out.join(format!("beelet-{}-linux-{}-static.tar.gz", version(), arch.machine()));
    write(files, &path, seconds)?;
    Ok(path)
}

/// Writes the files as a compressed archive to `path`; all its times are `seconds` since 1970.
pub(super) fn write(files: &[(String, Entry)], path: &Path, seconds: u64) -> Result<()> {
    let said = || format!("could not write {}", path.display());
    let file = File::create(path).with_context(said)?;
    let mut archive = tar::Builder::new(GzBuilder::new().mtime(0).write(file, Compression::best()));
    for (name, entry) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mtime(seconds);
        match entry {
            Entry::File(content, mode) => {
                header.set_mode(*mode);
                header.set_size(content.len() as u64);
                archive.append_data(&mut header, name, content.as_slice()).with_context(said)?;
            }
            Entry::Folder(mode) => {
                header.set_mode(*mode);
                header.set_size(0);
                header.set_entry_type(tar::EntryType::Directory);
                archive.append_data(&mut header, name, std::io::empty()).with_context(said)?;
            }
            Entry::Link(target) => {
                header.set_mode(0o777);
                header.set_size(0);
                header.set_entry_type(tar::EntryType::Symlink);
                archive.append_link(&mut header, name, target).with_context(said)?;
            }
        }
    }
    archive.into_inner().and_then(flate2::write::GzEncoder::finish).with_context(said)?;
    Ok(())
}
