//! Expansion of volumes on the node (`pkg/volume/csi/expander.go`).

use std::collections::BTreeMap;

use beelet_model::storage::Storage;
use beelet_proto::csi::{CapacityRange, NodeExpandVolumeRequest};
use beelet_units::quantity::Quantity;

use crate::{
    Csi, Error, VolumeId, Wanted, lock,
    publish::{Facts, secret},
};

impl Csi {
    /// Returns true if a driver expands volumes on the node.
    ///
    /// # Errors
    /// The driver is not registered or does not answer.
    pub async fn expands(&self, driver: &str) -> Result<bool, Error> {
        Ok(self.driver(driver)?.abilities().await?.expands)
    }

    /// Returns the known size of a volume on this node, by the volume's driver and handle.
    #[must_use]
    pub fn size_of(&self, driver: &str, handle: &str) -> Option<Quantity> {
        lock(&self.0.sizes).get(&VolumeId::new(driver, handle)).copied()
    }

    /// Records the size of a volume on this node, until the volume is unstaged.
    pub fn record_size(&self, driver: &str, handle: &str, size: Quantity) {
        lock(&self.0.sizes).insert(VolumeId::new(driver, handle), size);
    }

    /// Makes the driver expand a published volume to `size`.
    ///
    /// # Errors
    /// The driver is not registered or refuses the call.
    pub async fn expand(
        &self,
        storage: &dyn Storage,
        wanted: Wanted<'_>,
        size: Quantity,
    ) -> Result<(), Error> {
        let crate::Source::Persistent(_, source) = wanted.source else { return Ok(()) };
        let driver = self.driver(&source.driver)?;
        let abilities = driver.abilities().await?;
        if !abilities.expands {
            return Err(Error::NeverExpands(source.driver.clone()));
        }
        let mut secrets = BTreeMap::new();
        if let Some(of) = &source.node_expand_secret_ref {
            let text = |text: &'_ Option<String>| text.clone().unwrap_or_default();
            secrets = secret(storage, "NodeExpandSecretRef", &text(&of.namespace), &text(&of.name)).await?;
        }
        let id = VolumeId::new(&source.driver, &source.volume_handle);
        let uid = wanted.pod.metadata.uid.clone().unwrap_or_default();
        let facts = Facts { wanted, id, object: None, abilities, publish_context: BTreeMap::new() };
        let _held = self.0.locks.hold(&facts.id).await;
        let record = facts.record(&self.0.node);
        let staged = if abilities.stages {
            self.0.folders.staging_path(&record).to_string_lossy().into_owned()
        } else {
            String::new()
        };
        let request = NodeExpandVolumeRequest {
            volume_id: facts.id.handle.clone(),
            volume_path: self.0.folders.publish_path(&record, &uid).to_string_lossy().into_owned(),
            capacity_range: Some(CapacityRange { required_bytes: size.value(), limit_bytes: 0 }),
            staging_target_path: staged,
            volume_capability: Some(facts.capability()),
            secrets: secrets.into_iter().collect(),
        };
        driver.expand(request).await
    }
}
