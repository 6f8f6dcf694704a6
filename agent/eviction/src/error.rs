//! Errors in reading the numbers for eviction.

use std::io;

use beelet_policy::eviction::Signal;
use beelet_units::quantity::Quantity;

/// A failed reading. The message is a complete sentence.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the kernel could not be read.
    #[error("cannot read {file}: {source}")]
    Read {
        /// The file.
        file: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A file that should contain only a number does not.
    #[error("{0} does not contain a number")]
    NotANumber(&'static str),
    /// `/proc/meminfo` lacks a required field.
    #[error("/proc/meminfo lacks MemTotal, AnonPages, Cached, Buffers, SwapCached or Inactive(file)")]
    NoMemory,
    /// `/proc/loadavg` lacks the number of threads.
    #[error("/proc/loadavg lacks the number of threads")]
    NoThreads,
    /// A file system could not be measured.
    #[error(transparent)]
    Disk(#[from] beelet_base::Error),
    /// The reading is implausible.
    #[error("the signal {} has an invalid capacity: {capacity}", .signal.name())]
    NoCapacity {
        /// The signal.
        signal: Signal,
        /// The capacity, zero or less.
        capacity: Quantity,
    },
}
