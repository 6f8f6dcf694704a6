//! Credential providers: programs that know the credentials of the node, or of a pod's service account, for
//! an image registry (KEP-2133, KEP-4412; `pkg/credentialprovider/plugin` of the kubelet). Responses are
//! cached for the duration that they state.
//!
//! Must never log a program's response, nor use the credentials of one pod's service account for another
//! account's pod.

mod exec;

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use beelet_base::clock::After as _;
use beelet_config::{CredentialProvider, CredentialProviders, TokenAttributes};
use beelet_model::accounts::{AccountError, ServiceAccounts};
use beelet_policy::{
    images::credentials::{PullAccount, matches},
    pod::references::TokenReference,
};
use rustix::fs::Access;
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tracing::{debug, warn};

use self::exec::{CacheKeyType, ExecError, Login, Request};
use super::{metrics::Metrics, reference};

/// Maximum number of cached responses per program.
const KEPT: usize = 1000;
/// Requested lifetime of a token in seconds: the API's own default.
const TOKEN_SECONDS: i64 = 3600;

/// Pod that needs an image.
#[derive(Clone, Debug, Default)]
pub struct Asker {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's UID.
    pub uid: String,
    /// Its service account; empty if it has none.
    pub service_account: String,
}

/// Login at a registry, from a program.
pub(super) struct Provided {
    /// The registry, or a path in it.
    pub(super) registry: String,
    pub(super) username: String,
    pub(super) password: String,
    /// Service account that the login was issued for, if any.
    pub(super) account: Option<PullAccount>,
}

/// All configured programs.
#[derive(Debug, Default)]
pub struct Providers {
    all: Vec<Provider>,
    accounts: Option<Arc<dyn ServiceAccounts>>,
    metrics: Metrics,
}

/// Credential provider program.
struct Provider {
    config: CredentialProvider,
    program: PathBuf,
    cache: Mutex<BTreeMap<Key, Kept>>,
    /// Serializes calls for the same image and account: the next caller may find the response in the cache.
    /// Other calls run concurrently, as in the kubelet, so that a slow one delays no other pull.
    asking: Mutex<BTreeMap<Key, Weak<tokio::sync::Mutex<()>>>>,
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").field("program", &self.program).finish_non_exhaustive()
    }
}

/// Key of a cached response.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    of: Of,
    account: Option<OfAccount>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Of {
    Image(String),
    Registry(String),
    All,
}

/// Service account of a cached response, as far as the response depends on it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OfAccount {
    account: PullAccount,
    annotations: BTreeMap<String, String>,
    /// Digest of the token, if responses are valid for one token only.
    token: Option<[u8; 32]>,
}

struct Kept {
    logins: Arc<BTreeMap<String, Login>>,
    until: Instant,
}

/// Service account of the requesting pod, with its token.
struct Identity {
    account: PullAccount,
    annotations: BTreeMap<String, String>,
    token: Arc<str>,
}

/// Error of a program that cannot be used at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("image credential provider {name}: {} {why}", .path.display())]
pub struct ProviderError {
    name: String,
    path: PathBuf,
    why: String,
}

