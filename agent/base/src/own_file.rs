//! Plain files in folders that containers may have reached too, by a hostPath: what they put in a file's
//! place is never followed, waited for, or written through. Blocking.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::walk::remove_folder;

/// How often something else is cleared away before the agent gives up: somebody puts it there again and
/// again.
const TRIES: usize = 3;

/// Opens a file for reading if it is a plain one. A link is refused by the kernel, and a FIFO isn't waited
/// for.
pub fn read(path: &Path) -> io::Result<File> {
    plain(OpenOptions::new().read(true), path)
}

/// Opens a file of the agent's own for writing, and makes it where there is none; as it is, not emptied. What
/// else is in its place is removed.
pub fn own(path: &Path) -> io::Result<File> {
    let mut tries = 0;
    loop {
        tries += 1;
        clear(path)?;
        let opened = plain(OpenOptions::new().read(true).write(true).create(true).mode(0o600), path);
        if opened.is_ok() || tries == TRIES {
            return opened;
        }
    }
}

/// Removes what is at `path`, unless it is a plain file.
pub fn clear(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => Ok(()),
        Ok(_) => remove_folder(path).map_err(io::Error::other),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Sets a file's permissions by its descriptor: no umask has a say.
pub fn permit(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(fs::Permissions::from_mode(mode))
}

fn plain(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(i32::try_from(flags.bits()).unwrap_or_default()).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::other("it is not a plain file"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn only_plain_files_are_read_and_others_give_way_to_ones_of_our_own() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("secret");
        fs::write(&secret, "hush").unwrap();
        let at = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink(&secret, at("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o666);
        for (name, kind) in [("fifo", rustix::fs::FileType::Fifo), ("socket", rustix::fs::FileType::Socket)] {
            rustix::fs::mknodat(rustix::fs::CWD, at(name), kind, mode, 0).unwrap();
        }
        fs::create_dir_all(at("folder/full")).unwrap();
        for name in ["link", "dangling", "fifo", "socket", "folder"] {
            let path = at(name);
            assert!(read(&path).is_err(), "{name}");
            let mut file = own(&path).unwrap();
            file.write_all(b"ours").unwrap();
            permit(&file, 0o666).unwrap();
            let mut text = String::new();
            read(&path).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "ours", "{name}");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o666);
        }
        assert_eq!(fs::read_to_string(&secret).unwrap(), "hush");
        assert!(!at("nowhere").exists());
        // What is there already stays as it is.
        let mut text = String::new();
        own(&at("link")).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "ours");
        assert_eq!(read(&at("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
