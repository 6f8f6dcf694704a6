//! ID ranges of pods with their own user namespace (KEP-127), in the kubelet's file and format:
//! `<pods>/<uid>/userns`. The agent and a kubelet can replace each other without a restart of pods.
//!
//! The files are the only state: a range is allocated if a file has it, and free once the pod's folder is
//! removed, by any program. Must never change the range of a pod. All functions block.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use beelet_base::folder::{PRIVATE, make_folder};
use beelet_policy::resources::user_namespaces::{IdPool, IdRange};
use beelet_proto::cri;
use beelet_state::{ForeignFile, StateError};
use serde::{Deserialize, Serialize};
use tracing::warn;

/// Name of the file.
const FILE: &str = "userns";

/// Failed allocation of an ID range.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The pod's folder cannot be created.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// The file cannot be read or written.
    #[error(transparent)]
    State(#[from] StateError),
    /// The record of a pod that may run is damaged. Until its range is known, no pod gets a range: two pods
    /// must never share IDs.
    #[error(
        "the user IDs of pod {uid} are unknown ({why}), so no other pod can get user IDs; the runtime may report them"
    )]
    Unknown {
        /// UID of the pod with the record.
        uid: String,
        /// Cause.
        why: String,
    },
    /// All ranges are allocated.
    #[error(
        "all user and group IDs for pods are in use; add more for the user `kubelet` in /etc/subuid and /etc/subgid"
    )]
    NoneLeft,
}

/// Content of the file, in the kubelet's format.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mappings {
    #[serde(rename = "uidMappings")]
    uids: Vec<Mapping>,
    #[serde(rename = "gidMappings")]
    gids: Vec<Mapping>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

impl Mappings {
    fn of(ids: IdRange) -> Self {
        let mapping = || vec![Mapping { host_id: ids.first, container_id: 0, length: ids.length }];
        Self { uids: mapping(), gids: mapping() }
    }

    /// Returns the range if users and groups have one identical mapping, which begins at the container's
    /// root.
    fn ids(&self) -> Option<IdRange> {
        let [Mapping { host_id, container_id: 0, length }] = self.uids[..] else { return None };
        let sound = self.uids == self.gids && host_id != 0 && length != 0;
        sound.then_some(IdRange { first: host_id, length })
    }
}

/// Allocator of pods' ID ranges.
#[derive(Debug)]
pub struct UserNamespaces {
    pool: IdPool,
    pods_dir: PathBuf,
    choosing: Mutex<()>,
}

impl UserNamespaces {
    /// Returns an allocator of ranges of `pool` for the pods with folders in `pods_dir`.
    #[must_use]
    pub fn new(pool: IdPool, pods_dir: PathBuf) -> Self {
        Self { pool, pods_dir, choosing: Mutex::default() }
    }

    /// Returns the range of a pod. Allocates a free range if the pod has none.
    ///
    /// # Errors
    /// Among others [`Error::Unknown`]: see [`Self::unknown`].
    pub(crate) fn of(&self, uid: &str) -> Result<IdRange, Error> {
        let _one_at_a_time = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self.file(uid);
        // Earlier versions allocated the last range too. The kernel rejects that range, so no process ever
        // used it.
        let known = read(&file).map_err(|why| unknown(uid, why))?;
        if let Some(ids) = known.filter(|ids| ids.is_usable()) {
            return Ok(ids);
        }
        let ids = self.pool.choose(uid, &self.allocated()?).ok_or(Error::NoneLeft)?;
        self.write(&file, uid, ids)
    }

    fn write(&self, file: &ForeignFile, uid: &str, ids: IdRange) -> Result<IdRange, Error> {
        make_folder(&self.pods_dir.join(uid), PRIVATE)?;
        // Serialization of this type cannot fail.
        let bytes = serde_json::to_vec(&Mappings::of(ids)).unwrap_or_default();
        file.replace(&bytes)?;
        file.settle()?;
        Ok(ids)
    }

    /// Releases the range of an ended pod. No process of the pod may run.
    pub(crate) fn release(&self, uid: &str) -> Result<(), Error> {
        Ok(self.file(uid).remove()?)
    }

    /// Returns the ranges of all pods.
    fn allocated(&self) -> Result<Vec<IdRange>, Error> {
        let mut allocated = Vec::new();
        for uid in self.pods()? {
            allocated.extend(read(&self.file(&uid)).map_err(|why| unknown(&uid, why))?);
        }
        Ok(allocated)
    }

