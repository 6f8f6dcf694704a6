//! The state of a folder of manifests itself, apart from its files.

use std::path::Path;

use beelet_model::table::RejectedManifest;

/// The result of reading the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FolderState {
    /// It was read.
    Read,
    /// It isn't there.
    Missing,
    /// It's there but can't be read: a sentence that says why.
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

    /// The result of the last reading.
    pub(super) fn state(&self) -> &FolderState {
        &self.state
    }

    /// Returns true if it is unknown which files the folder has.
    pub(super) fn is_unread(&self) -> bool {
        match self.state {
            FolderState::Read => false,
            FolderState::Missing => !self.was_read,
            FolderState::Unreadable(_) => true,
        }
    }

    /// The complaint about the folder at `path`, if it was not read.
    pub(super) fn complaint(&self, path: &Path) -> Option<RejectedManifest> {
        let shown = path.display();
        let message = match (&self.state, self.was_read) {
            (FolderState::Read, _) => return None,
            (FolderState::Missing, false) => {
                format!("{shown}: the folder of static pods is not there; create it, or set staticPodPath")
            }
            (FolderState::Missing, true) => {
                format!("{shown}: the folder of static pods was taken away; its pods are stopped")
            }
            (FolderState::Unreadable(why), _) => format!("{shown}: {why}; what runs goes on as it is"),
        };
        Some(RejectedManifest { file: path.to_owned(), message })
    }
}
