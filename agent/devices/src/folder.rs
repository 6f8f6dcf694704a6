//! Folders shared by plugins and the agent: `device-plugins` and `plugins_registry`.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _},
    path::{Component, Path, PathBuf},
};

use super::Error;

/// Creates the folder if it is missing and removes the sockets in it: plugins watch their socket, and
/// register again when it is removed. Other files (the checkpoint) stay. Blocks.
///
/// # Errors
/// The folder cannot be created or read, or a socket cannot be removed.
pub(super) fn clear(dir: &Path) -> Result<(), Error> {
    let failed = |cause: io::Error| Error::Folder { path: dir.to_owned(), cause };
    fs::DirBuilder::new().recursive(true).mode(0o750).create(dir).map_err(failed)?;
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            match fs::remove_file(entry.path()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Returns the socket that a plugin names in its registration, which must be below `dir` after resolving
/// links and dots. Blocks.
///
/// # Errors
/// The path does not exist, is not a socket, or is outside `dir`.
pub(super) fn socket_in(dir: &Path, endpoint: &str) -> Result<PathBuf, Error> {
    let named = Path::new(endpoint);
    let inside = named.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if endpoint.is_empty() || !inside {
        return Err(Error::Endpoint { endpoint: endpoint.to_owned(), dir: dir.to_owned() });
    }
    within(dir, &dir.join(named))
}

/// Returns the canonical path of the socket at `path`, which must be below `dir`. Blocks.
///
/// # Errors
/// The path does not exist, is not a socket, or is outside `dir`.
fn within(dir: &Path, path: &Path) -> Result<PathBuf, Error> {
    let canonical = inside(dir, path, path.canonicalize())?;
    check_socket(path, &canonical)?;
    Ok(canonical)
}

/// Returns the canonical path of the socket at `path`, as [`within`] does. A plugin may register before its
/// service listens, as under the kubelet: if the file is missing, its folder must be below `dir`. Blocks.
///
/// # Errors
/// The path is not a socket or is outside `dir`, or its folder is missing.
pub(super) fn service_within(dir: &Path, path: &Path) -> Result<PathBuf, Error> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return within(dir, path);
    };
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            inside(dir, path, folder.canonicalize().map(|folder| folder.join(name)))
        }
        _ => within(dir, path),
    }
}

/// Returns the canonical form of `path` if it is below `dir`.
fn inside(dir: &Path, path: &Path, canonical: io::Result<PathBuf>) -> Result<PathBuf, Error> {
    let bad = |why: String| Error::Socket { path: path.to_owned(), why };
    let failed = |error: io::Error| bad(error.to_string());
    let canonical = canonical.map_err(failed)?;
    if !canonical.starts_with(dir.canonicalize().map_err(failed)?) {
        return Err(bad(format!(
            "the path leads to {}, which is not in {}",
            canonical.display(),
            dir.display()
        )));
    }
    Ok(canonical)
}

fn check_socket(path: &Path, canonical: &Path) -> Result<(), Error> {
    let bad = |why: String| Error::Socket { path: path.to_owned(), why };
    let kind = fs::metadata(canonical).map_err(|error| bad(error.to_string()))?.file_type();
    if kind.is_socket() { Ok(()) } else { Err(bad("the path is not a socket".to_owned())) }
}

/// Maximum number of sockets per folder, and maximum depth.
const MAX_SOCKETS: usize = 256;
const MAX_DEPTH: usize = 4;

/// Returns all folders (except hidden ones) and sockets below `dir`, in order. Skips unreadable ones. Blocks.
pub(super) fn scan(dir: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (mut folders, mut sockets) = (vec![(dir.to_owned(), 0)], Vec::new());
    let mut at = 0;
    while let Some((folder, depth)) = folders.get(at).cloned() {
        at += 1;
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            if kind.is_dir() && depth < MAX_DEPTH && folders.len() < MAX_SOCKETS {
                folders.push((entry.path(), depth + 1));
            } else if kind.is_socket() && sockets.len() < MAX_SOCKETS {
                sockets.push(entry.path());
            }
        }
    }
    sockets.sort();
    (folders.into_iter().map(|(folder, _)| folder).collect(), sockets)
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    #[test]
    fn only_sockets_go_when_the_folder_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("device-plugins");
        clear(&inside).unwrap();
        let _listener = UnixListener::bind(inside.join("old.sock")).unwrap();
        fs::write(inside.join("kubelet_internal_checkpoint"), "{}").unwrap();
        fs::create_dir(inside.join("folder")).unwrap();
        clear(&inside).unwrap();
        let mut left: Vec<_> = fs::read_dir(&inside).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["folder", "kubelet_internal_checkpoint"]);
    }

    #[test]
    fn an_endpoint_is_a_socket_inside_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("device-plugins");
        fs::create_dir_all(inside.join("deep")).unwrap();
        let _listeners: Vec<_> = ["device-plugins/a.sock", "device-plugins/deep/b.sock", "outside.sock"]
            .iter()
            .map(|path| UnixListener::bind(dir.path().join(path)).unwrap())
            .collect();
        fs::write(inside.join("file"), "").unwrap();
        symlink("../outside.sock", inside.join("link.sock")).unwrap();
        symlink("a.sock", inside.join("good-link.sock")).unwrap();
        for endpoint in ["a.sock", "./a.sock", "deep/b.sock", "good-link.sock"] {
            assert!(socket_in(&inside, endpoint).is_ok(), "{endpoint}");
        }
        for endpoint in [
            "",
            "../outside.sock",
            "deep/../a.sock",
            "/etc/passwd",
            "link.sock",
            "file",
            "nothing.sock",
            "a\0b",
        ] {
            assert!(socket_in(&inside, endpoint).is_err(), "{endpoint:?}");
        }
    }

    #[test]
    fn a_service_may_be_missing_but_not_lead_outside() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("plugins");
        fs::create_dir_all(inside.join("gpu")).unwrap();
        let _listener = UnixListener::bind(inside.join("gpu/dra.sock")).unwrap();
        fs::write(inside.join("file"), "").unwrap();
        symlink("/nowhere/x.sock", inside.join("dangling")).unwrap();
        symlink("..", inside.join("up")).unwrap();
        for good in ["gpu/dra.sock", "gpu/later.sock"] {
            assert_eq!(service_within(&inside, &inside.join(good)).unwrap(), inside.join(good));
        }
        for bad in ["../later.sock", "up/later.sock", "missing/later.sock", "dangling", "file"] {
            assert!(service_within(&inside, &inside.join(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn hidden_files_are_not_found() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("vendor/.hidden")).unwrap();
        let paths = ["a.sock", ".b.sock", "vendor/c.sock", "vendor/.hidden/d.sock"];
        let _listeners: Vec<_> =
            paths.iter().map(|path| UnixListener::bind(dir.path().join(path)).unwrap()).collect();
        let (folders, sockets) = scan(dir.path());
        assert_eq!(folders, [dir.path().to_owned(), dir.path().join("vendor")]);
        assert_eq!(sockets, [dir.path().join("a.sock"), dir.path().join("vendor/c.sock")]);
    }
}
