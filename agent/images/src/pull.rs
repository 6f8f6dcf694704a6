//! Gets images as their pull policy says: a bounded number at a time, at a bounded rate, one image once.
//!
//! How long a pod waits after a pull that failed is its worker's business (`ErrImagePull`, then
//! `ImagePullBackOff`, 10 s doubling to 300 s). Nobody else may pull.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use beelet_proto::cri;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::lease::{Lease, Leases};
use super::reference;
use beelet_cri::{Error, Runtime};
use beelet_model::pod::ImageUser;

/// How pulls are limited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Pulls at a time; None: as many as are asked for.
    pub parallel: Option<usize>,
    /// Pulls per second, on average; 0: as many as are asked for.
    pub per_second: f64,
    /// Pulls that may begin at once after a quiet time.
    pub burst: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { parallel: Some(5), per_second: 5.0, burst: 10 }
    }
}

/// An image that is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// As the runtime identifies it.
    pub id: String,
    /// User and group that it runs as.
    pub user: ImageUser,
}

/// Why there is no image for a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PullError {
    /// The word that the pod's status shows.
    pub reason: &'static str,
    /// A sentence.
    pub message: String,
    transient: bool,
}

impl PullError {
    fn new(reason: &'static str, message: String) -> Self {
        Self { reason, message, transient: false }
    }

    fn of_runtime(reason: &'static str, error: &Error) -> Self {
        Self { reason, message: error.to_string(), transient: error.is_transient() }
    }

    /// Returns true if the runtime wasn't there or gave no answer: nothing is known against the image.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        self.transient
    }
}

type Pulled = Result<String, Error>;
/// By image, and whether it is pulled though it may be here.
type UnderWay = HashMap<(String, Freshness), WeakShared<BoxFuture<'static, Pulled>>>;

/// When an image is pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Freshness {
    /// Whatever is here.
    Always,
    /// Unless it has come since it was looked for.
    IfAbsent,
}

/// Pulls images, within [`Limits`], and each once at a time.
#[derive(Debug)]
pub struct Puller {
    runtime: Runtime,
    slots: Arc<Semaphore>,
    bucket: Arc<Mutex<Bucket>>,
    under_way: Mutex<UnderWay>,
}

