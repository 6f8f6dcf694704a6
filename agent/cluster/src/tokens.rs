//! Requests and renews the service account tokens that pods refer to.

use std::{sync::Arc, time::Duration};

use beelet_model::table::PodName;
use beelet_policy::{
    node::token,
    pod::references::{self, TokenReference},
};
use beelet_state::events::{self, Recorder};
use beelet_units::bounds;
use serde_json::{Value, json};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::{
    assigned::Wanted,
    backoff::{Pauses, chance},
    client::{Client, Error},
    held::Held,
    url::escaped,
};

/// A pod that waits for a token.
pub(crate) struct Waiting {
    pub(crate) of: TokenReference,
    pub(crate) pods: watch::Receiver<Wanted>,
    pub(crate) events: Recorder,
    /// Cause in the last event.
    pub(crate) said: Option<String>,
}

impl Waiting {
    /// Records the kubelet's event of a missing token, once per cause. A pod with an older token does not
    /// wait.
    pub(crate) fn record(&mut self, held: &Held, error: &Error) {
        if held.tokens_optional || held.tokens.contains_key(&self.of) {
            return;
        }
        let why = if error.code().is_some() { error.message.clone() } else { error.to_string() };
        if self.said.as_ref() == Some(&why) {
            return;
        }
        let pods = self.pods.borrow().clone();
        let name = PodName { namespace: self.of.namespace.clone(), name: self.of.pod.clone() };
        let Some(pod) = pods.as_ref().and_then(|all| all.pods.get(&name)) else { return };
        let volume = references::volume_of_token(pod, &self.of).unwrap_or_default();
        let message =
            format!("MountVolume.SetUp failed for volume {volume:?} : failed to fetch token: {why}");
        self.events.warning(events::Object::pod(pod), "FailedMount", message);
        self.said = Some(why);
    }
}

/// Requests a token of a service account and renews it, until dropped.
pub(crate) async fn keep_token(client: Client, mut waiting: Waiting, out: Arc<watch::Sender<Held>>) {
    let of = waiting.of.clone();
    let mut pauses = Pauses::default();
    let mut failing = false;
    loop {
        match request_token(&client, &of).await {
            Ok((token, lifetime)) => {
                if std::mem::take(&mut failing) {
                    info!(pod = of.pod, account = of.service_account, "the API server issues tokens again");
                }
                pauses.reset();
                out.send_modify(|held| drop(held.tokens.insert(of.clone(), token)));
                tokio::time::sleep(token::renew_after(lifetime, chance())).await;
            }
            Err(error) => {
                if pauses.may_be_early(&error) {
                    debug!(pod = of.pod, %error, "cannot get a token for the pod yet");
                } else {
                    waiting.record(&out.borrow(), &error);
                    if !std::mem::replace(&mut failing, true) {
                        warn!(pod = of.pod, account = of.service_account, %error, "cannot get a token for the pod, retrying");
                    }
                }
                client.presence().pause(pauses.of(&error), &error).await;
            }
        }
    }
}

/// Requests a token of a service account. Returns the token and its lifetime.
pub(crate) async fn request_token(
    client: &Client,
    of: &TokenReference,
) -> Result<(Arc<str>, Duration), Error> {
    let answer = token_status(client, of).await?;
    let token = answer["status"]["token"].as_str().unwrap_or_default();
    // Use the server's duration instead of its expiration time: this machine's clock may be wrong.
    let seconds = answer["spec"]["expirationSeconds"].as_i64().unwrap_or(of.expiration_seconds);
    Ok((token.into(), bounds::seconds(seconds.max(60))))
}

/// Requests a token of a service account. Returns the whole answer after checking that it has a token.
pub(crate) async fn token_status(client: &Client, of: &TokenReference) -> Result<Value, Error> {
    let path = format!(
        "/api/v1/namespaces/{}/serviceaccounts/{}/token",
        escaped(&of.namespace),
        escaped(&of.service_account)
    );
    let audiences: Vec<&str> = Some(of.audience.as_str()).into_iter().filter(|a| !a.is_empty()).collect();
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": audiences,
            "expirationSeconds": of.expiration_seconds,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": of.pod, "uid": of.uid},
        },
    });
    let answer = client.create(&path, &request).await?;
    if answer["status"]["token"].as_str().unwrap_or_default().is_empty() {
        let message = "the answer has no token".to_owned();
        return Err(Error {
            request: format!("POST {path}"),
            kind: crate::client::Kind::Unreachable,
            message,
        });
    }
    Ok(answer)
}
