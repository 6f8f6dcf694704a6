//! Reports a collection's objects to a [`Sink`]: one list, then one watch, across all faults of the server. A
//! streamed collection uses a watch that starts with the list, one request instead of two (KEP-3157), if the
//! server supports it.
//!
//! A new watch continues where the last one ended; if the server can't continue it ("410 Gone"), a new list
//! comes first. Must never report to a sink anything older than its last state.

use std::{collections::BTreeMap, time::Duration};

use futures::{Stream, StreamExt};
use serde_json::Value;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use crate::{
    backoff::{Pauses, chance},
    client::{ANSWER, Client, Error, Event, Kind},
    url::{escaped, field_selector},
};

/// Minimum requested duration of a watch, in seconds.
const WATCH_SECONDS: u32 = 300;
/// Silence after which a watch counts as dead. Bookmarks come once per minute.
const SILENCE: Duration = Duration::from_secs(180);
/// Duration of a watch from which its end counts as regular: the next watch starts at once.
const LASTED: Duration = Duration::from_secs(5);

/// A set of objects.
#[derive(Clone, Debug)]
pub(crate) struct Collection {
    /// Path, e.g. `/api/v1/pods`.
    pub(crate) path: String,
    /// Field selector: a field and its value; None for all objects.
    pub(crate) field: Option<(&'static str, String)>,
    /// True if the watch starts with the list.
    pub(crate) streamed: bool,
}

/// Receiver of a collection's objects.
pub(crate) trait Sink {
    /// Handles the list of all objects. Returns false to request the list again before accepting it.
    fn listed(&mut self, objects: Vec<Value>) -> bool;
    /// Handles a new or changed object.
    fn applied(&mut self, object: &Value);
    /// Handles a deleted object.
    fn deleted(&mut self, object: &Value);
}

/// Follows a collection until dropped.
pub(crate) async fn follow(client: &Client, of: &Collection, sink: &mut (impl Sink + Send)) {
    let mut line = Line { client, of, pauses: Pauses::default(), failing: false };
    loop {
        if line.is_streamed() {
            line.watch(None, sink).await;
            continue;
        }
        match line.list().await {
            Ok((objects, version)) => {
                line.answered();
                if sink.listed(objects) {
                    line.watch(Some(version), sink).await;
                } else {
                    line.pauses.wait().await;
                }
            }
            Err(error) => line.failed(&error).await,
        }
    }
}

struct Line<'a> {
    client: &'a Client,
    of: &'a Collection,
    pauses: Pauses,
    failing: bool,
}

impl Line<'_> {
    fn is_streamed(&self) -> bool {
        self.of.streamed && self.client.has_streamed_lists()
    }

    async fn list(&self) -> Result<(Vec<Value>, String), Error> {
        let mut list = self.client.get(&self.url("")).await?;
        let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        let objects =
            items(&mut list).map_err(|cause| Error::unreachable(&format!("GET {}", self.of.path), &cause))?;
        Ok((objects, version))
    }

    /// Watches from `version`, or with a streamed list, in a loop until a list is necessary.
    async fn watch(&mut self, mut version: Option<String>, sink: &mut (impl Sink + Send)) {
        loop {
            let began = Instant::now();
            match self.watch_once(&mut version, sink).await {
                Ok(()) if began.elapsed() >= LASTED => self.pauses.reset(),
                Ok(()) => self.pauses.wait().await,
                Err(error) if version.is_none() && matches!(error.code(), Some(400 | 422)) => {
                    self.do_without_streams(&error.message);
                    return;
                }
                // An invalid resource version can't start a watch.
                Err(error) if error.is_expired() || (version.is_some() && error.kind == Kind::Unaskable) => {
                    info!(what = self.of.path, %error, "cannot continue the watch; listing again");
                    // All nodes may get this answer at the same moment: wait a random pause.
                    self.pauses.of(&error).wait(error.retry_after()).await;
                    return;
                }
                Err(error) => self.failed(&error).await,
            }
            if version.is_none() && !self.is_streamed() {
                return;
            }
        }
    }

    async fn watch_once(
        &mut self,
        version: &mut Option<String>,
        sink: &mut (impl Sink + Send),
    ) -> Result<(), Error> {
        let seconds = WATCH_SECONDS + u32::from(chance());
        let from = match version {
            Some(version) => format!("resourceVersion={}", escaped(version)),
            None => "sendInitialEvents=true&resourceVersionMatch=NotOlderThan".to_owned(),
        };
        let query = format!("watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&{from}");
        let mut events = self.client.watch(&self.url(&query)).await?;
        let version = match version {
            Some(version) => version,
            None => match timeout(ANSWER, all_there_is(&mut events)).await {
                Ok(Some(all)) => {
                    let (objects, at) = all?;
                    self.answered();
                    if !sink.listed(objects) {
                        return Ok(());
                    }
                    version.insert(at)
                }
                Ok(None) => return Ok(()),
                Err(_) => {
                    self.do_without_streams("the answer does not mark the end of the initial events");
                    return Ok(());
                }
            },
        };
        self.answered();
        while let Ok(Some(event)) = timeout(SILENCE, events.next()).await {
            match event? {
                Event::Applied(object) => {
                    advance(version, object["metadata"]["resourceVersion"].as_str());
                    sink.applied(&object);
                }
                Event::Deleted(object) => {
                    advance(version, object["metadata"]["resourceVersion"].as_str());
                    sink.deleted(&object);
                }
                Event::Bookmark(bookmark) | Event::Complete(bookmark) => advance(version, Some(&bookmark)),
            }
            self.pauses.reset();
        }
        Ok(())
    }

    fn url(&self, query: &str) -> String {
        let Collection { path, field, .. } = self.of;
        let field = field.as_ref().map_or_else(String::new, |(field, value)| field_selector(field, value));
        let all: Vec<&str> = [field.as_str(), query].into_iter().filter(|part| !part.is_empty()).collect();
        if all.is_empty() { path.clone() } else { format!("{path}?{}", all.join("&")) }
    }

    async fn failed(&mut self, error: &Error) {
        if self.failing {
            debug!(what = self.of.path, %error, "still cannot list or watch in the API server");
        } else if self.pauses.may_be_early(error) {
            debug!(what = self.of.path, %error, "cannot list or watch in the API server yet");
        } else {
            warn!(what = self.of.path, %error, "cannot list or watch in the API server; keeping the last known state");
            self.failing = true;
        }
        self.client.presence().pause(self.pauses.of(error), error).await;
    }

    fn do_without_streams(&self, why: &str) {
        debug!(
            what = self.of.path,
            why, "the API server does not support streamed lists; listing before each watch"
        );
        self.client.disable_streamed_lists();
    }

    fn answered(&mut self) {
        if std::mem::take(&mut self.failing) {
            info!(what = self.of.path, "listing and watching in the API server again");
        }
    }
}

