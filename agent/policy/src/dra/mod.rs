//! Dynamic Resource Allocation on a node (KEP-4381): a pod's claims, its right to use them, the claims to
//! prepare and unprepare, and a container's CDI devices. Follows the kubelet's rules (`pkg/kubelet/cm/dra`,
//! `dynamic-resource-allocation/resourceclaim`) and uses its messages.
//!
//! Must never do I/O: callers pass in the claims and the drivers' answers.

pub mod checkpoint;
mod error;
pub mod health;
mod ledger;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::{
    core::v1::{Container, Pod, PodExtendedResourceClaimStatus, PodResourceClaim},
    resource::v1::ResourceClaim,
};

pub use self::{
    error::ClaimError,
    ledger::{Ledger, Unprepared},
};
use crate::devices::registration::is_extended_resource_name;
use beelet_units::{object_name::is_subdomain, quantity::Quantity};

/// Pool and name of a device.
pub type DeviceKey = (String, String);

/// The drivers' gRPC services that the agent speaks, newest first.
pub const SERVICES: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];
/// Prefix of the extended resource that a DeviceClass provides if it names none.
const CLASS_PREFIX: &str = "deviceclass.resource.kubernetes.io/";
/// Maximum number of devices of one claim that a driver may prepare, and of names of each. A claim's
/// allocation has at most 32 devices (`AllocationResultsMaxSize`).
const MAX_DEVICES: usize = 256;
const MAX_NAMES: usize = 64;
/// Maximum length of a name from a driver, in bytes.
const MAX_NAME: usize = 1024;
/// Maximum bytes of all names of one claim's devices: memory and the record hold them while a pod has the
/// claim.
const MAX_NAMES_OF_CLAIM: usize = 64 << 10;

/// Namespace and name of a claim, as containers and records refer to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimKey {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// A device that a driver has prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// The device's pool.
    pub pool: String,
    /// The device's name in the pool.
    pub name: String,
    /// The share of the device.
    pub share: Option<String>,
    /// The claim's requests that the device is for; empty for all.
    pub requests: Vec<String>,
    /// CDI names, by which the runtime knows the device.
    pub cdi: Vec<String>,
}

/// State of a claim that pods of this node use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimInfo {
    /// The claim's UID.
    pub uid: String,
    /// UIDs of the pods that use the claim.
    pub pods: BTreeSet<String>,
    /// Every driver that allocated part of the claim, with the devices that it prepared.
    pub drivers: BTreeMap<String, Vec<Device>>,
    /// True if all drivers have prepared the claim since this agent started.
    pub prepared: bool,
}

impl ClaimInfo {
    /// Returns the CDI devices for a request, or for all requests if it is empty.
    fn cdi<'a>(&'a self, request: &'a str) -> impl Iterator<Item = &'a str> {
        let devices = self.drivers.values().flatten();
        let devices = devices.filter(move |device| device.is_for(request));
        devices.flat_map(|device| &device.cdi).map(String::as_str)
    }
}

impl Device {
    /// Returns true if the device is for this request of its claim, or if `request` is empty. A subrequest
    /// `gpu/small` matches `gpu`: containers and drivers may name either.
    fn is_for(&self, request: &str) -> bool {
        request.is_empty()
            || self.requests.is_empty()
            || self.requests.iter().any(|named| base(named) == base(request))
    }

    /// Returns the pool and name by which the driver knows the device.
    fn key(&self) -> DeviceKey {
        (self.pool.clone(), self.name.clone())
    }

    /// Checks the values that a driver reported.
    ///
    /// # Errors
    /// The device has too many names, or invalid ones.
    fn check(&self) -> Result<(), ClaimError> {
        if self.requests.len() > MAX_NAMES || self.cdi.len() > MAX_NAMES {
            return Err(ClaimError::TooManyNames);
        }
        // The record is JSON inside of JSON: a character escaped twice grows several times.
        let is_sound = |c: char| !c.is_control() && !matches!(c, '"' | '\\');
        let sound = |name: &&String| name.len() <= MAX_NAME && name.chars().all(is_sound);
        match self.names().find(|name| !sound(name)) {
            Some(name) => Err(ClaimError::BadName(name.chars().take(64).collect())),
            None if self.cdi.iter().any(String::is_empty) => Err(ClaimError::NamelessCdiDevice),
            None => Ok(()),
        }
    }

    /// Returns all names that a driver gave the device.
    fn names(&self) -> impl Iterator<Item = &String> {
        let own = [&self.pool, &self.name].into_iter().chain(&self.share);
        own.chain(&self.requests).chain(&self.cdi)
    }
}

