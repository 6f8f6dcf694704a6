//! A unix socket that is never accessible to other users, not even briefly. Other users may write to its
//! directory (that of device plugins), so only files created here are changed by name.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};

/// Maximum connections waiting to be accepted.
const WAITING: i32 = 1024;
/// Maximum temporary names to try.
const NAMES: u32 = 16;

/// A listening socket and its file, which is removed on drop.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    inode: u64,
}

impl Socket {
    /// Listens at `path` (mode 0600), in place of a socket that a dead process left. Any other file there is
    /// an error.
    pub(super) async fn bind(path: &Path) -> anyhow::Result<(UnixListener, Self)> {
        let dir = path.parent().filter(|dir| dir.is_absolute());
        let dir = dir.with_context(|| format!("{} is not an absolute path of a socket", path.display()))?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .with_context(|| format!("cannot create the directory {} for the socket", dir.display()))?;
        refuse_if_in_use(path).await?;
        let (listener, newborn) = listen(dir).with_context(|| {
            format!("cannot create the socket {} (the path is limited to about 90 bytes)", path.display())
        })?;
        let inode = fs::symlink_metadata(&newborn).map(|found| found.ino());
        let put = inode.and_then(|inode| fs::rename(&newborn, path).map(|()| inode));
        if put.is_err() {
            let _ = fs::remove_file(&newborn);
        }
        let inode = put.with_context(|| format!("cannot move the socket to {}", path.display()))?;
        Ok((listener, Self { path: path.to_owned(), inode }))
    }
}

/// Listens at a temporary name in the directory. The socket has its mode before it has a name: a file is
/// created with the mode of the socket that is bound to it (`unix_bind_bsd` in net/unix/af_unix.c).
fn listen(dir: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let newborn = bind(&socket, dir)?;
    rustix::net::listen(&socket, WAITING)?;
    Ok((UnixListener::from_std(socket.into())?, newborn))
}

/// Binds a socket to an unused name in the directory. A killed process with the same process ID may have left
/// a socket there, and other users may have created any file; these files stay.
fn bind(socket: &OwnedFd, dir: &Path) -> io::Result<PathBuf> {
    for number in 0..NAMES {
        let newborn = dir.join(format!(".{}.{number}", std::process::id()));
        match rustix::net::bind(socket, &SocketAddrUnix::new(&newborn)?) {
            Ok(()) => return Ok(newborn),
            Err(Errno::ADDRINUSE) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::ADDRINUSE.into())
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Another instance may have replaced the file.
        if fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

async fn refuse_if_in_use(path: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot inspect {}", path.display())),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            bail!("{} exists and is not a socket: move it away, or set another `runDir`", path.display());
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Ok(_) => {
            bail!("another process serves {}: stop that process, or set another `runDir`", path.display())
        }
        // Refused: no process listens. Not found: the file was removed in the meantime.
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            Ok(())
        }
        Err(error) => {
            Err(error).with_context(|| format!("cannot determine whether {} is in use", path.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[tokio::test]
    async fn a_socket_is_its_owners_and_nothing_of_others_in_its_folder_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("device-plugins");
        let victim = dir.path().join("victim");
        fs::write(&victim, "").unwrap();
        fs::set_permissions(&victim, fs::Permissions::from_mode(0o644)).unwrap();
        fs::create_dir(&folder).unwrap();
        symlink(&victim, folder.join(format!(".{}.0", std::process::id()))).unwrap();
        symlink(dir.path().join("made"), folder.join(format!(".{}.1", std::process::id()))).unwrap();
        let path = folder.join("kubelet.sock");
        for _ in 0..2 {
            let (listener, socket) = Socket::bind(&path).await.unwrap();
            let found = fs::symlink_metadata(&path).unwrap();
            assert!(found.file_type().is_socket() && found.permissions().mode() & 0o7777 == 0o600);
            let (connected, accepted) = tokio::join!(UnixStream::connect(&path), listener.accept());
            assert!(connected.is_ok() && accepted.is_ok());
            assert!(Socket::bind(&path).await.unwrap_err().to_string().contains("another process serves"));
            // The file of a killed instance is replaced.
            std::mem::forget(socket);
        }
        let (_listener, socket) = Socket::bind(&path).await.unwrap();
        drop(socket);
        assert!(!path.exists() && !dir.path().join("made").exists());
        assert_eq!(fs::metadata(&victim).unwrap().permissions().mode() & 0o7777, 0o644);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "only the planted files are left");
    }
}
