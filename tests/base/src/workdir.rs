//! Where tests put their files, and how they wait.

use anyhow::{Context as _, Result, anyhow, bail};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, Instant};

/// How long a test waits for something that should take a moment. Only a broken program reaches it: machines
/// under load are slow, and a test must not mind.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// How much longer than a real machine an emulated one may take: a wait's patience times this. What
/// `BEELET_PATIENCE` says, 1 without it.
static FACTOR: LazyLock<u32> = LazyLock::new(|| {
    let said = std::env::var("BEELET_PATIENCE").ok();
    said.and_then(|factor| factor.parse().ok()).filter(|factor| *factor > 0).unwrap_or(1)
});

/// A patience as this machine needs it. The waits of this module do it themselves.
pub fn stretched(patience: Duration) -> Duration {
    patience * *FACTOR
}

/// The repository's top folder.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_path_buf()
}

/// Cargo's target folder: the one that the running program is in, else `target` at the repository's top.
pub fn target_dir() -> PathBuf {
    let running = std::env::current_exe().ok();
    let of_running =
        running.iter().flat_map(|exe| exe.ancestors()).find(|dir| dir.join("CACHEDIR.TAG").is_file());
    of_running.map_or_else(|| repository().join("target"), Path::to_path_buf)
}

/// A short name that no other process has at the same time: usable as a part of a cgroup's, a network's or a
/// folder's name.
pub fn unique(prefix: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("{prefix}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Set by the first SIGINT, SIGTERM or SIGHUP after [`heed_signals`].
static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on a signal to stop makes every wait end with an error, so that what the program made is taken
/// back on the way out. Whatever makes something on the machine calls it first.
pub fn heed_signals() -> Result<()> {
    let flag = Arc::new(AtomicBool::new(false));
    if INTERRUPTED.set(Arc::clone(&flag)).is_err() {
        return Ok(()); // they are heeded
    }
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&flag)).context("could not handle signals")?;
    }
    Ok(())
}

/// From now on Ctrl-C doesn't end this process: those that it started get the signal too, and are waited for
/// while they take back what they made.
pub fn outlive_interrupts() -> Result<()> {
    let ignored = Arc::default();
    signal_hook::flag::register(signal_hook::consts::SIGINT, ignored).context("could not handle Ctrl-C")?;
    Ok(())
}

/// Returns true if a signal to stop has come.
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Calls `probe` until it hands back a value, for things that give no event to wait for; at most for the
/// `patience`, [`stretched`]. The error names what was waited for, and what the last call said.
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

/// [`wait_for`] for what must be done after a signal too: taking things down.
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
                bail!("waited {} s for {what}; the last look said: {last}", patience.as_secs());
            }
            Err(_) => std::thread::park_timeout(Duration::from_millis(10)),
        }
    }
}

/// Reads a whole small file; the error names it.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))
}

/// Writes a whole file, with its folders; the error names it.
pub fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("could not make {}", parent.display()))?;
    }
    std::fs::write(path, text).with_context(|| format!("could not write {}", path.display()))
}