/// Checks the number of devices that a driver prepared for a claim, before converting them.
///
/// # Errors
/// The driver prepared too many.
pub fn check_count(devices: usize) -> Result<(), ClaimError> {
    if devices > MAX_DEVICES {
        return Err(ClaimError::TooManyDevices(devices));
    }
    Ok(())
}

/// Checks the devices that a driver prepared for a claim.
///
/// # Errors
/// The devices are too many, have too many bytes of names, or one of them is invalid.
pub fn check_devices(devices: &[Device]) -> Result<(), ClaimError> {
    check_count(devices.len())?;
    devices.iter().try_for_each(Device::check)?;
    let length: usize = devices.iter().flat_map(Device::names).map(String::len).sum();
    if length > MAX_NAMES_OF_CLAIM {
        return Err(ClaimError::NamesTooLong(length));
    }
    Ok(())
}

/// Returns the request of a subrequest (`BaseRequestRef`).
fn base(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

/// Returns the service to call a driver by: the first of its services that the agent speaks
/// (`validateSupportedServices`).
///
/// # Errors
/// The driver names no service that the agent speaks.
pub fn service(supported: &[String]) -> Result<&'static str, ClaimError> {
    if supported.is_empty() {
        return Err(ClaimError::NoServices);
    }
    let known = |named: &String| SERVICES.into_iter().find(|known| known == named);
    supported.iter().find_map(known).ok_or_else(|| {
        let shown = supported.iter().take(8).map(|service| service.chars().take(64).collect());
        ClaimError::UnknownServices(shown.collect())
    })
}

/// Returns true for a valid driver name: a DNS subdomain of at most 63 characters in either case, as in the
/// API (`validateDriverName` checks the name in lower case). Comparisons of names are case-sensitive.
#[must_use]
pub fn is_driver_name(name: &str) -> bool {
    name.len() <= 63 && is_subdomain(&name.to_ascii_lowercase())
}

/// A claim that a pod uses, by its name in the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The claim.
    pub key: ClaimKey,
    /// True for a claim that a template created for this pod alone.
    pub is_own: bool,
}

/// Returns true if a pod uses claims, or may.
#[must_use]
pub fn has_claims(pod: &Pod) -> bool {
    let named = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    named.is_some_and(|claims| !claims.is_empty()) || extended(pod).is_some()
}

/// Returns the claims that a pod uses, in their order (`resourceclaim.Name`). Skips entries that needed no
/// claim.
///
/// # Errors
/// A template's claim has not been created yet.
pub fn wanted(pod: &Pod) -> Result<Vec<Wanted>, ClaimError> {
    let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let named = claims.map(|claim| named(pod, claim)).collect::<Result<Vec<_>, _>>()?;
    let of_resources =
        extended(pod).map(|status| Wanted { key: key(pod, &status.resource_claim_name), is_own: false });
    Ok(named.into_iter().flatten().chain(of_resources).collect())
}

fn extended(pod: &Pod) -> Option<&PodExtendedResourceClaimStatus> {
    pod.status.as_ref()?.extended_resource_claim_status.as_ref()
}

fn key(pod: &Pod, name: &str) -> ClaimKey {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    ClaimKey { namespace, name: name.to_owned() }
}

fn named(pod: &Pod, claim: &PodResourceClaim) -> Result<Option<Wanted>, ClaimError> {
    if let Some(name) = &claim.resource_claim_name {
        return Ok(Some(Wanted { key: key(pod, name), is_own: false }));
    }
    let (of, metadata) = (&claim.name, &pod.metadata);
    let failed = |reason: &'static str| {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        let (namespace, pod) = (name(&metadata.namespace), name(&metadata.name));
        Err(ClaimError::Unresolved { namespace, pod, entry: of.clone(), reason })
    };
    if claim.resource_claim_template_name.is_none() {
        return failed("none of the supported fields are set");
    }
    let statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    match statuses.into_iter().find(|status| status.name == *of) {
        Some(status) => {
            Ok(status.resource_claim_name.as_deref().map(|name| Wanted { key: key(pod, name), is_own: true }))
        }
        None => failed("ResourceClaim not created yet"),
    }
}