impl Puller {
    /// A puller with these limits.
    pub fn new(runtime: Runtime, limits: Limits) -> Self {
        let slots = limits.parallel.unwrap_or(Semaphore::MAX_PERMITS).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            runtime,
            slots: Arc::new(Semaphore::new(slots)),
            bucket: Arc::new(Mutex::new(Bucket::new(limits, Instant::now()))),
            under_way: Mutex::default(),
        }
    }

    /// The image, pulled if `policy` (`Always`, `IfNotPresent`, `Never`) says so. `auths` are tried in their
    /// order; none at all is tried where there are none. Dropped, it gives up, unless others wait for the
    /// same pull.
    ///
    /// # Errors
    /// With the word for the pod's status, as users know it from the kubelet.
    pub async fn image(
        &self,
        image: &str,
        policy: &str,
        auths: Vec<cri::AuthConfig>,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<Image, PullError> {
        if let Err(why) = reference::parse(image) {
            return Err(PullError::new("InvalidImageName", format!("the image name {image:?} {why}")));
        }
        let freshness = if policy == "Always" { Freshness::Always } else { Freshness::IfAbsent };
        if freshness == Freshness::IfAbsent {
            if let Some(present) = self.status(image).await? {
                return Ok(present);
            }
            if policy == "Never" {
                let message =
                    format!("image {image} is not on this node, and its pull policy is Never: import it");
                return Err(PullError::new("ErrImageNeverPull", message));
            }
        }
        let id = self.pull(image, freshness, auths, sandbox).await?;
        // What the runtime calls the image is known; who it runs as is not.
        let status = self.status(&id).await?;
        Ok(Image { user: status.map(|image| image.user).unwrap_or_default(), id })
    }

    /// The same, and nobody removes it as long as the lease lives: it begins before the image is looked for.
    ///
    /// # Errors
    /// As for [`Puller::image`].
    pub async fn leased(
        &self,
        leases: &Leases,
        image: &str,
        policy: &str,
        auths: Vec<cri::AuthConfig>,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<(Image, Lease), PullError> {
        let mut lease = leases.acquire(image).await;
        let mut found = self.image(image, policy, auths.clone(), sandbox).await?;
        // An image that was removed just now, under another of its names, is looked for once more; this time
        // it is held.
        if !lease.extend(&found.id).await {
            found = self.image(image, policy, auths, sandbox).await?;
            let _ = lease.extend(&found.id).await;
        }
        Ok((found, lease))
    }

    async fn status(&self, image: &str) -> Result<Option<Image>, PullError> {
        let status = self.runtime.image_status(image).await;
        let status = status.map_err(|e| PullError::of_runtime("ImageInspectError", &e))?;
        Ok(status.map(|image| Image {
            user: ImageUser { uid: image.uid.map(|uid| uid.value), name: image.username },
            id: image.id,
        }))
    }

    async fn pull(
        &self,
        image: &str,
        freshness: Freshness,
        auths: Vec<cri::AuthConfig>,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<String, PullError> {
        let mut failed = None;
        let none = auths.is_empty().then_some(None);
        for auth in auths.into_iter().map(Some).chain(none) {
            match self.pull_once(image, freshness, auth, sandbox).await {
                Ok(id) => return Ok(id),
                Err(error) => failed = Some(error),
            }
        }
        let reason = "ErrImagePull";
        Err(failed.map_or_else(
            || PullError::new(reason, format!("image {image} was not pulled")),
            |error| PullError::of_runtime(reason, &error),
        ))
    }

    /// One pull, or a share in one that is under way. Those with credentials are never shared: what one pod
    /// may have must not come to another by accident.
    fn pull_once(
        &self,
        image: &str,
        freshness: Freshness,
        auth: Option<cri::AuthConfig>,
        sandbox: &cri::PodSandboxConfig,
    ) -> Shared<BoxFuture<'static, Pulled>> {
        let is_shared = auth.is_none();
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.retain(|_, pull| pull.upgrade().is_some_and(|pull| pull.peek().is_none()));
        // One that is pulled in any case is fresh enough for everybody.
        let fit = [Freshness::Always, freshness].map(|freshness| (image.to_owned(), freshness));
        let mut shared = fit.iter().filter(|_| is_shared).filter_map(|pull| under_way.get(pull)?.upgrade());
        if let Some(pull) = shared.next() {
            return pull;
        }
        let pull = limited(
            self.runtime.clone(),
            Arc::clone(&self.slots),
            Arc::clone(&self.bucket),
            image.to_owned(),
            freshness,
            auth,
            sandbox.clone(),
        );
        let pull = pull.boxed().shared();
        if let Some(weak) = pull.downgrade().filter(|_| is_shared) {
            under_way.insert((image.to_owned(), freshness), weak);
        }
        pull
    }
}

/// A pull that waits for its turn.
async fn limited(
    runtime: Runtime,
    slots: Arc<Semaphore>,
    bucket: Arc<Mutex<Bucket>>,
    image: String,
    freshness: Freshness,
    auth: Option<cri::AuthConfig>,
    sandbox: cri::PodSandboxConfig,
) -> Pulled {
    // The semaphore is never closed.
    let _slot = slots.acquire_owned().await.ok();
    // Another pull of it may have ended since the pod looked for it.
    if freshness == Freshness::IfAbsent
        && let Ok(Some(here)) = runtime.image_status(&image).await
    {
        return Ok(here.id);
    }
    let start_at = bucket.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now());
    tokio::time::sleep_until(start_at).await;
    let started = Instant::now();
    let pulled = runtime.pull_image(&image, auth, &sandbox).await;
    if pulled.is_ok() {
        tracing::info!(image, seconds = started.elapsed().as_secs_f32(), "image pulled");
    }
    pulled
}

/// A token bucket: a token for each pull, filled at a rate, up to the burst.
#[derive(Debug)]
struct Bucket {
    period: Duration,
    burst: u32,
    /// When the bucket was or will be empty: tokens are periods that have gone by since.
    empty_at: Instant,
}

impl Bucket {
    fn new(limits: Limits, now: Instant) -> Self {
        let period = match limits.per_second {
            rate if rate > 0.0 => Duration::try_from_secs_f64(1.0 / rate).unwrap_or(Duration::ZERO),
            _ => Duration::ZERO,
        };
        let burst = limits.burst.max(1);
        Self { period, burst, empty_at: now.checked_sub(period * burst).unwrap_or(now) }
    }

    /// Takes a token; when it may be used.
    fn take(&mut self, now: Instant) -> Instant {
        let full = now.checked_sub(self.period * self.burst).unwrap_or(now);
        self.empty_at = self.empty_at.max(full) + self.period;
        self.empty_at.max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pulls_begin_in_a_burst_and_then_at_the_rate() {
        let start = Instant::now() + Duration::from_secs(1000);
        let mut bucket = Bucket::new(Limits { parallel: None, per_second: 2.0, burst: 3 }, start);
        let mut waits = |at: Duration, times: usize| -> Vec<u128> {
            (0..times).map(|_| (bucket.take(start + at) - (start + at)).as_millis()).collect()
        };
        assert_eq!(waits(Duration::ZERO, 5), [0, 0, 0, 500, 1000]);
        assert_eq!(waits(Duration::from_secs(1), 1), [500]);
        // However long it was quiet, the burst is all there is.
        assert_eq!(waits(Duration::from_secs(3600), 4), [0, 0, 0, 500]);
    }

    #[test]
    fn a_rate_of_nothing_is_no_limit() {
        let now = Instant::now();
        let mut bucket = Bucket::new(Limits { parallel: None, per_second: 0.0, burst: 1 }, now);
        assert!((0..100).all(|_| bucket.take(now) == now));
    }
}
