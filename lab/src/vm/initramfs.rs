//! File system of a guest: an initramfs, which is a cpio archive in the "newc" format (Linux,
//! Documentation/driver-api/early-userspace/buffer-format.rst). Entries are sorted by path, so that the same
//! content produces the same archive.

use anyhow::{Context as _, Result};
use cpio::newc::{Builder, ModeFileType, trailer};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Entry at a path of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Folder,
    Link(String),
    Text(String),
    /// File of this machine, read when the archive is written.
    File(PathBuf),
}

/// Files of a guest by path, without the leading slash.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree(BTreeMap<String, Entry>);

impl Tree {
    /// Adds an empty folder.
    pub(super) fn folder(&mut self, path: &str) {
        self.add(path, Entry::Folder);
    }

    /// Adds a symbolic link, unless the path exists.
    pub(super) fn link(&mut self, path: &str, target: &str) {
        if !self.0.contains_key(path.trim_start_matches('/')) {
            self.add(path, Entry::Link(target.to_owned()));
        }
    }

    /// Adds a file with this text, executable like all files of a guest.
    pub(super) fn text(&mut self, path: &str, text: impl Into<String>) {
        self.add(path, Entry::Text(text.into()));
    }

    /// Adds a copy of a file of this machine.
    pub(super) fn file(&mut self, path: &str, source: &Path) {
        self.add(path, Entry::File(source.to_path_buf()));
    }

    fn add(&mut self, path: &str, entry: Entry) {
        let path = path.trim_start_matches('/');
        let mut parent = path;
        while let Some((folder, _)) = parent.rsplit_once('/') {
            self.0.entry(folder.to_owned()).or_insert(Entry::Folder);
            parent = folder;
        }
        self.0.insert(path.to_owned(), entry);
    }

    /// Writes the archive; returns its size in bytes. A parent's path is a prefix of its children's, so that
    /// the map's order has every folder before its entries.
    pub(super) fn write(&self, output: impl Write) -> Result<u64> {
        let mut output = Counted { inner: output, bytes: 0 };
        for (number, (path, entry)) in (1..).zip(&self.0) {
            let (kind, mode, content) = match entry {
                Entry::Folder => (ModeFileType::Directory, 0o755, Vec::new()),
                Entry::Link(target) => (ModeFileType::Symlink, 0o777, target.clone().into_bytes()),
                Entry::Text(text) => (ModeFileType::Regular, 0o755, text.clone().into_bytes()),
                Entry::File(source) => {
                    let content =
                        std::fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
                    (ModeFileType::Regular, 0o755, content)
                }
            };
            let size = u32::try_from(content.len())
                .with_context(|| format!("/{path} is too big for an initramfs: 4 GiB is a file's limit"))?;
            let mut file =
                Builder::new(path).ino(number).mode(mode).set_mode_file_type(kind).write(output, size);
            file.write_all(&content).context("cannot write the initramfs")?;
            output = file.finish().context("cannot write the initramfs")?;
        }
        let mut output = trailer(output).context("cannot write the initramfs")?;
        output.flush().context("cannot write the initramfs")?;
        Ok(output.bytes)
    }
}

struct Counted<W> {
    inner: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    /// Returns path, mode and content of each entry of the archive.
    fn read(archive: &[u8]) -> Vec<(String, u32, String)> {
        let mut rest = archive;
        let mut found = Vec::new();
        loop {
            let mut reader = cpio::NewcReader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                return found;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut content = String::new();
            reader.read_to_string(&mut content).unwrap();
            found.push((name, mode, content));
            rest = reader.finish().unwrap();
        }
    }

    #[test]
    fn an_archive_has_every_folder_before_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("x"), "from outside").unwrap();
        let mut tree = Tree::default();
        tree.file("/usr/bin/x", &dir.path().join("x"));
        tree.link("bin/sh", "busybox");
        tree.link("usr/bin/x", "never: the path exists");
        tree.text("init", "#!/bin/sh\n");
        tree.folder("proc");
        let mut archive = Vec::new();
        let size = tree.write(&mut archive).unwrap();
        assert_eq!(size, archive.len() as u64);
        let expected = [
            ("bin", 0o040_755, ""),
            ("bin/sh", 0o120_777, "busybox"),
            ("init", 0o100_755, "#!/bin/sh\n"),
            ("proc", 0o040_755, ""),
            ("usr", 0o040_755, ""),
            ("usr/bin", 0o040_755, ""),
            ("usr/bin/x", 0o100_755, "from outside"),
        ]
        .map(|(path, mode, content)| (path.to_owned(), mode, content.to_owned()));
        assert_eq!(read(&archive), expected);
    }

    #[test]
    fn a_missing_file_is_an_error_that_names_it() {
        let mut tree = Tree::default();
        tree.file("x", Path::new("/nonexistent/x"));
        let error = tree.write(Vec::new()).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/x"), "{error}");
    }
}
