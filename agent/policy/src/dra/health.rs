//! Health of claims' devices, as their drivers report it (KEP-4680; `pkg/kubelet/cm/dra/healthinfo.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::{Container, Pod, ResourceClaim, ResourceHealth, ResourceStatus};

use super::{Device, DeviceKey, Ledger, MAX_NAME, named};
use beelet_units::{bounds, moment::Moment};

/// Lifetime of a report that states none, and the maximum lifetime.
const LEASE: Duration = Duration::from_secs(30);
const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
/// Limits of the devices and of the bytes of names and messages kept of one plugin.
const MAX_DEVICES: usize = 4096;
const MAX_BYTES: usize = 512 << 10;
/// Maximum bytes of a message about a device; a longer one is truncated and ends with `...`
/// (`truncateHealthMessage`).
const MAX_MESSAGE: usize = 1024;

/// The health of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// No driver reports the device, or the last report has expired.
    #[default]
    Unknown,
    /// The device works.
    Healthy,
    /// The device does not work.
    Unhealthy,
}

/// A driver's report about a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The device's pool.
    pub pool: String,
    /// The device's name in the pool.
    pub device: String,
    /// The device's health.
    pub health: Health,
    /// Lifetime of the report in seconds; 0 or less for the default.
    pub lease: i64,
    /// Further details, or empty.
    pub message: String,
}

impl Report {
    fn read(self, now: Moment) -> (DeviceKey, Known) {
        let lease = if self.lease > 0 { bounds::seconds(self.lease).min(MAX_LEASE) } else { LEASE };
        let known = Known { health: self.health, message: shortened(self.message), until: now.plus(lease) };
        ((self.pool, self.device), known)
    }
}

/// The last report about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    health: Health,
    message: String,
    until: Moment,
}

/// The drivers' latest valid reports: by driver, and by reporting plugin, the newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthBook(BTreeMap<String, BTreeMap<u64, BTreeMap<DeviceKey, Known>>>);

impl HealthBook {
    /// Records a report of one of a driver's plugins. Devices missing from the report keep their state until
    /// it expires. Returns the devices whose state changed.
    pub fn report(
        &mut self,
        driver: &str,
        plugin: u64,
        reports: Vec<Report>,
        now: Moment,
    ) -> BTreeSet<DeviceKey> {
        let mut changed = self.expire(driver, plugin, now);
        let devices = self.0.entry(driver.to_owned()).or_default().entry(plugin).or_default();
        let mut bytes: usize = devices.iter().map(|(key, known)| size(key, &known.message)).sum();
        for report in reports {
            let (key, known) = report.read(now);
            let before = devices.get(&key);
            let added = size(&key, &known.message);
            let freed = before.map_or(0, |before| size(&key, &before.message));
            let is_sound = |name: &String| !name.is_empty() && name.len() <= MAX_NAME;
            let has_room =
                bytes - freed + added <= MAX_BYTES && (before.is_some() || devices.len() < MAX_DEVICES);
            if !is_sound(&key.0) || !is_sound(&key.1) || !has_room {
                continue;
            }
            bytes = bytes - freed + added;
            if before.is_none_or(|before| (before.health, &before.message) != (known.health, &known.message))
            {
                changed.insert(key.clone());
            }
            devices.insert(key, known);
        }
        changed
    }

    /// Drops a plugin's expired reports. Returns the devices concerned.
    pub fn expire(&mut self, driver: &str, plugin: u64, now: Moment) -> BTreeSet<DeviceKey> {
        let Some(devices) = self.0.get_mut(driver).and_then(|plugins| plugins.get_mut(&plugin)) else {
            return BTreeSet::new();
        };
        let expired: BTreeSet<DeviceKey> =
            devices.iter().filter(|(_, known)| known.until <= now).map(|(key, _)| key.clone()).collect();
        devices.retain(|key, _| !expired.contains(key));
        expired
    }

    /// Returns the time at which the first report of a plugin expires.
    #[must_use]
    pub fn next_expiry(&self, driver: &str, plugin: u64) -> Option<Moment> {
        self.0.get(driver)?.get(&plugin)?.values().map(|known| known.until).min()
    }

    /// Drops all reports of a plugin. Returns the devices concerned.
    pub fn forget(&mut self, driver: &str, plugin: u64) -> BTreeSet<DeviceKey> {
        let Some(plugins) = self.0.get_mut(driver) else { return BTreeSet::new() };
        let forgotten = plugins.remove(&plugin).unwrap_or_default();
        if plugins.is_empty() {
            self.0.remove(driver);
        }
        forgotten.into_keys().collect()
    }

