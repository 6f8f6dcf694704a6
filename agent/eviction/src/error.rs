//! Why a number that eviction goes by could not be read.

use std::io;

use beelet_policy::eviction::Signal;
use beelet_units::quantity::Quantity;

/// A reading that failed. Displayed, it is a whole sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the kernel's could not be read.
    #[error("{file} cannot be read: {source}")]
    Read {
        /// The file.
        file: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A file that should hold a number and nothing else.
    #[error("{0} holds no number")]
    NotANumber(&'static str),
    /// The machine's memory is not told.
    #[error("/proc/meminfo lacks MemTotal, AnonPages, Cached, Buffers, SwapCached or Inactive(file)")]
    NoMemory,
    /// The machine's threads are not counted.
    #[error("/proc/loadavg does not say how many threads there are")]
    NoThreads,
    /// A file system could not be measured.
    #[error(transparent)]
    Disk(#[from] beelet_base::Error),
    /// A reading that can't be true.
    #[error("{} is said to have a capacity of {capacity}", .signal.name())]
    NoCapacity {
        /// The signal.
        signal: Signal,
        /// The capacity, zero or less.
        capacity: Quantity,
    },
}
