//! What a request to the kubelet's server asks for, in the words of the API's authorization: a verb on a
//! subresource of `nodes`.
//!
//! Source: `NodeRequestAttributes` in pkg/kubelet/server/auth.go, with the subresources of KEP-2862. In one
//! point this is stricter: a command, an attachment, a forwarded port and a checkpoint are always `create`,
//! also where a WebSocket asks for them by GET. Otherwise the right to read `nodes/proxy` would be the right
//! to run commands.

/// A right to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// `get`, `create`, …; empty for a method that the API knows no verb for.
    pub verb: &'static str,
    /// The subresource of `nodes`: `proxy`, `stats`, `metrics`, …
    pub subresource: &'static str,
}

/// Pages with a subresource of their own. Whoever has the one right or `proxy` may read them.
const FINE: [(&str, &str); 4] =
    [("/pods", "pods"), ("/healthz", "healthz"), ("/configz", "configz"), ("/runningpods", "pods")];
/// Pages with a subresource that stands for itself.
const COARSE: [(&str, &str); 4] =
    [("/stats", "stats"), ("/metrics", "metrics"), ("/logs", "log"), ("/checkpoint", "checkpoint")];
/// What acts on a container whatever the method is.
const ACTS: [&str; 5] = ["/exec", "/attach", "/portForward", "/run", "/checkpoint"];

/// The rights of which one is enough for `method` on `path`, in the order in which they are asked for.
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

/// The path is the page, or below it.
fn is_at(path: &str, page: &str) -> bool {
    path.strip_prefix(page).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The page's name in metrics: the first part of a path that is served, `other` for all else, so that nobody
/// can make up series by asking.
#[must_use]
pub fn page(path: &str) -> &'static str {
    PAGES.iter().copied().find(|page| is_at(path, &format!("/{page}"))).unwrap_or("other")
}

/// The longer ones first.
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

/// Returns true if a request to the page may take as long as it likes, as the kubelet's metrics have it.
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
    fn pages_have_names_of_a_closed_list() {
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