    /// Returns the pods with unreadable records. The runtime may know their ranges.
    pub(crate) fn unknown(&self) -> Result<Vec<String>, Error> {
        let mut pods = self.pods()?;
        pods.retain(|uid| read(&self.file(uid)).is_err());
        Ok(pods)
    }

    /// Replaces an unreadable record by the range that the runtime reports for the pod; None if the pod has
    /// no running sandbox.
    pub(crate) fn learn(&self, uid: &str, ids: Option<IdRange>) -> Result<(), Error> {
        let _one_at_a_time = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self.file(uid);
        if read(&file).is_err() {
            let moved_to = file.set_aside()?;
            warn!(
                uid,
                ?ids,
                ?moved_to,
                "the record of a pod's user IDs is damaged, using the IDs that the runtime reports"
            );
        }
        match ids {
            Some(ids) => self.write(&file, uid, ids).map(drop),
            None => Ok(()),
        }
    }

    /// Returns the pods with folders.
    fn pods(&self) -> Result<Vec<String>, Error> {
        let failed = |cause: std::io::Error| unknown("", format!("{}: {cause}", self.pods_dir.display()));
        let entries = match std::fs::read_dir(&self.pods_dir) {
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut pods = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            // Names that are not UTF-8 are not UIDs, and only folders have records.
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            pods.extend(entry.file_name().into_string().ok().filter(|_| is_folder));
        }
        Ok(pods)
    }

    fn file(&self, uid: &str) -> ForeignFile {
        ForeignFile::new(self.pods_dir.join(uid).join(FILE))
    }
}

fn unknown(uid: &str, why: String) -> Error {
    Error::Unknown { uid: uid.to_owned(), why }
}

/// Returns the range in a record, or None if the record does not exist.
fn read(file: &ForeignFile) -> Result<Option<IdRange>, String> {
    let Some(bytes) = file.read().map_err(|error| error.to_string())? else { return Ok(None) };
    let form = || format!("{} is damaged", file.path().display());
    let read = serde_json::from_slice::<Mappings>(&bytes).map_err(|_| form())?;
    read.ids().map(Some).ok_or_else(form)
}

