//! Authentication by client certificates, bearer tokens or configured anonymity, and authorization of each
//! request. Verdicts of the API server are cached for the configured times, which default to the kubelet's.
//!
//! Sources: BuildAuth in cmd/kubelet/app/auth.go, DelegatingAuthenticatorConfig and webhook authorizer of
//! apiserver.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use tokio::time::timeout;
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};

use beelet_base::room::Source;
use beelet_config::{Authorization, Server};
use beelet_model::review::{AccessReviewer, ReviewError, TokenReviewer, User};
use beelet_policy::node::access::{Access, access};

use crate::cache::Cache;
use crate::identity::{AUTHENTICATED, anonymous, user_of};
use crate::tls::Clients;
use crate::turns::{For, Turns};

/// Maximum cached verdicts of each kind.
const VERDICTS: usize = 8192;
/// Size in bytes from which a user's verdicts are not cached.
const LARGE_USER: usize = 10_000;
/// Maximum time for a review, including the wait for a turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// The API server's reviews of unknown tokens and users. Without them all tokens are unknown, and the API
/// server allows no request.
#[derive(Clone, Default)]
pub struct Reviewers {
    /// Reviews bearer tokens.
    pub tokens: Option<Arc<dyn TokenReviewer>>,
    /// Reviews access rights.
    pub access: Option<Arc<dyn AccessReviewer>>,
}

impl std::fmt::Debug for Reviewers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reviewers").finish_non_exhaustive()
    }
}

/// Reason why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The client is unknown.
    Unauthorized(String),
    /// The user lacks the right.
    Forbidden(String),
    /// The right cannot be determined.
    Undecided(String),
    /// The user has the right, but the connection limit is reached.
    Crowded,
}

impl Refusal {
    /// Returns the cause for the log.
    pub(crate) fn cause(&self) -> &str {
        match self {
            Self::Unauthorized(cause) | Self::Forbidden(cause) | Self::Undecided(cause) => cause,
            Self::Crowded => "too many connections",
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            // The error in the credentials is only logged.
            Self::Unauthorized(_) => (StatusCode::UNAUTHORIZED, "Unauthorized\n").into_response(),
            Self::Forbidden(cause) => (StatusCode::FORBIDDEN, format!("{cause}\n")).into_response(),
            Self::Undecided(cause) => {
                (StatusCode::INTERNAL_SERVER_ERROR, format!("{cause}\n")).into_response()
            }
            Self::Crowded => {
                let sentence = "too many connections: close some, or try again later\n";
                (StatusCode::SERVICE_UNAVAILABLE, sentence).into_response()
            }
        }
    }
}

pub(crate) struct Auth {
    reviewers: Reviewers,
    anonymous: bool,
    token_ttl: Option<Duration>,
    authorization: Authorization,
    /// Users of known tokens, and unknown tokens: separate caches, so that unknown tokens cannot displace
    /// users.
    known: Cache<[u8; 32], User>,
    strange: Cache<[u8; 32], ()>,
    verdicts: Cache<(User, Access), bool>,
    turns: Turns,
}

impl Auth {
    pub(crate) fn new(config: &Server, reviewers: Reviewers) -> Self {
        Self {
            reviewers,
            anonymous: config.anonymous,
            token_ttl: config.token_ttl,
            authorization: config.authorization,
            known: Cache::new(VERDICTS),
            strange: Cache::new(VERDICTS),
            verdicts: Cache::new(VERDICTS),
            turns: Turns::new(),
        }
    }

