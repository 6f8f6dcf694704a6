//! Credential plugins: programs under `exec` in a kubeconfig that return the node's credential for the API
//! server (client-go's `plugin/pkg/client/auth/exec`).
//!
//! At most one run is active at a time, with a timeout, in a task that never blocks a thread. Requests use
//! the old credential until it expires, so a hanging plugin delays only requests without a valid credential.
//! Must never log a credential.

mod exec;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use beelet_base::blocking::blocking;
use futures::{FutureExt, future::BoxFuture};
use http::{HeaderValue, Request, Response, StatusCode, header::AUTHORIZATION};
use jiff::{SignedDuration, Timestamp};
use kube::{Config, config::AuthInfo};
use tokio::{sync::watch, time::Instant};
use tower::{BoxError, Service, ServiceExt};
use tracing::{info, warn};

pub(crate) use self::exec::{Error, Exec};

/// Minimum time between the end of a run and the next start.
const PAUSE: Duration = Duration::from_secs(1);
/// Minimum age of a refused credential for a replacement.
const YOUNG: Duration = Duration::from_secs(10);
/// Divisor of a credential's lifetime: the credential is replaced when less than this fraction of its
/// lifetime and less than [`LAST`] is left.
const LAST_PART: i32 = 5;
/// Maximum remaining time of a credential that is replaced.
const LAST: SignedDuration = SignedDuration::from_mins(5);

/// A certificate and its key, in PEM.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// A plugin's credential.
pub(crate) struct Credential {
    /// Value of the header `Authorization`.
    pub(crate) token: Option<HeaderValue>,
    pub(crate) pair: Option<Pair>,
    pub(crate) expires: Option<Timestamp>,
    /// Time of issue, by the wall clock and the monotonic clock.
    pub(crate) given: (Timestamp, Instant),
}

impl Credential {
    fn holds(&self, now: Timestamp) -> bool {
        self.expires.is_none_or(|expires| now < expires)
    }

    /// Returns true in the last part of the lifetime.
    fn is_ending(&self, now: Timestamp) -> bool {
        self.expires.is_some_and(|expires| {
            let life = expires.duration_since(self.given.0);
            expires.duration_since(now) < (life / LAST_PART).min(LAST)
        })
    }
}

/// End time and result of a run.
type Ended = (Instant, Result<Arc<Credential>, Error>);

/// A plugin and its last result.
pub(crate) struct Plugin {
    exec: Exec,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    newest: Option<Arc<Credential>>,
    /// True if the server has refused the newest credential.
    refused: bool,
    /// The last run; its value is None while the plugin runs.
    run: Option<watch::Receiver<Option<Ended>>>,
    failing: bool,
}

impl Plugin {
    pub(crate) fn new(exec: Exec) -> Arc<Self> {
        Arc::new(Self { exec, state: Mutex::default() })
    }

    /// Returns the newest credential. Waits for the plugin only without a valid credential.
    pub(crate) async fn credential(self: &Arc<Self>) -> Result<Arc<Credential>, Error> {
        let mut run = {
            let (now, mut state) = (Timestamp::now(), self.lock());
            match state.newest.clone().filter(|newest| newest.holds(now)) {
                None => self.begin(&mut state),
                Some(newest) => {
                    if state.refused || newest.is_ending(now) {
                        self.begin(&mut state);
                    }
                    return Ok(newest);
                }
            }
        };
        match run.wait_for(Option::is_some).await.as_deref() {
            Ok(Some((_, result))) => result.clone(),
            Ok(None) | Err(_) => Err(Error::Interrupted),
        }
    }

    /// Records that the server has refused a credential.
    fn refused(&self, credential: &Arc<Credential>) {
        let mut state = self.lock();
        let is_newest = state.newest.as_ref().is_some_and(|newest| Arc::ptr_eq(newest, credential));
        if is_newest && credential.given.1.elapsed() >= YOUNG {
            state.refused = true;
        }
    }

    /// Starts the plugin on the runtime of the caller, unless it runs or has just ended. The run continues if
    /// the request that started it is cancelled.
    fn begin(self: &Arc<Self>, state: &mut State) -> watch::Receiver<Option<Ended>> {
        let counts = |run: &watch::Receiver<Option<Ended>>| match &*run.borrow() {
            None => run.has_changed().is_ok(),
            Some((at, _)) => at.elapsed() < PAUSE,
        };
        if let Some(run) = state.run.clone().filter(counts) {
            return run;
        }
        let (ended, run) = watch::channel(None);
        let plugin = Arc::clone(self);
        tokio::spawn(async move {
            let result = plugin.exec.run().await.map(Arc::new);
            plugin.record(&result);
            ended.send_replace(Some((Instant::now(), result)));
        });
        state.run = Some(run.clone());
        run
    }

