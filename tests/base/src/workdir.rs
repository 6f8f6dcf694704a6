//! Work folders of tests, and waiting.

use anyhow::{Context as _, Result, anyhow, bail};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, Instant};

/// Most time that a test waits for something fast. Only a broken program reaches it: a slow machine under
/// load must not fail a test.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Factor on all wait times, for emulated machines: the value of `BEELET_PATIENCE`, 1 by default.
static FACTOR: LazyLock<u32> = LazyLock::new(|| {
    let value = std::env::var("BEELET_PATIENCE").ok();
    value.and_then(|factor| factor.parse().ok()).filter(|factor| *factor > 0).unwrap_or(1)
});

/// Returns a wait time scaled for this machine. The waits of this module scale theirs themselves.
pub fn stretched(patience: Duration) -> Duration {
    patience * *FACTOR
}

/// Returns the repository's top folder.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_path_buf()
}

/// Returns cargo's target folder: the one of the running program, or else `target` in the repository's top
/// folder.
pub fn target_dir() -> PathBuf {
    let running = std::env::current_exe().ok();
    let of_running =
        running.iter().flat_map(|exe| exe.ancestors()).find(|dir| dir.join("CACHEDIR.TAG").is_file());
    of_running.map_or_else(|| repository().join("target"), Path::to_path_buf)
}

/// Returns a short name that no other process uses at the same time, valid as a part of the name of a cgroup,
/// a network or a folder.
pub fn unique(prefix: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("{prefix}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Set by the first SIGINT, SIGTERM or SIGHUP after [`heed_signals`].
static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Makes every wait end with an error after a signal to stop, so that the program can undo its changes. Must
/// be called before the machine is changed.
pub fn heed_signals() -> Result<()> {
    let flag = Arc::new(AtomicBool::new(false));
    if INTERRUPTED.set(Arc::clone(&flag)).is_err() {
        return Ok(()); // the handlers are installed
    }
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&flag)).context("cannot handle signals")?;
    }
    Ok(())
}

/// Makes this process survive Ctrl-C: its child processes also receive the signal, and it waits until they
/// have undone their changes.
pub fn outlive_interrupts() -> Result<()> {
    let ignored = Arc::default();
    signal_hook::flag::register(signal_hook::consts::SIGINT, ignored).context("cannot handle Ctrl-C")?;
    Ok(())
}

/// Returns true if a signal to stop was received.
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Calls `probe` until it returns a value, for at most `patience` ([`stretched`]); for conditions without an
/// event to wait for. The error names `what`, and the error of the last call.
pub fn wait_for<T, E: Display>(
    what: &str,
    patience: Duration,
    mut probe: impl FnMut() -> std::result::Result<T, E>,
) -> Result<T> {
    wait_regardless(what, patience, || {
        let probed = probe().map(Ok);
        if probed.is_err() && interrupted() { Ok(Err(anyhow!("interrupted"))) } else { probed }
    })?
}

/// Like [`wait_for`], but also after a signal: for undoing changes.
pub fn wait_regardless<T, E: Display>(
    what: &str,
    patience: Duration,
    mut probe: impl FnMut() -> std::result::Result<T, E>,
) -> Result<T> {
    let patience = stretched(patience);
    let deadline = Instant::now() + patience;
    loop {
        match probe() {
            Ok(value) => return Ok(value),
            Err(last) if Instant::now() >= deadline => {
                bail!("timed out after {} s waiting for {what}; last error: {last}", patience.as_secs());
            }
            Err(_) => std::thread::park_timeout(Duration::from_millis(10)),
        }
    }
}

/// Reads a whole small file; errors include its path.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a whole file, creating its folders; errors include its path.
pub fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