    /// Authenticates a client by the certificates of its connection and the headers of its request.
    pub(crate) async fn user(
        &self,
        chain: &[CertificateDer<'static>],
        clients: Option<&Clients>,
        headers: &HeaderMap,
        source: Source,
    ) -> Result<User, Refusal> {
        let mut trouble = None;
        if let (Some((own, others)), Some(clients)) = (chain.split_first(), clients) {
            match clients.verify_client_cert(own, others, UnixTime::now()) {
                Ok(_) => match user_of(own) {
                    Some(user) => return Ok(user),
                    None => trouble = Some("the client's certificate has no user name".to_owned()),
                },
                Err(error) => trouble = Some(format!("the client's certificate: {error}")),
            }
        }
        // Without reviews a token cannot be rejected and is ignored, as in the kubelet.
        let counts = self.token_ttl.is_some() || !self.anonymous;
        if let Some(token) = bearer_token(headers).filter(|_| counts) {
            match self.user_of_token(token, source).await {
                Ok(Some(user)) => return Ok(user),
                Ok(None) => trouble = Some("unknown bearer token".to_owned()),
                Err(error) => trouble = Some(format!("the bearer token: {error}")),
            }
        }
        match trouble {
            // Invalid credentials differ from missing ones.
            Some(trouble) => Err(Refusal::Unauthorized(trouble)),
            None if self.anonymous => Ok(anonymous()),
            None => Err(Refusal::Unauthorized("no credentials".to_owned())),
        }
    }

    async fn user_of_token(&self, token: &str, source: Source) -> Result<Option<User>, ReviewError> {
        let (Some(ttl), Some(reviewer)) = (self.token_ttl, &self.reviewers.tokens) else {
            return Err(ReviewError("tokens are not reviewed on this node".to_owned()));
        };
        let key = Sha256::digest(token.as_bytes()).into();
        if let Some(known) = self.known.get(&key) {
            return Ok(Some(known));
        }
        if self.strange.get(&key).is_some() {
            return Ok(None);
        }
        let who = if self.known.last(&key).is_some() { For::Known } else { For::Stranger(source) };
        let Some(mut user) = self.in_turn(who, reviewer.review(token)).await? else {
            self.known.forget(&key);
            self.strange.insert(key, (), ttl);
            return Ok(None);
        };
        if !user.groups.iter().any(|group| group == AUTHENTICATED) {
            user.groups.push(AUTHENTICATED.to_owned());
        }
        self.known.insert(key, user.clone(), ttl);
        Ok(Some(user))
    }

    /// Checks the user's right to make this request.
    pub(crate) async fn allow(
        &self,
        user: &User,
        method: &str,
        path: &str,
        source: Source,
    ) -> Result<(), Refusal> {
        let Authorization::Webhook { allowed, refused } = self.authorization else { return Ok(()) };
        let rights = access(method, path);
        for right in &rights {
            match self.may(user, *right, (allowed, refused), source).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!("cannot decide whether {} may {}: {error}", user.name, said(*right));
                    let sentence = format!("Authorization error ({})", attributes(user, *right));
                    return Err(Refusal::Undecided(sentence));
                }
            }
        }
        let last = rights.last().map(|right| attributes(user, *right)).unwrap_or_default();
        Err(Refusal::Forbidden(format!("Forbidden ({last})")))
    }

    async fn may(
        &self,
        user: &User,
        right: Access,
        (allowed, refused): (Duration, Duration),
        source: Source,
    ) -> Result<bool, ReviewError> {
        let Some(reviewer) = &self.reviewers.access else {
            return Err(ReviewError("no API server for access reviews".to_owned()));
        };
        let key = (user.clone(), right);
        if let Some(verdict) = self.verdicts.get(&key) {
            return Ok(verdict);
        }
        let who = if self.verdicts.last(&key) == Some(true) { For::Known } else { For::Stranger(source) };
        let verdict = self.in_turn(who, reviewer.review(user, right)).await?;
        if size(user) < LARGE_USER {
            self.verdicts.insert(key, verdict, if verdict { allowed } else { refused });
        }
        Ok(verdict)
    }

    async fn in_turn<T>(
        &self,
        who: For,
        review: impl Future<Output = Result<T, ReviewError>>,
    ) -> Result<T, ReviewError> {
        let whole = async {
            let _turn = self.turns.acquire(who).await;
            review.await
        };
        let late = || ReviewError(format!("the API server gave no verdict within {} s", PATIENCE.as_secs()));
        timeout(PATIENCE, whole).await.unwrap_or_else(|_| Err(late()))
    }
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim().split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn size(user: &User) -> usize {
    let extra = user.extra.iter().flat_map(|(key, values)| values.iter().chain([key]));
    user.groups.iter().chain(extra).map(String::len).sum::<usize>() + user.name.len() + user.uid.len()
}

