//! A pod's claims are prepared before its sandbox is made, and given back when nothing of it runs any more.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use beelet_model::{storage::Storage, table::PodTable};
use beelet_policy::dra::{ClaimInfo, ClaimKey, Unprepared};
use beelet_proto::dra::v1 as wire;
use futures::future::join_all;
use k8s_openapi::api::core::v1 as core;

use crate::{
    Dra, Error,
    answer::{prepared, unprepared},
    lock, policy,
};

/// Claims with their UIDs.
type Batch = Vec<(ClaimKey, String)>;

impl Dra {
    /// Has drivers prepare the claims of a pod, as the API server has them now. Those that are prepared
    /// already are left as they are.
    ///
    /// # Errors
    /// The pod may not have one, or a driver can't, or not yet.
    pub async fn prepare(&self, storage: Option<&dyn Storage>, pod: &core::Pod) -> Result<(), Error> {
        if !policy::has_claims(pod) {
            return Ok(());
        }
        let began = Instant::now();
        let prepared = self.prepare_all(storage, pod).await;
        self.0.metrics.operated("PrepareResources", prepared.is_err(), began.elapsed());
        prepared
    }

    async fn prepare_all(&self, storage: Option<&dyn Storage>, pod: &core::Pod) -> Result<(), Error> {
        // Nothing is noted before all is known: a pod whose driver was never here can be deleted.
        let claims = read(storage, pod).await?;
        for driver in claims.iter().flat_map(|(_, info)| info.drivers.keys()) {
            self.plugin(driver)?;
        }
        let keys: BTreeSet<ClaimKey> = claims.iter().map(|(key, _)| key.clone()).collect();
        let _held = self.hold(&keys).await;
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        self.change(|ledger| ledger.enter(uid, &claims))?;
        self.save().await?;
        let batches = lock(&self.0.ledger).unprepared(&keys);
        if batches.is_empty() {
            return Ok(());
        }
        let asked = batches.into_iter().map(|(driver, batch)| self.prepare_by(driver, batch));
        join_all(asked).await.into_iter().collect::<Result<(), Error>>()?;
        self.change(|ledger| ledger.set_prepared(&keys));
        self.save().await
    }

    async fn prepare_by(&self, driver: String, batch: Batch) -> Result<(), Error> {
        let answer = self.plugin(&driver)?.prepare(on_wire(&batch)).await?;
        for (key, devices) in prepared(&batch, answer)? {
            self.change(|ledger| ledger.set_devices(key, &driver, devices));
        }
        Ok(())
    }

    /// Has drivers take back what they have prepared for a pod, all but what other pods use too, by the
    /// record or, where that was lost, by the table. Nothing is asked where it has nothing.
    ///
    /// # Errors
    /// A driver can't, or not yet: what it did not take back stays noted. Or the record can't be written:
    /// [`Self::has`] stays true until it is.
    pub async fn unprepare(&self, uid: &str, table: &PodTable) -> Result<(), Error> {
        let keys: BTreeSet<ClaimKey> = lock(&self.0.ledger).of_pod(uid).into_iter().collect();
        if keys.is_empty() {
            // Drivers have all back, but the record on the disk may still say that the pod has it.
            return if lock(&self.0.unsaved).has(uid) { self.save().await } else { Ok(()) };
        }
        let began = Instant::now();
        let _held = self.hold(&keys).await;
        if self.0.lost {
            self.find_users(uid, &keys, table);
        }
        let unprepared = self.unprepare_all(uid).await;
        self.0.metrics.operated("UnprepareResources", unprepared.is_err(), began.elapsed());
        unprepared
    }

    /// Notes who else runs with these claims. They have not begun since the record was lost, or they would be
    /// in the ledger.
    fn find_users(&self, uid: &str, keys: &BTreeSet<ClaimKey>, table: &PodTable) {
        let here = table.pods.values().filter(|entry| entry.ended().is_none());
        let others: Vec<(&core::Pod, &str)> = here
            .filter_map(|entry| Some((&entry.pod, entry.pod.metadata.uid.as_deref()?)))
            .filter(|(_, other)| *other != uid)
            .collect();
        self.change(|ledger| {
            for key in keys {
                let users = others.iter().filter(|(pod, _)| policy::runs_with(pod, key));
                ledger.share(key, users.map(|(_, other)| (*other).to_owned()));
            }
        });
    }

    async fn unprepare_all(&self, uid: &str) -> Result<(), Error> {
        let Unprepared { last, shared } = lock(&self.0.ledger).leaving(uid);
        let mut batches: BTreeMap<&str, Batch> = BTreeMap::new();
        for (key, claim, drivers) in &last {
            for driver in drivers {
                batches.entry(driver).or_default().push((key.clone(), claim.clone()));
            }
        }
        let asked = batches.into_iter().map(async |(driver, batch)| {
            let done = self.unprepare_by(driver, &batch).await;
            (batch, done)
        });
        let (mut kept, mut failure) = (BTreeSet::new(), None);
        for (batch, done) in join_all(asked).await {
            if let Err(error) = done {
                kept.extend(batch.into_iter().map(|(key, _)| key));
                failure.get_or_insert(error);
            }
        }
        self.change(|ledger| {
            let given_back = last.iter().map(|(key, _, _)| key).filter(|key| !kept.contains(*key));
            // Before it is gone from the ledger: nobody may see it in neither.
            lock(&self.0.unsaved).note(uid);
            shared.iter().chain(given_back).for_each(|key| ledger.leave(uid, key));
        });
        self.save().await?;
        failure.map_or(Ok(()), Err)
    }

    async fn unprepare_by(&self, driver: &str, batch: &Batch) -> Result<(), Error> {
        let answer = self.plugin(driver)?.unprepare(on_wire(batch)).await?;
        unprepared(batch, answer)
    }

    /// The CDI devices of a container. A record that was lost is made up for by the claims as they are now.
    ///
    /// # Errors
    /// As of [`Self::prepare`].
    pub async fn cdi_devices(
        &self,
        storage: Option<&dyn Storage>,
        pod: &core::Pod,
        container: &core::Container,
    ) -> Result<Vec<String>, Error> {
        let known = || policy::cdi_devices(&lock(&self.0.ledger), pod, container);
        if let Some(devices) = known()? {
            return Ok(devices);
        }
        self.prepare(storage, pod).await?;
        known()?.ok_or(Error::NotOfPod)
    }
}

/// The claims of a pod, as the API server has them.
async fn read(storage: Option<&dyn Storage>, pod: &core::Pod) -> Result<Vec<(ClaimKey, ClaimInfo)>, Error> {
    let wanted = policy::wanted(pod)?;
    let storage = storage.ok_or(Error::NoApiServer)?;
    let asked = wanted.into_iter().map(async |wanted| {
        let ClaimKey { namespace, name } = &wanted.key;
        let claim = storage.resource_claim(namespace, name).await;
        let claim = claim.map_err(|cause| Error::Unread { name: name.clone(), cause })?;
        let info = policy::accept(pod, &wanted, &claim)?;
        Ok((wanted.key, info))
    });
    join_all(asked).await.into_iter().collect()
}

fn on_wire(batch: &Batch) -> Vec<wire::Claim> {
    let claim = |(key, uid): &(ClaimKey, String)| wire::Claim {
        namespace: key.namespace.clone(),
        uid: uid.clone(),
        name: key.name.clone(),
    };
    batch.iter().map(claim).collect()
}
