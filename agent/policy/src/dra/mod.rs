//! Dynamic Resource Allocation on a node (KEP-4381): which claims a pod has, whether it may use them, what is
//! to be prepared and unprepared, and which CDI devices a container gets. The kubelet's rules
//! (`pkg/kubelet/cm/dra`, `dynamic-resource-allocation/resourceclaim`), in its words.
//!
//! Must never ask anybody: claims come in as they were read, and drivers' answers as they were given.

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

/// The gRPC services of drivers that the agent speaks, the newest first.
pub const SERVICES: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];
/// Extended resources that a DeviceClass stands behind without a name of its own for them.
const CLASS_PREFIX: &str = "deviceclass.resource.kubernetes.io/";
/// Devices of one claim that a driver may prepare, and the names of each. A claim's allocation has at most 32
/// devices (`AllocationResultsMaxSize`).
const MAX_DEVICES: usize = 256;
const MAX_NAMES: usize = 64;
/// The longest name that a driver may give, in bytes.
const MAX_NAME: usize = 1024;
/// All names of one claim's devices, in bytes: they are in memory and in the record for as long as a pod has
/// the claim.
const MAX_NAMES_OF_CLAIM: usize = 64 << 10;

/// A claim by its namespace and its name: what containers and records refer to.
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
    /// The pool that has it.
    pub pool: String,
    /// Its name there.
    pub name: String,
    /// Which share of it.
    pub share: Option<String>,
    /// The claim's requests that it is for; none: all of them.
    pub requests: Vec<String>,
    /// The names by which the runtime knows it.
    pub cdi: Vec<String>,
}

/// What is known of a claim that pods of this node use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimInfo {
    /// The claim's UID.
    pub uid: String,
    /// The pods that use it, by their UIDs.
    pub pods: BTreeSet<String>,
    /// Every driver that allocated something of it, with the devices that it prepared.
    pub drivers: BTreeMap<String, Vec<Device>>,
    /// All drivers have prepared it since this agent began.
    pub prepared: bool,
}

impl ClaimInfo {
    /// The CDI devices for a request, or for all where it is empty.
    fn cdi<'a>(&'a self, request: &'a str) -> impl Iterator<Item = &'a str> {
        let devices = self.drivers.values().flatten();
        let devices = devices.filter(move |device| device.is_for(request));
        devices.flat_map(|device| &device.cdi).map(String::as_str)
    }
}

impl Device {
    /// Returns true if it is for this request of its claim, or for all where it is empty. Of `gpu/small`, a
    /// subrequest, `gpu` counts: containers and drivers may name either.
    fn is_for(&self, request: &str) -> bool {
        request.is_empty()
            || self.requests.is_empty()
            || self.requests.iter().any(|named| base(named) == base(request))
    }

    /// The pool and the name that its driver knows it by.
    fn key(&self) -> DeviceKey {
        (self.pool.clone(), self.name.clone())
    }

    /// Checks what a driver said of it.
    ///
    /// # Errors
    /// It has too many names, or impossible ones.
    fn check(&self) -> Result<(), ClaimError> {
        if self.requests.len() > MAX_NAMES || self.cdi.len() > MAX_NAMES {
            return Err(ClaimError::TooManyNames);
        }
        // The record is JSON inside of JSON: a character that is escaped twice takes many times its room.
        let is_sound = |c: char| !c.is_control() && !matches!(c, '"' | '\\');
        let sound = |name: &&String| name.len() <= MAX_NAME && name.chars().all(is_sound);
        match self.names().find(|name| !sound(name)) {
            Some(name) => Err(ClaimError::BadName(name.chars().take(64).collect())),
            None if self.cdi.iter().any(String::is_empty) => Err(ClaimError::NamelessCdiDevice),
            None => Ok(()),
        }
    }

    /// All names that a driver gave it.
    fn names(&self) -> impl Iterator<Item = &String> {
        let own = [&self.pool, &self.name].into_iter().chain(&self.share);
        own.chain(&self.requests).chain(&self.cdi)
    }
}

