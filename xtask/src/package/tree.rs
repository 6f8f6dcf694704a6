//! A folder with the files of a package, for programs that pack folders.

use anyhow::{Context as _, Result};
use beelet_tests_base::{images::Entry, workdir};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Makes the folder `root` with these files and their modes, in place of an older one.
pub(super) fn make(root: &Path, files: &[(String, Entry)]) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root).with_context(|| format!("could not remove {}", root.display()))?;
    }
    fs::create_dir_all(root).with_context(|| format!("could not make {}", root.display()))?;
    for (path, entry) in files {
        place(root, path, entry)?;
    }
    Ok(())
}

/// Adds a file to the folder `root`.
pub(super) fn place(root: &Path, name: &str, entry: &Entry) -> Result<()> {
    let path = &root.join(name);
    let mode = match entry {
        Entry::File(content, mode) => {
            workdir::write(path, content)?;
            *mode
        }
        Entry::Folder(mode) => {
            fs::create_dir_all(path).with_context(|| format!("could not make {}", path.display()))?;
            *mode
        }
        Entry::Link(target) => {
            return std::os::unix::fs::symlink(target, path)
                .with_context(|| format!("could not make {}", path.display()));
        }
    };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| format!("could not set the mode of {}", path.display()))?;
    // The umask of the calling shell set the modes of the folders above.
    for folder in path.ancestors().skip(1).take_while(|folder| folder.starts_with(root)) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
