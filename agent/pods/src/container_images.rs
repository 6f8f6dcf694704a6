//! Pulls of a container's images, with events for the progress.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use beelet_base::spans::TARGET;
use beelet_cri::Runtime;
use beelet_images::{
    Lease,
    pull::{Image, Progress, Wanted},
};
use beelet_model::objects::Objects;
use beelet_spec::env;
use beelet_state::events::Object;
use beelet_units::duration;
use k8s_openapi::api::core::v1 as core;
use tokio::time::Instant;
use tracing::{Instrument, trace_span};

use crate::{
    deps::{ImageDeps, Reports},
    error::StartError,
    plan::PodPlan,
    runtime_abilities,
};

/// A container of a pod, and the objects that the pod may refer to.
pub(crate) struct PodContainer<'a> {
    pub(crate) plan: &'a Arc<PodPlan>,
    pub(crate) container: &'a core::Container,
    pub(crate) objects: Arc<Objects>,
}

/// Pulls the images of containers.
#[derive(Clone, Debug)]
pub(crate) struct ImagePulls {
    pub(crate) runtime: Runtime,
    pub(crate) images: ImageDeps,
    pub(crate) reports: Reports,
}

/// Images of a container and of its image volumes. The leases protect the images until the container is
/// created.
pub(crate) struct ContainerImages {
    pub(crate) image: Image,
    /// By volume.
    pub(crate) volumes: BTreeMap<String, String>,
    _leases: Vec<Lease>,
}

impl ImagePulls {
    /// Pulls a container's image, and the images of the image volumes that the container mounts.
    ///
    /// # Errors
    /// An image cannot be pulled, or the runtime cannot mount images.
    pub(crate) async fn pull(&self, container: &PodContainer<'_>) -> Result<ContainerImages, StartError> {
        let wanted = container;
        let PodContainer { plan, container, .. } = wanted;
        let policy = container.image_pull_policy.as_deref();
        let (image, lease) = self.image(wanted, container.image.as_deref(), policy).await?;
        let mounted = |name: &str| container.volume_mounts.iter().flatten().any(|mount| mount.name == name);
        let (mut volumes, mut leases) = (BTreeMap::new(), vec![lease]);
        for (name, source) in plan.volumes.images().filter(|(name, _)| mounted(name)) {
            runtime_abilities::require(&self.runtime, &format!("volume {name}"), &runtime_abilities::IMAGES)
                .await?;
            let mut mounts = container.volume_mounts.iter().flatten().filter(|mount| mount.name == name);
            if mounts.any(|mount| mount.sub_path.is_some() || mount.sub_path_expr.is_some()) {
                runtime_abilities::require(
                    &self.runtime,
                    &format!("volume {name}"),
                    &runtime_abilities::PARTS_OF_IMAGES,
                )
                .await?;
            }
            let (reference, policy) = (source.reference.as_deref(), source.pull_policy.as_deref());
            let (image, lease) = self.image(wanted, reference, policy).await?;
            volumes.insert(name.to_owned(), image.id);
            leases.push(lease);
        }
        Ok(ContainerImages { image, volumes, _leases: leases })
    }

    /// Pulls an image according to its pull policy.
    async fn image(
        &self,
        container: &PodContainer<'_>,
        reference: Option<&str>,
        policy: Option<&str>,
    ) -> Result<(Image, Lease), StartError> {
        let PodContainer { plan, container, objects } = container;
        let image = reference.unwrap_or_default();
        let began = Instant::now();
        let record = |progress: Progress<'_>| {
            if let Progress::Pulled(took, _, size) = progress {
                self.reports.metrics.startup.pulled(&plan.uid, began.elapsed());
                self.reports.metrics.started.pulled(took, size);
            }
            self.record_progress(Object::container(&plan.pod, &container.name), image, progress);
        };
        let account = plan.pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        let wanted = Wanted {
            image,
            policy: policy.unwrap_or("IfNotPresent"),
            sandbox: plan.sandbox()?,
            secrets: pull_secrets(plan, objects),
            service_account: account.unwrap_or_default(),
            tell: &record,
        };
        let object = || Object::container(&plan.pod, &container.name);
        let span = trace_span!(target: TARGET, "image", otel.name = "ensureImageExists", image);
        let getting = Box::pin(self.images.puller.leased(&self.images.leases, &wanted)).instrument(span);
        Ok(self.reports.events.while_waiting(object, &format!("image {image:?}"), getting).await?)
    }

    /// Records the progress of an image as events, with the kubelet's messages.
    fn record_progress(&self, object: Object, image: &str, progress: Progress<'_>) {
        let rounded = |took: Duration| duration::format(Duration::from_millis(millis(took)));
        match progress {
            Progress::Here => {
                let message = format!(
                    "Container image {image:?} already present on machine and can be accessed by the pod"
                );
                self.reports.events.normal(object, "Pulled", message);
            }
            Progress::Pulling => {
                self.reports.events.normal(object, "Pulling", format!("Pulling image {image:?}"));
            }
            Progress::Pulled(took, whole, size) => {
                let (took, whole) = (rounded(took), rounded(whole));
                let message = format!(
                    "Successfully pulled image {image:?} in {took} ({whole} including waiting). Image size: {size} bytes."
                );
                self.reports.events.normal(object, "Pulled", message);
            }
            Progress::Failed(why) => {
                self.reports.events.warning(
                    object,
                    "Failed",
                    format!("Failed to pull image {image:?}: {why}"),
                );
            }
        }
    }
}

/// Returns the pod's Secrets for registries. A missing Secret is skipped, as in the kubelet: the registry may
/// not require the Secret.
fn pull_secrets<'o>(plan: &PodPlan, objects: &'o Objects) -> Vec<&'o core::Secret> {
    let named = plan.pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let found = named.filter_map(|reference| {
        let secret = objects.secret(&plan.name.namespace, &reference.name);
        if secret.is_none() {
            tracing::warn!(pod = %plan.name, "{}", env::missing(&plan.pod, "Secret", &reference.name));
        }
        secret
    });
    found.collect()
}

fn millis(took: Duration) -> u64 {
    u64::try_from(took.as_millis()).unwrap_or(u64::MAX)
}
