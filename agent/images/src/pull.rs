//! Pulls images as their pull policy says: within a limit of parallel pulls and a rate limit, and each image
//! once at a time. A pod uses an image on the node if it may ([`access`](super::access)), and pulls it again
//! otherwise.
//!
//! The pod's worker decides how long to wait after a failed pull (`ErrImagePull`, then `ImagePullBackOff`, 10
//! s doubling to 300 s). No other part may pull.

use std::collections::HashMap;
use std::future::ready;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use beelet_base::clock::After as _;
use beelet_proto::cri;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use k8s_openapi::api::core::v1::Secret;
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::Instant;

use super::access::Access;
use super::credentials::{Credential, Keys, of_pod};
use super::lease::{Lease, Leases};
use super::providers::Asker;
use super::pull_metrics::Request;
use super::reference;
use beelet_cri::{Error, Runtime};
use beelet_model::pod::ImageUser;
use beelet_policy::images::credentials::OfPod;

/// Limits of pulls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Maximum number of parallel pulls; None: unlimited.
    pub parallel: Option<usize>,
    /// Average pulls per second; 0: unlimited.
    pub per_second: f64,
    /// Pulls that may start at once after an idle period.
    pub burst: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { parallel: Some(5), per_second: 5.0, burst: 10 }
    }
}

/// Image on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The runtime's id.
    pub id: String,
    /// User and group that it runs as.
    pub user: ImageUser,
    /// Its size in bytes.
    pub size: u64,
}

/// Request of a pod for an image.
pub struct Wanted<'a> {
    /// Its name.
    pub image: &'a str,
    /// `Always`, `IfNotPresent` or `Never`.
    pub policy: &'a str,
    /// The sandbox of the pod.
    pub sandbox: &'a cri::PodSandboxConfig,
    /// The pod's existing image pull secrets.
    pub secrets: Vec<&'a Secret>,
    /// The pod's service account; empty if it has none.
    pub service_account: &'a str,
    /// Receives the progress.
    pub tell: &'a (dyn Fn(Progress<'_>) + Send + Sync),
}

/// Progress of a request for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// The image is on the node, and the pod may use it.
    Here,
    /// The image is about to be pulled.
    Pulling,
    /// The image was pulled: duration of the pull, duration including the wait for its turn, and the image's
    /// size in bytes.
    Pulled(Duration, Duration, u64),
    /// The pull failed, with the cause.
    Failed(&'a str),
}

impl Wanted<'_> {
    fn asker(&self) -> Asker {
        let metadata = self.sandbox.metadata.clone().unwrap_or_default();
        Asker {
            namespace: metadata.namespace,
            pod: metadata.name,
            uid: metadata.uid,
            service_account: self.service_account.to_owned(),
        }
    }
}

/// Error that leaves a container without an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PullError {
    /// Reason in the pod's status.
    pub reason: &'static str,
    /// Message in the pod's status.
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

    /// Returns the error of a pull. Runtimes begin their message with one of these words if they know more
    /// (`evalCRIPullErr`).
    fn of_pull(error: &Error) -> Self {
        let known = ["RegistryUnavailable", "SignatureValidationFailed"];
        let reason = known.into_iter().find(|known| error.message.starts_with(known));
        Self::of_runtime(reason.unwrap_or("ErrImagePull"), error)
    }

    /// Returns true if the runtime was unavailable or did not answer, so that the image may be fine.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        self.transient
    }
}

/// Result of a pull, own or shared.
#[derive(Clone, Debug)]
struct Fetched {
    id: String,
    /// Duration of the pull; None: another one had completed in the meantime.
    took: Option<Duration>,
}

type Pulled = Result<Fetched, Error>;
/// Pulls under way, by image and freshness.
type UnderWay = HashMap<(String, Freshness), WeakShared<BoxFuture<'static, Pulled>>>;

/// Condition of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Freshness {
    /// Pull even if the image is on the node.
    Always,
    /// Pull unless the image has arrived since it was looked up.
    IfAbsent,
}

/// Pulls images within [`Limits`], each once at a time.
#[derive(Debug)]
pub struct Puller {
    runtime: Runtime,
    keys: Keys,
    access: Arc<Access>,
    slots: Arc<Semaphore>,
    bucket: Arc<Mutex<Bucket>>,
    under_way: Mutex<UnderWay>,
}

