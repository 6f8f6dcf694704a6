//! Prepares a pod's claims before its sandbox is created, and unprepares them when its containers have
//! terminated.

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
    /// Prepares the claims of a pod as the API server has them now. Skips prepared claims.
    ///
    /// # Errors
    /// The pod may not use a claim, or a driver failed or is missing.
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
        // Nothing is recorded before all claims are read: a pod whose driver was never here can be deleted.
        let claims = read(storage, pod).await?;
        for driver in claims.iter().flat_map(|(_, info)| info.drivers.keys()) {
            self.0.drivers.plugin(driver)?;
        }
        let keys: BTreeSet<ClaimKey> = claims.iter().map(|(key, _)| key.clone()).collect();
        let _held = self.0.claims.hold(&keys).await;
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        self.0.claims.change(|ledger| ledger.enter(uid, &claims))?;
        self.0.claims.save().await?;
        let batches = lock(&self.0.claims.ledger).unprepared(&keys);
        if batches.is_empty() {
            return Ok(());
        }
        let asked = batches.into_iter().map(|(driver, batch)| self.prepare_by(driver, batch));
        join_all(asked).await.into_iter().collect::<Result<(), Error>>()?;
        self.0.claims.change(|ledger| ledger.set_prepared(&keys));
        self.0.claims.save().await
    }

    async fn prepare_by(&self, driver: String, batch: Batch) -> Result<(), Error> {
        let answer = self.0.drivers.plugin(&driver)?.prepare(on_wire(&batch)).await?;
        for (key, devices) in prepared(&batch, answer)? {
            self.0.claims.change(|ledger| ledger.set_devices(key, &driver, devices));
        }
        Ok(())
    }

    /// Unprepares the claims of a pod, except those that other pods use according to the record or, if it was
    /// lost, the table. Calls no driver if the pod holds none.
    ///
    /// # Errors
    /// A driver failed or is missing: its claims stay recorded. Or the record cannot be written:
    /// [`Self::has`] stays true until it is.
    pub async fn unprepare(&self, uid: &str, table: &PodTable) -> Result<(), Error> {
        let keys: BTreeSet<ClaimKey> = lock(&self.0.claims.ledger).of_pod(uid).into_iter().collect();
        if keys.is_empty() {
            // All claims are unprepared, but the record on disk may still list them for the pod.
            return if lock(&self.0.claims.unsaved).has(uid) { self.0.claims.save().await } else { Ok(()) };
        }
        let began = Instant::now();
        let _held = self.0.claims.hold(&keys).await;
        if self.0.claims.lost {
            self.find_users(uid, &keys, table);
        }
        let unprepared = self.unprepare_all(uid).await;
        self.0.metrics.operated("UnprepareResources", unprepared.is_err(), began.elapsed());
        unprepared
    }

    /// Adds other running users of these claims. They started before the record was lost, otherwise the
    /// ledger would list them.
    fn find_users(&self, uid: &str, keys: &BTreeSet<ClaimKey>, table: &PodTable) {
        let here = table.pods.values().filter(|entry| entry.ended().is_none());
        let others: Vec<(&core::Pod, &str)> = here
            .filter_map(|entry| Some((&entry.pod, entry.pod.metadata.uid.as_deref()?)))
            .filter(|(_, other)| *other != uid)
            .collect();
        self.0.claims.change(|ledger| {
            for key in keys {
                let users = others.iter().filter(|(pod, _)| policy::runs_with(pod, key));
                ledger.share(key, users.map(|(_, other)| (*other).to_owned()));
            }
        });
    }

    async fn unprepare_all(&self, uid: &str) -> Result<(), Error> {
        let Unprepared { last, shared } = lock(&self.0.claims.ledger).leaving(uid);
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
        self.0.claims.change(|ledger| {
            let done = last.iter().map(|(key, _, _)| key).filter(|key| !kept.contains(*key));
            // Added before it leaves the ledger, so that it is always in one of the two.
            lock(&self.0.claims.unsaved).add(uid);
            shared.iter().chain(done).for_each(|key| ledger.leave(uid, key));
        });
        self.0.claims.save().await?;
        failure.map_or(Ok(()), Err)
    }

    async fn unprepare_by(&self, driver: &str, batch: &Batch) -> Result<(), Error> {
        let answer = self.0.drivers.plugin(driver)?.unprepare(on_wire(batch)).await?;
        unprepared(batch, answer)
    }

    /// Returns the CDI devices of a container. If the record was lost, prepares the claims as they are now.
    ///
    /// # Errors
    /// As for [`Self::prepare`].
    pub async fn cdi_devices(
        &self,
        storage: Option<&dyn Storage>,
        pod: &core::Pod,
        container: &core::Container,
    ) -> Result<Vec<String>, Error> {
        let known = || policy::cdi_devices(&lock(&self.0.claims.ledger), pod, container);
        if let Some(devices) = known()? {
            return Ok(devices);
        }
        self.prepare(storage, pod).await?;
        known()?.ok_or(Error::NotOfPod)
    }
}

/// Reads the claims of a pod from the API server.
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