fn said(right: Access) -> String {
    format!("{} nodes/{}", right.verb, right.subresource)
}

/// Returns the kubelet's text for a right.
fn attributes(user: &User, right: Access) -> String {
    format!("user={}, verb={}, resource=nodes, subresource={}", user.name, right.verb, right.subresource)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use beelet_model::review::Review;

    use super::*;

    /// Knows two tokens, and allows `jane` to read pods and stats.
    #[derive(Default)]
    struct Fake {
        asked: AtomicUsize,
    }

    impl TokenReviewer for Fake {
        fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                match token {
                    "jane" => Ok(Some(User { name: "jane".to_owned(), ..User::default() })),
                    "broken" => Err(ReviewError("the API server is unavailable".to_owned())),
                    _ => Ok(None),
                }
            })
        }
    }

    impl AccessReviewer for Fake {
        fn review<'a>(&'a self, user: &'a User, access: Access) -> Review<'a, bool> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                Ok(user.name == "jane"
                    && access.verb == "get"
                    && ["pods", "stats"].contains(&access.subresource))
            })
        }
    }

    fn auth(anonymous: bool) -> (Auth, Arc<Fake>) {
        let fake = Arc::new(Fake::default());
        let reviewers = Reviewers { tokens: Some(fake.clone()), access: Some(fake.clone()) };
        let seconds = Duration::from_secs;
        let auth = Auth {
            anonymous,
            token_ttl: Some(seconds(120)),
            authorization: Authorization::Webhook { allowed: seconds(300), refused: seconds(30) },
            reviewers,
            known: Cache::new(8),
            strange: Cache::new(8),
            verdicts: Cache::new(8),
            turns: Turns::new(),
        };
        (auth, fake)
    }

    fn here() -> Source {
        Source::of([10, 0, 0, 1].into())
    }

    fn headers(authorization: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if !authorization.is_empty() {
            headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        }
        headers
    }

    #[tokio::test]
    async fn a_token_is_somebodys_and_wrong_credentials_are_not_none() {
        let check = async |authorization: &str, anonymous: bool, expected: Result<&str, &str>| {
            let (auth, _) = auth(anonymous);
            let user = auth.user(&[], None, &headers(authorization), here()).await;
            let found = user.as_ref().map(|user| user.name.as_str()).map_err(Refusal::cause);
            match (found, expected) {
                (Ok(name), Ok(expected)) => assert_eq!(name, expected),
                (Err(cause), Err(part)) => assert!(cause.contains(part), "{cause}"),
                (found, _) => panic!("{authorization}: {found:?}"),
            }
        };
        check("Bearer jane", false, Ok("jane")).await;
        check("bearer  jane ", false, Ok("jane")).await;
        check("Bearer john", true, Err("unknown bearer token")).await;
        check("Bearer broken", true, Err("the API server is unavailable")).await;
        check("Basic jane", false, Err("no credentials")).await;
        check("Bearer", true, Ok("system:anonymous")).await;
        check("", true, Ok("system:anonymous")).await;
        check("", false, Err("no credentials")).await;
    }

    #[tokio::test(start_paused = true)]
    async fn verdicts_count_for_their_time() {
        let (auth, fake) = auth(false);
        let asked = || fake.asked.swap(0, Ordering::Relaxed);
        let jane = auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        assert_eq!(jane.groups, [AUTHENTICATED]);
        auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        assert_eq!(asked(), 1);
        tokio::time::advance(Duration::from_secs(120)).await;
        auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        assert_eq!(asked(), 1);
        for _ in 0..2 {
            auth.allow(&jane, "GET", "/pods", here()).await.unwrap();
            let refusal = auth.allow(&jane, "GET", "/metrics", here()).await.unwrap_err();
            let words = "Forbidden (user=jane, verb=get, resource=nodes, subresource=metrics)";
            assert_eq!(refusal, Refusal::Forbidden(words.to_owned()));
        }
        assert_eq!(asked(), 2);
        tokio::time::advance(Duration::from_secs(31)).await;
        auth.allow(&jane, "GET", "/pods", here()).await.unwrap();
        auth.allow(&jane, "GET", "/metrics", here()).await.unwrap_err();
        assert_eq!(asked(), 1);
        tokio::time::advance(Duration::from_secs(300)).await;
        auth.allow(&jane, "GET", "/pods", here()).await.unwrap();
        assert_eq!(asked(), 1);
    }

    #[tokio::test]
    async fn without_an_api_server_nothing_is_allowed_by_it() {
        let (mut auth, _) = auth(true);
        auth.reviewers = Reviewers::default();
        let user = auth.user(&[], None, &headers(""), here()).await.unwrap();
        assert!(matches!(auth.allow(&user, "GET", "/pods", here()).await, Err(Refusal::Undecided(_))));
        assert!(matches!(
            auth.user(&[], None, &headers("Bearer jane"), here()).await,
            Err(Refusal::Unauthorized(_))
        ));
        auth.authorization = Authorization::AlwaysAllow;
        auth.allow(&user, "DELETE", "/anything", here()).await.unwrap();
    }

    #[tokio::test]
    async fn a_token_counts_for_nothing_where_tokens_are_not_reviewed() {
        let asked = async |anonymous: bool| {
            let (mut auth, _) = auth(anonymous);
            auth.token_ttl = None;
            auth.user(&[], None, &headers("Bearer jane"), here()).await.map(|user| user.name)
        };
        assert_eq!(asked(true).await.as_deref(), Ok("system:anonymous"));
        assert!(matches!(asked(false).await, Err(Refusal::Unauthorized(_))));
    }

    /// Answers for `jane` at once, and never for others.
    struct Slow;

    impl TokenReviewer for Slow {
        fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
            Box::pin(async move {
                match token {
                    "jane" => Ok(Some(User { name: "jane".to_owned(), ..User::default() })),
                    _ => std::future::pending().await,
                }
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn random_tokens_keep_no_real_one_waiting() {
        let (mut auth, _) = auth(false);
        auth.reviewers.tokens = Some(Arc::new(Slow));
        auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        tokio::time::advance(Duration::from_secs(121)).await;
        let auth = Arc::new(auth);
        let random = |number: u8, from: u8| {
            let (auth, headers) = (Arc::clone(&auth), headers(&format!("Bearer random-{number}")));
            let from = Source::of([10, 0, 1, from].into());
            tokio::spawn(async move { auth.user(&[], None, &headers, from).await })
        };
        // A source can only use up its own turns: an unknown token from another source is reviewed.
        let flood: Vec<_> = (0..100).map(|number| random(number, 1)).collect();
        tokio::task::yield_now().await;
        let began = tokio::time::Instant::now();
        auth.known.forget(&Sha256::digest(b"jane").into());
        auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        assert!(began.elapsed().is_zero());
        // Many sources use up the turns of strangers: a previously known token is still reviewed.
        tokio::time::advance(Duration::from_secs(121)).await;
        let more: Vec<_> = (0..100).map(|number| random(number, number)).collect();
        tokio::task::yield_now().await;
        let began = tokio::time::Instant::now();
        auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        assert!(began.elapsed().is_zero());
        flood.into_iter().chain(more).for_each(|task| task.abort());
    }

    #[tokio::test]
    async fn tokens_that_are_nobodys_take_no_room_from_those_of_somebody() {
        let (auth, fake) = auth(false);
        auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        for number in 0..50 {
            auth.user(&[], None, &headers(&format!("Bearer random-{number}")), here()).await.unwrap_err();
        }
        fake.asked.store(0, Ordering::Relaxed);
        auth.user(&[], None, &headers("Bearer jane"), here()).await.unwrap();
        auth.user(&[], None, &headers("Bearer random-49"), here()).await.unwrap_err();
        assert_eq!(fake.asked.load(Ordering::Relaxed), 0);
    }
}
