//! Raises logind's shutdown delay to the time that the pods need.

use std::{fmt::Write as _, fs, io, path::Path, time::Duration};

use beelet_base::{
    blocking::blocking,
    folder::{READABLE, make_folder},
};
use beelet_policy::node::shutdown::Periods;
use beelet_systemd::logind::Logind;
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

/// Name of the drop-in; sorts after the kubelet's (`99-kubelet.conf`), since the last file by name counts.
const FILE: &str = "99-node-shutdown.conf";
/// Time limit for logind to read its configuration.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two checks: logind does not announce a reload.
const PAUSE: Duration = Duration::from_millis(100);

/// Raises logind's longest delay to the needed one, if it is shorter.
///
/// # Errors
/// Fails with a sentence if the delay stays too short.
pub(crate) async fn make(logind: &Logind, periods: &Periods, drop_ins: &Path) -> Result<(), String> {
    let needed = periods.needed_delay();
    let mut longest = logind.longest_delay().await.map_err(|error| error.to_string())?;
    if longest >= needed {
        return Ok(());
    }
    let raised = raise(logind, needed, drop_ins).await;
    let deadline = Instant::now() + PATIENCE;
    while raised.is_ok() && longest < needed && Instant::now() < deadline {
        sleep(PAUSE).await;
        longest = logind.longest_delay().await.unwrap_or(longest);
    }
    if longest >= needed {
        info!(seconds = needed.as_secs(), "raised logind's InhibitDelayMaxSec");
        return Ok(());
    }
    let why = raised.err().unwrap_or_else(|| format!("{}/{FILE} had no effect", drop_ins.display()));
    // A delay without the margin suffices if no pod uses all of its time.
    if longest >= periods.total() {
        debug!("logind's InhibitDelayMaxSec stays at {longest:?}: {why}");
        return Ok(());
    }
    Err(format!(
        "logind delays a shutdown by at most {} s, but pods may take {} s: set InhibitDelayMaxSec={} in \
         /etc/systemd/logind.conf ({why})",
        longest.as_secs(),
        periods.total().as_secs(),
        needed.as_secs()
    ))
}

async fn raise(logind: &Logind, needed: Duration, drop_ins: &Path) -> Result<(), String> {
    let folder = drop_ins.to_owned();
    let written = blocking("writing logind's configuration", move || write(&folder, needed)).await;
    written?;
    logind.reload().await.map_err(|error| error.to_string())
}

fn write(folder: &Path, needed: Duration) -> Result<(), String> {
    make_folder(folder, READABLE).map_err(|error| error.to_string())?;
    let mut text =
        String::from("# Created by beelet for its shutdownGracePeriod. Removed by the next boot.\n[Login]\n");
    let _ = writeln!(text, "InhibitDelayMaxSec={}", needed.as_secs());
    let path = folder.join(FILE);
    let said = |error: io::Error| format!("cannot write {}: {error}", path.display());
    fs::write(&path, text).map_err(said)?;
    // The unit's umask would hide the file from other users.
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(&path, readable).map_err(said)
}