/// Returns the objects of a list. An answer without items, e.g. `{}`, does not count as an empty list: a
/// proxy's answer must not remove every pod.
fn items(list: &mut Value) -> Result<Vec<Value>, &'static str> {
    let is_list = list["kind"].as_str().is_some_and(|kind| kind.ends_with("List"));
    match list.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) if items.iter().all(Value::is_object) => Ok(items),
        Some(Value::Array(_)) => Err("the answer's items are not objects"),
        // Go also encodes an empty list as null.
        Some(Value::Null) if is_list => Ok(Vec::new()),
        _ => Err("the answer is not a list"),
    }
}

/// Reads the initial events of a watch. Returns the objects and their version; None if the watch ended too
/// early.
async fn all_there_is(
    events: &mut (impl Stream<Item = Result<Event, Error>> + Unpin),
) -> Option<Result<(Vec<Value>, String), Error>> {
    let mut objects = BTreeMap::new();
    loop {
        match events.next().await? {
            Ok(Event::Applied(object)) => drop(objects.insert(key_of(&object), object)),
            Ok(Event::Deleted(object)) => drop(objects.remove(&key_of(&object))),
            Ok(Event::Bookmark(_)) => {}
            Ok(Event::Complete(version)) => return Some(Ok((objects.into_values().collect(), version))),
            Err(error) => return Some(Err(error)),
        }
    }
}

/// Returns an object's namespace and name.
pub(crate) fn key_of(object: &Value) -> (String, String) {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    (text("namespace"), text("name"))
}

/// Advances to a version, never back: bookmarks may come out of order.
fn advance(version: &mut String, to: Option<&str>) {
    let Some(to) = to.filter(|to| !to.is_empty()) else { return };
    if !is_older(to, version) {
        to.clone_into(version);
    }
}

/// Returns true if a resource version is older than another, which is known only of numeric versions.
pub(crate) fn is_older(version: &str, than: &str) -> bool {
    let number = |text: &str| text.parse::<u128>().ok();
    number(version).zip(number(than)).is_some_and(|(version, than)| version < than)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_list_of_objects_is_a_list() {
        let check = |mut list: Value, expected: Option<usize>| {
            let before = list.to_string();
            assert_eq!(items(&mut list).ok().map(|items| items.len()), expected, "{before}");
        };
        check(json!({ "kind": "PodList", "items": [{}, {}] }), Some(2));
        check(json!({ "kind": "PodList", "items": [] }), Some(0));
        check(json!({ "kind": "PodList", "items": null }), Some(0));
        check(json!({ "items": null }), None);
        check(json!({ "kind": "PodList" }), None);
        check(json!({ "kind": "PodList", "items": [{}, "ok"] }), None);
        check(json!({ "kind": "PodList", "items": [null] }), None);
        for other in
            [json!({ "kind": "PodList", "items": "ok" }), json!({}), json!([]), json!("ok"), json!(null)]
        {
            check(other, None);
        }
    }

    #[test]
    fn a_version_never_goes_back() {
        let check = |version: &str, to: Option<&str>, expected: &str| {
            let mut version = version.to_owned();
            advance(&mut version, to);
            assert_eq!(version, expected);
        };
        check("9", Some("10"), "10");
        check("10", Some("9"), "10");
        check("10", Some(""), "10");
        check("10", None, "10");
        check("", Some("1"), "1");
        check("opaque", Some("other"), "other");
    }
}
