//! Shell completion of names, which come from the agent. The agent has one second to answer; without an
//! answer the completion is empty and prints no error.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::time::Duration;

use beelet_client::Client;
use beelet_model::table::PodTable;
use beelet_proto::beelet as proto;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter as _};

/// Maximum time that a completion takes.
const PATIENCE: Duration = Duration::from_secs(1);

/// Completes pod names.
pub(super) fn pods() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| begin_with(current, table().pods.keys().map(|name| &name.name)))
}

/// Completes container names of the pods on the command line, or of all pods.
pub(super) fn containers() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let words: Vec<OsString> = std::env::args_os().collect();
        begin_with(current, containers_of(&table(), &words))
    })
}

/// Completes namespaces of pods.
pub(super) fn namespaces() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        begin_with(current, table().pods.keys().map(|name| &name.namespace))
    })
}

/// Completes the names of local images.
pub(super) fn images() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let listed = asked(async |mut client| client.images.list().await);
        let listed: proto::ListImagesResponse = listed.unwrap_or_default();
        begin_with(current, listed.images.iter().flat_map(|image| &image.tags))
    })
}

/// Completes the output formats of `beelet get`.
pub(super) fn formats() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        begin_with(current, ["table", "wide", "json", "yaml", "name", "jsonpath=", "custom-columns="])
    })
}

/// Completes a local path, or the name of a pod followed by a colon.
pub(super) fn places() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let pods = table();
        let pods = pods.pods.keys().map(|name| format!("{}:", name.name));
        let mut places = begin_with(current, pods);
        places.extend(PathCompleter::any().complete(current));
        places
    })
}

fn table() -> PodTable {
    asked(async |mut client| client.pods.list().await.map(|(table, _)| table)).unwrap_or_default()
}

/// Returns the agent's answer, or None on error or timeout.
fn asked<T>(question: impl AsyncFnOnce(Client) -> Result<T, beelet_client::ClientError>) -> Option<T> {
    let socket = std::env::var_os("BEELET_SOCKET").unwrap_or_else(|| super::SOCKET.into());
    let asking = async {
        let client = Client::connect(Path::new(&socket)).await?;
        anyhow::Ok(question(client).await?)
    };
    let answer = super::block_on(async { tokio::time::timeout(PATIENCE, asking).await? });
    answer.ok()
}

/// Returns the distinct names that begin with the typed text.
fn begin_with(current: &OsStr, names: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<CompletionCandidate> {
    let typed = current.to_string_lossy();
    let names = names.into_iter().filter(|name| name.as_ref().starts_with(&*typed));
    let names: BTreeSet<String> = names.map(|name| name.as_ref().to_owned()).collect();
    names.into_iter().map(CompletionCandidate::new).collect()
}

fn containers_of(table: &PodTable, words: &[OsString]) -> Vec<String> {
    let is_named = |name: &str, entry: &beelet_model::table::PodEntry| {
        let pod = beelet_model::table::PodName::of(&entry.pod);
        words.iter().any(|word| word == name || word.to_str().is_some_and(|word| entry.is_called(&pod, word)))
    };
    let named: Vec<_> = table.pods.iter().filter(|(name, entry)| is_named(&name.name, entry)).collect();
    let chosen = if named.is_empty() { table.pods.iter().collect() } else { named };
    let specs = chosen.into_iter().filter_map(|(_, entry)| entry.pod.spec.as_ref());
    let containers =
        specs.flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()));
    containers.map(|container| container.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use beelet_model::table::{PodEntry, PodName};
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_are_those_of_the_pod_that_is_named_already() {
        let mut table = PodTable::default();
        for (pod, containers) in [("web-n1", ["main", "side"]), ("db-n1", ["postgres", "init"])] {
            let containers: Vec<_> = containers.iter().map(|name| json!({ "name": name })).collect();
            let pod = json!({"metadata": {"name": pod, "namespace": "default"}, "spec": {"containers": containers}});
            let entry = PodEntry::of(serde_json::from_value(pod).unwrap());
            table.pods.insert(PodName::of(&entry.pod), Arc::new(entry));
        }
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        assert_eq!(containers_of(&table, &words(&["beelet", "logs", "web-n1", "-c"])), ["main", "side"]);
        assert_eq!(containers_of(&table, &words(&["beelet", "logs", "-c"])).len(), 4);
    }

    #[test]
    fn what_is_completed_goes_on_from_what_was_typed() {
        let names = ["web", "worker", "db", "web"];
        let completed: Vec<_> = begin_with(OsStr::new("w"), names);
        let completed: Vec<&OsStr> = completed.iter().map(CompletionCandidate::get_value).collect();
        assert_eq!(completed, ["web", "worker"]);
    }
}
