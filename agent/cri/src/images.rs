//! The calls about images.

use std::sync::Arc;

use beelet_proto::cri;

use super::call::Call;
use super::door::Door;
use super::subject::{image_subject, pod};
use super::{Error, Operation};

/// The images of the runtime, which may have a socket of their own.
#[derive(Clone, Debug)]
pub struct Images(pub(super) Arc<Door>);

impl Images {
    /// Returns all images on this node.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn list(&self) -> Result<Vec<cri::Image>, Error> {
        let response = self
            .0
            .call(Operation::ListImages, String::new())
            .images(cri::ListImagesRequest { filter: None }, |mut client, request| async move {
                client.list_images(request).await
            })
            .await?;
        Ok(response.images)
    }

    /// Returns an image by name, digest or id; None where the node doesn't have it.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn status(&self, image: &str) -> Result<Option<cri::Image>, Error> {
        let request = cri::ImageStatusRequest { image: Some(image_spec(image)), verbose: false };
        let response = self
            .0
            .call(Operation::ImageStatus, image_subject(image))
            .images(request, |mut client, request| async move { client.image_status(request).await })
            .await?;
        Ok(response.image)
    }

    /// Pulls an image for a pod, with `auth` or anonymously; returns the reference by which a container runs
    /// it. The call has no deadline: the runtime aborts a pull that makes no progress. Dropping the future
    /// aborts it earlier.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn pull(
        &self,
        image: &str,
        auth: Option<cri::AuthConfig>,
        sandbox_config: &cri::PodSandboxConfig,
    ) -> Result<String, Error> {
        let request = cri::PullImageRequest {
            image: Some(image_spec(image)),
            auth,
            sandbox_config: Some(sandbox_config.clone()),
        };
        let subject = match &sandbox_config.metadata {
            Some(_) => format!("{} for {}", image_subject(image), pod(sandbox_config)),
            None => image_subject(image),
        };
        let call = self.0.call(Operation::PullImage, subject);
        let response = Call { deadline: None, ..call }
            .images(request, |mut client, request| async move { client.pull_image(request).await })
            .await?;
        Ok(response.image_ref)
    }

    /// Removes an image with all its names. Idempotent.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn remove(&self, image: &str) -> Result<(), Error> {
        let request = cri::RemoveImageRequest { image: Some(image_spec(image)) };
        self.0
            .call(Operation::RemoveImage, image_subject(image))
            .images(request, |mut client, request| async move { client.remove_image(request).await })
            .await?;
        Ok(())
    }

    /// Returns the file systems that hold images and containers, with their use in bytes and inodes.
    ///
    /// # Errors
    /// The call fails with an [`Error`].
    pub async fn fs_info(&self) -> Result<cri::ImageFsInfoResponse, Error> {
        self.0
            .call(Operation::ImageFsInfo, String::new())
            .images(cri::ImageFsInfoRequest {}, |mut client, request| async move {
                client.image_fs_info(request).await
            })
            .await
    }
}

fn image_spec(image: &str) -> cri::ImageSpec {
    cri::ImageSpec {
        image: image.to_owned(),
        user_specified_image: image.to_owned(),
        ..cri::ImageSpec::default()
    }
}
