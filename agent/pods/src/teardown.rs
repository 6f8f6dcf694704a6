//! Removal of the volumes, the cgroup, the devices and the logs of a pod whose containers have ended.

use std::sync::Arc;

use beelet_base::{blocking::BlockingTasks, walk::remove_folder};
use beelet_cgroups::{Cgroups, kill};
use beelet_devices::Devices;
use beelet_volumes::{PodVolumes, VolumeManager};

use crate::{error::Error, plan::PodPlan, pod_users::PodUsers};

/// Removes parts of pods.
#[derive(Clone, Debug)]
pub(crate) struct Teardown {
    pub(crate) volumes: VolumeManager,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) devices: Devices,
    pub(crate) users: PodUsers,
}

impl Teardown {
    /// Removes the cgroup and the volumes, and releases the devices, of a pod whose containers and sandboxes
    /// are removed.
    ///
    /// # Errors
    /// A volume or a cgroup is still in use.
    pub(crate) async fn release(&self, plan: &Arc<PodPlan>, tasks: &BlockingTasks) -> Result<(), Error> {
        self.release_with(plan, tasks, PodVolumes::tear_down).await?;
        self.devices.forget(&plan.uid);
        Ok(())
    }

    /// Removes the cgroup and the volumes of an ended pod, whose containers remain for inspection by users.
    /// The pod's devices are released as soon as another pod needs them.
    ///
    /// # Errors
    /// A volume or a cgroup is still in use.
    pub(crate) async fn release_ended(
        &self,
        plan: &Arc<PodPlan>,
        tasks: &BlockingTasks,
    ) -> Result<(), Error> {
        self.release_with(plan, tasks, PodVolumes::release).await?;
        self.users.release(&plan.uid, tasks).await
    }

    async fn release_with(
        &self,
        plan: &Arc<PodPlan>,
        tasks: &BlockingTasks,
        of_volumes: fn(&PodVolumes) -> Result<(), beelet_volumes::Error>,
    ) -> Result<(), Error> {
        // The blocking work of a cancelled step may create files and mounts until it notices the
        // cancellation.
        tasks.done().await;
        self.volumes.unpublish(&plan.uid).await.map_err(Error::of_files)?;
        let (plan, cgroups) = (Arc::clone(plan), Arc::clone(&self.cgroups));
        let remove = tasks.run(move || {
            for path in &plan.cgroups {
                // A missing cgroup may still exist in another hierarchy.
                kill::destroy(&cgroups, path)?;
            }
            of_volumes(&plan.volumes).map_err(Error::of_files)
        });
        remove.await
    }

    /// Removes the logs of a removed pod.
    ///
    /// # Errors
    /// The folder cannot be removed.
    pub(crate) async fn remove_logs(&self, plan: &Arc<PodPlan>, tasks: &BlockingTasks) -> Result<(), Error> {
        let plan = Arc::clone(plan);
        tasks.run(move || remove_folder(&plan.logs).map_err(Error::of_files)).await
    }
}
