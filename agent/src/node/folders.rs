//! The folders that must be there before any part starts, and whether the runtime sees what is mounted in
//! them.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, bail};
use tokio::task::spawn_blocking;
use tracing::warn;

use beelet_base::folder::{PRIVATE, make_folder};
use beelet_base::propagation::{self, Reach, inspect};
use beelet_config::Config;
use beelet_cri::mounts::Mounts;

/// Several parts make folders in it: it has one mode, whichever comes first.
pub(super) async fn make_kubelet_dir(config: &Config) -> Result<()> {
    let dir = config.beelet.kubelet_dir.clone();
    let made = spawn_blocking(move || make_folder(&dir, PRIVATE)).await.context("the kubelet's folder")?;
    made.map_err(anyhow::Error::msg)
}

/// A node whose runtime does not see what is mounted for pods would run them without their Secrets.
/// Gives what looks again at a runtime that is started anew.
pub(super) async fn refuse_lost_mounts(pods_dir: &Path, socket: &Path) -> Result<Arc<Mounts>> {
    let runtime = beelet_cri::ownership::listener(socket).await;
    let folder = pods_dir.to_owned();
    let looking = spawn_blocking(move || {
        // Without it the tables of mounts alone decide.
        if let Err(error) = make_folder(&folder, PRIVATE) {
            warn!("{error}");
        }
        inspect(&folder, std::process::id(), runtime)
    });
    let found = looking.await.context("the mounts of pods")?;
    let sentence = propagation::sentence(found, &pods_dir.display().to_string(), runtime);
    match found.reach {
        Reach::Yes => {}
        Reach::Unknown => {
            warn!("{sentence}. If it does not, {}: see `beelet doctor`", propagation::CONSEQUENCE);
        }
        Reach::No => {
            bail!("{sentence}, and {}; {}", propagation::CONSEQUENCE, propagation::remedy(found.stranger))
        }
    }
    Ok(Arc::new(Mounts::new(pods_dir, socket)))
}
