//! Checks drivers' responses before they are used. Pure.

use std::collections::BTreeMap;

use beelet_policy::dra::{ClaimKey, Device, check_count, check_devices};
use beelet_proto::dra::v1 as wire;

use crate::{
    Error,
    plugin::{PREPARE, UNPREPARE, WORDS},
};

/// Returns the devices that a driver has prepared for each claim of `batch` (claims with their UIDs).
///
/// # Errors
/// The driver failed for a claim, skipped one, answered for one outside the batch, or returned impossible
/// devices.
pub fn prepared(
    batch: &[(ClaimKey, String)],
    answer: wire::NodePrepareResourcesResponse,
) -> Result<Vec<(&ClaimKey, Vec<Device>)>, Error> {
    let results = answer.claims.into_iter().map(|(uid, of)| (uid, (of.error, of.devices)));
    let of_claims = checked(PREPARE, batch, results.collect())?.into_iter().map(|(key, devices)| {
        let impossible = |why| {
            let what = format!("returned an invalid response for ResourceClaim {}: {why}", key.name);
            Error::Answer { method: PREPARE, what }
        };
        check_count(devices.len()).map_err(impossible)?;
        let devices: Vec<Device> = devices.into_iter().map(device).collect();
        check_devices(&devices).map_err(impossible)?;
        Ok((key, devices))
    });
    of_claims.collect()
}

/// Checks that a driver has unprepared each claim of `batch`.
///
/// # Errors
/// The driver failed for a claim, skipped one, or answered for one outside the batch.
pub(crate) fn unprepared(
    batch: &[(ClaimKey, String)],
    answer: wire::NodeUnprepareResourcesResponse,
) -> Result<(), Error> {
    let results = answer.claims.into_iter().map(|(uid, of)| (uid, (of.error, ())));
    checked(UNPREPARE, batch, results.collect()).map(drop)
}

fn device(device: wire::Device) -> Device {
    Device {
        pool: device.pool_name,
        name: device.device_name,
        share: device.share_id,
        requests: device.request_names,
        cdi: device.cdi_device_ids,
    }
}

/// Matches a driver's results with the requested claims. `results` has by UID an error, empty on success, and
/// a value.
///
/// # Errors
/// The driver failed for a claim, skipped one, or answered for one outside the batch.
fn checked<'b, T>(
    method: &'static str,
    batch: &'b [(ClaimKey, String)],
    mut results: BTreeMap<String, (String, T)>,
) -> Result<Vec<(&'b ClaimKey, T)>, Error> {
    let mut found = Vec::with_capacity(batch.len());
    let mut skipped = 0;
    for (key, uid) in batch {
        match results.remove(uid) {
            Some((error, more)) if error.is_empty() => found.push((key, more)),
            Some((error, _)) => {
                let error: String = error.chars().take(WORDS).collect();
                let what = format!("failed for ResourceClaim {}: {error}", key.name);
                return Err(Error::Answer { method, what });
            }
            None => skipped += 1,
        }
    }
    if let Some((uid, _)) = results.first_key_value() {
        return Err(Error::Answer {
            method,
            what: format!("returned result for unknown claim UID {uid:.64}"),
        });
    }
    if skipped > 0 {
        return Err(Error::Answer { method, what: format!("skipped {skipped} ResourceClaims") });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_must_answer_for_exactly_the_requested_claims() {
        let key = |name: &str| ClaimKey { namespace: "shop".to_owned(), name: name.to_owned() };
        let batch = [(key("a"), "u-a".to_owned()), (key("b"), "u-b".to_owned())];
        let check = |results: &[(&str, &str)], expected: Result<usize, &str>| {
            let results = results.iter().map(|(uid, error)| ((*uid).to_owned(), ((*error).to_owned(), ())));
            let found = checked(PREPARE, &batch, results.collect());
            let found = found.map(|all| all.len()).map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        check(&[("u-a", ""), ("u-b", "")], Ok(2));
        check(&[("u-a", "")], Err("NodePrepareResources skipped 1 ResourceClaims"));
        check(&[("u-a", ""), ("u-b", "no")], Err("NodePrepareResources failed for ResourceClaim b: no"));
        check(
            &[("u-a", ""), ("u-b", ""), ("u-c", "")],
            Err("NodePrepareResources returned result for unknown claim UID u-c"),
        );
    }
}
