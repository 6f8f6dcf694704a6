//! The ids of pods with user namespaces of their own (KEP-127), in the file and form in which the kubelet
//! remembers them:
//! `<pods>/<uid>/userns`. Either takes over from the other without touching what runs.
//!
//! The files are all there is: what is taken is what they say, and ids are free again as soon as a pod's
//! folder is gone, whoever took it away. Must never change the ids of a pod that has some. All calls block.

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
    /// The ids of a pod that may run can't be known from its record. No pod gets ids until they are: two pods
    /// must never share any.
    #[error(
        "the user ids of the pod {uid} can't be known ({why}), so no other pod can get any; the runtime may tell them"
    )]
    Unknown {
        /// The pod with the record.
        uid: String,
        /// What is wrong.
        why: String,
    },
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
    ///
    /// # Errors
    /// Among others [`Error::Unknown`]: see [`Self::unknown`].
    pub(crate) fn of(&self, uid: &str) -> Result<IdRange, Error> {
        let _one_at_a_time = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self.file(uid);
        // The last range of all was handed out before: the kernel refuses it, so nothing ever ran with it.
        let known = read(&file).map_err(|why| unknown(uid, why))?;
        if let Some(ids) = known.filter(|ids| ids.is_usable()) {
            return Ok(ids);
        }
        let ids = self.pool.choose(uid, &self.taken()?).ok_or(Error::NoneLeft)?;
        self.write(&file, uid, ids)
    }

    fn write(&self, file: &ForeignFile, uid: &str, ids: IdRange) -> Result<IdRange, Error> {
        make_folder(&self.pods_dir.join(uid), PRIVATE)?;
        // The form has no part that JSON lacks.
        let bytes = serde_json::to_vec(&Mappings::of(ids)).unwrap_or_default();
        file.replace(&bytes)?;
        file.settle()?;
        Ok(ids)
    }

    /// Takes the ids of a pod back that has ended: nothing runs in its namespace any more.
    pub(crate) fn release(&self, uid: &str) -> Result<(), Error> {
        Ok(self.file(uid).remove()?)
    }

    /// All ids that pods have.
    fn taken(&self) -> Result<Vec<IdRange>, Error> {
        let mut taken = Vec::new();
        for uid in self.pods()? {
            taken.extend(read(&self.file(&uid)).map_err(|why| unknown(&uid, why))?);
        }
        Ok(taken)
    }

    /// The pods whose records can't be read: whether they have ids, and which, the runtime may know.
    pub(crate) fn unknown(&self) -> Result<Vec<String>, Error> {
        let mut pods = self.pods()?;
        pods.retain(|uid| read(&self.file(uid)).is_err());
        Ok(pods)
    }

    /// Puts what the runtime says in place of a record that can't be read: the ids of what runs of the pod,
    /// none if nothing does.
    pub(crate) fn learn(&self, uid: &str, ids: Option<IdRange>) -> Result<(), Error> {
        let _one_at_a_time = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let file = self.file(uid);
        if read(&file).is_err() {
            let moved_to = file.set_aside()?;
            warn!(
                uid,
                ?ids,
                ?moved_to,
                "the record of a pod's user ids is damaged: the runtime's word counts"
            );
        }
        match ids {
            Some(ids) => self.write(&file, uid, ids).map(drop),
            None => Ok(()),
        }
    }

    /// The pods that have folders.
    fn pods(&self) -> Result<Vec<String>, Error> {
        let failed = |cause: std::io::Error| unknown("", format!("{}: {cause}", self.pods_dir.display()));
        let entries = match std::fs::read_dir(&self.pods_dir) {
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut pods = Vec::new();
        for entry in entries {
            let entry = entry.map_err(failed)?;
            // A pod's UID is text, and what is no folder has no record.
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

/// The ids in a record; None where there is no record.
fn read(file: &ForeignFile) -> Result<Option<IdRange>, String> {
    let Some(bytes) = file.read().map_err(|error| error.to_string())? else { return Ok(None) };
    let form = || format!("{} is damaged", file.path().display());
    let read = serde_json::from_slice::<Mappings>(&bytes).map_err(|_| form())?;
    read.ids().map(Some).ok_or_else(form)
}

/// The ids of what runs in a sandbox, as the runtime says them.
///
/// # Errors
/// The runtime doesn't say whether the sandbox has ids of its own, or says something that can't be.
pub(crate) fn told(status: &cri::PodSandboxStatusResponse) -> Result<Option<IdRange>, String> {
    let linux = status.status.as_ref().and_then(|status| status.linux.as_ref());
    let options = linux.and_then(|linux| linux.namespaces.as_ref()?.options.as_ref());
    let users = options.and_then(|options| options.userns_options.as_ref());
    let users = users.ok_or("the runtime doesn't tell the ids of its sandbox")?;
    if users.mode == i32::from(cri::NamespaceMode::Node) {
        return Ok(None);
    }
    match &users.uids[..] {
        [cri::IdMapping { host_id, container_id: 0, length }]
            if users.uids == users.gids && *host_id != 0 && *length != 0 =>
        {
            Ok(Some(IdRange { first: *host_id, length: *length }))
        }
        _ => Err("the runtime tells ids of its sandbox that can't be".to_owned()),
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
    fn with_a_record_that_can_not_be_nobody_gets_ids_until_the_runtime_tells_them() {
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
        // Of a pod of which nothing runs, the ids are free.
        std::fs::write(folder.join(FILE), "").unwrap();
        users.learn("a", None).unwrap();
        assert!(users.of("b").is_ok() && users.of("a").is_ok());
        // A link, or a FIFO, is no record either, and nobody waits for it.
        std::fs::remove_file(folder.join(FILE)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.join(FILE)).unwrap();
        assert!(users.of("b").is_ok(), "it has its own");
        users.release("b").unwrap();
        assert!(matches!(users.of("b"), Err(Error::Unknown { .. })));
    }

    #[test]
    fn the_runtimes_word_of_a_sandboxs_ids_is_whole_or_none() {
        let status = |users: Option<cri::UserNamespace>| {
            let options = cri::NamespaceOption { userns_options: users, ..Default::default() };
            let namespaces = Some(cri::Namespace { options: Some(options) });
            let linux = Some(cri::LinuxPodSandboxStatus { namespaces });
            let status = Some(cri::PodSandboxStatus { linux, ..Default::default() });
            told(&cri::PodSandboxStatusResponse { status, ..Default::default() })
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
        assert!(status(None).is_err(), "a runtime that says nothing");
        assert!(told(&cri::PodSandboxStatusResponse::default()).is_err());
    }
}
