//! The rights that a request to the kubelet's server needs, in the terms of the API's authorization: a verb
//! on a subresource of `nodes`.
//!
//! Source: `NodeRequestAttributes` in pkg/kubelet/server/auth.go, with the subresources of KEP-2862. Stricter
//! in one point: exec, attach, port-forward and checkpoint always need `create`, also if a WebSocket requests
//! them by GET. Otherwise the right to read `nodes/proxy` would be the right to run commands.

/// A right that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// `get`, `create`, …; empty for a method without a verb in the API.
    pub verb: &'static str,
    /// The subresource of `nodes`: `proxy`, `stats`, `metrics`, …
    pub subresource: &'static str,
}

/// Pages with their own subresource; a right to either that subresource or `proxy` grants access.
const FINE: [(&str, &str); 4] =
    [("/pods", "pods"), ("/healthz", "healthz"), ("/configz", "configz"), ("/runningpods", "pods")];
/// Pages with their own subresource; only a right to that subresource grants access.
const COARSE: [(&str, &str); 4] =
    [("/stats", "stats"), ("/metrics", "metrics"), ("/logs", "log"), ("/checkpoint", "checkpoint")];
/// Pages that act on a container regardless of the method.
const ACTS: [&str; 5] = ["/exec", "/attach", "/portForward", "/run", "/checkpoint"];

/// Returns the rights for `method` on `path`, in the order of the checks; any one of them is enough.
#[must_use]
pub fn access(method: &str, path: &str) -> Vec<Access> {
    let acts = ACTS.iter().any(|page| is_at(path, page));
    let verb = match method {
        _ if acts => "create",
        "POST" => "create",
        "GET" | "HEAD" => "get",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "",
    };
    let of = |pages: &[(&str, &'static str)]| {
        pages.iter().find(|(page, _)| is_at(path, page)).map(|(_, subresource)| *subresource)
    };
    let subresources = match (of(&COARSE), of(&FINE)) {
        (Some(coarse), _) => vec![coarse],
        (None, Some(fine)) => vec![fine, "proxy"],
        (None, None) => vec!["proxy"],
    };
    subresources.into_iter().map(|subresource| Access { verb, subresource }).collect()
}

/// Returns true if the path is the page, or below it.
fn is_at(path: &str, page: &str) -> bool {
    path.strip_prefix(page).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns the page's name in metrics: the first part of a served path, or `other`, so that clients cannot
/// create series through requests.
#[must_use]
pub fn page(path: &str) -> &'static str {
    PAGES.iter().copied().find(|page| is_at(path, &format!("/{page}"))).unwrap_or("other")
}

/// Longer names first.
const PAGES: [&str; 18] = [
    "healthz",
    "pods",
    "runningpods",
    "metrics/cadvisor",
    "metrics/resource",
    "metrics/probes",
    "metrics/slis",
    "metrics",
    "stats",
    "configz",
    "containerLogs",
    "logs",
    "exec",
    "attach",
    "portForward",
    "run",
    "checkpoint",
    "debug",
];

/// Returns true if a request to the page may take any time, as in the kubelet's metrics.
#[must_use]
pub fn is_long_running(page: &str) -> bool {
    matches!(page, "containerLogs" | "exec" | "attach" | "portForward" | "run")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_has_its_rights() {
        let check = |method: &str, path: &str, expected: &str| {
            let rights: Vec<String> = access(method, path)
                .into_iter()
                .map(|access| format!("{} {}", access.verb, access.subresource))
                .collect();
            assert_eq!(rights.join(", "), expected, "{method} {path}");
        };
        check("GET", "/healthz", "get healthz, get proxy");
        check("GET", "/healthz/ping", "get healthz, get proxy");
        check("GET", "/healthzz", "get proxy");
        check("GET", "/pods", "get pods, get proxy");
        check("GET", "/pods/", "get pods, get proxy");
        check("GET", "/runningpods/", "get pods, get proxy");
        check("GET", "/configz", "get configz, get proxy");
        check("GET", "/stats", "get stats");
        check("GET", "/stats/summary", "get stats");
        check("GET", "/metrics", "get metrics");
        check("HEAD", "/metrics", "get metrics");
        check("GET", "/metrics/cadvisor", "get metrics");
        check("GET", "/metrics/slis", "get metrics");
        check("PUT", "/debug/flags/v", "update proxy");
        check("GET", "/metricsx", "get proxy");
        check("GET", "/logs/", "get log");
        check("GET", "/logs/syslog", "get log");
        check("GET", "/containerLogs/ns/pod/main", "get proxy");
        check("POST", "/checkpoint/ns/pod/main", "create checkpoint");
        check("POST", "/exec/ns/pod/main", "create proxy");
        check("GET", "/exec/ns/pod/main", "create proxy");
        check("GET", "/attach/ns/pod/main", "create proxy");
        check("GET", "/portForward/ns/pod", "create proxy");
        check("GET", "/run/ns/pod/main", "create proxy");
        check("PUT", "/run/ns/pod/main", "create proxy");
        check("GET", "/", "get proxy");
        check("GET", "", "get proxy");
        check("PUT", "/pods", "update pods, update proxy");
        check("PATCH", "/x", "patch proxy");
        check("DELETE", "/x", "delete proxy");
        check("TRACE", "/x", " proxy");
    }

    #[test]
    fn page_names_come_from_a_closed_list() {
        let check = |path: &str, expected: &str| assert_eq!(page(path), expected, "{path}");
        check("/metrics", "metrics");
        check("/metrics/cadvisor", "metrics/cadvisor");
        check("/metrics/other", "metrics");
        check("/exec/ns/pod/main", "exec");
        check("/executable", "other");
        check("/", "other");
        assert!(is_long_running("exec") && !is_long_running("metrics"));
    }
}
