//! Records which file owns which name, across restarts of the agent: a copy of a manifest must not take over
//! the name from the file of the running pod.
//!
//! The record is written without waiting for the disk. A power cut ends every pod and may lose the record;
//! then the names of the files decide ([`Claims`]).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;
use tracing::warn;

use super::file::{File, Good};
use beelet_base::blocking::spawn_blocking;
use beelet_model::objects::Object;
use beelet_state::{Loaded, State};

/// Name of the durable record.
const NAME: &str = "manifests";

/// Owner of each object's name, by kind and name ([`key`]).
pub(super) type Owners = BTreeMap<String, PathBuf>;

/// Owners of names and UIDs. Of two files with the same name, a file that ends in `.yaml`, `.yml` or `.json`
/// wins over any other, because backups have other endings. Next, the previous owner of the name wins, even
/// while its file is unreadable: a copy of a manifest must not take over the name from the running pod. Next,
/// the shorter file name wins, then the first in order. Modification times do not count: a backup is always
/// older.
#[derive(Debug, Default)]
pub(super) struct Claims {
    pub(super) owners: Owners,
    /// Files without the ownership of their name: the owner, and a message.
    pub(super) refused: BTreeMap<PathBuf, (PathBuf, String)>,
}

impl Claims {
    pub(super) fn of(files: &BTreeMap<PathBuf, File>, before: &Owners) -> Claims {
        let mut claims = Claims::default();
        for (key, file) in before {
            // A file without valid content since the agent's start may still belong to a running pod.
            if files.get(file).is_some_and(|file| file.good.is_none()) {
                claims.owners.insert(key.clone(), file.clone());
            }
        }
        let wanted = files.iter().filter_map(|(path, file)| Some((path, file.good.as_ref()?)));
        let mut wanted: Vec<_> = wanted.map(|(path, good)| (path, good, key(good))).collect();
        wanted.sort_by_key(|(path, _, key)| {
            (!has_usual_ending(path), before.get(key) != Some(*path), path.as_os_str().len(), *path)
        });
        let mut uids: BTreeMap<&str, &PathBuf> = BTreeMap::new();
        for (path, good, key) in wanted {
            let uid = match good {
                Good::Pod(good) => good.pod.metadata.uid.as_deref(),
                _ => None,
            };
            let owner = match (claims.owners.get(&key), uid.and_then(|uid| Some((uid, *uids.get(uid)?)))) {
                (Some(owner), _) => Some((owner, format!("metadata.name: the {key}"))),
                (None, Some((uid, owner))) => Some((owner, format!("metadata.uid: {uid}"))),
                (None, None) => None,
            };
            if let Some((owner, what)) = owner {
                let rule = "only one of the two files counts; change or remove the other";
                let sentence = format!("{what} is in {} already: {rule}", owner.display());
                claims.refused.insert(path.clone(), (owner.clone(), sentence));
                continue;
            }
            uids.extend(uid.map(|uid| (uid, path)));
            claims.owners.insert(key, path.clone());
        }
        claims
    }
}

/// Returns true if a file has a usual ending of manifests.
fn has_usual_ending(path: &Path) -> bool {
    path.extension().and_then(OsStr::to_str).is_some_and(|end| matches!(end, "yaml" | "yml" | "json"))
}

/// Returns the unique key of an object: its kind and name.
fn key(good: &Good) -> String {
    let (kind, metadata) = match good {
        Good::Pod(good) => ("Pod", &good.pod.metadata),
        Good::Class(class) => ("PriorityClass", &class.metadata),
        Good::Other(object) => (object.kind(), object.metadata()),
    };
    let name = metadata.name.as_deref().unwrap_or_default();
    // Classes are not namespaced, regardless of their metadata.
    let is_class = matches!(good, Good::Class(_) | Good::Other(Object::RuntimeClass(_)));
    match metadata.namespace.as_deref().filter(|_| !is_class) {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

/// Reads the owners that an earlier instance of the agent recorded.
pub(super) fn load(state: &State) -> Owners {
    match state.load::<Owners>(NAME) {
        Ok(Loaded::Value { value, .. }) => value,
        Ok(Loaded::Absent) => Owners::new(),
        Ok(Loaded::Quarantined { moved_to, reason }) => {
            warn!(?moved_to, %reason, "the record of manifests was damaged and moved aside; of two files with the same \
                pod name, the one with the usual ending and the shorter name wins");
            Owners::new()
        }
        Err(error) => {
            warn!(%error, "cannot read the record of manifests; of two files with the same pod name, the one with the \
                usual ending and the shorter name wins");
            Owners::new()
        }
    }
}

/// Writes the newest owners at each change until the sender is dropped.
pub(super) async fn keep(mut owners: watch::Receiver<Owners>, state: Arc<State>) {
    while owners.changed().await.is_ok() {
        let newest = owners.borrow_and_update().clone();
        let state = Arc::clone(&state);
        let written = spawn_blocking(move || {
            // A path that is not UTF-8 can't be in the record.
            let texts: BTreeMap<&str, &str> =
                newest.iter().filter_map(|(name, file)| Some((name.as_str(), file.to_str()?))).collect();
            state.store_for_this_boot(NAME, &texts).map_err(|error| error.to_string())
        });
        if let Err(cause) = written.await.unwrap_or_else(|failed| Err(failed.to_string())) {
            warn!(error = cause, "cannot write the record of manifests; retrying when a manifest changes");
        }
    }
}
