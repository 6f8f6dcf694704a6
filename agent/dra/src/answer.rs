//! Drivers' answers, checked before anything is made of them. Pure.

use std::collections::BTreeMap;

use beelet_policy::dra::{ClaimKey, Device, check_count, check_devices};
use beelet_proto::dra::v1 as wire;

use crate::{
    Error,
    plugin::{PREPARE, UNPREPARE, WORDS},
};

/// The devices that a driver has prepared for each claim of `batch`, claims with their UIDs.
///
/// # Errors
/// It failed for one, left one out, answered for one that it was not asked for, or names devices that can't
/// be.
pub fn prepared(
    batch: &[(ClaimKey, String)],
    answer: wire::NodePrepareResourcesResponse,
) -> Result<Vec<(&ClaimKey, Vec<Device>)>, Error> {
    let said = answer.claims.into_iter().map(|(uid, of)| (uid, (of.error, of.devices)));
    let of_claims = checked(PREPARE, batch, said.collect())?.into_iter().map(|(key, devices)| {
        let impossible = |why| {
            let what = format!("gave an impossible answer for ResourceClaim {}: {why}", key.name);
            Error::Answer { method: PREPARE, what }
        };
        check_count(devices.len()).map_err(impossible)?;
        let devices: Vec<Device> = devices.into_iter().map(device).collect();
        check_devices(&devices).map_err(impossible)?;
        Ok((key, devices))
    });
    of_claims.collect()
}

/// Checks that a driver has taken back what it prepared for each claim of `batch`.
///
/// # Errors
/// It failed for one, left one out, or answered for one that it was not asked for.
pub(crate) fn unprepared(
    batch: &[(ClaimKey, String)],
    answer: wire::NodeUnprepareResourcesResponse,
) -> Result<(), Error> {
    let said = answer.claims.into_iter().map(|(uid, of)| (uid, (of.error, ())));
    checked(UNPREPARE, batch, said.collect()).map(drop)
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

/// What a driver says of each claim that it was asked for: by UID, an error or none, and more.
///
/// # Errors
/// It failed for one, left one out, or answered for one that it was not asked for.
fn checked<'b, T>(
    method: &'static str,
    batch: &'b [(ClaimKey, String)],
    mut said: BTreeMap<String, (String, T)>,
) -> Result<Vec<(&'b ClaimKey, T)>, Error> {
    let mut found = Vec::with_capacity(batch.len());
    let mut skipped = 0;
    for (key, uid) in batch {
        match said.remove(uid) {
            Some((error, more)) if error.is_empty() => found.push((key, more)),
            Some((error, _)) => {
                let error: String = error.chars().take(WORDS).collect();
                let what = format!("failed for ResourceClaim {}: {error}", key.name);
                return Err(Error::Answer { method, what });
            }
            None => skipped += 1,
        }
    }
    if let Some((uid, _)) = said.first_key_value() {
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
    fn a_driver_answers_for_each_claim_that_it_was_asked_for_and_for_no_other() {
        let key = |name: &str| ClaimKey { namespace: "shop".to_owned(), name: name.to_owned() };
        let batch = [(key("a"), "u-a".to_owned()), (key("b"), "u-b".to_owned())];
        let check = |said: &[(&str, &str)], expected: Result<usize, &str>| {
            let said = said.iter().map(|(uid, error)| ((*uid).to_owned(), ((*error).to_owned(), ())));
            let found = checked(PREPARE, &batch, said.collect());
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
