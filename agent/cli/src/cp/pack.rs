//! Files and folders of this machine into an archive, on its way to a container.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use tokio::sync::mpsc;

/// Bytes in one message.
const PIECE: usize = 32 << 10;

/// What is to be packed.
pub(super) struct Packer {
    path: PathBuf,
    /// What it is called there; "." if what is in the folder goes without it.
    name: String,
}

impl Packer {
    pub(super) fn new(path: &Path, name: &str) -> Self {
        Self { path: path.to_owned(), name: name.to_owned() }
    }

    /// Writes the archive, and that there is no more. A folder is walked as it is; links in it are copied as
    /// links.
    pub(super) fn pack(&self, input: &mpsc::Sender<proto::ExecInput>) -> io::Result<()> {
        let packed = self.write(BufWriter::with_capacity(PIECE, Sender(input)));
        // Where nobody reads any more, what reads says why.
        let _ = input.blocking_send(proto::ExecInput { input: Some(Input::StdinClosed(true)) });
        match packed {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            packed => packed,
        }
    }

    fn write(&self, out: impl Write) -> io::Result<()> {
        let mut archive = tar::Builder::new(out);
        archive.follow_symlinks(false);
        // What is named on the command line is meant, not a link to it.
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