    /// Returns the report of the newest plugin that knows a device.
    fn of(&self, driver: &str, device: &Device, now: Moment) -> (Health, Option<String>) {
        let key = device.key();
        let plugins = self.0.get(driver).into_iter().flat_map(|plugins| plugins.values().rev());
        let mut known = plugins.filter_map(|devices| devices.get(&key)).filter(|known| known.until > now);
        known.next().map_or((Health::Unknown, None), |known| {
            (known.health, Some(known.message.clone()).filter(|message| !message.is_empty()))
        })
    }

    /// Returns the devices of a container's claims, one entry per claim or request that the container names
    /// (`UpdateAllocatedResourcesStatus`).
    #[must_use]
    pub fn statuses(
        &self,
        ledger: &Ledger,
        pod: &Pod,
        container: &Container,
        now: Moment,
    ) -> Vec<ResourceStatus> {
        let claims = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
        let status = |used: &ResourceClaim| {
            let mut of_pod = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
            let wanted = named(pod, of_pod.find(|claim| claim.name == used.name)?).ok()??;
            let info = ledger.get(&wanted.key)?;
            if !info.pods.contains(pod.metadata.uid.as_deref()?) {
                return None;
            }
            let request = used.request.as_deref().unwrap_or_default();
            let mut resources: Vec<ResourceHealth> = Vec::new();
            for (driver, device) in
                info.drivers.iter().flat_map(|(driver, all)| all.iter().map(move |one| (driver, one)))
            {
                let resource_id = identifier(driver, device);
                if device.is_for(request) && !resources.iter().any(|known| known.resource_id == resource_id) {
                    let (health, message) = self.of(driver, device, now);
                    resources.push(ResourceHealth {
                        health: Some(format!("{health:?}")),
                        message,
                        resource_id,
                    });
                }
            }
            let name = if request.is_empty() {
                format!("claim:{}", used.name)
            } else {
                format!("claim:{}/{request}", used.name)
            };
            (!resources.is_empty()).then_some(ResourceStatus { name, resources: Some(resources) })
        };
        claims.filter_map(status).collect()
    }
}

/// Returns the device's first CDI name, or else its driver, pool and name.
fn identifier(driver: &str, device: &Device) -> String {
    device.cdi.first().cloned().unwrap_or_else(|| format!("{driver}/{}/{}", device.pool, device.name))
}

fn shortened(message: String) -> String {
    if message.len() <= MAX_MESSAGE {
        return message;
    }
    format!("{}...", &message[..message.floor_char_boundary(MAX_MESSAGE - 3)])
}

