//! Packs local files and directories into an archive for a container.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use tokio::sync::mpsc;

/// Bytes per message.
const PIECE: usize = 32 << 10;

/// A local path to pack.
pub(super) struct Packer {
    path: PathBuf,
    /// Name in the archive; "." for the content of a directory.
    name: String,
}

impl Packer {
    pub(super) fn new(path: &Path, name: &str) -> Self {
        Self { path: path.to_owned(), name: name.to_owned() }
    }

    /// Writes the archive and closes the command's input. Links inside a directory are copied as links.
    pub(super) fn pack(&self, input: &mpsc::Sender<proto::ExecInput>) -> io::Result<()> {
        let packed = self.write(BufWriter::with_capacity(PIECE, Sender(input)));
        // If the receiver is closed, the receiving side reports the cause.
        let _ = input.blocking_send(proto::ExecInput { input: Some(Input::StdinClosed(true)) });
        match packed {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            packed => packed,
        }
    }

    fn write(&self, out: impl Write) -> io::Result<()> {
        let mut archive = tar::Builder::new(out);
        archive.follow_symlinks(false);
        // A link on the command line stands for its target.
        let path = self.path.canonicalize()?;
        if path.is_dir() {
            archive.append_dir_all(&self.name, &path)?;
        } else {
            archive.append_path_with_name(&path, &self.name)?;
        }
        archive.into_inner()?.flush()
    }
}

/// A command's standard input.
struct Sender<'a>(&'a mpsc::Sender<proto::ExecInput>);

impl Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let input = proto::ExecInput { input: Some(Input::Stdin(bytes.to_vec())) };
        self.0.blocking_send(input).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use beelet_base::archive::{Kind, Reader};

    use super::*;

    #[test]
    fn a_folder_is_packed_under_its_new_name_with_its_links() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("site/sub")).unwrap();
        std::fs::write(dir.path().join("site/sub/file"), "text").unwrap();
        std::os::unix::fs::symlink("sub/file", dir.path().join("site/link")).unwrap();
        let mut bytes = Vec::new();
        Packer::new(&dir.path().join("site"), "www").write(&mut bytes).unwrap();
        let mut reader = Reader::new(bytes.as_slice());
        let mut found = BTreeMap::new();
        while let Some(member) = reader.next_member().unwrap() {
            found.insert(String::from_utf8(member.name).unwrap(), member.kind);
        }
        assert_eq!(found["www/sub/file"], Kind::File);
        assert_eq!(found["www/link"], Kind::Link(b"sub/file".to_vec()));
        assert!(found.keys().all(|name| name.starts_with("www")), "{found:?}");
    }
}
