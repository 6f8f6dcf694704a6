//! Credential providers: programs that know who the node, or a pod's service account, is at an image registry
//! (KEP-2133, KEP-4412; `pkg/credentialprovider/plugin` of the kubelet). Answers are kept as long as they
//! say.
//!
//! Must never log what a program answers, or hand one pod what was given for another's account.

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

/// The most answers that are kept of one program.
const KEPT: usize = 1000;
/// For how many seconds a token is asked: the API's own default.
const TOKEN_SECONDS: i64 = 3600;

/// Who wants an image.
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

/// A login at a registry that a program gave.
pub(super) struct Given {
    /// The registry, or a path in it.
    pub(super) registry: String,
    pub(super) username: String,
    pub(super) password: String,
    /// The account that it was given for, if it was for one.
    pub(super) account: Option<PullAccount>,
}

/// All programs that are asked.
#[derive(Debug, Default)]
pub struct Providers {
    all: Vec<Provider>,
    accounts: Option<Arc<dyn ServiceAccounts>>,
    metrics: Metrics,
}

/// A program.
struct Provider {
    config: CredentialProvider,
    program: PathBuf,
    cache: Mutex<BTreeMap<Key, Kept>>,
    /// One question at a time for an image and an account: the next one may find the answer. Others are asked
    /// beside it, as by the kubelet: a slow answer holds up nobody else's pull.
    asking: Mutex<BTreeMap<Key, Weak<tokio::sync::Mutex<()>>>>,
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Provider").field("program", &self.program).finish_non_exhaustive()
    }
}

/// What an answer is kept under.
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

/// The account that an answer was given for, as far as the answer depends on it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OfAccount {
    account: PullAccount,
    annotations: BTreeMap<String, String>,
    /// A digest of the token, where answers hold for one token only.
    token: Option<[u8; 32]>,
}

struct Kept {
    logins: Arc<BTreeMap<String, Login>>,
    until: Instant,
}

/// The account of the pod that asks, with a token of it.
struct Identity {
    account: PullAccount,
    annotations: BTreeMap<String, String>,
    token: Arc<str>,
}

/// Why a program can't be used at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("image credential provider {name}: {} {why}", .path.display())]
pub struct ProviderError {
    name: String,
    path: PathBuf,
    why: String,
}

/// Why there is no login.
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
    /// The programs of a configuration; their tokens come from `accounts`. Blocking.
    ///
    /// # Errors
    /// A program isn't there, or can't be executed.
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

    /// The logins for an image. What a program doesn't know, or fails to say, is passed over: the registry
    /// may not ask.
    pub(super) async fn logins(&self, image: &str, asker: &Asker) -> Vec<Given> {
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
                    warn!(provider = provider.config.name, image, %pod, %error, "a credential provider gives nothing");
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
    ) -> Result<Vec<Given>, AskError> {
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
        let given = logins.iter().map(|(registry, login)| Given {
            registry: registry.clone(),
            username: login.username.clone(),
            password: login.password.clone(),
            account: identity.as_ref().map(|identity| identity.account.clone()),
        });
        Ok(given.collect())
    }

    /// The pod's account; None if it lacks an annotation that the program requires: it is not for such
    /// accounts.
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
            std::fs::metadata(&program).map_err(|error| wrong(format!("can't be used: {error}")))?;
        if !metadata.is_file() || rustix::fs::access(&program, Access::EXEC_OK).is_err() {
            return Err(wrong("is no program that can be executed".to_owned()));
        }
        Ok(Self { config: config.clone(), program, cache: Mutex::default(), asking: Mutex::default() })
    }

    /// What the program says of an image, now or when it was asked before.
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

    /// The lock of a question that may be under way.
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
        // So many at once are nobody's usual use; the program is asked again for what is left out.
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
