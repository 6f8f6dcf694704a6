//! Drain of a node through the API server: cordon, evictions, and the wait until the pods have left
//! (`beelet drain`). The node's own identity suffices: the Node authorizer and NodeRestriction permit a node
//! to change its own `spec.unschedulable` and to evict its own pods.

use std::{path::Path, time::Duration};

use beelet_base::blocking::blocking;
use beelet_policy::node::drain::{Answer, Drain, Options, Target, Verdict, refusal, verdict};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use crate::{
    assigned::pods_of,
    client::{Client, Error, Patch},
    kubeconfig, requests,
    url::escaped,
};

/// Time between two lists of the node's pods.
const PERIOD: Duration = Duration::from_secs(1);

/// A step of the drain, for the command's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The Node was cordoned or uncordoned, or already was; true if it changed.
    Schedulable(bool, bool),
    /// The pod stays, for this reason.
    Stays(String, &'static str),
    /// The pod will be evicted, and loses this.
    Loses(String, &'static str),
    /// The API server accepted the pod's eviction.
    Evicted(String),
    /// The eviction was refused, for this reason; a later attempt follows unless it can't succeed.
    Refused(String, String),
    /// The pod has left the node.
    Left(String),
    /// A request failed; the next round follows.
    Failed(String),
}

/// Failure of a drain.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// A request failed.
    #[error(transparent)]
    Api(#[from] Error),
    /// Some pods may not be evicted; no pod was.
    #[error("no pod was evicted, because these may not be: {}", listed(.0))]
    Forbidden(Vec<(String, String)>),
    /// The time is over, or the evictions of these pods can't succeed.
    #[error("{reason}; still there: {}", listed(.rest))]
    Incomplete {
        /// The reason.
        reason: String,
        /// The pods that are still there, with the last refusal.
        rest: Vec<(String, String)>,
    },
}

fn listed(pods: &[(String, String)]) -> String {
    let one = |(pod, why): &(String, String)| match why.as_str() {
        "" => pod.clone(),
        why => format!("{pod} ({why})"),
    };
    pods.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Returns a client with the identity of a kubeconfig, without its renewal: for commands.
///
/// # Errors
/// The kubeconfig is unusable.
pub async fn open(kubeconfig: &Path) -> Result<Client, kubeconfig::Error> {
    let path = kubeconfig.to_owned();
    let read = move || kubeconfig::client(&path, &requests::Metrics::default());
    let client = blocking("the kubeconfig", read).await?;
    Ok(Client::new(watch::channel(client).1))
}

/// Marks the Node as unschedulable, or as schedulable. Returns true if that changed the Node.
///
/// # Errors
/// See [`Error`].
pub async fn set_unschedulable(client: &Client, node: &str, unschedulable: bool) -> Result<bool, Error> {
    let path = format!("/api/v1/nodes/{}", escaped(node));
    let found = client.get(&path).await?;
    if (found["spec"]["unschedulable"] == json!(true)) == unschedulable {
        return Ok(false);
    }
    // Null removes the field, as kubectl does.
    let value = if unschedulable { json!(true) } else { Value::Null };
    client.patch(&path, Patch::Merge, &json!({ "spec": { "unschedulable": value } })).await?;
    Ok(true)
}

/// Arguments of [`drain`].
#[derive(Clone, Debug)]
pub struct Task {
    /// The Node's name.
    pub node: String,
    /// The pods that may be evicted.
    pub options: Options,
    /// Grace period of the pods; None: their own.
    pub grace_seconds: Option<u64>,
    /// Time limit; None: no limit.
    pub timeout: Option<Duration>,
    /// True to report without a change.
    pub dry_run: bool,
}

/// Cordons the Node, evicts its pods, and waits until they have left.
///
/// # Errors
/// A pod may not be evicted, the time is over, or a request failed before the first eviction.
pub async fn drain(client: &Client, task: &Task, report: &mut impl FnMut(Step)) -> Result<(), DrainError> {
    let began = Instant::now();
    let changed = if task.dry_run { false } else { set_unschedulable(client, &task.node, true).await? };
    report(Step::Schedulable(false, changed));
    check(&pods_of(client, &task.node).await?, &task.options, report)?;
    if task.dry_run {
        return Ok(());
    }
    let mut drain = Drain::new(task.options.clone());
    loop {
        match pods_of(client, &task.node).await {
            Ok(pods) => {
                let round = drain.round(&pods, began.elapsed());
                round.left.iter().for_each(|pod| report(Step::Left(pod.to_string())));
                for pod in &round.evict {
                    let answer = evict(client, pod, task.grace_seconds).await;
                    if answer == Answer::Accepted {
                        report(Step::Evicted(pod.to_string()));
                    }
                    if let Some(why) = drain.answered(pod, answer, began.elapsed()) {
                        report(Step::Refused(pod.to_string(), why));
                    }
                }
                if drain.is_over() {
                    return over(&drain);
                }
            }
            // The API server may be away for a while: its node may be the drained one.
            Err(error) if error.is_transient() => report(Step::Failed(error.to_string())),
            Err(error) => return Err(error.into()),
        }
        if let Some(limit) = task.timeout.filter(|limit| began.elapsed() >= *limit) {
            let reason = format!("the node is not drained after {} s", limit.as_secs());
            return Err(DrainError::Incomplete { reason, rest: rest(&drain) });
        }
        sleep(PERIOD).await;
    }
}

/// Reports the fate of each pod. Fails if one may not be evicted.
fn check(pods: &[Pod], options: &Options, report: &mut impl FnMut(Step)) -> Result<(), DrainError> {
    let mut forbidden = Vec::new();
    for pod in pods {
        let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
        let name =
            format!("{}/{}", namespace.as_deref().unwrap_or_default(), name.as_deref().unwrap_or_default());
        match verdict(pod, options) {
            Verdict::Evict(None) => {}
            Verdict::Evict(Some(loss)) => report(Step::Loses(name, loss)),
            Verdict::Stay(why) => report(Step::Stays(name, why)),
            Verdict::Refuse(why) => forbidden.push((name, why.to_owned())),
        }
    }
    if forbidden.is_empty() { Ok(()) } else { Err(DrainError::Forbidden(forbidden)) }
}

fn over(drain: &Drain) -> Result<(), DrainError> {
    match rest(drain) {
        rest if rest.is_empty() => Ok(()),
        rest => Err(DrainError::Incomplete { reason: "the other pods have left".to_owned(), rest }),
    }
}

fn rest(drain: &Drain) -> Vec<(String, String)> {
    drain.rest().into_iter().map(|(pod, why)| (pod.to_string(), why.unwrap_or_default())).collect()
}

async fn evict(client: &Client, pod: &Target, grace_seconds: Option<u64>) -> Answer {
    let (namespace, name) = (escaped(&pod.namespace), escaped(&pod.name));
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction");
    let mut options = json!({ "preconditions": { "uid": pod.uid } });
    if let Some(seconds) = grace_seconds {
        options["gracePeriodSeconds"] = json!(seconds);
    }
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": { "name": pod.name, "namespace": pod.namespace },
        "deleteOptions": options,
    });
    match client.create(&path, &eviction).await {
        Ok(_) => Answer::Accepted,
        Err(error) => refusal(error.code(), &error.message, error.retry_after()),
    }
}
