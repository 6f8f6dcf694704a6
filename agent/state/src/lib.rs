//! Durable state: the only writer of files that must survive the agent.
//!
//! Each record is a file: a checksum line, then a JSON envelope with the boot of the write. A record is
//! replaced as a whole (temporary file, fsync, rename, fsync of the folder), so that a crash or a full disk
//! leaves the old one. A damaged record is set aside under another name and reported; it is never deleted and
//! never prevents a start. State outside this crate can be lost at any instant.
//!
//! [`ForeignFile`] is a file whose format and place another program defines.
//!
//! All calls block: async callers use `spawn_blocking`. This crate must never interpret the records.

pub mod events;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

mod folder;
mod foreign;

use beelet_base::own_file;
use beelet_codec::data;

pub use beelet_base::lock::{Lock, LockError};
/// Encodes a value, or a part of one, as in a record.
pub use beelet_codec::data::to_json as json_text;
pub use foreign::ForeignFile;

use folder::Folder;

/// Beginning of a record's first line; the checksum of the rest follows.
const MAGIC: &str = "beelet-state/1 sha256:";
/// Size limit of a record, far above any real one; a larger file is not ours.
const MAX_RECORD: u64 = 64 << 20;
/// Number of set-aside copies kept per record.
const MAX_QUARANTINED: usize = 5;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A folder of records, locked for this process while the value lives.
#[derive(Debug)]
pub struct State {
    folder: Folder,
    boot_id: String,
    lock: Lock,
}

/// Result of loading a record.
#[derive(Debug, PartialEq, Eq)]
pub enum Loaded<T> {
    /// The intact record.
    Value {
        /// Stored value.
        value: T,
        /// True if the record was stored since the last boot: only then are its process ids, cgroups and
        /// network namespaces valid.
        same_boot: bool,
    },
    /// The record does not exist.
    Absent,
    /// The record was damaged, and was set aside.
    Quarantined {
        /// New path of the damaged file.
        moved_to: PathBuf,
        /// Kind of damage.
        reason: Damage,
    },
}

/// Damage of a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The file exceeds the size limit of records.
    #[error("the file is larger than {MAX_RECORD} bytes")]
    TooLarge,
    /// The line with the checksum is missing.
    #[error("the checksum line is missing")]
    NoFirstLine,
    /// The file was changed, or not written to its end.
    #[error("the checksum does not match the content")]
    Checksum,
    /// Another version with other fields wrote the record.
    #[error("the content has an unknown format: {0}")]
    Form(String),
    /// The file was renamed.
    #[error("the file contains the record {0:?}")]
    OtherRecord(String),
}

/// Failure to keep state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another instance has locked the folder, or locking failed.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The disk is full. The record is unchanged.
    #[error(
        "no space left to write {}: the former content is intact, but changes are not kept; free some space in its \
         file system",
        .0.display()
    )]
    NoSpace(PathBuf),
    /// The content exceeds the size that is read back. The file is unchanged.
    #[error("the new content of {} has more than {MAX_RECORD} bytes, and is not written", .0.display())]
    TooLarge(PathBuf),
    /// Another failure of the file system.
    #[error("state: cannot {action} {}: {source}", .path.display())]
    Io {
        /// Attempted action.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The value has no JSON form, a bug of the caller.
    #[error("state: record {name} cannot be written as JSON: {source}")]
    Encode {
        /// The record.
        name: String,
        /// Cause.
        source: serde_json::Error,
    },
    /// The name is not valid for a file, a bug of the caller.
    #[error("state: {0:?} cannot name a record: use lower case letters, digits and '-'")]
    Name(String),
}

/// Body of a record's file.
#[derive(Deserialize)]
struct Envelope {
    record: String,
    boot: String,
    value: Value,
}

impl State {
    /// Opens `dir` (created with mode 0700 if missing) and takes its instance lock.
    ///
    /// # Errors
    /// Fails if another process has the lock (the error names it), or the folder cannot be created or read.
    pub fn open(dir: &Path) -> Result<Self, StateError> {
        let boot_id = fs::read_to_string(BOOT_ID).map_err(|e| io_error("read", Path::new(BOOT_ID), e))?;
        Self::open_in_boot(dir, boot_id.trim())
    }

