//! Which file has which name, over restarts of the agent too: a copy of a manifest must not take the name
//! from the file that a pod runs from.
//!
//! What is kept is written without waiting for the disk. A power cut ends every pod; the record may be lost
//! with it, and then the names of the files decide ([`Claims`]).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tracing::warn;

use super::file::{File, Good};
use beelet_model::objects::Object;
use beelet_state::{Loaded, State};

/// The name of the durable record.
const NAME: &str = "manifests";

/// Which file has an object's name, by kind and name ([`key`]).
pub(super) type Owners = BTreeMap<String, PathBuf>;

/// Which file has which name and UID. Of two files with one name, a file that ends in `.yaml`, `.yml` or
/// `.json` counts before any other, because a backup is what has another ending. Then the file that had the
/// name keeps it, also while the agent can't read it: a copy of a manifest must not take the name from the
/// pod that runs. Then the shorter file name counts, then the first in order. Modification times decide
/// nothing: a backup is always older.
#[derive(Debug, Default)]
pub(super) struct Claims {
    pub(super) owners: Owners,
    /// Files that don't get the name they want: which file has it, and a sentence.
    pub(super) refused: BTreeMap<PathBuf, (PathBuf, String)>,
}

impl Claims {
    pub(super) fn of(files: &BTreeMap<PathBuf, File>, before: &Owners) -> Claims {
        let mut claims = Claims::default();
        for (key, file) in before {
            // A file that was never valid since the agent's start may still be what a pod runs from.
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

/// Returns true if a file has an ending that people give to manifests.
fn has_usual_ending(path: &Path) -> bool {
    path.extension().and_then(OsStr::to_str).is_some_and(|end| matches!(end, "yaml" | "yml" | "json"))
}

/// What no two files may describe: a kind and a name.
fn key(good: &Good) -> String {
    let (kind, metadata) = match good {
        Good::Pod(good) => ("Pod", &good.pod.metadata),
        Good::Class(class) => ("PriorityClass", &class.metadata),
        Good::Other(object) => (object.kind(), object.metadata()),
    };
    let name = metadata.name.as_deref().unwrap_or_default();
    // Whatever is written, classes have none.
    let is_class = matches!(good, Good::Class(_) | Good::Other(Object::RuntimeClass(_)));
    match metadata.namespace.as_deref().filter(|_| !is_class) {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

/// What an earlier instance knew.
pub(super) fn load(state: &State) -> Owners {
    match state.load::<Owners>(NAME) {
        Ok(Loaded::Value { value, .. }) => value,
        Ok(Loaded::Absent) => Owners::new(),
        Ok(Loaded::Quarantined { moved_to, reason }) => {
            warn!(?moved_to, %reason, "the record of manifests was damaged and set aside; of two files with one pod's \
                name the one with the usual ending and the shorter name counts");
            Owners::new()
        }
        Err(error) => {
            warn!(%error, "the record of manifests can't be read; of two files with one pod's name the one with the \
                usual ending and the shorter name counts");
            Owners::new()
        }
    }
}

/// Writes what is sent, the newest, until nobody sends any more.
pub(super) async fn keep(mut owners: watch::Receiver<Owners>, state: Arc<State>) {
    while owners.changed().await.is_ok() {
        let newest = owners.borrow_and_update().clone();
        let state = Arc::clone(&state);
        let written = spawn_blocking(move || {
            // A path that is no text can't be in the record; its file is told by its time.
            let texts: BTreeMap<&str, &str> =
                newest.iter().filter_map(|(name, file)| Some((name.as_str(), file.to_str()?))).collect();
            state.store_for_this_boot(NAME, &texts).map_err(|error| error.to_string())
        });
        if let Err(cause) = written.await.unwrap_or_else(|failed| Err(failed.to_string())) {
            warn!(
                error = cause,
                "the record of manifests can't be written; it is tried again when a manifest changes"
            );
        }
    }
}
