//! A unix socket that is never open to others, not even between its making and its chmod.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use tokio::net::{UnixListener, UnixStream};

/// A listening socket and the file it is reached by, which goes when this value does.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    inode: u64,
}

impl Socket {
    /// Listens at `path` with mode 0600. A file left by a dead process is replaced; anything else there is an
    /// error.
    pub(super) async fn bind(path: &Path) -> anyhow::Result<(UnixListener, Self)> {
        let dir = path.parent().filter(|dir| dir.is_absolute());
        let dir = dir.with_context(|| format!("{} is not an absolute path of a socket", path.display()))?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .with_context(|| format!("cannot make the folder {} for the socket", dir.display()))?;
        refuse_if_in_use(path).await?;
        // Born in a folder that only we can enter, it has its mode before it has its name.
        let nursery = Nursery::new(dir)?;
        let newborn = nursery.0.join("s");
        let listener = UnixListener::bind(&newborn).with_context(|| {
            format!("cannot make the socket {} (its path may have at most about 90 bytes)", path.display())
        })?;
        fs::set_permissions(&newborn, fs::Permissions::from_mode(0o600))
            .and_then(|()| fs::rename(&newborn, path))
            .with_context(|| format!("cannot put the socket at {}", path.display()))?;
        let inode = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.ino();
        Ok((listener, Self { path: path.to_owned(), inode }))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Another instance may have put its own there meanwhile.
        if fs::metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

async fn refuse_if_in_use(path: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot look at {}", path.display())),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            bail!("{} is there and is not a socket: move it away, or set another runDir", path.display());
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Ok(_) => bail!("another process serves {}: stop that one, or set another runDir", path.display()),
        // Refused: nobody listens any more. Not found: gone since we looked.
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            Ok(())
        }
        Err(error) => Err(error).with_context(|| format!("cannot tell whether {} is in use", path.display())),
    }
}

/// A folder of mode 0700, removed with what is in it.
struct Nursery(PathBuf);

impl Nursery {
    fn new(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join(format!(".{}", std::process::id()));
        // Left by a process that had our id and was killed here.
        let _ = fs::remove_dir_all(&path);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make the folder {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Nursery {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
