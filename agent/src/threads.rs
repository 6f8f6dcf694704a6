//! The threads of a daemon.

use std::{io, time::Duration};

use tokio::runtime::{Builder, Runtime};

/// How long a thread that may block waits for more work. What is read once per second finds it again: a
/// thread is not made anew for each reading.
const IDLE: Duration = Duration::from_secs(3);

/// A runtime of so many threads for all that waits. Those that may block (files, statistics) come and go: on
/// a node that rests there are few, however many a hundred pods needed when they started at once.
///
/// # Errors
/// The system gives no threads.
pub(crate) fn runtime(workers: usize) -> io::Result<Runtime> {
    beelet_bpf::tame_allocator();
    Builder::new_multi_thread().worker_threads(workers).thread_keep_alive(IDLE).enable_all().build()
}
