//! The state of a folder of manifests itself, apart from its files.

use std::path::Path;

use beelet_model::table::RejectedManifest;

/// The result of reading the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FolderState {
    /// The folder was read.
    Read,
    /// The folder does not exist.
    Missing,
    /// The folder can't be read; with the cause.
    Unreadable(String),
}

/// The state of the folder, now and before.
#[derive(Debug)]
pub(super) struct Standing {
    state: FolderState,
    was_read: bool,
}

impl Default for Standing {
    fn default() -> Self {
        Self { state: FolderState::Missing, was_read: false }
    }
}

impl Standing {
    /// Records the result of a reading.
    pub(super) fn set(&mut self, state: FolderState) {
        self.was_read |= state == FolderState::Read;
        self.state = state;
    }

    /// Returns the result of the last reading.
    pub(super) fn state(&self) -> &FolderState {
        &self.state
    }

    /// Returns true if the folder's files are unknown.
    pub(super) fn is_unread(&self) -> bool {
        match self.state {
            FolderState::Read => false,
            FolderState::Missing => !self.was_read,
            FolderState::Unreadable(_) => true,
        }
    }

    /// Returns a notice if the folder at `path` has never existed. Its absence rejects nothing: a node of a
    /// cluster needs no folder.
    pub(super) fn absence(&self, path: &Path) -> Option<String> {
        let never = self.state == FolderState::Missing && !self.was_read;
        never.then(|| {
            format!("{}: the folder of static pods does not exist; the agent waits for it", path.display())
        })
    }

    /// Returns the rejection of the folder at `path`, if it was removed or can't be read.
    pub(super) fn complaint(&self, path: &Path) -> Option<RejectedManifest> {
        let shown = path.display();
        let message = match (&self.state, self.was_read) {
            (FolderState::Read, _) | (FolderState::Missing, false) => return None,
            (FolderState::Missing, true) => {
                format!("{shown}: the folder of static pods was removed; its pods are terminated")
            }
            (FolderState::Unreadable(why), _) => format!("{shown}: {why}; its running pods stay"),
        };
        Some(RejectedManifest { file: path.to_owned(), message })
    }
}