/// Returns the range that the runtime reports for a sandbox, or None for the node's user namespace.
///
/// # Errors
/// The runtime does not report the user namespace of the sandbox, or reports an invalid mapping.
pub(crate) fn reported(status: &cri::PodSandboxStatusResponse) -> Result<Option<IdRange>, String> {
    let linux = status.status.as_ref().and_then(|status| status.linux.as_ref());
    let options = linux.and_then(|linux| linux.namespaces.as_ref()?.options.as_ref());
    let users = options.and_then(|options| options.userns_options.as_ref());
    let users = users.ok_or("the runtime does not report the user IDs of the sandbox")?;
    if users.mode == i32::from(cri::NamespaceMode::Node) {
        return Ok(None);
    }
    match &users.uids[..] {
        [cri::IdMapping { host_id, container_id: 0, length }]
            if users.uids == users.gids && *host_id != 0 && *length != 0 =>
        {
            Ok(Some(IdRange { first: *host_id, length: *length }))
        }
        _ => Err("the runtime reports invalid user IDs for the sandbox".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn users(dir: &Path, ranges: u32) -> UserNamespaces {
        let of = IdRange { first: 65_536, length: 65_536 * ranges };
        UserNamespaces::new(IdPool::new(Some(of), 65_536, ranges).unwrap(), dir.to_owned())
    }

    #[test]
    fn a_range_survives_a_restart_and_is_free_after_removal_of_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|uid| users(dir.path(), 2).of(uid).unwrap());
        assert_ne!(a, b);
        assert_eq!(users(dir.path(), 2).of("a").unwrap(), a);
        let text = std::fs::read_to_string(dir.path().join("a/userns")).unwrap();
        let mapping = format!(r#"[{{"hostId":{},"containerId":0,"length":65536}}]"#, a.first);
        assert_eq!(text, format!(r#"{{"uidMappings":{mapping},"gidMappings":{mapping}}}"#));
        let full = users(dir.path(), 2).of("c").unwrap_err();
        assert!(full.to_string().contains("/etc/subuid"), "{full}");
        std::fs::remove_dir_all(dir.path().join("a")).unwrap();
        assert_eq!(users(dir.path(), 2).of("c").unwrap(), a);
        users(dir.path(), 2).release("c").unwrap();
        users(dir.path(), 2).release("c").unwrap();
        assert_eq!(users(dir.path(), 2).of("d").unwrap(), a);
    }

    #[test]
    fn a_damaged_record_blocks_allocation_until_the_runtime_reports_its_range() {
        let dir = tempfile::tempdir().unwrap();
        let users = users(dir.path(), 2);
        let folder = dir.path().join("a");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(dir.path().join("no-folder"), "").unwrap();
        let other = r#"{"uidMappings":[{"hostId":0,"containerId":0,"length":1}],"gidMappings":[{"hostId":0,"containerId":0,"length":1}]}"#;
        let of_a = IdRange { first: 131_072, length: 65_536 };
        let last = other.replace("0,\"containerId", "4294901760,\"containerId").replace(":1}", ":65536}");
        std::fs::write(folder.join(FILE), &last).unwrap();
        assert_eq!(read(&users.file("a")).map(|ids| ids.map(|ids| ids.first)), Ok(Some(4_294_901_760)));
        assert_ne!(users.of("a").unwrap().first, 4_294_901_760);
        for text in ["", "{}", other, "\u{0}"] {
            std::fs::write(folder.join(FILE), text).unwrap();
            for uid in ["a", "b"] {
                let why = users.of(uid).unwrap_err();
                assert!(matches!(&why, Error::Unknown { uid, .. } if uid == "a"), "{text:?}: {why}");
            }
            assert_eq!(users.unknown().unwrap(), ["a"]);
            users.learn("a", Some(of_a)).unwrap();
            assert_eq!(users.of("a").unwrap(), of_a, "{text:?}");
            assert_eq!(users.of("b").unwrap().first, 65_536, "{text:?}");
            assert!(users.unknown().unwrap().is_empty());
            users.release("b").unwrap();
        }
        // The range of a pod without a running sandbox is free.
        std::fs::write(folder.join(FILE), "").unwrap();
        users.learn("a", None).unwrap();
        assert!(users.of("b").is_ok() && users.of("a").is_ok());
        // A link is not a valid record.
        std::fs::remove_file(folder.join(FILE)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.join(FILE)).unwrap();
        assert!(users.of("b").is_ok(), "the pod has its own record");
        users.release("b").unwrap();
        assert!(matches!(users.of("b"), Err(Error::Unknown { .. })));
    }

    #[test]
    fn a_reported_range_is_valid_or_an_error() {
        let status = |users: Option<cri::UserNamespace>| {
            let options = cri::NamespaceOption { userns_options: users, ..Default::default() };
            let namespaces = Some(cri::Namespace { options: Some(options) });
            let linux = Some(cri::LinuxPodSandboxStatus { namespaces });
            let status = Some(cri::PodSandboxStatus { linux, ..Default::default() });
            reported(&cri::PodSandboxStatusResponse { status, ..Default::default() })
        };
        let mode = |mode: cri::NamespaceMode, uids: &[(u32, u32, u32)]| {
            let mapping = |&(host_id, container_id, length)| cri::IdMapping { host_id, container_id, length };
            let uids: Vec<_> = uids.iter().map(mapping).collect();
            status(Some(cri::UserNamespace { mode: mode.into(), gids: uids.clone(), uids }))
        };
        assert_eq!(mode(cri::NamespaceMode::Node, &[]), Ok(None));
        let own = IdRange { first: 65_536, length: 65_536 };
        assert_eq!(mode(cri::NamespaceMode::Pod, &[(65_536, 0, 65_536)]), Ok(Some(own)));
        let wrong: [&[(u32, u32, u32)]; 5] =
            [&[], &[(0, 0, 1)], &[(1, 1, 1)], &[(1, 0, 0)], &[(1, 0, 1), (2, 1, 1)]];
        for wrong in wrong {
            assert!(mode(cri::NamespaceMode::Pod, wrong).is_err(), "{wrong:?}");
        }
        assert!(status(None).is_err(), "a runtime without the field");
        assert!(reported(&cri::PodSandboxStatusResponse::default()).is_err());
    }
}
