//! Ledger of the tests of the suites, each with its last result; written by runs.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context as _, Result, bail};

/// Result of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Outcome {
    /// The test passed.
    Pass,
    /// The test failed.
    Fail,
    /// The test skipped itself, with a reason.
    Skip,
    /// The run ended before the test did.
    Cut,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Pass, Self::Fail, Self::Skip, Self::Cut];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Skip => "skip",
            Self::Cut => "cut",
        }
    }
}

/// Result of a test.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) test: String,
    pub(super) outcome: Outcome,
    /// Duration in seconds.
    pub(super) seconds: f64,
    /// First line of the message of a test that did not pass.
    pub(super) reason: String,
}

/// Results by suite and test.
#[derive(Default)]
pub(super) struct Ledger {
    rows: BTreeMap<(String, String), Row>,
}

const HEAD: &str =
    "# Made by runs of `cargo xtask conformance`, never by hand: suite, result, seconds, test, reason.";

impl Ledger {
    /// Parses a ledger; an error names the line.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut rows = BTreeMap::new();
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
            let at = || format!("line {} of the ledger", index + 1);
            let fields: Vec<&str> = line.split('\t').collect();
            let [suite, outcome, seconds, test, reason] = fields[..] else {
                bail!("{} has {} fields instead of 5", at(), fields.len());
            };
            let known = Outcome::ALL.into_iter().find(|known| known.name() == outcome);
            let outcome = known.with_context(|| format!("{}: unknown result {outcome:?}", at()))?;
            let seconds = seconds.parse().with_context(at)?;
            let row = Row { test: test.to_owned(), outcome, seconds, reason: reason.to_owned() };
            rows.insert((suite.to_owned(), test.to_owned()), row);
        }
        Ok(Self { rows })
    }

    /// Records a newer result. A cut run does not replace a result.
    pub(super) fn record(&mut self, suite: &str, row: Row) {
        let key = (suite.to_owned(), row.test.clone());
        if row.outcome != Outcome::Cut || !self.rows.contains_key(&key) {
            self.rows.insert(key, row);
        }
    }

    /// Returns the results of a suite, by name.
    pub(super) fn of<'a>(&'a self, suite: &'a str) -> impl Iterator<Item = &'a Row> {
        self.rows.iter().filter(move |((of, _), _)| of == suite).map(|(_, row)| row)
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}")?;
        for ((suite, test), Row { outcome, seconds, reason, .. }) in &self.rows {
            writeln!(f, "{suite}\t{}\t{seconds:.1}\t{test}\t{reason}", outcome.name())?;
        }
        Ok(())
    }
}

/// Counts the results, as in "224 pass, 3 fail".
pub(super) fn counts<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let mut all = BTreeMap::new();
    for row in rows {
        *all.entry(row.outcome).or_insert(0_u32) += 1;
    }
    let parts: Vec<String> = all.into_iter().map(|(outcome, n)| format!("{n} {}", outcome.name())).collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test: &str, outcome: Outcome) -> Row {
        Row { test: test.to_owned(), outcome, seconds: 1.0, reason: String::new() }
    }

    #[test]
    fn a_ledger_is_read_as_it_was_written() {
        let text = format!(
            "{HEAD}\ncluster\tfail\t2.5\tB\tno such file\ncluster\tpass\t1.0\tA\t\nnode\tskip\t0.0\tA\tno GPU\n"
        );
        let ledger = Ledger::parse(&text).unwrap();
        let sorted = format!(
            "{HEAD}\ncluster\tpass\t1.0\tA\t\ncluster\tfail\t2.5\tB\tno such file\nnode\tskip\t0.0\tA\tno GPU\n"
        );
        assert_eq!(ledger.to_string(), sorted);
        assert_eq!(counts(ledger.of("cluster")), "1 pass, 1 fail");
        let error =
            |text: &str| Ledger::parse(text).err().map(|error| format!("{error:#}")).unwrap_or_default();
        assert!(error("cluster\tpass\n").contains("line 1 of the ledger has 2 fields"));
        assert!(error("cluster\twell\t1\tA\t\n").contains("unknown result \"well\""));
    }

    #[test]
    fn a_cut_result_replaces_no_other() {
        let check = |first: Outcome, then: Outcome, expected: Outcome| {
            let mut ledger = Ledger::default();
            ledger.record("node", row("A", first));
            ledger.record("node", row("A", then));
            assert_eq!(ledger.of("node").next().unwrap().outcome, expected);
        };
        check(Outcome::Pass, Outcome::Cut, Outcome::Pass);
        check(Outcome::Pass, Outcome::Fail, Outcome::Fail);
        check(Outcome::Cut, Outcome::Fail, Outcome::Fail);
    }
}
