//! The target for redirects of applications and settings in annotations, and the parser of a process' state.

use std::collections::BTreeMap;

use beelet_policy::probe::{ProbeKind, settings};

use beelet_base::process;
use beelet_probes::http;

/// Tests three lines: the path of a probe's request, the location in the answer, and an annotation. A
/// redirect stays on the host and leads to a valid request; settings from the annotation are within their
/// limits.
pub fn probes(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut lines = text.splitn(3, '\n');
    let mut line = || lines.next().unwrap_or_default();
    let (path, location, annotation) = (format!("/{}", line()), line(), line());
    for host in ["10.0.0.1", "::1", "web"] {
        for tls in [false, true] {
            http::redirect(tls, &path, host, location);
        }
    }
    let annotations = BTreeMap::from([(settings::POD_ANNOTATION.to_owned(), annotation.to_owned())]);
    for kind in [ProbeKind::Liveness, ProbeKind::Readiness, ProbeKind::Startup] {
        let (found, problems) = settings::read(&annotations, "main", kind);
        assert!(problems.len() <= annotation.split([' ', ',', '\n', '\t']).count());
        assert!(found.period.is_none_or(|period| period >= settings::SHORTEST), "{found:?}");
        assert!(
            found.canary.is_none_or(|every| every.is_zero() || every >= settings::SHORTEST_ASKED),
            "{found:?}"
        );
        assert!(found.timeout.is_none_or(|timeout| timeout >= settings::SHORTEST), "{found:?}");
    }
}

/// Tests the parser of `/proc/<pid>/stat`.
pub(crate) fn process(stat: &[u8]) {
    let _ = process::parse(stat);
}
