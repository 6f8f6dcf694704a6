//! Volumes that disappeared from the node's disk while their pod runs, and the messages that report the loss.

use std::fmt;

/// The lost part of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Files, but not their folder.
    Files,
    /// Folder, or the file system in memory that was mounted on it.
    Folder,
    /// Folder of an emptyDir, with all files that containers had written.
    Data,
}

/// A lost volume that was made again. Its display form is the message of the event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Volume's name.
    pub volume: String,
    /// Lost part.
    pub loss: Loss,
}

impl Restored {
    /// Returns the reason of the event.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self.loss {
            Loss::Files | Loss::Folder => "VolumeRestored",
            Loss::Data => "VolumeLost",
        }
    }
}

impl fmt::Display for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let volume = &self.volume;
        match self.loss {
            Loss::Files => {
                write!(f, "volume {volume}: files were missing on the node and have been restored")
            }
            Loss::Folder => write!(
                f,
                "volume {volume}: the folder was missing on the node and has been restored with its files; running \
                 containers see the volume after a restart"
            ),
            Loss::Data => write!(
                f,
                "volume {volume}: the folder was missing on the node, and all files that containers had written are \
                 lost; the agent made an empty folder, which running containers see after a restart"
            ),
        }
    }
}