/// Error of a call for logins.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error(transparent)]
    Exec(#[from] ExecError),
    #[error("needs a token of the pod's service account: {0}")]
    Account(#[from] AccountError),
    #[error("returned the service account's token as the password, which it may only with cacheType: Token")]
    EchoedToken,
}

impl Providers {
    /// Opens the programs of a configuration; their tokens come from `accounts`. Blocking.
    ///
    /// # Errors
    /// A program does not exist or cannot be executed.
    pub fn open(
        config: Option<&CredentialProviders>,
        accounts: Option<Arc<dyn ServiceAccounts>>,
        metrics: Metrics,
    ) -> Result<Self, ProviderError> {
        let all = config.into_iter().flat_map(|config| {
            config.providers.iter().map(|provider| Provider::open(&config.bin_dir, provider))
        });
        Ok(Self { all: all.collect::<Result<_, _>>()?, accounts, metrics })
    }

    /// Returns the logins for an image. Skips programs without a login and failed calls: the registry may
    /// allow anonymous pulls.
    pub(super) async fn logins(&self, image: &str, asker: &Asker) -> Vec<Provided> {
        let repository = reference::normalized(image);
        let mut all = Vec::new();
        for provider in &self.all {
            if !provider.config.match_images.iter().any(|pattern| matches(pattern, &repository)) {
                continue;
            }
            match self.of_provider(provider, &repository, asker).await {
                Ok(given) => all.extend(given),
                Err(error) => {
                    let pod = format_args!("{}/{}", asker.namespace, asker.pod);
                    warn!(provider = provider.config.name, image, %pod, %error, "credential provider failed; pulling without its credentials");
                }
            }
        }
        all
    }

    async fn of_provider(
        &self,
        provider: &Provider,
        repository: &str,
        asker: &Asker,
    ) -> Result<Vec<Provided>, AskError> {
        let identity = match &provider.config.tokens {
            None => None,
            Some(tokens) if asker.service_account.is_empty() && tokens.require_service_account => {
                return Ok(Vec::new());
            }
            Some(_) if asker.service_account.is_empty() => None,
            Some(tokens) => match self.identity(tokens, asker).await? {
                Some(identity) => Some(identity),
                None => return Ok(Vec::new()),
            },
        };
        let logins = provider.logins(repository, identity.as_ref(), &self.metrics).await?;
        let given = logins.iter().map(|(registry, login)| Provided {
            registry: registry.clone(),
            username: login.username.clone(),
            password: login.password.clone(),
            account: identity.as_ref().map(|identity| identity.account.clone()),
        });
        Ok(given.collect())
    }

    /// Returns the pod's account; None if it lacks an annotation that the program requires, so that the
    /// program does not serve it.
    async fn identity(&self, tokens: &TokenAttributes, asker: &Asker) -> Result<Option<Identity>, AskError> {
        let Asker { namespace, pod, uid, service_account } = asker;
        let none = || AccountError("this node has no API server".to_owned());
        let accounts = self.accounts.as_ref().ok_or_else(none)?;
        let found = accounts.account(namespace, service_account).await?;
        let mut annotations = BTreeMap::new();
        for key in &tokens.required_annotations {
            let Some(value) = found.annotations.get(key) else {
                debug!(%namespace, %service_account, key, "the account lacks an annotation that a provider requires");
                return Ok(None);
            };
            annotations.insert(key.clone(), value.clone());
        }
        let optional = tokens.optional_annotations.iter();
        annotations
            .extend(optional.filter_map(|key| Some((key.clone(), found.annotations.get(key)?.clone()))));
        let of = TokenReference {
            namespace: namespace.clone(),
            service_account: service_account.clone(),
            pod: pod.clone(),
            uid: uid.clone(),
            audience: tokens.audience.clone(),
            expiration_seconds: TOKEN_SECONDS,
        };
        let token = accounts.token(&of).await?;
        let account =
            PullAccount { namespace: namespace.clone(), name: service_account.clone(), uid: found.uid };
        Ok(Some(Identity { account, annotations, token }))
    }
}

impl Provider {
    fn open(bin_dir: &Path, config: &CredentialProvider) -> Result<Self, ProviderError> {
        let program = bin_dir.join(&config.name);
        let wrong = |why: String| ProviderError { name: config.name.clone(), path: program.clone(), why };
        let metadata =
            std::fs::metadata(&program).map_err(|error| wrong(format!("cannot be used: {error}")))?;
        if !metadata.is_file() || rustix::fs::access(&program, Access::EXEC_OK).is_err() {
            return Err(wrong("is not an executable file".to_owned()));
        }
        Ok(Self { config: config.clone(), program, cache: Mutex::default(), asking: Mutex::default() })
    }

    /// Returns the logins for an image from the cache or from the program.
    async fn logins(
        &self,
        repository: &str,
        identity: Option<&Identity>,
        metrics: &Metrics,
    ) -> Result<Arc<BTreeMap<String, Login>>, AskError> {
        let account = identity.map(|identity| self.of_account(identity));
        if let Some(known) = self.known(repository, account.as_ref()) {
            return Ok(known);
        }
        let asking = self.asking(repository, account.as_ref());
        let _one_at_a_time = asking.lock().await;
        if let Some(known) = self.known(repository, account.as_ref()) {
            return Ok(known);
        }
        let (token, none) = (identity.map_or("", |identity| &*identity.token), BTreeMap::new());
        let annotations = identity.map_or(&none, |identity| &identity.annotations);
        let request = Request::new(self.config.version, repository, token, annotations);
        let began = Instant::now();
        let response = exec::ask(&self.program, &self.config, &request).await;
        metrics.asked(&self.config.name, began.elapsed(), response.is_err());
        let response = response?;
        let holds = response.holds()?.unwrap_or(self.config.default_cache_duration);
        let logins = Arc::new(response.auth.unwrap_or_default());
        let by_token = self.config.tokens.as_ref().is_some_and(|tokens| tokens.cache_by_token);
        if !token.is_empty() && !by_token && logins.values().any(|login| login.password == token) {
            return Err(AskError::EchoedToken);
        }
        let of = match response.cache_key_type {
            CacheKeyType::Image => Of::Image(repository.to_owned()),
            CacheKeyType::Registry => Of::Registry(registry(repository)),
            CacheKeyType::Global => Of::All,
        };
        if !holds.is_zero() {
            self.keep(Key { of, account }, Kept { logins: Arc::clone(&logins), until: began.after(holds) });
        }
        Ok(logins)
    }

    /// Returns the lock of calls for an image and account.
    fn asking(&self, repository: &str, account: Option<&OfAccount>) -> Arc<tokio::sync::Mutex<()>> {
        let key = Key { of: Of::Image(repository.to_owned()), account: account.cloned() };
        let mut all = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(asking) = all.get(&key).and_then(Weak::upgrade) {
            return asking;
        }
        all.retain(|_, asking| asking.strong_count() > 0);
        let asking = Arc::default();
        all.insert(key, Arc::downgrade(&asking));
        asking
    }

    fn of_account(&self, identity: &Identity) -> OfAccount {
        let by_token = self.config.tokens.as_ref().is_some_and(|tokens| tokens.cache_by_token);
        OfAccount {
            account: identity.account.clone(),
            annotations: identity.annotations.clone(),
            token: by_token.then(|| Sha256::digest(identity.token.as_bytes()).into()),
        }
    }

    fn known(&self, repository: &str, account: Option<&OfAccount>) -> Option<Arc<BTreeMap<String, Login>>> {
        let now = Instant::now();
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let keys = [Of::Image(repository.to_owned()), Of::Registry(registry(repository)), Of::All];
        let mut kept = keys.into_iter().filter_map(|of| cache.get(&Key { of, account: account.cloned() }));
        kept.find(|kept| kept.until > now).map(|kept| Arc::clone(&kept.logins))
    }

    fn keep(&self, key: Key, kept: Kept) {
        let now = Instant::now();
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|_, kept| kept.until > now);
        // Far more entries than usual: an omitted one costs another call.
        if cache.len() < KEPT || cache.contains_key(&key) {
            cache.insert(key, kept);
        }
    }
}

fn registry(repository: &str) -> String {
    repository.split('/').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
