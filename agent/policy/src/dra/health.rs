//! How the devices of claims are, as their drivers say it (KEP-4680; `pkg/kubelet/cm/dra/healthinfo.go`).

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::core::v1::{Container, Pod, ResourceHealth, ResourceStatus};

use super::{Device, Ledger, MAX_NAME, named};
use crate::moment::Moment;

/// How long what a driver says holds, where it doesn't say for how long.
const LEASE: Duration = Duration::from_secs(30);
/// Devices of one driver. More are not known.
const MAX_DEVICES: usize = 4096;
/// Characters of what a driver says of a device; of a longer text the end is cut off, and `...` says so.
const MAX_MESSAGE: usize = 1024;

/// The health of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Nobody says, or not any more.
    #[default]
    Unknown,
    /// It works.
    Healthy,
    /// It does not.
    Unhealthy,
}

/// What a driver says of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The pool that has it.
    pub pool: String,
    /// Its name there.
    pub device: String,
    /// How it is.
    pub health: Health,
    /// For how long that holds, in seconds; 0 or less: for as long as is usual.
    pub lease: i64,
    /// More about it, or nothing.
    pub message: String,
}

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    health: Health,
    message: String,
    until: Moment,
}

/// By pool and name.
type Devices = BTreeMap<(String, String), Known>;

/// What drivers said last, as long as it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthBook(BTreeMap<String, Devices>);

impl HealthBook {
    /// Takes in what a driver says. Devices that it leaves out are as they were until that holds no more.
    /// Returns true if a device is not as it was.
    pub fn report(&mut self, driver: &str, reports: Vec<Report>, now: Moment) -> bool {
        let mut changed = self.expire(driver, now);
        let devices = self.0.entry(driver.to_owned()).or_default();
        for report in reports {
            let is_sound = |name: &String| !name.is_empty() && name.len() <= MAX_NAME;
            if ![&report.pool, &report.device].into_iter().all(is_sound) {
                continue;
            }
            let known = Known {
                health: report.health,
                message: shortened(&report.message),
                until: now.plus(
                    u64::try_from(report.lease)
                        .ok()
                        .filter(|lease| *lease > 0)
                        .map_or(LEASE, Duration::from_secs),
                ),
            };
            let device = (report.pool, report.device);
            let before = devices.get(&device);
            if before.is_none() && devices.len() >= MAX_DEVICES {
                continue;
            }
            changed |= before
                .is_none_or(|before| (before.health, &before.message) != (known.health, &known.message));
            devices.insert(device, known);
        }
        changed
    }

    /// Forgets what holds no more. Returns true if that was anything.
    pub fn expire(&mut self, driver: &str, now: Moment) -> bool {
        let Some(devices) = self.0.get_mut(driver) else { return false };
        let before = devices.len();
        devices.retain(|_, known| known.until > now);
        devices.len() != before
    }

    /// When something that a driver said holds no more.
    #[must_use]
    pub fn next_expiry(&self, driver: &str) -> Option<Moment> {
        self.0.get(driver)?.values().map(|known| known.until).min()
    }

    /// Forgets all that a driver said. Returns true if that was anything.
    pub fn forget(&mut self, driver: &str) -> bool {
        self.0.remove(driver).is_some_and(|devices| !devices.is_empty())
    }

    fn of(&self, driver: &str, device: &Device, now: Moment) -> (Health, Option<String>) {
        let known =
            self.0.get(driver).and_then(|devices| devices.get(&(device.pool.clone(), device.name.clone())));
        let Some(known) = known.filter(|known| known.until > now) else { return (Health::Unknown, None) };
        (known.health, Some(known.message.clone()).filter(|message| !message.is_empty()))
    }

    /// The devices of a container's claims, one entry per claim or request that the container names
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
        let status = |used: &k8s_openapi::api::core::v1::ResourceClaim| {
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

/// A device by the name that the runtime knows it by, or by its driver, pool and name.
fn identifier(driver: &str, device: &Device) -> String {
    device.cdi.first().cloned().unwrap_or_else(|| format!("{driver}/{}/{}", device.pool, device.name))
}

fn shortened(message: &str) -> String {
    match message.char_indices().nth(MAX_MESSAGE) {
        None => message.to_owned(),
        Some(_) => message.chars().take(MAX_MESSAGE - 3).chain("...".chars()).collect(),
    }
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

    /// A pod whose container has all of one claim, and a request of another.
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

    /// Claim or request, device, health and message.
    fn told(book: &HealthBook, now: Moment) -> Vec<(String, String, String, String)> {
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

    fn is(told: &[(String, String, String, String)], expected: &[[&str; 4]]) {
        let told: Vec<[&str; 4]> = told.iter().map(|(a, b, c, d)| [a.as_str(), b, c, d]).collect();
        assert_eq!(told, expected);
    }

    #[test]
    fn each_device_of_a_claim_or_request_is_told_once_and_is_unknown_until_its_driver_says_more() {
        let mut book = HealthBook::default();
        is(
            &told(&book, at(0)),
            &[["claim:gpu", "x/gpu=0", "Unknown", ""], ["claim:nic/fast/big", "nic.x/p/n0", "Unknown", ""]],
        );
        assert!(book.report("gpu.x", vec![report("g0", Health::Healthy, 0, "")], at(0)));
        assert!(book.report("nic.x", vec![report("n0", Health::Unhealthy, 0, "no carrier")], at(0)));
        is(
            &told(&book, at(1)),
            &[
                ["claim:gpu", "x/gpu=0", "Healthy", ""],
                ["claim:nic/fast/big", "nic.x/p/n0", "Unhealthy", "no carrier"],
            ],
        );
    }

    #[test]
    fn what_a_driver_said_holds_for_its_lease_and_no_longer() {
        let mut book = HealthBook::default();
        assert!(book.report("gpu.x", vec![report("g0", Health::Healthy, 0, "")], at(0)));
        assert!(!book.report("gpu.x", vec![report("g0", Health::Healthy, 60, "")], at(10)), "the same again");
        // Left out of a report it is as it was.
        assert!(book.report("gpu.x", vec![report("g9", Health::Healthy, -1, "")], at(20)));
        assert_eq!(book.next_expiry("gpu.x"), Some(at(50)));
        assert!(book.expire("gpu.x", at(50)));
        is(&told(&book, at(69))[..1], &[["claim:gpu", "x/gpu=0", "Healthy", ""]]);
        is(&told(&book, at(70))[..1], &[["claim:gpu", "x/gpu=0", "Unknown", ""]]);
        assert!(book.forget("gpu.x") && !book.forget("gpu.x"));
    }

    #[test]
    fn a_driver_that_says_too_much_is_heard_as_far_as_there_is_room() {
        let mut book = HealthBook::default();
        let many = (0..2 * MAX_DEVICES)
            .map(|n| report(&n.to_string(), Health::Healthy, i64::MAX, &"é".repeat(2000)));
        assert!(book.report("gpu.x", many.collect(), at(0)));
        assert_eq!(book.0["gpu.x"].len(), MAX_DEVICES);
        let message = &book.0["gpu.x"][&("p".to_owned(), "0".to_owned())].message;
        assert!(message.chars().count() == MAX_MESSAGE && message.ends_with("é..."), "{message}");
        assert!(!book.report("gpu.x", vec![report("", Health::Healthy, 0, "")], at(0)));
        assert!(!book.report(
            "gpu.x",
            vec![report(&"x".repeat(MAX_NAME + 1), Health::Healthy, 0, "")],
            at(0)
        ));
    }
}
