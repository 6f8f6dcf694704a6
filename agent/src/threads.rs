//! Threads of a daemon.

use std::{future::Future, io, time::Duration};

use tokio::runtime::{Builder, Runtime};

/// Maximum idle time of a blocking thread, so that readings once per second reuse the thread.
const IDLE: Duration = Duration::from_secs(3);

/// Maximum wait for blocking threads when a daemon ends.
const LAST: Duration = Duration::from_secs(2);

/// Runs a daemon with `workers` threads until it ends.
///
/// Does not wait longer for blocked threads (a mount of a vanished server, a driver with an hour's time), as
/// dropping the runtime would: a record on disk lets the next start continue.
///
/// # Errors
/// The system cannot create threads, or the daemon failed.
pub(crate) fn run<T>(workers: usize, daemon: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = runtime(workers)?;
    let ran = runtime.block_on(daemon);
    runtime.shutdown_timeout(LAST);
    ran
}

/// Returns a runtime with `workers` threads for asynchronous tasks. Idle blocking threads (files, statistics)
/// end: an idle node has few of them, even after a hundred pods started at once.
///
/// # Errors
/// The system cannot create threads.
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
