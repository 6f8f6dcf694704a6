//! Parser for `beelet doctor --bpf -o json`, as far as the documentation needs it.

use serde::Deserialize;
use std::collections::BTreeMap;

/// Findings of the doctor by the name of the check: the detail of a passed check, otherwise the fault.
pub(super) type Findings = BTreeMap<String, Result<String, String>>;

#[derive(Deserialize)]
struct Report {
    #[serde(default, rename = "canRun")]
    can_run: bool,
    findings: Vec<Finding>,
}

#[derive(Deserialize)]
struct Finding {
    check: String,
    state: String,
    detail: String,
}

/// Returns true if the doctor found that the agent can run.
pub(super) fn can_run(json: &str) -> bool {
    report(json).can_run
}

fn report(json: &str) -> Report {
    serde_json::from_str(json).unwrap_or(Report { can_run: false, findings: Vec::new() })
}

/// Parses the findings; empty if the text is not a report, as from a doctor that failed.
pub(super) fn read(json: &str) -> Findings {
    let mut findings = Findings::new();
    for Finding { check, state, detail } in report(json).findings {
        let entry = findings.entry(check).or_insert_with(|| Ok(detail.clone()));
        if state != "ok" && entry.is_ok() {
            *entry = Err(detail);
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_bad_finding_is_enough() {
        let json = r#"{"canRun":false,"findings":[
            {"check":"a","state":"ok","detail":"fine"},
            {"check":"b","state":"ok","detail":"fine"},
            {"check":"b","state":"degraded","detail":"no BTF","consequence":"c","remedy":"r"},
            {"check":"b","state":"missing","detail":"second","consequence":"c","remedy":"r"}]}"#;
        let expected = [("a".to_owned(), Ok("fine".to_owned())), ("b".to_owned(), Err("no BTF".to_owned()))];
        assert_eq!(read(json), Findings::from(expected));
        assert!(!can_run(json) && can_run(&json.replace("false", "true")));
    }

    #[test]
    fn an_invalid_report_has_no_findings() {
        for text in ["", "error: unrecognized subcommand", "{}", "[]"] {
            assert!(read(text).is_empty() && !can_run(text), "{text}");
        }
    }
}
