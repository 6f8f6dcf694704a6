//! Files of the manifest directory: reads, writes and removals.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::KEPT;
use tonic::Status;

/// Returns the time of the last change in nanoseconds since 1970, or 0 if it is unknown.
pub(super) fn changed_ns(file: &Path) -> i64 {
    let changed = fs::metadata(file).and_then(|metadata| metadata.modified()).ok();
    let since = changed.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.and_then(|since| i64::try_from(since.as_nanos()).ok()).unwrap_or_default()
}

pub(super) fn temporary(folder: &Path, name: &OsStr) -> PathBuf {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(".new");
    folder.join(hidden)
}

/// Creates the directory of a manifest if missing, for root only, because manifests may contain Secrets.
#[allow(clippy::result_large_err)] // tonic's own error type
pub(super) fn make_folder_of(file: &Path) -> Result<(), Status> {
    let Some(folder) = file.parent() else { return Ok(()) };
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|e| Status::internal(format!("cannot create the directory {}: {e}", folder.display())))
}

/// Writes a manifest atomically.
pub(super) fn write(path: &Path, text: &str) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    // A hidden name is never a manifest's. The name is constant: after a crash here, the next write of this
    // manifest replaces the leftover.
    let temporary = temporary(folder, name);
    let written = (|| {
        use std::os::unix::fs::OpenOptionsExt;
        // The manifest may contain Secrets.
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(folder)?.sync_all()
    })();
    if written.is_err() {
        // The temporary file may not exist.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes a manifest, or renames it to a name that is not a manifest's and returns that name.
#[allow(clippy::result_large_err)] // tonic's own error type
pub(super) fn remove_manifest(path: &Path, keep: bool) -> Result<Option<PathBuf>, Status> {
    let failed = |e: io::Error| Status::internal(format!("cannot remove {}: {e}", path.display()));
    if !keep {
        return fs::remove_file(path).map(|()| None).map_err(failed);
    }
    let mut name = path.as_os_str().to_owned();
    name.push(KEPT);
    let kept = PathBuf::from(name);
    fs::rename(path, &kept).map_err(failed)?;
    Ok(Some(kept))
}
