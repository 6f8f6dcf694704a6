//! The smaller pages `/configz`, `/runningpods/`, `/run` and `/checkpoint`, and the answers of disabled
//! pages.

use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use beelet_units::bounds;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use serde_json::{Value, json};

use beelet_base::blocking::blocking;
use beelet_base::folder::{PRIVATE, make_folder};
use beelet_model::pod::running;
use beelet_model::table::PodTable;

use crate::App;
use crate::containers::Failure;
use crate::logs::Pairs;
use crate::streams::{Parts, target};

/// Maximum timeout of a checkpoint in seconds.
const CHECKPOINT_MAX: u64 = 24 * 60 * 60;

fn as_json(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// Returns the effective configuration.
pub(crate) async fn configz(State(app): State<App>) -> Response {
    as_json(&json!({ "kubeletconfig": *app.configz }))
}

/// Returns the pods with a running container: names and images.
pub(crate) async fn running_pods(State(app): State<App>) -> Response {
    let table = app.table.borrow().clone();
    as_json(&running_list(&table))
}

fn running_list(table: &PodTable) -> Value {
    let pod = |pod: &core::Pod| {
        let containers: Vec<Value> = running(pod)
            .map(
                |(_, container)| json!({ "name": container.name, "image": container.image, "resources": {} }),
            )
            .collect();
        let meta = &pod.metadata;
        (!containers.is_empty()).then(|| {
            json!({
                "metadata": { "name": meta.name, "namespace": meta.namespace, "uid": meta.uid },
                "spec": { "containers": containers },
                "status": {},
            })
        })
    };
    let items: Vec<Value> = table.pods.values().filter_map(|entry| pod(&entry.pod)).collect();
    json!({ "kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items })
}

/// Runs a command to completion and returns both outputs.
pub(crate) async fn run(
    State(app): State<App>,
    path: Parts,
    Query(pairs): Query<Pairs>,
) -> Result<Response, Failure> {
    let target = target(path);
    let (_, entry) = target.find(&app.table.borrow())?;
    let id = target.running(&entry.pod)?;
    let cmd = pairs.iter().find(|(name, _)| name == "cmd").map(|(_, cmd)| cmd.as_str()).unwrap_or_default();
    let command: Vec<String> = cmd.split(' ').map(str::to_owned).collect();
    let done = app.runtime.containers.exec_sync(id, command, Duration::ZERO).await?;
    let output = [done.stdout, done.stderr].concat();
    if done.exit_code != 0 {
        let sentence =
            format!("command '{cmd}' exited with {}: {}", done.exit_code, String::from_utf8_lossy(&output));
        return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, sentence));
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], output).into_response())
}

/// Writes a checkpoint of a container to an archive on this node.
pub(crate) async fn checkpoint(
    State(app): State<App>,
    path: Parts,
    Query(pairs): Query<Pairs>,
) -> Result<Response, Failure> {
    let target = target(path);
    let (name, entry) = target.find(&app.table.borrow())?;
    let id = target.running(&entry.pod)?;
    let timeout = pairs.iter().find(|(key, _)| key == "timeout").map(|(_, value)| value.parse::<u64>());
    let wrong = |_| Failure::new(StatusCode::BAD_REQUEST, "timeout must be a number of seconds");
    let seconds = timeout.transpose().map_err(wrong)?.unwrap_or(0).min(CHECKPOINT_MAX);
    let timeout = bounds::seconds(i64::try_from(seconds).unwrap_or(i64::MAX));
    let folder = app.checkpoints.to_path_buf();
    let made = blocking("creating the directory of checkpoints", move || make_folder(&folder, PRIVATE)).await;
    made.map_err(|error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    let file = format!(
        "checkpoint-{}_{}-{}-{:.0}.tar",
        name.name,
        name.namespace,
        target.container,
        Timestamp::now()
    );
    let location = app.checkpoints.join(file);
    app.runtime.containers.checkpoint(id, &location, timeout).await.map_err(|error| {
        // Programs look for the runtime's words in the kubelet's sentence.
        let object = format!("{}/{}/{}", name.namespace, name.name, target.container);
        let sentence = format!("checkpointing of {object} failed ({})", error.rpc);
        Failure::new(StatusCode::INTERNAL_SERVER_ERROR, sentence)
    })?;
    Ok(as_json(&json!({ "items": [location] })))
}

/// Answers if the configuration disables access to containers.
pub(crate) async fn disabled() -> Response {
    (StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n").into_response()
}

/// Answers if the configuration disables the machine's logs.
pub(crate) async fn no_logs() -> Response {
    (StatusCode::METHOD_NOT_ALLOWED, "logs endpoint is disabled.\n").into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use beelet_model::table::{PodEntry, PodName};

    use super::*;

    #[test]
    fn only_what_runs_is_a_running_pod() {
        let mut table = PodTable::default();
        for (name, state) in [("web", json!({ "running": {} })), ("db", json!({ "waiting": {} }))] {
            let pod = json!({
                "metadata": { "name": name, "namespace": "default", "uid": "u1" },
                "spec": { "containers": [{ "name": "main", "image": "busybox", "env": [{ "name": "A" }] }] },
                "status": { "containerStatuses": [
                    { "name": "main", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": state, "containerID": "c://1" },
                ] },
            });
            let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
            table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        }
        let list = running_list(&table);
        assert_eq!(list["items"].as_array().unwrap().len(), 1);
        assert_eq!(list["items"][0]["metadata"]["name"], "web");
        let containers = json!([{ "name": "main", "image": "busybox", "resources": {} }]);
        assert_eq!(list["items"][0]["spec"]["containers"], containers);
    }
}