impl Puller {
    /// Creates a puller with these limits and the node's credentials.
    pub fn new(runtime: Runtime, limits: Limits, keys: Keys, access: Arc<Access>) -> Self {
        let slots = limits.parallel.unwrap_or(Semaphore::MAX_PERMITS).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            runtime,
            keys,
            access,
            slots: Arc::new(Semaphore::new(slots)),
            bucket: Arc::new(Mutex::new(Bucket::new(limits, Instant::now()))),
            under_way: Mutex::default(),
        }
    }

    /// Records of the credentials that images were pulled with.
    #[must_use]
    pub fn access(&self) -> &Arc<Access> {
        &self.access
    }

    /// Returns the image, pulled if its policy says so or if the pod may not use the one on the node.
    /// Credentials are tried in order; without any, the pull is anonymous. A dropped call stops its pull
    /// unless others wait for it.
    ///
    /// # Errors
    /// The reason is for the pod's status, as users know it from the kubelet.
    pub async fn image(&self, wanted: &Wanted<'_>) -> Result<Image, PullError> {
        let mut request = Request::default();
        let found = self.find(wanted, &mut request).await;
        self.access.metrics().requested(wanted.policy, request);
        found
    }

    async fn find(&self, wanted: &Wanted<'_>, request: &mut Request) -> Result<Image, PullError> {
        let Wanted { image, policy, .. } = *wanted;
        if let Err(why) = reference::parse(image) {
            return Err(PullError::new("InvalidImageName", format!("the image name {image:?} {why}")));
        }
        let credentials = OnceCell::new();
        let mut freshness = Freshness::Always;
        if policy != "Always" {
            let here = self.status(image).await?;
            request.is_here = Some(here.is_some());
            match here {
                Some(here) if self.is_granted(wanted, &here.id, &credentials).await? => {
                    request.must_pull = Some(false);
                    (wanted.tell)(Progress::Here);
                    return Ok(here);
                }
                // Reported as missing in either case: the pod must not learn that the image is on the node.
                _ if policy == "Never" => {
                    let message = format!(
                        "image {image} is not present with pull policy of Never: import the image, or change `imagePullPolicy`"
                    );
                    return Err(PullError::new("ErrImageNeverPull", message));
                }
                Some(_) => {}
                None => freshness = Freshness::IfAbsent,
            }
        }
        request.must_pull = Some(true);
        self.fetch(wanted, freshness, &credentials).await
    }

    /// Pulls the image with the pod's credentials.
    async fn fetch(
        &self,
        wanted: &Wanted<'_>,
        mut freshness: Freshness,
        credentials: &OnceCell<Vec<Credential>>,
    ) -> Result<Image, PullError> {
        let Wanted { image, tell, .. } = *wanted;
        let credentials = self.credentials(wanted, credentials).await?;
        tell(Progress::Pulling);
        let began = Instant::now();
        loop {
            if let Err(error) = self.access.begin(image).await {
                let message = format!("failed to record image pull intent: {error}");
                return Err(PullError::new("ErrImagePull", message));
            }
            let unfinished = Unfinished { access: Some(Arc::clone(&self.access)), image };
            let pull = self.pull(image, freshness, credentials, wanted.sandbox);
            let (fetched, used) = pull.await.inspect_err(|error| tell(Progress::Failed(&error.message)))?;
            // After a pull the runtime's id of the image is known even if its status (user, size) is not.
            let status = self.status(&fetched.id).await?;
            let here = status.unwrap_or_else(|| Image {
                id: fetched.id.clone(),
                user: ImageUser::default(),
                size: 0,
            });
            match fetched.took {
                Some(took) => {
                    unfinished.finish();
                    self.access.end(image, Some((here.id.as_str(), Credential::record(used)))).await;
                    tell(Progress::Pulled(took, began.elapsed(), here.size));
                    return Ok(here);
                }
                // Another request pulled the image in the meantime, with other credentials.
                None if self.is_granted_to(image, &here.id, credentials).await => {
                    tell(Progress::Here);
                    return Ok(here);
                }
                None => freshness = Freshness::Always,
            }
        }
    }

    /// Returns the image with a lease, acquired before the lookup, that protects it from removal.
    ///
    /// # Errors
    /// As for [`Puller::image`].
    pub async fn leased(&self, leases: &Leases, wanted: &Wanted<'_>) -> Result<(Image, Lease), PullError> {
        let mut lease = leases.acquire(wanted.image).await;
        let mut found = self.image(wanted).await?;
        // An image just removed under another of its names is looked up once more, now under the lease.
        if !lease.extend(&found.id).await {
            found = self.image(wanted).await?;
            let _ = lease.extend(&found.id).await;
        }
        Ok((found, lease))
    }

    /// Returns the pod's credentials for the image, searched once.
    async fn credentials<'c>(
        &self,
        wanted: &Wanted<'_>,
        known: &'c OnceCell<Vec<Credential>>,
    ) -> Result<&'c [Credential], PullError> {
        let find = || async {
            let found = self.keys.of(wanted.image, &wanted.secrets, &wanted.asker()).await;
            found.map_err(|error| PullError::new("ErrImagePull", error.to_string()))
        };
        known.get_or_try_init(find).await.map(Vec::as_slice)
    }

    /// Returns true if the pod may use the image on the node.
    async fn is_granted(
        &self,
        wanted: &Wanted<'_>,
        id: &str,
        known: &OnceCell<Vec<Credential>>,
    ) -> Result<bool, PullError> {
        let mut failed = None;
        let own = async {
            match self.credentials(wanted, known).await {
                Ok(all) => of_pod(all),
                Err(error) => {
                    failed = Some(error);
                    OfPod::default()
                }
            }
        };
        let granted = self.access.is_granted(wanted.image, id, own).await;
        failed.map_or(Ok(granted), Err)
    }

    async fn is_granted_to(&self, image: &str, id: &str, credentials: &[Credential]) -> bool {
        self.access.is_granted(image, id, ready(of_pod(credentials))).await
    }

    async fn status(&self, image: &str) -> Result<Option<Image>, PullError> {
        let status = self.runtime.images.status(image).await;
        let status = status.map_err(|e| PullError::of_runtime("ImageInspectError", &e))?;
        Ok(status.map(|image| Image {
            user: ImageUser { uid: image.uid.map(|uid| uid.value), name: image.username },
            id: image.id,
            size: image.size,
        }))
    }

    /// Tries the credentials in order; returns the ones that worked.
    async fn pull<'c>(
        &self,
        image: &str,
        freshness: Freshness,
        credentials: &'c [Credential],
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<(Fetched, Option<&'c Credential>), PullError> {
        let mut failed = None;
        let none = credentials.is_empty().then_some(None);
        for used in credentials.iter().map(Some).chain(none) {
            let auth = used.map(|credential| credential.auth.clone());
            match self.pull_once(image, freshness, auth, sandbox).await {
                Ok(fetched) => return Ok((fetched, used)),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.map_or_else(
            || PullError::new("ErrImagePull", format!("image {image} was not pulled")),
            |error| PullError::of_pull(&error),
        ))
    }

    /// Starts a pull or joins one under way. Pulls with credentials are never shared: a pod must not get
    /// another pod's image by accident.
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
        // An unconditional pull is fresh enough for all requests.
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

/// Pulls an image when the limits allow.
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
    // Another pull of the image may have completed since the pod looked it up.
    if freshness == Freshness::IfAbsent
        && let Ok(Some(here)) = runtime.images.status(&image).await
    {
        return Ok(Fetched { id: here.id, took: None });
    }
    let start_at = bucket.lock().unwrap_or_else(PoisonError::into_inner).reserve(Instant::now());
    tokio::time::sleep_until(start_at).await;
    let started = Instant::now();
    let pulled = runtime.images.pull(&image, auth, &sandbox).await;
    let took = started.elapsed();
    pulled.map(|id| {
        tracing::info!(image, seconds = took.as_secs_f32(), "pulled an image");
        Fetched { id, took: Some(took) }
    })
}

