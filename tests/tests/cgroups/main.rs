//! Cgroups on this machine's kernel, with its cgroup version. The tests also run in the guests of `cargo
//! xtask vm`.

mod effects;
mod hints;
mod kernel;
mod runc;
mod tuner;

use std::time::{Duration, Instant};

use beelet_cgroups::{Cgroups, kill};

/// Destroys the pod's cgroup within `patience`, with as many calls of two seconds as a busy machine needs.
/// Returns the processes that were killed for it.
fn destroyed(cgroups: &Cgroups, pod: &str, patience: Duration) -> Vec<u32> {
    let deadline = Instant::now() + patience;
    let mut killed = Vec::new();
    while cgroups.paths.exists_anywhere(pod) {
        match kill::destroy(cgroups, pod) {
            Ok(ended) => killed.extend(ended),
            Err(error) => assert!(error.is_busy() && Instant::now() < deadline, "{error}"),
        }
    }
    killed
}
