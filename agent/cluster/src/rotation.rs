//! Maintains the node's identity: renews the client certificate in time, and reloads a replaced kubeconfig or
//! replaced certificates. Clients use the new identity from their next request on.
//!
//! The wall clock is read each minute, so correcting a wrong clock later takes effect.

use std::{
    fmt,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use beelet_base::blocking::blocking;
use beelet_base::work::Work;
use jiff::Timestamp;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backoff::{self, Backoff},
    bootstrap,
    certificate::{Addresses, Error, Lifetime, Store},
    client::Client,
    identity::{Connections, Options, Unlabelled},
    kubeconfig,
};

/// Interval of checks of files and clock.
const CHECK_PERIOD: Duration = Duration::from_secs(60);
/// Fraction of a certificate's lifetime after which it is renewed, and the maximum random addition.
const PART: (f64, f64) = (0.7, 0.2);
/// Time before a certificate's expiry at which warnings start, unless its last tenth starts later.
const EARLY: Duration = Duration::from_secs(7 * 24 * 3600);
/// Interval of these warnings.
const REMINDER: Duration = Duration::from_secs(6 * 3600);

/// Inode, size and modification time of a file.
type Stamp = Option<(u64, u64, i64, i64)>;

/// This node's identity at the API server.
pub struct Identity {
    options: Options,
    newest: watch::Sender<kube::Client>,
    changes: watch::Sender<u64>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Identity {
    pub(crate) fn new(
        options: Options,
        newest: watch::Sender<kube::Client>,
        changes: watch::Sender<u64>,
    ) -> Self {
        Self { options, newest, changes }
    }

    /// Returns a source of separate connections.
    #[must_use]
    pub fn connections(&self) -> Connections {
        Connections::new(&self.options, &self.changes)
    }

    /// Maintains the identity until `stop`.
    pub fn keep(self, client: Client, stop: CancellationToken) -> Work {
        Box::pin(async move {
            stop.run_until_cancelled(self.run(client)).await;
        })
    }

    async fn run(self, client: Client) {
        let (mut known, mut part) = (self.stamps().await, part());
        let (mut reminded, mut said) = (None, None);
        let mut backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(600));
        loop {
            let now = Timestamp::now();
            let lifetime = self.lifetime().await;
            self.measure(lifetime, now);
            let rotates = self.rotates().await;
            if self.options.rotate && !rotates {
                self.keep_embedded().await;
            }
            if self.options.rotate && !rotates && said.replace(()).is_none() {
                warn!(
                    "`rotateCertificates` has no effect: the kubeconfig does not point to {}",
                    Store::new(self.options.cert_dir.clone()).current().display()
                );
            }
            let due = lifetime.filter(|_| rotates).map(|lifetime| lifetime.rotation(part));
            let mut pause = due.map_or(CHECK_PERIOD, |due| {
                let left: Duration = due.duration_since(now).try_into().unwrap_or_default();
                left.clamp(Duration::from_secs(1), CHECK_PERIOD)
            });
            if due.is_some_and(|due| due <= now) {
                match self.renew(&client, lifetime, now).await {
                    Ok(fresh) => {
                        info!(until = %fresh.until, "got a new client certificate");
                        self.reload().await;
                        (known, part) = (self.stamps().await, self::part());
                        let now = Timestamp::now();
                        if fresh.covers(now) {
                            backoff.reset();
                            continue;
                        }
                        // Each further certificate would be due at once, too.
                        warn!(
                            "the new client certificate is valid from {} to {}, and this machine's clock says {now}: set \
                             the clock",
                            fresh.from, fresh.until
                        );
                        pause = backoff.next(None);
                    }
                    Err(error) => {
                        self.options.metrics.errors.inc();
                        warn!("cannot renew the client certificate, retrying: {error}");
                        pause = backoff.next(None);
                    }
                }
            }
            if let Some(lifetime) = lifetime {
                remind(lifetime, now, rotates, &mut reminded);
            }
            sleep(pause).await;
            let stamps = self.stamps().await;
            if stamps != known {
                info!(kubeconfig = %self.options.kubeconfig.display(), "the kubeconfig or its certificates have changed");
                known = stamps;
                self.reload().await;
            }
        }
    }

    /// Requests a certificate with the current identity, or with the bootstrap identity if the current one
    /// expired.
    async fn renew(&self, client: &Client, old: Option<Lifetime>, now: Timestamp) -> Result<Lifetime, Error> {
        let store = Store::new(self.options.cert_dir.clone());
        let expired = old.is_none_or(|old| !old.covers(now));
        let helper = match self.options.bootstrap.as_deref().filter(|_| expired) {
            Some(path) => bootstrap::client(path, &self.options).await.ok(),
            None => None,
        };
        let client = helper.as_ref().unwrap_or(client);
        store.renew(client, &self.options.node_name, &Addresses::default()).await
    }

    /// Reloads the files and switches all clients to the new connection.
    async fn reload(&self) {
        match self.connections().open().await {
            Ok(client) => {
                self.newest.send_replace(client);
                self.changes.send_modify(|changes| *changes += 1);
            }
            Err(error) => warn!("cannot reload the kubeconfig; keeping the current identity: {error}"),
        }
    }

    async fn lifetime(&self) -> Option<Lifetime> {
        let path = self.options.kubeconfig.clone();
        blocking("the kubeconfig", move || kubeconfig::lifetime(&path)).await.ok().flatten()
    }

    /// Returns true if rotation is enabled and the kubeconfig uses the agent's own certificate.
    async fn rotates(&self) -> bool {
        let (path, current) =
            (self.options.kubeconfig.clone(), Store::new(self.options.cert_dir.clone()).current());
        let pointed = blocking("the kubeconfig", move || {
            let user = kubeconfig::config(&path).ok()?.auth_info;
            user.client_certificate.filter(|_| user.client_certificate_data.is_none()).map(PathBuf::from)
        });
        self.options.rotate && pointed.await == Some(current)
    }

