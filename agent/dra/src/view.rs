//! View of pods' claims for monitoring.

use k8s_openapi::api::core::v1 as core;

use crate::{Dra, lock, policy};

/// Claim that a container uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimView {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Devices prepared for the claim.
    pub devices: Vec<DeviceView>,
}

/// Prepared device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceView {
    /// Name of the driver.
    pub driver: String,
    /// Device as returned by the driver.
    pub device: policy::Device,
}

impl Dra {
    /// Returns the claims that a container uses, with all devices prepared for them
    /// (`GetContainerClaimInfos`); empty if one of them is unknown.
    #[must_use]
    pub fn claims_of(&self, pod: &core::Pod, container: &core::Container) -> Vec<ClaimView> {
        let Ok(claims) = policy::of_container(pod, container) else { return Vec::new() };
        let ledger = lock(&self.0.claims.ledger);
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
