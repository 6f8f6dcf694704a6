//! Parses a suite's results, as ginkgo writes them for JUnit.

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::ledger::{Outcome, Row};

#[derive(Deserialize)]
struct Suites {
    #[serde(default, rename = "testsuite")]
    suites: Vec<Suite>,
}

#[derive(Deserialize)]
struct Suite {
    #[serde(default, rename = "testcase")]
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    #[serde(rename = "@name")]
    name: String,
    #[serde(default, rename = "@status")]
    status: String,
    #[serde(default, rename = "@time")]
    time: f64,
    failure: Option<Said>,
    error: Option<Said>,
    skipped: Option<Said>,
}

#[derive(Deserialize)]
struct Said {
    #[serde(default, rename = "@message")]
    message: String,
}

impl Said {
    /// Returns the first line, truncated for a table.
    fn shown(&self) -> String {
        let line = self.message.trim().lines().next().unwrap_or_default();
        line.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
    }
}

/// Parses the selected tests and their results.
pub(super) fn read(text: &str) -> Result<Vec<Row>> {
    let suites: Suites = quick_xml::de::from_str(text).context("the file is not a JUnit report")?;
    let cases = suites.suites.into_iter().flat_map(|suite| suite.cases);
    Ok(cases.filter_map(row).collect())
}

/// Returns None for a case that is not a test or was not selected.
fn row(case: Case) -> Option<Row> {
    let test = case.name.strip_prefix("[It] ")?;
    let (outcome, reason) = match (case.failure.or(case.error), case.skipped) {
        (Some(said), _) if was_cut(&case.status, &said.message) => (Outcome::Cut, said.shown()),
        (Some(said), _) => (Outcome::Fail, said.shown()),
        // Ginkgo reports every test outside the focus like this.
        (None, Some(said)) if matches!(said.message.trim(), "" | "skipped") => return None,
        (None, Some(said)) if said.message.contains("earlier spec") => (Outcome::Cut, said.shown()),
        (None, Some(said)) => (Outcome::Skip, said.shown()),
        (None, None) => (Outcome::Pass, String::new()),
    };
    Some(Row { test: without_labels(test).to_owned(), outcome, seconds: case.time, reason })
}

/// Returns true if the end of the run ended the test.
fn was_cut(status: &str, message: &str) -> bool {
    matches!(status, "interrupted" | "aborted" | "timedout")
        || message.contains("suite timeout occurred")
        || message.contains("Interrupted by")
}

/// Returns a test's name without the label list that ginkgo appends.
fn without_labels(name: &str) -> &str {
    match name.rfind(" [sig-") {
        Some(at) if at > 0 && name[at..].matches(']').count() == 1 && name.ends_with(']') => &name[..at],
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_as_what_became_of_each_test() {
        let report = r#"<?xml version="1.0" encoding="UTF-8"?>
            <testsuites tests="6"><testsuite name="s" package="/p">
            <properties><property name="x" value="y"></property></properties>
            <testcase name="[SynchronizedBeforeSuite]" classname="s" status="passed" time="1"></testcase>
            <testcase name="[It] [sig-node] A should a [Conformance] [sig-node, Conformance]" status="passed" time="1.25"></testcase>
            <testcase name="[It] [sig-node] B should b [sig-node]" status="failed" time="2"><failure message="one&#xA;two" type="failed">long</failure><system-err>x</system-err></testcase>
            <testcase name="[It] [sig-node] C [sig-node]" status="skipped" time="0"><skipped message="skipped"></skipped></testcase>
            <testcase name="[It] [sig-node] D [sig-node]" status="skipped" time="0"><skipped message="skipped - no GPU"></skipped></testcase>
            <testcase name="[It] [sig-node] E [sig-node]" status="timedout" time="9"><failure message="A suite timeout occurred"></failure></testcase>
            </testsuite></testsuites>"#;
        let shown: Vec<_> = read(report)
            .unwrap()
            .into_iter()
            .map(|row| (row.test, row.outcome, row.seconds.to_string(), row.reason))
            .collect();
        let row = |test: &str, outcome, seconds: &str, reason: &str| {
            (test.to_owned(), outcome, seconds.to_owned(), reason.to_owned())
        };
        assert_eq!(
            shown,
            [
                row("[sig-node] A should a [Conformance]", Outcome::Pass, "1.25", ""),
                row("[sig-node] B should b", Outcome::Fail, "2", "one"),
                row("[sig-node] D", Outcome::Skip, "0", "skipped - no GPU"),
                row("[sig-node] E", Outcome::Cut, "9", "A suite timeout occurred"),
            ]
        );
        assert!(read("no report").is_err());
    }
}
