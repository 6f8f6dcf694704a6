//! The threads of a daemon.

use std::{future::Future, io, time::Duration};

use tokio::runtime::{Builder, Runtime};

/// How long a thread that may block waits for more work. What is read once per second finds it again: a
/// thread is not made anew for each reading.
const IDLE: Duration = Duration::from_secs(3);

/// How long what may block is waited for when a daemon ends.
const LAST: Duration = Duration::from_secs(2);

/// Runs a daemon with so many threads until it ends.
///
/// What blocks then (a mount of a server that is gone, a driver with an hour's time) isn't waited for longer,
/// as dropping the runtime would: a record on disk tells the next start of it.
///
/// # Errors
/// The system gives no threads, or the daemon's own.
pub(crate) fn run<T>(workers: usize, daemon: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = runtime(workers)?;
    let ran = runtime.block_on(daemon);
    runtime.shutdown_timeout(LAST);
    ran
}

/// A runtime of so many threads for all that waits. Those that may block (files, statistics) come and go: on
/// a node that rests there are few, however many a hundred pods needed when they started at once.
///
/// # Errors
/// The system gives no threads.
fn runtime(workers: usize) -> io::Result<Runtime> {
    beelet_bpf::tame_allocator();
    Builder::new_multi_thread().worker_threads(workers).thread_keep_alive(IDLE).enable_all().build()
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn a_daemon_that_ends_does_not_wait_for_what_blocks_without_end() {
        let (unblock, blocked) = mpsc::channel::<()>();
        let (done, ended) = mpsc::channel();
        thread::spawn(move || {
            let ran = run(1, async {
                tokio::task::spawn_blocking(move || blocked.recv());
                Ok(7)
            });
            done.send(ran.unwrap())
        });
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(7));
        drop(unblock);
    }
}