/// Checks how many devices a driver prepared for a claim, before anything is made of them.
///
/// # Errors
/// There are too many.
pub fn check_count(devices: usize) -> Result<(), ClaimError> {
    if devices > MAX_DEVICES {
        return Err(ClaimError::TooManyDevices(devices));
    }
    Ok(())
}

/// Checks what a driver prepared for a claim.
///
/// # Errors
/// There are too many devices, their names are too long together, or one of them can't be.
pub fn check_devices(devices: &[Device]) -> Result<(), ClaimError> {
    check_count(devices.len())?;
    devices.iter().try_for_each(Device::check)?;
    let length: usize = devices.iter().flat_map(Device::names).map(String::len).sum();
    if length > MAX_NAMES_OF_CLAIM {
        return Err(ClaimError::NamesTooLong(length));
    }
    Ok(())
}

/// The request of a subrequest (`BaseRequestRef`).
fn base(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

/// The service to call a driver by: the first that it names of those that the agent speaks
/// (`validateSupportedServices`).
///
/// # Errors
/// There is none.
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

/// Returns true for what a driver may be called: a DNS subdomain of at most 63 characters in either case, as
/// the API has it (`validateDriverName` looks at the name in lower case). Names are compared as they are.
#[must_use]
pub fn is_driver_name(name: &str) -> bool {
    name.len() <= 63 && is_subdomain(&name.to_ascii_lowercase())
}

/// A claim that a pod uses, by its name in the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The claim.
    pub key: ClaimKey,
    /// It was made from a template, for this pod alone.
    pub is_own: bool,
}

/// Returns true if a pod uses claims, or may.
#[must_use]
pub fn has_claims(pod: &Pod) -> bool {
    let named = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    named.is_some_and(|claims| !claims.is_empty()) || extended(pod).is_some()
}

/// The claims that a pod uses, in their order (`resourceclaim.Name`). One that nothing had to be made for is
/// left out.
///
/// # Errors
/// The claim of a template has not been made yet.
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

/// What a pod's claim is, if the pod may use it as it was read.
///
/// # Errors
/// It is another pod's, is not reserved for this one, or is not allocated.
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

/// The claims that a container uses, each with the requests that it names; an empty one is for all.
///
/// # Errors
/// The claim of a template has not been made yet.
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

/// Returns true if a container asks for an extended resource that a DeviceClass may stand behind.
fn asks_for(container: &Container, resource: &str) -> bool {
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let Some(amount) = requests.and_then(|requests| requests.get(resource)) else { return false };
    let is_some = Quantity::parse(&amount.0).is_ok_and(|amount| amount.value() != 0);
    is_some && is_claimable(resource)
}

/// Returns true if a DeviceClass may stand behind a resource. For others what a status says does not count:
/// nobody has cpu or memory by a claim.
fn is_claimable(resource: &str) -> bool {
    is_extended_resource_name(resource) || resource.starts_with(CLASS_PREFIX)
}

/// Returns true if a claim, and no device plugin, gives the container what it asks for of a resource.
#[must_use]
pub fn is_claimed(pod: &Pod, container: &str, resource: &str) -> bool {
    let mappings = extended(pod).map(|status| status.request_mappings.as_slice()).unwrap_or_default();
    is_claimable(resource)
        && mappings
            .iter()
            .any(|mapping| mapping.container_name == container && mapping.resource_name == resource)
}

/// Returns true if a pod uses a claim and something of it was made: its claims were prepared before that.
#[must_use]
pub fn runs_with(pod: &Pod, claim: &ClaimKey) -> bool {
    let status = pod.status.iter();
    let mut statuses = status
        .flat_map(|status| status.init_container_statuses.iter().chain(&status.container_statuses).flatten());
    statuses.any(|status| status.container_id.is_some())
        && wanted(pod).is_ok_and(|all| all.iter().any(|wanted| wanted.key == *claim))
}

/// The CDI devices of a container, each once; None if one of its claims is not among those that are known.
/// One that only other pods are known to use is not: the record that had this pod was lost.
///
/// # Errors
/// The claim of a template has not been made yet.
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
        // A container may name one request very often.
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