/// Record of a pull under way. Dropping it before `finish` records a failure.
struct Unfinished<'a> {
    access: Option<Arc<Access>>,
    image: &'a str,
}

impl Unfinished<'_> {
    /// Disarms the guard: the caller records the result.
    fn finish(mut self) {
        self.access = None;
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(access) = self.access.take() {
            let image = self.image.to_owned();
            tokio::spawn(async move { access.end(&image, None).await });
        }
    }
}

/// Token bucket with one token per pull, filled at a rate up to the burst.
#[derive(Debug)]
struct Bucket {
    period: Duration,
    burst: u32,
    /// Time at which the bucket was or will be empty: the tokens are the periods elapsed since.
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

    /// Takes a token; returns the time from which it may be used.
    fn reserve(&mut self, now: Instant) -> Instant {
        let full = now.checked_sub(self.period * self.burst).unwrap_or(now);
        self.empty_at = self.empty_at.max(full).after(self.period);
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
            (0..times).map(|_| (bucket.reserve(start + at) - (start + at)).as_millis()).collect()
        };
        assert_eq!(waits(Duration::ZERO, 5), [0, 0, 0, 500, 1000]);
        assert_eq!(waits(Duration::from_secs(1), 1), [500]);
        // However long the idle period, the burst is the limit.
        assert_eq!(waits(Duration::from_secs(3600), 4), [0, 0, 0, 500]);
    }

    #[test]
    fn a_rate_of_nothing_is_no_limit() {
        let now = Instant::now();
        let mut bucket = Bucket::new(Limits { parallel: None, per_second: 0.0, burst: 1 }, now);
        assert!((0..100).all(|_| bucket.reserve(now) == now));
    }
}
