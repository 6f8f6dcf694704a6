//! Volumes that were lost from the node's disk while their pod runs, and the sentences that report it.

use std::fmt;

/// The lost part of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The files, not their folder.
    Files,
    /// The folder, or the file system in memory that was mounted on it.
    Folder,
    /// The folder of an emptyDir, with all that containers had written there.
    Data,
}

/// A lost volume that was made again. Displayed, it is a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Its name.
    pub volume: String,
    /// The part that was lost.
    pub loss: Loss,
}

impl Restored {
    /// The reason of the event.
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
                write!(f, "volume {volume}: its files were gone from the node and are written again")
            }
            Loss::Folder => write!(
                f,
                "volume {volume}: its folder was gone from the node and is made again, with its files; containers that \
                 run see it once they are restarted"
            ),
            Loss::Data => write!(
                f,
                "volume {volume}: its folder was gone from the node, with all that containers had written there; it is \
                 made again, empty, and containers that run see it once they are restarted"
            ),
        }
    }
}
