//! Requests of the nodes, as the API server's audit log has them.

use std::collections::BTreeMap;

use anyhow::Result;
use beelet_tests::cluster::Cluster;
use jiff::Timestamp;
use serde_json::Value;

use super::nodes::Fleet;

/// Verb and resource, with its subresource.
pub(super) type Kind = (String, String);

/// Event of a node's request.
#[derive(Debug)]
struct Event {
    node: String,
    kind: Kind,
    /// The stage of a watch's start, which its end follows in an event of its own.
    starts: bool,
    at: Timestamp,
    code: u64,
}

/// Events of all nodes in a part of the log, oldest first.
pub(super) struct Audit(Vec<Event>);

impl Audit {
    /// Returns the number of events so far.
    pub(super) fn mark(cluster: &Cluster) -> Result<usize> {
        Ok(cluster.audit()?.len())
    }

    /// Returns the nodes' events after the first `mark` events of the log.
    pub(super) fn since(cluster: &Cluster, mark: usize) -> Result<Audit> {
        Ok(Audit(cluster.audit()?.iter().skip(mark).filter_map(event).collect()))
    }

    /// Returns the requests: a watch counts at its start only, even if it ends later.
    fn requests(&self) -> impl Iterator<Item = &Event> {
        self.0.iter().filter(|event| event.kind.0 != "watch" || event.starts)
    }

    /// Returns the number of requests of each node.
    pub(super) fn per_node(&self, fleet: &Fleet) -> Vec<f64> {
        let of = |name: &String| self.requests().filter(|event| event.node == *name).count() as f64;
        fleet.names().iter().map(of).collect()
    }

    /// Returns the number of requests by verb and resource.
    pub(super) fn by_kind(&self) -> BTreeMap<Kind, usize> {
        let mut counts = BTreeMap::new();
        for event in self.requests() {
            *counts.entry(event.kind.clone()).or_default() += 1;
        }
        counts
    }

    /// Returns the number of each node's watches that have started and not ended.
    pub(super) fn open_watches(&self, fleet: &Fleet) -> Vec<f64> {
        let of = |name: &String| {
            let watches = self.0.iter().filter(|event| event.node == *name && event.kind.0 == "watch");
            watches.map(|event| if event.starts { 1.0 } else { -1.0 }).sum::<f64>()
        };
        fleet.names().iter().map(of).collect()
    }

    /// Returns the seconds from `began` to each node's first renewal of its lease.
    pub(super) fn first_renewals(&self, fleet: &Fleet, began: Timestamp) -> Vec<f64> {
        let renewed = |name: &String| {
            let is_renewal = |event: &&Event| {
                event.node == *name
                    && event.kind == ("update".to_owned(), "leases".to_owned())
                    && event.code == 200
            };
            let first = self.0.iter().find(is_renewal)?.at;
            Some(first.duration_since(began).as_secs_f64())
        };
        fleet.names().iter().filter_map(renewed).collect()
    }

    /// Returns the number of requests in the busiest second.
    pub(super) fn busiest_second(&self) -> usize {
        let mut seconds: BTreeMap<i64, usize> = BTreeMap::new();
        for event in self.requests() {
            *seconds.entry(event.at.as_second()).or_default() += 1;
        }
        seconds.into_values().max().unwrap_or(0)
    }
}

/// Returns None for a request that is not a node's.
fn event(event: &Value) -> Option<Event> {
    let node = event["user"]["username"].as_str()?.strip_prefix("system:node:")?.to_owned();
    let object = &event["objectRef"];
    let resource = match (object["resource"].as_str(), object["subresource"].as_str()) {
        (Some(resource), Some(sub)) => format!("{resource}/{sub}"),
        (Some(resource), None) => resource.to_owned(),
        // A path that is not a resource may have parameters.
        (None, _) => event["requestURI"].as_str()?.split('?').next()?.to_owned(),
    };
    Some(Event {
        node,
        kind: (event["verb"].as_str()?.to_owned(), resource),
        starts: event["stage"] == "ResponseStarted",
        at: event["stageTimestamp"].as_str()?.parse().ok()?,
        code: event["responseStatus"]["code"].as_u64().unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn made(verb: &str, resource: &str, stage: &str, at: &str) -> Option<Event> {
        event(&json!({
            "user": { "username": "system:node:n1" }, "verb": verb, "stage": stage, "stageTimestamp": at,
            "objectRef": { "resource": resource }, "responseStatus": { "code": 200 },
        }))
    }

    #[test]
    fn a_watch_counts_once_and_is_open_until_its_end() {
        let second = "2026-01-01T00:00:01.5Z";
        let events = [
            made("watch", "pods", "ResponseStarted", second),
            made("watch", "pods", "ResponseComplete", "2026-01-01T00:00:02Z"),
            made("watch", "services", "ResponseStarted", second),
            made("update", "leases", "ResponseComplete", second),
            event(&json!({ "user": { "username": "admin" }, "verb": "get" })),
        ];
        let audit = Audit(events.into_iter().flatten().collect());
        let fleet = Fleet::of_names(&["n1", "n2"]);
        assert_eq!(audit.per_node(&fleet), [3.0, 0.0]);
        assert_eq!(audit.open_watches(&fleet), [1.0, 0.0]);
        assert_eq!(audit.busiest_second(), 3);
        let began = "2026-01-01T00:00:00Z".parse().unwrap();
        assert_eq!(audit.first_renewals(&fleet, began), [1.5]);
        assert_eq!(audit.by_kind().len(), 3);
    }
}
