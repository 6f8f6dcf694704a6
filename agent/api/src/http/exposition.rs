//! The two exposition formats: OpenMetrics, and the older text format, which the kubelet writes and all
//! clients read.
//!
//! A client receives OpenMetrics only if its `Accept` header names it. Parsers of the text format stop at an
//! unknown type, and some parsers (Kubernetes' own tests) never recover.

use axum::http::{HeaderMap, header};

/// Format of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// https://prometheus.io/docs/specs/om/open_metrics_spec/
    OpenMetrics,
    /// https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
    Text,
}

impl Format {
    /// Returns the format that a request accepts.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        if accepted.any(|value| value.contains("application/openmetrics-text")) {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// Returns the media type of the format.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Converts an OpenMetrics page to the text format: a counter's family gets the name of its samples, and the
/// type "unknown" becomes "counter", because it marks the kubelet's counters with names that OpenMetrics does
/// not allow ([`beelet_base::kubelet_counter`]).
pub(super) fn to_text(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    let mut help: Option<&str> = None;
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = Some(rest);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "unknown" => ("", "counter"),
                kind => ("", kind),
            };
            if let Some((_, help)) = help.take().and_then(|help| help.split_once(' ')) {
                push(&mut text, &["# HELP ", name, suffix, " ", help]);
            }
            push(&mut text, &["# TYPE ", name, suffix, " ", kind]);
        } else if !line.starts_with('#') {
            push(&mut text, &[line]);
        }
    }
    text
}

fn push(text: &mut String, parts: &[&str]) {
    parts.iter().for_each(|part| text.push_str(part));
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_asks_for_openmetrics_gets_it() {
        let check = |accept: Option<&str>, expected: Format| {
            let mut headers = HeaderMap::new();
            if let Some(accept) = accept {
                headers.insert(header::ACCEPT, accept.parse().unwrap());
            }
            assert_eq!(Format::of(&headers), expected, "{accept:?}");
        };
        check(None, Format::Text);
        check(Some("*/*"), Format::Text);
        check(Some("text/plain;version=0.0.4"), Format::Text);
        let prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        check(Some(prometheus), Format::OpenMetrics);
    }

    #[test]
    fn the_text_format_has_its_own_names_and_types() {
        let page = "# HELP exits Exits, in all.\n# TYPE exits counter\nexits_total{a=\"# b\"} 1\n\
                    # HELP kubelet_evictions Evictions.\n# TYPE kubelet_evictions unknown\nkubelet_evictions 2\n\
                    # HELP wait_seconds Time.\n# TYPE wait_seconds histogram\n# UNIT wait_seconds seconds\n\
                    wait_seconds_bucket{le=\"+Inf\"} 0\n# EOF\n";
        let expected = "# HELP exits_total Exits, in all.\n# TYPE exits_total counter\nexits_total{a=\"# b\"} 1\n\
                        # HELP kubelet_evictions Evictions.\n# TYPE kubelet_evictions counter\nkubelet_evictions 2\n\
                        # HELP wait_seconds Time.\n# TYPE wait_seconds histogram\n\
                        wait_seconds_bucket{le=\"+Inf\"} 0\n";
        assert_eq!(to_text(page), expected);
    }
}