    fn record(&self, result: &Result<Arc<Credential>, Error>) {
        let (mut state, plugin) = (self.lock(), self.exec.name());
        match result {
            Ok(credential) => {
                (state.newest, state.refused) = (Some(Arc::clone(credential)), false);
                if std::mem::take(&mut state.failing) {
                    info!(plugin, "the kubeconfig's credential plugin works again");
                }
            }
            Err(error) if !std::mem::replace(&mut state.failing, true) => {
                warn!(plugin, %error, "cannot get a credential from the kubeconfig's plugin, retrying");
            }
            Err(_) => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates the service for requests with a certificate; reads files.
type WithPair<S> = Arc<dyn Fn(AuthInfo) -> Result<S, String> + Send + Sync>;

/// Service that adds a plugin's credential to requests. Clones share the credential.
pub(crate) struct Authenticated<S> {
    plugin: Arc<Plugin>,
    without_pair: S,
    with_pair: WithPair<S>,
    /// The service with the newest certificate.
    newest: Arc<Mutex<Option<(Pair, S)>>>,
}

impl<S: Clone> Clone for Authenticated<S> {
    fn clone(&self) -> Self {
        Self {
            plugin: Arc::clone(&self.plugin),
            without_pair: self.without_pair.clone(),
            with_pair: Arc::clone(&self.with_pair),
            newest: Arc::clone(&self.newest),
        }
    }
}

impl<S: Clone + Send + 'static> Authenticated<S> {
    /// Creates the service from one without a certificate and a factory of services with a certificate: a new
    /// certificate must not use connections of an earlier one.
    pub(crate) fn new(
        exec: Exec,
        without_pair: S,
        with_pair: impl Fn(AuthInfo) -> Result<S, String> + Send + Sync + 'static,
    ) -> Self {
        let (plugin, with_pair) = (Plugin::new(exec), Arc::new(with_pair));
        Self { plugin, without_pair, with_pair, newest: Arc::default() }
    }

    async fn way(&self, pair: Option<&Pair>) -> Result<S, BoxError> {
        let Some(pair) = pair else { return Ok(self.without_pair.clone()) };
        let known = || self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, way)) = known().as_ref().filter(|(of, _)| of == pair) {
            return Ok(way.clone());
        }
        let (user, make) = (exec::user_of(pair)?, Arc::clone(&self.with_pair));
        let way = blocking("a credential plugin's certificate", move || make(user)).await?;
        *known() = Some((pair.clone(), way.clone()));
        Ok(way)
    }
}

impl<S, B, R> Service<Request<B>> for Authenticated<S>
where
    S: Service<Request<B>, Response = Response<R>, Error = BoxError> + Clone + Send + Sync + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: 'static,
{
    type Response = Response<R>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<R>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        // The inner service depends on the credential: `call` waits until it is ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let own = self.clone();
        async move {
            let credential = own.plugin.credential().await?;
            let way = own.way(credential.pair.as_ref()).await?;
            if let Some(token) = &credential.token {
                request.headers_mut().insert(AUTHORIZATION, token.clone());
            }
            let answer = way.oneshot(request).await?;
            if answer.status() == StatusCode::UNAUTHORIZED {
                own.plugin.refused(&credential);
            }
            Ok(answer)
        }
        .boxed()
    }
}

/// Removes the plugin from a kubeconfig's user, since the library would run it without a timeout. Returns
/// None if another credential has precedence (the order of `kube`'s `Auth::try_from`).
///
/// # Errors
/// The kubeconfig's description of the plugin is invalid.
pub(crate) fn extract_plugin(config: &mut Config) -> Result<Option<Exec>, Error> {
    let user = &mut config.auth_info;
    let Some(exec) = user.exec.take() else { return Ok(None) };
    let is_named = user.username.is_some() && user.password.is_some();
    let comes_first =
        user.auth_provider.is_some() || is_named || user.token.is_some() || user.token_file.is_some();
    if comes_first { Ok(None) } else { Exec::new(exec).map(Some) }
}

#[cfg(test)]
mod tests;