/// Returns a pod's claim if the pod may use it.
///
/// # Errors
/// The claim belongs to another pod, is not reserved for this one, or is not allocated.
pub fn accept(pod: &Pod, wanted: &Wanted, claim: &ResourceClaim) -> Result<ClaimInfo, ClaimError> {
    let metadata = &claim.metadata;
    let (uid, of) = (metadata.uid.as_deref().unwrap_or_default(), &pod.metadata);
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (pod_uid, pod_name, ClaimKey { namespace, name }) = (text(&of.uid), text(&of.name), &wanted.key);
    if uid.is_empty() || pod_uid.is_empty() {
        return Err(ClaimError::NoUid(name.clone()));
    }
    let mut owners = metadata.owner_references.iter().flatten();
    if wanted.is_own && !owners.any(|owner| owner.controller == Some(true) && owner.uid == pod_uid) {
        let (namespace, name) = (namespace.clone(), name.clone());
        return Err(ClaimError::NotOwner { namespace, name, pod: pod_name });
    }
    let status = claim.status.as_ref();
    let mut reserved = status.into_iter().flat_map(|status| status.reserved_for.iter().flatten());
    if !reserved.any(|user| user.uid == pod_uid) {
        let (name, uid) = (name.clone(), uid.to_owned());
        return Err(ClaimError::NotReserved { pod: pod_name, pod_uid, name, uid });
    }
    let allocated = status.and_then(|status| status.allocation.as_ref());
    let allocated = allocated.ok_or_else(|| ClaimError::NotAllocated(name.clone()))?;
    let results = allocated.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    let drivers = results.map(|result| (result.driver.clone(), Vec::new())).collect();
    Ok(ClaimInfo { uid: uid.to_owned(), drivers, ..ClaimInfo::default() })
}

/// Returns the claims that a container uses, each with the requests that it names; an empty one stands for
/// all.
///
/// # Errors
/// A template's claim has not been created yet.
pub fn of_container<'a>(
    pod: &'a Pod,
    container: &'a Container,
) -> Result<Vec<(ClaimKey, Vec<&'a str>)>, ClaimError> {
    let mut found = Vec::new();
    let used = || container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
    for claim in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
        let requests = used().filter(|used| used.name == claim.name);
        let requests: Vec<&str> = requests.map(|used| used.request.as_deref().unwrap_or_default()).collect();
        if requests.is_empty() {
            continue;
        }
        found.extend(named(pod, claim)?.map(|wanted| (wanted.key, requests)));
    }
    if let Some(status) = extended(pod) {
        let mapped = status.request_mappings.iter().filter(|mapping| {
            mapping.container_name == container.name && asks_for(container, &mapping.resource_name)
        });
        let requests: Vec<&str> = mapped.map(|mapping| mapping.request_name.as_str()).collect();
        if !requests.is_empty() {
            found.push((key(pod, &status.resource_claim_name), requests));
        }
    }
    Ok(found)
}

/// Returns true if a container requests an extended resource that a DeviceClass may provide.
fn asks_for(container: &Container, resource: &str) -> bool {
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let Some(amount) = requests.and_then(|requests| requests.get(resource)) else { return false };
    let is_some = Quantity::parse(&amount.0).is_ok_and(|amount| amount.value() != 0);
    is_some && is_claimable(resource)
}

/// Returns true if a DeviceClass may provide a resource. For other resources a status does not count: no
/// claim provides cpu or memory.
fn is_claimable(resource: &str) -> bool {
    is_extended_resource_name(resource) || resource.starts_with(CLASS_PREFIX)
}

/// Returns true if a claim, and not a device plugin, provides a container's devices of a resource.
#[must_use]
pub fn is_claimed(pod: &Pod, container: &str, resource: &str) -> bool {
    let mappings = extended(pod).map(|status| status.request_mappings.as_slice()).unwrap_or_default();
    is_claimable(resource)
        && mappings
            .iter()
            .any(|mapping| mapping.container_name == container && mapping.resource_name == resource)
}

/// Returns true if a pod uses a claim and has a container already: its claims were prepared before that.
#[must_use]
pub fn runs_with(pod: &Pod, claim: &ClaimKey) -> bool {
    let status = pod.status.iter();
    let mut statuses = status
        .flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses).flatten());
    statuses.any(|status| status.container_id.is_some())
        && wanted(pod).is_ok_and(|all| all.iter().any(|wanted| wanted.key == *claim))
}

/// Returns the CDI devices of a container, each once; `None` if the ledger lacks one of its claims or knows
/// only other pods as its users: the record of this pod was lost.
///
/// # Errors
/// A template's claim has not been created yet.
pub fn cdi_devices(
    ledger: &Ledger,
    pod: &Pod,
    container: &Container,
) -> Result<Option<Vec<String>>, ClaimError> {
    let (mut devices, mut known) = (Vec::new(), BTreeSet::new());
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    for (key, requests) in of_container(pod, container)? {
        let info = ledger.get(&key).filter(|info| info.pods.contains(uid));
        let Some(info) = info else { return Ok(None) };
        // A container may name one request many times.
        let mut named = BTreeSet::new();
        for request in requests.into_iter().filter(|request| named.insert(*request)) {
            for name in info.cdi(request) {
                if known.insert(name) {
                    devices.push(name.to_owned());
                }
            }
        }
    }
    Ok(Some(devices))
}

#[cfg(test)]
mod tests;
