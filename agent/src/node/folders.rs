//! Creates the folders that all parts need, and checks that the runtime sees mounts in them.

use std::{path::Path, sync::Arc};

use anyhow::{Context, Result, bail};
use tracing::warn;

use beelet_base::blocking::spawn_blocking;
use beelet_base::folder::{PRIVATE, make_folder};
use beelet_base::propagation::{self, Reach, inspect};
use beelet_config::Config;
use beelet_cri::mounts::Mounts;

/// Creates the kubelet's folder. Several parts create folders in it, so its mode must not depend on the first
/// one.
pub(super) async fn make_kubelet_dir(config: &Config) -> Result<()> {
    let dir = config.beelet.kubelet_dir.clone();
    let made = spawn_blocking(move || make_folder(&dir, PRIVATE)).await.context("the kubelet's folder")?;
    made.map_err(anyhow::Error::msg)
}

/// Refuses a runtime that does not see the pods' mounts, which would run pods without their Secrets. Returns
/// the check for a restarted runtime.
pub(super) async fn refuse_lost_mounts(pods_dir: &Path, socket: &Path) -> Result<Arc<Mounts>> {
    let runtime = beelet_cri::ownership::listener(socket).await;
    let folder = pods_dir.to_owned();
    let looking = spawn_blocking(move || {
        // Without the folder, the check uses the mount tables alone.
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
            warn!("{sentence}; if it does not, {} (see `beelet doctor`)", propagation::CONSEQUENCE);
        }
        Reach::No => {
            bail!("{sentence}, and {}; {}", propagation::CONSEQUENCE, propagation::remedy(found.stranger))
        }
    }
    Ok(Arc::new(Mounts::new(pods_dir, socket)))
}
