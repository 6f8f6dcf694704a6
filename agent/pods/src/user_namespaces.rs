//! The ids of pods with user namespaces of their own (KEP-127), in the file and form in which the kubelet
//! remembers them:
//! `<pods>/<uid>/userns`. Either takes over from the other without touching what runs.
//!
//! The files are all there is: what is taken is what they say, and ids are free again as soon as a pod's
//! folder is gone, whoever took it away. Must never change the ids of a pod that has some. All calls block.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use beelet_base::folder::{PRIVATE, make_folder};
use beelet_policy::user_namespaces::{IdPool, IdRange};
use beelet_state::{ForeignFile, StateError};
use serde::{Deserialize, Serialize};
use tracing::warn;

/// The file's name.
const FILE: &str = "userns";

/// Why a pod has no ids.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The pod's folder can't be made.
    #[error(transparent)]
    Folder(#[from] beelet_base::Error),
    /// The file can't be read or written.
    #[error(transparent)]
    State(#[from] StateError),
    /// There are more pods than ranges.
    #[error(
        "all user and group ids that pods may have are in use; give the user kubelet more of them in /etc/subuid \
             and /etc/subgid"
    )]
    NoneLeft,
}

/// What the file says, as the kubelet writes it.
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

    /// The range, if there is one and the same for users and groups, with root at its beginning.
    fn ids(&self) -> Option<IdRange> {
        let [Mapping { host_id, container_id: 0, length }] = self.uids[..] else { return None };
        let sound = self.uids == self.gids && host_id != 0 && length != 0;
        sound.then_some(IdRange { first: host_id, length })
    }
}

/// Gives pods their ids.
#[derive(Debug)]
pub struct UserNamespaces {
    pool: IdPool,
    pods_dir: PathBuf,
    choosing: Mutex<()>,
}

impl UserNamespaces {
    /// Gives ids of `pool` to the pods whose folders are in `pods_dir`.
    #[must_use]
    pub fn new(pool: IdPool, pods_dir: PathBuf) -> Self {
        Self { pool, pods_dir, choosing: Mutex::default() }
    }

    /// The ids of a pod: those that it has, else some that nobody has, which are its own from now on.
    pub(crate) fn of(&self, uid: &str) -> Result<IdRange, Error> {
        let _one_at_a_time = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let file = file(&self.pods_dir.join(uid));
        if let Some(bytes) = file.read()? {
            // The last range of all was handed out before: nothing ever ran with it.
            if let Some(ids) = parse(&bytes).filter(|ids| ids.is_usable()) {
                return Ok(ids);
            }
            let moved_to = file.set_aside()?;
            warn!(uid, ?moved_to, "the record of a pod's user ids is damaged and set aside; it gets others");
        }
        let ids = self.pool.choose(uid, &self.taken()).ok_or(Error::NoneLeft)?;
        make_folder(&self.pods_dir.join(uid), PRIVATE)?;
        // The form has no part that JSON lacks.
        let bytes = serde_json::to_vec(&Mappings::of(ids)).unwrap_or_default();
        file.replace(&bytes)?;
        file.settle()?;
        Ok(ids)
    }

    /// Takes the ids of a pod back that has ended: nothing runs in its namespace any more.
    pub(crate) fn release(&self, uid: &str) -> std::io::Result<()> {
        match std::fs::remove_file(self.pods_dir.join(uid).join(FILE)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All ids that pods have.
    fn taken(&self) -> Vec<IdRange> {
        let folders = std::fs::read_dir(&self.pods_dir).into_iter().flatten().flatten();
        folders.filter_map(|folder| parse(&file(&folder.path()).read().ok()??)).collect()
    }
}

fn file(folder: &Path) -> ForeignFile {
    ForeignFile::new(folder.join(FILE))
}

fn parse(bytes: &[u8]) -> Option<IdRange> {
    serde_json::from_slice::<Mappings>(bytes).ok()?.ids()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(dir: &Path, ranges: u32) -> UserNamespaces {
        let of = IdRange { first: 65_536, length: 65_536 * ranges };
        UserNamespaces::new(IdPool::new(Some(of), 65_536, ranges).unwrap(), dir.to_owned())
    }

    #[test]
    fn a_pod_keeps_its_ids_over_a_restart_and_gives_them_back_with_its_folder() {
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
    fn a_record_that_can_not_be_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let users = users(dir.path(), 2);
        let folder = dir.path().join("a");
        std::fs::create_dir(&folder).unwrap();
        let other = r#"{"uidMappings":[{"hostId":0,"containerId":0,"length":1}],"gidMappings":[{"hostId":0,"containerId":0,"length":1}]}"#;
        let last = other.replace("0,\"containerId", "4294901760,\"containerId").replace(":1}", ":65536}");
        assert_eq!(parse(last.as_bytes()).map(|ids| ids.first), Some(4_294_901_760));
        for text in ["", "{}", other, &last, "\u{0}"] {
            std::fs::write(folder.join(FILE), text).unwrap();
            let ids = users.of("a").unwrap();
            assert!(ids.first >= 65_536 && ids.length == 65_536, "{text:?}");
        }
    }
}
