//! Tokens of service accounts that pods refer to: requests them, and keeps them fresh.

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

/// A token, and the pod that waits for it.
pub(crate) struct Waiting {
    pub(crate) of: TokenReference,
    pub(crate) pods: watch::Receiver<Wanted>,
    pub(crate) events: Recorder,
    /// The reason in its last event.
    pub(crate) said: Option<String>,
}

impl Waiting {
    /// Records once per cause, in the kubelet's words, why the pod has no token. A pod that has an older one
    /// does not wait.
    pub(crate) fn say(&mut self, held: &Held, error: &Error) {
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

/// Keeps a token of a service account fresh.
pub(crate) async fn keep_token(client: Client, mut waiting: Waiting, out: Arc<watch::Sender<Held>>) {
    let of = waiting.of.clone();
    let mut pauses = Pauses::default();
    let mut failing = false;
    loop {
        match request_token(&client, &of).await {
            Ok((token, lifetime)) => {
                if std::mem::take(&mut failing) {
                    info!(pod = of.pod, account = of.service_account, "the API server gives tokens again");
                }
                pauses.reset();
                out.send_modify(|held| drop(held.tokens.insert(of.clone(), token)));
                tokio::time::sleep(token::renew_after(lifetime, chance())).await;
            }
            Err(error) => {
                if pauses.may_be_early(&error) {
                    debug!(pod = of.pod, %error, "there is no token for the pod yet");
                } else {
                    waiting.say(&out.borrow(), &error);
                    if !std::mem::replace(&mut failing, true) {
                        warn!(pod = of.pod, account = of.service_account, %error, "there is no new token for the pod");
                    }
                }
                client.presence().pause(pauses.of(&error), &error).await;
            }
        }
    }
}

/// Asks for a token of a service account; the token, and for how long it holds.
pub(crate) async fn request_token(
    client: &Client,
    of: &TokenReference,
) -> Result<(Arc<str>, Duration), Error> {
    let answer = token_status(client, of).await?;
    let token = answer["status"]["token"].as_str().unwrap_or_default();
    // By the server's word how long, not until when: this machine's clock may be wrong.
    let seconds = answer["spec"]["expirationSeconds"].as_i64().unwrap_or(of.expiration_seconds);
    Ok((token.into(), bounds::seconds(seconds.max(60))))
}

/// Asks for a token of a service account; the whole answer, which has one.
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