    /// Opens `dir` as in the boot with this id: for tests of reboots.
    ///
    /// # Errors
    /// As for [`State::open`].
    pub fn open_in_boot(dir: &Path, boot_id: &str) -> Result<Self, StateError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(|error| io_error("make the folder", dir, error))?;
        let lock = Lock::acquire(&dir.join("lock"), &subject(dir))?;
        let folder = Folder(dir.to_owned());
        folder.remove_leftovers()?;
        Ok(Self { folder, boot_id: boot_id.to_owned(), lock })
    }

    /// Creates a removed folder and its lock again: records are written again as they change, and no other
    /// instance may write there. Returns true if the lock was missing.
    ///
    /// # Errors
    /// As for [`State::open`].
    pub fn renew(&self) -> Result<bool, StateError> {
        Ok(self.lock.renew(&subject(&self.folder.0))?)
    }

    /// Returns the folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.folder.0
    }

    /// Reads the record `name`. A damaged record is set aside.
    ///
    /// # Errors
    /// Fails if the file system fails; a missing file is not an error.
    pub fn load<T: DeserializeOwned>(&self, name: &str) -> Result<Loaded<T>, StateError> {
        let path = self.folder.path(name)?;
        let bytes = match own_file::read(&path).and_then(|file| own_file::read_at_most(&file, MAX_RECORD)) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return self.quarantine(name, Damage::TooLarge),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Loaded::Absent),
            Err(error) => return Err(io_error("read", &path, error)),
        };
        match decode(name, &bytes) {
            Ok((value, boot)) => Ok(Loaded::Value { value, same_boot: boot == self.boot_id }),
            Err(reason) => self.quarantine(name, reason),
        }
    }

    /// Replaces the record `name` with `value`. On return the record survives a power cut.
    ///
    /// # Errors
    /// Fails if the disk is full or fails; the old record stays.
    pub fn store<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StateError> {
        self.store_json(name, &to_json(name, value)?)
    }

    /// Stores a value from its JSON text.
    ///
    /// # Errors
    /// As for [`State::store`].
    pub fn store_json(&self, name: &str, json: &str) -> Result<(), StateError> {
        self.replace(name, json, File::sync_all)?;
        self.folder.sync()
    }

    /// Stores a value without waiting for the disk: the record survives a crash of the agent, but after a
    /// power cut it may be lost or damaged (and is then set aside). For records that a reboot makes useless
    /// anyway.
    ///
    /// # Errors
    /// As for [`State::store`].
    pub fn store_for_this_boot<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StateError> {
        self.store_json_for_this_boot(name, &to_json(name, value)?)
    }

    /// Stores a value from its JSON text.
    ///
    /// # Errors
    /// As for [`State::store`].
    pub fn store_json_for_this_boot(&self, name: &str, json: &str) -> Result<(), StateError> {
        self.replace(name, json, |_| Ok(()))
    }

    fn replace(
        &self,
        name: &str,
        json: &str,
        settle: impl FnOnce(&File) -> io::Result<()>,
    ) -> Result<(), StateError> {
        let path = self.folder.path(name)?;
        let bytes = encode(name, &self.boot_id, json);
        let temporary = self.folder.0.join(format!("{name}.tmp"));
        let written = write_file(&temporary, &bytes)
            .and_then(|file| settle(&file))
            .and_then(|()| fs::rename(&temporary, &path));
        if let Err(error) = written {
            // A partial file would only waste space on a full disk.
            let _ = fs::remove_file(&temporary);
            return Err(write_error(&path, error));
        }
        Ok(())
    }

    /// Removes the record `name`, without waiting for the disk: after a power cut it may be back.
    ///
    /// # Errors
    /// As for [`State::remove`].
    pub fn remove_for_this_boot(&self, name: &str) -> Result<(), StateError> {
        let path = self.folder.path(name)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("remove", &path, error)),
            _ => Ok(()),
        }
    }

    /// Removes the record `name`; a missing record is a success.
    ///
    /// # Errors
    /// Fails if the file system fails.
    pub fn remove(&self, name: &str) -> Result<(), StateError> {
        let path = self.folder.path(name)?;
        match fs::remove_file(&path) {
            Ok(()) => self.folder.sync(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io_error("remove", &path, error)),
        }
    }

    /// Sets a record aside, and keeps the last few copies.
    fn quarantine<T>(&self, name: &str, reason: Damage) -> Result<Loaded<T>, StateError> {
        let path = self.folder.path(name)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let moved_to = self.folder.0.join(format!("{name}.corrupt-{now:020}"));
        fs::rename(&path, &moved_to).map_err(|error| io_error("set aside", &path, error))?;
        self.folder.sync()?;
        let prefix = format!("{name}.corrupt-");
        let mut copies = self.folder.files(|file| file.starts_with(&prefix))?;
        copies.sort();
        for old in copies.iter().rev().skip(MAX_QUARANTINED) {
            fs::remove_file(old).map_err(|error| io_error("remove", old, error))?;
        }
        Ok(Loaded::Quarantined { moved_to, reason })
    }
}

fn to_json<T: Serialize>(name: &str, value: &T) -> Result<String, StateError> {
    json_text(value).map_err(|source| StateError::Encode { name: name.to_owned(), source })
}

/// Encodes a record's file from its value's text.
#[must_use]
pub fn encode(name: &str, boot: &str, json: &str) -> Vec<u8> {
    let [record, boot] = [name, boot].map(|text| Value::from(text).to_string());
    let body = format!(r#"{{"record":{record},"boot":{boot},"value":{json}}}"#);
    let mut bytes = first_line(body.as_bytes()).into_bytes();
    bytes.extend(body.into_bytes());
    bytes
}

/// Decodes a record's file into its value and the boot of the write.
///
/// # Errors
/// Fails if the file differs from the output of [`encode`] for a value of this type and name.
pub fn decode<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<(T, String), Damage> {
    let body_start = bytes.iter().position(|b| *b == b'\n').ok_or(Damage::NoFirstLine)? + 1;
    let (line, body) = bytes.split_at(body_start);
    // Comparing the line instead of parsing it detects any changed byte, in the line too.
    if line != first_line(body).as_bytes() {
        return Err(Damage::Checksum);
    }
    let envelope: Envelope = serde_json::from_slice(body).map_err(|error| Damage::Form(error.to_string()))?;
    if envelope.record != name {
        return Err(Damage::OtherRecord(envelope.record));
    }
    let value = data::read(&envelope.value);
    Ok((value.map_err(|problem| Damage::Form(problem.to_string()))?, envelope.boot))
}

/// Returns the line before a record's body: the magic text, and the body's digest.
pub fn first_line(body: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut line = MAGIC.to_owned();
    for byte in Sha256::digest(body) {
        // Writing to a String cannot fail.
        let _ = write!(line, "{byte:02x}");
    }
    line.push('\n');
    line
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    Ok(file)
}

fn write_error(path: &Path, error: io::Error) -> StateError {
    match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => StateError::NoSpace(path.to_owned()),
        _ => io_error("write", path, error),
    }
}

/// Returns the subject of a folder's lock, for messages.
fn subject(dir: &Path) -> String {
    format!("state folder {}", dir.display())
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> StateError {
    StateError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
