//! Makes folders with an explicit mode, independent of the umask.

use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::Error;

/// Mode of folders that every user may read: logs, and volumes, which containers of any user read.
pub const READABLE: u32 = 0o755;

/// Mode of the folders above the pods' data, which only the agent and the runtime may enter on the machine.
pub const PRIVATE: u32 = 0o750;

/// Maximum length of a path on Linux, in bytes (`PATH_MAX`).
const LONGEST: usize = 4096;

/// Makes a folder and its missing parents with this mode, independent of the umask. Refuses a path that is
/// too long for Linux at once, without a lookup of every parent.
pub fn make_folder(path: &Path, mode: u32) -> Result<(), Error> {
    let failed = |cause: Errno| Error::MakeFolder { path: path.to_owned(), cause };
    if path.as_os_str().len() > LONGEST {
        return Err(failed(Errno::NAMETOOLONG));
    }
    let missing: Vec<&Path> =
        path.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists()).collect();
    let mode = Mode::from_raw_mode(mode);
    for folder in missing.into_iter().rev() {
        match rustix::fs::mkdir(folder, mode) {
            Ok(()) => {
                // By descriptor: another process may have replaced the folder by now.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let made = rustix::fs::open(folder, flags, Mode::empty()).map_err(failed)?;
                rustix::fs::fchmod(made, mode).map_err(failed)?;
            }
            Err(Errno::EXIST) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    if path.is_dir() { Ok(()) } else { Err(failed(Errno::NOTDIR)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_too_long_for_linux_costs_no_lookups() {
        // A million folders, of a path of a megabyte in the middle.
        let path = "/a".repeat(1 << 20);
        let refused = make_folder(Path::new(&path), READABLE).unwrap_err();
        assert!(matches!(refused, Error::MakeFolder { cause: Errno::NAMETOOLONG, .. }));
    }

    #[test]
    fn folders_have_the_requested_mode_with_any_umask() {
        use std::os::unix::fs::PermissionsExt;
        let strict = ["sh", "-c", "umask 077; exec \"$0\" \"$@\""];
        let name = "folders_have_the_requested_mode_with_any_umask";
        if !beelet_testing::again::in_child(module_path!(), name, &strict) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        make_folder(&dir.path().join("a/b"), PRIVATE).unwrap();
        make_folder(&dir.path().join("a/b/c/d"), READABLE).unwrap();
        let mode = |path: &str| dir.path().join(path).metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a"), mode("a/b"), mode("a/b/c"), mode("a/b/c/d")), (0o750, 0o750, 0o755, 0o755));
        // An existing folder stays as it is.
        make_folder(&dir.path().join("a/b/c"), PRIVATE).unwrap();
        assert_eq!(mode("a/b/c"), 0o755);
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert!(make_folder(&dir.path().join("file"), READABLE).is_err());
        assert!(make_folder(&dir.path().join("file/x"), READABLE).is_err());
    }
}