    /// Copies a certificate that the kubeconfig contains into the folder of certificates: see
    /// [`keep_embedded`].
    async fn keep_embedded(&self) {
        let (path, store) = (self.options.kubeconfig.clone(), Store::new(self.options.cert_dir.clone()));
        let current = store.current();
        match blocking("the kubeconfig", move || keep_embedded(&path, &store, Timestamp::now())).await {
            Ok(true) => info!("copied the kubeconfig's client certificate to {}", current.display()),
            Ok(false) => {}
            Err(error) => warn!("cannot copy the kubeconfig's client certificate: {error}"),
        }
    }

    async fn stamps(&self) -> Vec<(PathBuf, Stamp)> {
        let path = self.options.kubeconfig.clone();
        let stamp = |path: PathBuf| {
            let stamp = std::fs::metadata(&path).ok();
            let stamp = stamp.map(|file| (file.ino(), file.size(), file.mtime(), file.mtime_nsec()));
            (path, stamp)
        };
        blocking("the kubeconfig", move || kubeconfig::files(&path).into_iter().map(stamp).collect()).await
    }

    fn measure(&self, lifetime: Option<Lifetime>, now: Timestamp) {
        if let Some(lifetime) = lifetime {
            let left = lifetime.until.duration_since(now).as_secs_f64();
            self.options.metrics.ttl.get_or_create(&Unlabelled::new()).set(left);
        }
    }
}

/// Copies the certificate and the key that a kubeconfig contains into an empty store, as the kubelet's store
/// does with its first certificate; returns true if it did. kubeadm waits for the copy, then points the
/// kubeconfig of the first node to it (`kubelet-finalize`), and from then on the agent renews the
/// certificate. Blocking.
fn keep_embedded(kubeconfig: &Path, store: &Store, now: Timestamp) -> Result<bool, Error> {
    if store.current().symlink_metadata().is_ok() {
        return Ok(false);
    }
    let Ok(Some((certificate, key))) = kubeconfig::embedded(kubeconfig) else { return Ok(false) };
    store.install(&certificate, &key, now).map(|()| true)
}

/// Returns a random fraction of a certificate's lifetime, so that nodes of the same age don't renew at the
/// same time.
pub(crate) fn part() -> f64 {
    let (least, more) = PART;
    least + more * backoff::random()
}

fn remind(lifetime: Lifetime, now: Timestamp, rotates: bool, reminded: &mut Option<Instant>) {
    let last_tenth = lifetime.rotation(0.9);
    let early = lifetime.until.checked_sub(EARLY).unwrap_or(lifetime.until).max(last_tenth);
    if now < early || reminded.is_some_and(|at| at.elapsed() < REMINDER) {
        return;
    }
    *reminded = Some(Instant::now());
    let hint = if rotates {
        "see earlier warnings about its renewal"
    } else {
        "the agent does not renew it; replace the certificate"
    };
    let word = if now < lifetime.until { "expires" } else { "has expired" };
    warn!("the client certificate {word} at {}: {hint}", lifetime.until);
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;

    use super::*;

    #[test]
    fn certificates_are_renewed_in_the_last_third_of_their_lives() {
        let parts: Vec<f64> = (0..100).map(|_| part()).collect();
        assert!(parts.iter().all(|part| (0.7..=0.9).contains(part)), "{parts:?}");
        assert!(parts.iter().any(|part| *part != parts[0]));
    }

    #[test]
    fn a_certificate_in_the_kubeconfig_is_copied_once() {
        let dir = tempfile::tempdir().unwrap();
        let base64 = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let made = rcgen::generate_simple_self_signed(vec!["n1".to_owned()]).unwrap();
        let (certificate, key) = (made.cert.pem(), made.signing_key.serialize_pem());
        let write = |user: serde_json::Value| {
            let kubeconfig = serde_json::json!({
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:6443"}}],
                "users": [{"name": "u", "user": user}],
            });
            let path = dir.path().join("kubelet.conf");
            std::fs::write(&path, kubeconfig.to_string()).unwrap();
            path
        };
        let store = Store::new(dir.path().join("pki"));
        let keep = |path: &Path| keep_embedded(path, &store, Timestamp::now()).unwrap();
        assert!(!keep(&write(serde_json::json!({ "token": "t" }))), "the kubeconfig has no certificate");
        let user = serde_json::json!({
            "client-certificate-data": base64(&certificate), "client-key-data": base64(&key),
        });
        assert!(keep(&write(user.clone())));
        let kept = std::fs::read_to_string(store.current()).unwrap();
        assert!(kept.contains(certificate.trim()) && kept.contains(key.trim()), "{kept}");
        assert!(store.in_use().is_some());
        assert!(!keep(&write(user)), "the store has a certificate");
    }

    #[test]
    fn a_certificate_that_ends_soon_is_warned_of_now_and_then() {
        let day = 24 * 3600;
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let year = Lifetime { from: at(0), until: at(365 * day) };
        let mut reminded = None;
        remind(year, at(300 * day), false, &mut reminded);
        assert_eq!(reminded, None);
        remind(year, at(360 * day), false, &mut reminded);
        let first = reminded;
        assert!(first.is_some());
        remind(year, at(361 * day), false, &mut reminded);
        assert_eq!(reminded, first);
        // A certificate that is valid for a day causes warnings only in its last tenth.
        let mut reminded = None;
        remind(Lifetime { from: at(0), until: at(day) }, at(day / 2), true, &mut reminded);
        assert_eq!(reminded, None);
    }
}
