//! Parses the contents of one file, or of all files of a folder on as many threads as there are CPUs. Pure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use sha2::{Digest as _, Sha256};

use super::file::{Content, Digest};
use super::{Manifest, read};
use beelet_codec::error::ManifestError;

/// Number of files below which an additional thread does not pay off.
const FILES_PER_THREAD: usize = 16;

/// The parsed content of a file.
#[derive(Debug)]
pub(super) struct Reading {
    /// Digest of the bytes; None if unreadable.
    pub(super) digest: Option<Digest>,
    /// Modification time of the bytes.
    pub(super) modified: Option<SystemTime>,
    /// The manifest; None if the bytes are unchanged.
    pub(super) manifest: Option<Result<Manifest, ManifestError>>,
}

impl Reading {
    /// Parses the content of the file at `path`, unless its digest is `known`.
    pub(super) fn of(path: &Path, content: Content, known: Option<Digest>) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match content {
            Content::Bytes(bytes, modified) => {
                let digest = Sha256::digest(&bytes).into();
                let manifest = (known != Some(digest)).then(|| read_bytes(&bytes, &name));
                Self { digest: Some(digest), modified: Some(modified), manifest }
            }
            Content::Unreadable(why) => {
                let manifest = Some(Err(ManifestError::whole(&name, why)));
                Self { digest: None, modified: None, manifest }
            }
        }
    }
}

/// Parses files in parallel, except those with `known` digests. The agent's start waits for all manifests.
pub(super) fn read_all(
    files: Vec<(PathBuf, Content)>,
    known: &BTreeMap<PathBuf, Digest>,
) -> Vec<(PathBuf, Reading)> {
    let read_some = |files: Vec<(PathBuf, Content)>| -> Vec<(PathBuf, Reading)> {
        let one = |(path, content): (PathBuf, Content)| {
            let reading = Reading::of(&path, content, known.get(&path).copied());
            (path, reading)
        };
        files.into_iter().map(one).collect()
    };
    let cpus = thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let share = files.len().div_ceil(cpus).max(FILES_PER_THREAD);
    let mut rest = files;
    thread::scope(|scope| {
        let mut others = Vec::new();
        while rest.len() > share {
            let files = rest.split_off(rest.len() - share);
            others.push(scope.spawn(move || read_some(files)));
        }
        let mut all = read_some(rest);
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        all
    })
}

fn read_bytes(bytes: &[u8], name: &str) -> Result<Manifest, ManifestError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => read(text, name),
        Err(error) => {
            let message = format!("is not UTF-8 text (byte {})", error.valid_up_to());
            Err(ManifestError::whole(name, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_files_is_read_once_and_none_whose_bytes_are_known() {
        let content = |n: usize| {
            let text = format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c{n}}}\n");
            Content::Bytes(text.into_bytes(), SystemTime::UNIX_EPOCH)
        };
        let path = |n: usize| PathBuf::from(format!("/m/{n:04}.yaml"));
        for many in [0, 1, FILES_PER_THREAD, 10 * FILES_PER_THREAD + 3] {
            let files: Vec<_> = (0..many).map(|n| (path(n), content(n))).collect();
            let digests = |read: &[(PathBuf, Reading)]| -> BTreeMap<PathBuf, Digest> {
                read.iter().map(|(path, reading)| (path.clone(), reading.digest.unwrap())).collect()
            };
            let read = read_all(files.clone(), &BTreeMap::new());
            assert!(read.iter().all(|(_, reading)| matches!(reading.manifest, Some(Ok(_)))));
            assert_eq!((read.len(), digests(&read).len()), (many, many));
            let mut known = digests(&read);
            known.remove(&path(0));
            let again = read_all(files, &known);
            let anew = again.iter().filter(|(_, reading)| reading.manifest.is_some());
            assert_eq!(
                anew.map(|(path, _)| path.clone()).collect::<Vec<_>>(),
                (0..many.min(1)).map(path).collect::<Vec<_>>()
            );
        }
    }
}
