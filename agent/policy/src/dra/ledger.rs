//! The claims that this node's pods use: their users, and the remaining work for each.

use std::collections::{BTreeMap, BTreeSet};

use super::{ClaimError, ClaimInfo, ClaimKey, Device, DeviceKey};

/// Claims by namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger(BTreeMap<ClaimKey, ClaimInfo>);

/// The work that a pod's end requires.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unprepared {
    /// Claims that no other pod uses, with their UIDs and the drivers to call.
    pub last: Vec<(ClaimKey, String, Vec<String>)>,
    /// Claims that other pods use, too: only the pod's use ends.
    pub shared: Vec<ClaimKey>,
}

impl FromIterator<(ClaimKey, ClaimInfo)> for Ledger {
    fn from_iter<I: IntoIterator<Item = (ClaimKey, ClaimInfo)>>(claims: I) -> Self {
        Self(claims.into_iter().collect())
    }
}

impl Ledger {
    /// Returns a claim.
    #[must_use]
    pub fn get(&self, key: &ClaimKey) -> Option<&ClaimInfo> {
        self.0.get(key)
    }

    /// Returns all claims.
    pub fn iter(&self) -> impl Iterator<Item = (&ClaimKey, &ClaimInfo)> {
        self.0.iter()
    }

    /// Returns the UIDs of pods that use claims.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        self.0.values().flat_map(|info| &info.pods).cloned().collect()
    }

    /// Returns the UIDs of pods that have one of these devices of a driver.
    #[must_use]
    pub fn pods_with(&self, driver: &str, devices: &BTreeSet<DeviceKey>) -> BTreeSet<String> {
        let is_one = |device: &Device| devices.contains(&device.key());
        let has_one = |info: &&ClaimInfo| info.drivers.get(driver).is_some_and(|all| all.iter().any(is_one));
        self.0.values().filter(has_one).flat_map(|info| &info.pods).cloned().collect()
    }

    /// Returns the claims that a pod uses.
    #[must_use]
    pub fn of_pod(&self, uid: &str) -> Vec<ClaimKey> {
        let all = self.0.iter().filter(|(_, info)| info.pods.contains(uid));
        all.map(|(key, _)| key.clone()).collect()
    }

    /// Records that a pod uses these claims. Records none of them if any cannot be used.
    ///
    /// # Errors
    /// The ledger still has another claim of the same name, which its pods have not released.
    pub fn enter(&mut self, pod: &str, claims: &[(ClaimKey, ClaimInfo)]) -> Result<(), ClaimError> {
        for (key, info) in claims {
            if let Some(old) = self.0.get(key).filter(|old| old.uid != info.uid) {
                return Err(ClaimError::OlderClaim { name: key.name.clone(), uid: old.uid.clone() });
            }
        }
        for (key, info) in claims {
            let known = self.0.entry(key.clone()).or_insert_with(|| info.clone());
            known.pods.insert(pod.to_owned());
            for driver in info.drivers.keys() {
                known.drivers.entry(driver.clone()).or_insert_with(|| {
                    // Further devices have been allocated since: the earlier preparation is incomplete.
                    known.prepared = false;
                    Vec::new()
                });
            }
        }
        Ok(())
    }

    /// Returns those of these claims that must be prepared, by driver, each with its UID.
    #[must_use]
    pub fn unprepared(&self, keys: &BTreeSet<ClaimKey>) -> BTreeMap<String, Vec<(ClaimKey, String)>> {
        let mut batches: BTreeMap<String, Vec<(ClaimKey, String)>> = BTreeMap::new();
        let claims = keys.iter().filter_map(|key| Some((key, self.0.get(key)?)));
        for (key, info) in claims.filter(|(_, info)| !info.prepared) {
            for driver in info.drivers.keys() {
                batches.entry(driver.clone()).or_default().push((key.clone(), info.uid.clone()));
            }
        }
        batches
    }

    /// Records the devices that a driver has prepared for a claim, replacing earlier ones.
    pub fn set_devices(&mut self, key: &ClaimKey, driver: &str, devices: Vec<Device>) {
        if let Some(info) = self.0.get_mut(key) {
            info.drivers.insert(driver.to_owned(), devices);
        }
    }

    /// Records that all drivers have prepared these claims.
    pub fn set_prepared(&mut self, keys: &BTreeSet<ClaimKey>) {
        for key in keys {
            if let Some(info) = self.0.get_mut(key) {
                info.prepared = true;
            }
        }
    }

    /// Returns the work required before a pod has released its claims.
    #[must_use]
    pub fn leaving(&self, uid: &str) -> Unprepared {
        let mut found = Unprepared::default();
        for (key, info) in self.0.iter().filter(|(_, info)| info.pods.contains(uid)) {
            if info.pods.len() > 1 {
                found.shared.push(key.clone());
            } else {
                let drivers = info.drivers.keys().cloned().collect();
                found.last.push((key.clone(), info.uid.clone(), drivers));
            }
        }
        found
    }

    /// Records further pods that use a claim of the ledger.
    pub fn share(&mut self, key: &ClaimKey, pods: impl IntoIterator<Item = String>) {
        if let Some(info) = self.0.get_mut(key) {
            info.pods.extend(pods);
        }
    }

    /// Ends a pod's use of this claim; its last pod's end removes the claim.
    pub fn leave(&mut self, uid: &str, key: &ClaimKey) {
        let Some(info) = self.0.get_mut(key) else { return };
        info.pods.remove(uid);
        if info.pods.is_empty() {
            self.0.remove(key);
        }
    }

    /// Returns the number of prepared claims of each driver, and in all.
    #[must_use]
    pub fn in_use(&self) -> (BTreeMap<String, usize>, usize) {
        let prepared: Vec<&ClaimInfo> = self.0.values().filter(|info| info.prepared).collect();
        let mut counts = BTreeMap::new();
        for driver in prepared.iter().flat_map(|info| info.drivers.keys()) {
            *counts.entry(driver.clone()).or_default() += 1;
        }
        (counts, prepared.len())
    }
}
