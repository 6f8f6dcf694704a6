//! What monitors are told of pods' claims.

use k8s_openapi::api::core::v1 as core;

use crate::{Dra, lock, policy};

/// A claim that a container uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimView {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// What was prepared for it.
    pub devices: Vec<DeviceView>,
}

/// A device that was prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceView {
    /// The driver.
    pub driver: String,
    /// What the driver said.
    pub device: policy::Device,
}

impl Dra {
    /// The claims that a container uses, and all of the devices that were prepared for them
    /// (`GetContainerClaimInfos`); nothing as long as one of them is not known.
    #[must_use]
    pub fn claims_of(&self, pod: &core::Pod, container: &core::Container) -> Vec<ClaimView> {
        let Ok(claims) = policy::of_container(pod, container) else { return Vec::new() };
        let ledger = lock(&self.0.ledger);
        let view = |key: policy::ClaimKey| {
            let drivers = ledger.get(&key)?.drivers.iter();
            let devices = drivers.flat_map(|(driver, devices)| {
                devices.iter().map(|device| DeviceView { driver: driver.clone(), device: device.clone() })
            });
            Some(ClaimView { devices: devices.collect(), name: key.name, namespace: key.namespace })
        };
        claims.into_iter().map(|(key, _)| view(key)).collect::<Option<_>>().unwrap_or_default()
    }
}
