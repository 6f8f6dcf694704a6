//! The kubelet's own record of prepared claims, `dra_manager_state` (`pkg/kubelet/cm/dra/state`): a node can
//! switch from the kubelet to this agent and back while pods have claims.
//!
//! The data is JSON inside of JSON, with a CRC-32 of the inner text. Must never panic on any content of the
//! file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ClaimError, ClaimInfo, ClaimKey, Device, Ledger, check_devices};

const KIND: &str = "DRACheckpoint";
const VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// A reason why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file is not JSON of the expected form.
    #[error("cannot read the record of resource claims: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The file was changed or truncated after the write.
    #[error("the record of resource claims is corrupt: stored checksum {stored}, computed {computed}")]
    Checksum {
        /// Checksum in the file.
        stored: u32,
        /// Checksum of the content.
        computed: u32,
    },
    /// The record is of another version of Kubernetes, or has invalid values.
    #[error("cannot use the record of resource claims: {0}")]
    Unusable(String),
}

#[derive(Debug, Serialize, Deserialize)]
struct File {
    #[serde(rename = "Data")]
    data: String,
    #[serde(rename = "Checksum")]
    checksum: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Data {
    kind: String,
    #[serde(rename = "apiVersion")]
    version: String,
    #[serde(rename = "ClaimInfoStateList")]
    claims: Option<Vec<Claim>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Claim {
    #[serde(rename = "ClaimUID")]
    uid: String,
    claim_name: String,
    namespace: String,
    /// Go's set: each uid maps to an empty object.
    #[serde(rename = "PodUIDs")]
    pods: Option<BTreeMap<String, Value>>,
    driver_state: Option<BTreeMap<String, Driver>>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Driver {
    devices: Option<Vec<Prepared>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Prepared {
    pool_name: String,
    device_name: String,
    #[serde(rename = "ShareID", default)]
    share: Option<String>,
    request_names: Option<Vec<String>>,
    #[serde(rename = "CDIDeviceIDs")]
    cdi: Option<Vec<String>>,
}

/// Returns the file's content, checksum included.
///
/// # Errors
/// Never for a ledger; serialization is fallible in general.
pub fn write(ledger: &Ledger) -> Result<Vec<u8>, CheckpointError> {
    let claims = ledger.iter().map(|(key, info)| Claim {
        uid: info.uid.clone(),
        claim_name: key.name.clone(),
        namespace: key.namespace.clone(),
        pods: Some(info.pods.iter().map(|uid| (uid.clone(), Value::Object(Default::default()))).collect()),
        driver_state: Some(
            info.drivers.iter().map(|(name, devices)| (name.clone(), driver(devices))).collect(),
        ),
    });
    let data = Data { kind: KIND.to_owned(), version: VERSION.to_owned(), claims: Some(claims.collect()) };
    seal(serde_json::to_string(&data)?)
}

/// Wraps data as a file with a checksum.
///
/// # Errors
/// Never for a text; serialization is fallible in general.
pub fn seal(data: String) -> Result<Vec<u8>, CheckpointError> {
    let checksum = crc32(data.as_bytes());
    Ok(serde_json::to_vec(&File { data, checksum })?)
}

fn driver(devices: &[Device]) -> Driver {
    let prepared = devices.iter().map(|device| Prepared {
        pool_name: device.pool.clone(),
        device_name: device.name.clone(),
        share: device.share.clone(),
        request_names: Some(device.requests.clone()),
        cdi: Some(device.cdi.clone()),
    });
    Driver { devices: (!devices.is_empty()).then(|| prepared.collect()) }
}

/// Reads the ledger as of the write. No claim counts as prepared: the agent asks the drivers again.
///
/// # Errors
/// If the file is not as it was written.
pub fn read(bytes: &[u8]) -> Result<Ledger, CheckpointError> {
    let File { data, checksum: stored } = serde_json::from_slice(bytes)?;
    let computed = crc32(data.as_bytes());
    if stored != computed {
        return Err(CheckpointError::Checksum { stored, computed });
    }
    let Data { kind, version, claims } = serde_json::from_str(&data)?;
    if (kind.as_str(), version.as_str()) != (KIND, VERSION) {
        return Err(CheckpointError::Unusable(format!("unsupported version {version:.64} {kind:.64}")));
    }
    let known = claims.into_iter().flatten().map(known).collect::<Result<_, ClaimError>>();
    known.map_err(|error| CheckpointError::Unusable(error.to_string()))
}

fn known(claim: Claim) -> Result<(ClaimKey, ClaimInfo), ClaimError> {
    let drivers = claim.driver_state.unwrap_or_default().into_iter().map(|(name, driver)| {
        let devices: Vec<Device> = driver.devices.into_iter().flatten().map(device).collect();
        check_devices(&devices)?;
        Ok((name, devices))
    });
    let info = ClaimInfo {
        uid: claim.uid,
        pods: claim.pods.unwrap_or_default().into_keys().collect(),
        drivers: drivers.collect::<Result<_, ClaimError>>()?,
        prepared: false,
    };
    Ok((ClaimKey { namespace: claim.namespace, name: claim.claim_name }, info))
}

fn device(prepared: Prepared) -> Device {
    Device {
        pool: prepared.pool_name,
        name: prepared.device_name,
        share: prepared.share,
        requests: prepared.request_names.unwrap_or_default(),
        cdi: prepared.cdi.unwrap_or_default(),
    }
}

/// Computes the CRC-32 of IEEE 802.3, bit by bit: the text is short.
fn crc32(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0xEDB8_8320;
    let step = |crc: u32, _| (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg());
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