fn size(key: &DeviceKey, message: &str) -> usize {
    key.0.len() + key.1.len() + message.len()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::dra::{ClaimInfo, ClaimKey};

    fn at(seconds: u64) -> Moment {
        Moment::after_start(Duration::from_secs(seconds))
    }

    fn report(device: &str, health: Health, lease: i64, message: &str) -> Report {
        Report { pool: "p".to_owned(), device: device.to_owned(), health, lease, message: message.to_owned() }
    }

    /// Returns a pod whose container has all of one claim, and a request of another.
    fn pod() -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "shop", "uid": "u"},
            "spec": {
                "resourceClaims": [{"name": "gpu", "resourceClaimName": "one"}, {"name": "nic", "resourceClaimName": "two"}],
                "containers": [{"name": "c", "resources": {"claims": [{"name": "gpu"}, {"name": "nic", "request": "fast/big"}]}}],
            },
        }))
        .unwrap()
    }

    fn ledger() -> Ledger {
        let device = |name: &str, requests: &[&str], cdi: &[&str]| Device {
            pool: "p".to_owned(),
            name: name.to_owned(),
            requests: requests.iter().map(|name| (*name).to_owned()).collect(),
            cdi: cdi.iter().map(|name| (*name).to_owned()).collect(),
            ..Device::default()
        };
        let info = |driver: &str, devices: Vec<Device>| ClaimInfo {
            pods: ["u".to_owned()].into(),
            drivers: [(driver.to_owned(), devices)].into(),
            ..ClaimInfo::default()
        };
        let key = |name: &str| ClaimKey { namespace: "shop".to_owned(), name: name.to_owned() };
        let gpus = vec![device("g0", &[], &["x/gpu=0"]), device("g1", &[], &["x/gpu=0", "x/gpu=1"])];
        let nics = vec![device("n0", &["fast"], &[]), device("n1", &["slow"], &[])];
        [(key("one"), info("gpu.x", gpus)), (key("two"), info("nic.x", nics))].into_iter().collect()
    }

    /// Returns claim or request, device, health and message of each entry.
    fn listed(book: &HealthBook, now: Moment) -> Vec<(String, String, String, String)> {
        let pod = pod();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let all = book.statuses(&ledger(), &pod, container, now);
        let flat = all.into_iter().flat_map(|status| {
            let name = status.name;
            status.resources.into_iter().flatten().map(move |one| {
                (
                    name.clone(),
                    one.resource_id,
                    one.health.unwrap_or_default(),
                    one.message.unwrap_or_default(),
                )
            })
        });
        flat.collect()
    }

    fn is(listed: &[(String, String, String, String)], expected: &[[&str; 4]]) {
        let listed: Vec<[&str; 4]> = listed.iter().map(|(a, b, c, d)| [a.as_str(), b, c, d]).collect();
        assert_eq!(listed, expected);
    }

    fn keys(devices: &[&str]) -> BTreeSet<DeviceKey> {
        devices.iter().map(|device| ("p".to_owned(), (*device).to_owned())).collect()
    }

    #[test]
    fn each_device_of_a_claim_or_request_is_listed_once_and_unknown_until_reported() {
        let mut book = HealthBook::default();
        is(
            &listed(&book, at(0)),
            &[["claim:gpu", "x/gpu=0", "Unknown", ""], ["claim:nic/fast/big", "nic.x/p/n0", "Unknown", ""]],
        );
        assert_eq!(book.report("gpu.x", 1, vec![report("g0", Health::Healthy, 0, "")], at(0)), keys(&["g0"]));
        let broken = report("n0", Health::Unhealthy, 0, "no carrier");
        assert_eq!(book.report("nic.x", 2, vec![broken], at(0)), keys(&["n0"]));
        is(
            &listed(&book, at(1)),
            &[
                ["claim:gpu", "x/gpu=0", "Healthy", ""],
                ["claim:nic/fast/big", "nic.x/p/n0", "Unhealthy", "no carrier"],
            ],
        );
    }

    #[test]
    fn a_report_holds_for_its_lease_and_no_longer() {
        let mut book = HealthBook::default();
        assert_eq!(book.report("gpu.x", 1, vec![report("g0", Health::Healthy, 0, "")], at(0)), keys(&["g0"]));
        // The same report again, for longer.
        assert_eq!(book.report("gpu.x", 1, vec![report("g0", Health::Healthy, 60, "")], at(10)), keys(&[]));
        // A device missing from a report keeps its state.
        assert_eq!(
            book.report("gpu.x", 1, vec![report("g9", Health::Healthy, -1, "")], at(20)),
            keys(&["g9"])
        );
        assert_eq!(book.next_expiry("gpu.x", 1), Some(at(50)));
        assert_eq!(book.expire("gpu.x", 1, at(50)), keys(&["g9"]));
        is(&listed(&book, at(69))[..1], &[["claim:gpu", "x/gpu=0", "Healthy", ""]]);
        is(&listed(&book, at(70))[..1], &[["claim:gpu", "x/gpu=0", "Unknown", ""]]);
        // The maximum lifetime applies to any driver.
        book.report("gpu.x", 1, vec![report("g0", Health::Healthy, i64::MAX, "")], at(80));
        assert_eq!(book.next_expiry("gpu.x", 1), Some(at(80).plus(MAX_LEASE)));
    }

    #[test]
    fn of_two_plugins_the_newer_one_counts_for_what_it_knows_and_each_forgets_its_own() {
        let mut book = HealthBook::default();
        book.report("gpu.x", 2, vec![report("g0", Health::Healthy, 0, "")], at(0));
        book.report("gpu.x", 1, vec![report("g0", Health::Unhealthy, 0, "older")], at(1));
        is(&listed(&book, at(2))[..1], &[["claim:gpu", "x/gpu=0", "Healthy", ""]]);
        assert_eq!(book.forget("gpu.x", 2), keys(&["g0"]));
        is(&listed(&book, at(2))[..1], &[["claim:gpu", "x/gpu=0", "Unhealthy", "older"]]);
        assert_eq!(book.forget("gpu.x", 1), keys(&["g0"]));
        assert_eq!(book, HealthBook::default());
    }

    #[test]
    fn reports_beyond_the_limits_are_dropped() {
        let report_all = |count: usize, message: &str| {
            let mut book = HealthBook::default();
            let many = (0..count).map(|n| report(&n.to_string(), Health::Healthy, 0, message));
            book.report("gpu.x", 1, many.collect(), at(0));
            book
        };
        assert_eq!(report_all(2 * MAX_DEVICES, "").0["gpu.x"][&1].len(), MAX_DEVICES);
        let mut book = report_all(MAX_DEVICES, &"é".repeat(2000));
        let devices = &book.0["gpu.x"][&1];
        assert!(devices.iter().map(|(key, known)| size(key, &known.message)).sum::<usize>() <= MAX_BYTES);
        let message = &devices[&("p".to_owned(), "0".to_owned())].message;
        assert!(message.len() == MAX_MESSAGE - 1 && message.ends_with("é..."), "{}", message.len());
        let nameless = vec![
            report("", Health::Healthy, 0, ""),
            report(&"x".repeat(MAX_NAME + 1), Health::Healthy, 0, ""),
        ];
        assert_eq!(book.report("gpu.x", 1, nameless, at(0)), keys(&[]));
    }
}
