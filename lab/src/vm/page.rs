//! Page docs/machines.md: a table of the checks with a column per stock machine, and a table of the
//! end-to-end tests with a column per machine and cgroup driver. A run replaces its earlier results.

use super::results::Verdict;
use anyhow::Result;
use beelet_tests::workdir;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

const HEAD: &str = "\
# Stock machines

This page shows the results of `cargo xtask vm --machine NAME --write-docs`: a stock Debian, under QEMU without hardware
support, with our package installed by apt. Each column shows the last run on that machine; the first rows describe the machine.
[Kernels without a distribution](kernels.md) have their own page.

";
/// Cell of a check that was not made on a machine.
const NOT_THERE: &str = "-";
/// Rows that describe a machine, before its checks.
const FACTS: &[&str] = &["kernel", "systemd", "containerd", "built in", "checked in"];

/// Rows that describe a run of end-to-end tests.
pub(super) const TESTS_FACTS: &[&str] = &["built in", "up after", "last run"];

/// Heading of the end-to-end tests, which come last.
const TESTS: &str = "## End-to-end tests";
const ABOUT_TESTS: &str = "\
Results of `cargo xtask vm --machine NAME --driver DRIVER --e2e PREFIX,… --write-docs`: the tests of `tests/tests/e2e`, each with
its own containerd, which is the machine's program, with runc and that cgroup driver. Seconds are those of the emulated
machine's clock, which counts its instructions while it works, so that a busy host makes no deadline pass early;
BEELET_PATIENCE multiplies the deadlines. A run replaces the results of the tests that it completed; the first rows
describe the last run and its duration by the host's clock, without building the machine. A few of these runs had a
kubelet, on Debian 12, with `--pace 2`: a second of the machine's clock then takes the host less time, and a test takes three
times as many of them.

";

/// Heading of the results of single tests, which the groups above summarize.
const SINGLE: &str = "### Test by test";
/// Cell of a selected test that did not complete.
const NOT_REACHED: &str = "not reached";
/// First words of the cells of tests, with the words of their group.
const WORDS: &[(&str, &str)] =
    &[("ok", "passed"), ("skipped", "skipped"), ("**failed**", "**failed**"), (NOT_REACHED, NOT_REACHED)];

/// Cells by row and column.
#[derive(Debug, Default, PartialEq, Eq)]
struct Table {
    columns: Vec<String>,
    /// Rows in order of appearance.
    rows: Vec<String>,
    cells: BTreeMap<(String, String), String>,
}

/// Results of end-to-end tests on a machine.
pub(super) struct Tests {
    /// Machine and cgroup driver.
    pub(super) column: String,
    /// Facts about the run.
    pub(super) facts: Vec<(String, String)>,
    /// Selected tests.
    pub(super) tests: Vec<Found>,
    /// All end-to-end tests, so that the page drops removed ones.
    pub(super) all: BTreeSet<String>,
}

/// Result of a test.
pub(super) struct Found {
    /// Program, and the test with its modules.
    pub(super) name: String,
    /// Verdict in a word that a group knows, with the duration: `ok, 3 s`.
    pub(super) cell: String,
    /// Reason if it did not pass.
    pub(super) why: Option<String>,
}

impl Found {
    pub(super) fn new(name: String, verdict: Option<&Verdict>, seconds: f64, why: Option<String>) -> Found {
        let (word, timed) = match verdict {
            Some(Verdict::Passed) => ("ok", true),
            Some(Verdict::Failed(..)) => ("**failed**", true),
            Some(Verdict::Skipped(_)) => ("skipped", false),
            None => (NOT_REACHED, false),
        };
        let cell = if timed { format!("{word}, {seconds:.0} s") } else { word.to_owned() };
        Found { name, cell, why }
    }
}

/// Writes a machine's results into the page.
pub(super) fn write(machine: &str, results: &str, made: Duration, took: Duration) -> Result<()> {
    change(|checks, tests| {
        let mut table = Table::read(checks);
        table.clear(machine);
        table.set(machine, &checked(results, made, took));
        table.lead_with(FACTS);
        format!("{}{tests}", page_of(&table))
    })
}

/// Writes the results of end-to-end tests into the page.
pub(super) fn write_tests(found: &Tests) -> Result<()> {
    change(|checks, tests| format!("{checks}{}", with_tests(tests, found)))
}

/// Rewrites the page from its two parts.
fn change(by: impl FnOnce(&str, &str) -> String) -> Result<()> {
    let file: PathBuf = workdir::repository().join("docs/machines.md");
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let (checks, tests) = text.find(&format!("\n{TESTS}\n")).map_or((&*text, ""), |at| text.split_at(at));
    workdir::write(&file, by(checks, tests))?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

fn page_of(checks: &Table) -> String {
    format!("{HEAD}{}", checks.text())
}

/// Returns the part about end-to-end tests, updated with these results.
fn with_tests(text: &str, found: &Tests) -> String {
    let (summary, single) = text.find(&format!("\n{SINGLE}\n")).map_or((text, ""), |at| text.split_at(at));
    let (mut head, mut tests, mut reasons) = (Table::read(summary), Table::read(single), reasons_in(single));
    head.rows.retain(|row| TESTS_FACTS.contains(&row.as_str()));
    head.set(&found.column, &found.facts);
    for Found { name, cell, why } in &found.tests {
        let of_test = (found.column.clone(), name.clone());
        let known = tests.cells.contains_key(&(name.clone(), found.column.clone()));
        // An interrupted run has no result for tests that it did not reach: earlier results stay.
        if known && cell == NOT_REACHED {
            continue;
        }
        tests.set(&found.column, &[(name.clone(), cell.clone())]);
        reasons.remove(&of_test);
        reasons.extend(why.clone().map(|why| (of_test, why)));
    }
    tests.rows.retain(|test| found.all.contains(test));
    tests.rows.sort();
    reasons.retain(|(_, test), _| found.all.contains(test));
    for (column, rows) in groups(&tests) {
        head.set(&column, &rows);
    }
    head.rows.sort();
    head.lead_with(TESTS_FACTS);
    let mut text = format!("\n{TESTS}\n\n{ABOUT_TESTS}{}\n{SINGLE}\n\n{}", head.text(), tests.text());
    for (position, ((column, test), why)) in reasons.iter().enumerate() {
        let space = if position == 0 { "\n" } else { "" };
        let _ = writeln!(text, "{space}- {column}: `{test}`: {why}");
    }
    text
}

/// Parses why tests did not pass, by column and test: lines such as ``- debian-12, systemd: `e2e a::b`:
/// failed``.
fn reasons_in(text: &str) -> BTreeMap<(String, String), String> {
    let reason = |line: &str| {
        let (column, rest) = line.strip_prefix("- ")?.split_once(": `")?;
        let (test, why) = rest.split_once("`: ")?;
        Some(((column.to_owned(), test.to_owned()), why.to_owned()))
    };
    text.lines().filter_map(reason).collect()
}

/// Summarizes the groups of tests for each column: the numbers of results and the total duration.
fn groups(tests: &Table) -> BTreeMap<String, Vec<(String, String)>> {
    let mut groups: BTreeMap<String, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for test in &tests.rows {
        let group = test.split("::").next().unwrap_or(test);
        for column in &tests.columns {
            if let Some(cell) = tests.cells.get(&(test.clone(), column.clone())) {
                groups.entry(column.clone()).or_default().entry(group).or_default().push(cell);
            }
        }
    }
    let rows = |groups: BTreeMap<&str, Vec<&str>>| {
        groups.into_iter().map(|(group, cells)| (group.to_owned(), counted(&cells))).collect()
    };
    groups.into_iter().map(|(column, groups)| (column, rows(groups))).collect()
}

/// Formats `9 passed, 1 **failed**, 31 s` from cells such as `ok, 3 s`.
fn counted(cells: &[&str]) -> String {
    let is = |cell: &str, word: &str| cell.split(',').next() == Some(word);
    let count = |word: &str| cells.iter().filter(|cell| is(cell, word)).count();
    let counts = WORDS.iter().map(|(word, called)| (count(word), *called)).filter(|(count, _)| *count > 0);
    let mut parts: Vec<String> = counts.map(|(count, called)| format!("{count} {called}")).collect();
    let seconds = |cell: &&str| cell.split_once(", ")?.1.strip_suffix(" s")?.parse::<u64>().ok();
    let took: Vec<u64> = cells.iter().filter_map(seconds).collect();
    if !took.is_empty() {
        parts.push(format!("{} s", took.iter().sum::<u64>()));
    }
    parts.join(", ")
}

/// Returns the rows of a checked machine.
fn checked(results: &str, made: Duration, took: Duration) -> Vec<(String, String)> {
    let facts = results.lines().find_map(|line| line.strip_prefix("fact ")).unwrap_or_default();
    let mut facts: Vec<String> = facts.split(", ").map(str::to_owned).collect();
    facts.resize(FACTS.len() - 2, String::new());
    facts.extend([made, took].map(|time| format!("{} s", time.as_secs())));
    let facts = FACTS.iter().map(|name| (*name).to_owned()).zip(facts);
    facts.chain(results.lines().filter_map(outcome)).collect()
}

impl Table {
    fn read(text: &str) -> Table {
        let mut table = Table::default();
        let mut lines = text.lines().filter(|line| line.starts_with('|')).map(cells_of);
        let Some(head) = lines.next() else { return table };
        table.columns = head.into_iter().skip(1).collect();
        for row in lines.skip(1) {
            let Some((name, cells)) = row.split_first() else { continue };
            table.rows.push(name.clone());
            for (column, cell) in table.columns.iter().zip(cells) {
                if cell != NOT_THERE {
                    table.cells.insert((name.clone(), column.clone()), cell.clone());
                }
            }
        }
        table
    }

    /// Removes a column's cells.
    fn clear(&mut self, column: &str) {
        self.cells.retain(|(_, known), _| known != column);
    }

    /// Sets cells of a column; keeps its other cells.
    fn set(&mut self, column: &str, rows: &[(String, String)]) {
        if !self.columns.iter().any(|known| known == column) {
            self.columns.push(column.to_owned());
            self.columns.sort();
        }
        for (row, cell) in rows {
            if !self.rows.contains(row) {
                self.rows.push(row.clone());
            }
            self.cells.insert((row.clone(), column.to_owned()), cell.clone());
        }
        let cells = &self.cells;
        self.rows.retain(|row| cells.keys().any(|(known, _)| known == row));
    }

    /// Moves these rows before all others.
    fn lead_with(&mut self, first: &[&str]) {
        self.rows.sort_by_key(|row| first.iter().position(|known| known == row).unwrap_or(first.len()));
    }

    fn text(&self) -> String {
        let columns = self.columns.join(" | ");
        let mut text = format!("| | {columns} |\n|{}\n", " --- |".repeat(self.columns.len() + 1));
        for row in &self.rows {
            let cell = |column: &String| {
                self.cells.get(&(row.clone(), column.clone())).map_or(NOT_THERE, String::as_str)
            };
            let cells: Vec<&str> = self.columns.iter().map(cell).collect();
            let _ = writeln!(text, "| {row} | {} |", cells.join(" | "));
        }
        text
    }
}

/// Parses a check and its result.
fn outcome(line: &str) -> Option<(String, String)> {
    let plain = |text: &str| text.replace('|', "/").trim().to_owned();
    if let Some(name) = line.strip_prefix("ok ") {
        return Some((plain(name), "ok".to_owned()));
    }
    for (word, shown) in [("FAIL ", "**failed**"), ("skip ", "skipped")] {
        if let Some((name, why)) = line.strip_prefix(word).and_then(|rest| rest.split_once(": ")) {
            return Some((plain(name), format!("{shown}: {}", plain(why))));
        }
    }
    None
}

fn cells_of(line: &str) -> Vec<String> {
    line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_replaces_its_own_column_and_leaves_the_others() {
        let times = (Duration::from_secs(3), Duration::from_secs(9));
        let mut page = Table::default();
        let put = |page: &mut Table, machine: &str, results: &str| {
            page.clear(machine);
            page.set(machine, &checked(results, times.0, times.1));
        };
        put(&mut page, "debian-12", "fact 6.1, systemd 252, containerd 1.6\nok a\nFAIL b: no | pipe\n");
        put(&mut page, "debian-13", "fact 6.12, systemd 257, containerd 1.7\nok a\nskip c: missing\ndone\n");
        let text = page_of(&page);
        assert_eq!(Table::read(&text), page);
        for line in [
            "| | debian-12 | debian-13 |",
            "| kernel | 6.1 | 6.12 |",
            "| built in | 3 s | 3 s |",
            "| checked in | 9 s | 9 s |",
            "| a | ok | ok |",
            "| b | **failed**: no / pipe | - |",
            "| c | - | skipped: missing |",
        ] {
            assert!(text.lines().any(|known| known == line), "{line}\n{text}");
        }
        put(&mut page, "debian-12", "fact 6.1, systemd 252, containerd 1.6\nok a\nok b\n");
        assert!(page.text().contains("| b | ok | - |"));
    }

    /// Returns the page after a run of these tests, given with their cells and reasons.
    fn after(page: &str, column: &str, tests: &[(&str, &str, Option<&str>)]) -> String {
        let found = |(name, cell, why): &(&str, &str, Option<&str>)| Found {
            name: (*name).to_owned(),
            cell: (*cell).to_owned(),
            why: why.map(str::to_owned),
        };
        let facts = ["last run", "built in"].map(|row| (row.to_owned(), "x".to_owned())).to_vec();
        let all = ["e2e a::x", "e2e a::y", "e2e ab::x"].map(str::to_owned).into();
        let tests = tests.iter().map(found).collect();
        with_tests(page, &Tests { column: column.to_owned(), facts, tests, all })
    }

    #[track_caller]
    fn check(page: &str, tables_and_reasons: &str) {
        let (_, shown) = page.split_once(ABOUT_TESTS).expect("the page has an introduction");
        assert_eq!(shown, tables_and_reasons, "{page}");
    }

    #[test]
    fn a_run_of_some_tests_replaces_these_and_leaves_the_others() {
        let page = after("", "d, systemd", &[("e2e a::x", "**failed**, 2 s", Some("failed: no"))]);
        let page = after(&page, "d, systemd", &[("e2e ab::x", "**failed**, 1 s", Some("failed: no"))]);
        let page = after(&page, "d, cgroupfs", &[("e2e a::x", "skipped", Some("skipped: none"))]);
        let page = after(&page, "d, systemd", &[("e2e a::y", "ok, 4 s", None)]);
        let expected = "\
| | d, cgroupfs | d, systemd |
| --- | --- | --- |
| built in | x | x |
| last run | x | x |
| e2e a | 1 skipped | 1 passed, 1 **failed**, 6 s |
| e2e ab | - | 1 **failed**, 1 s |

### Test by test

| | d, cgroupfs | d, systemd |
| --- | --- | --- |
| e2e a::x | skipped | **failed**, 2 s |
| e2e a::y | - | ok, 4 s |
| e2e ab::x | - | **failed**, 1 s |

- d, cgroupfs: `e2e a::x`: skipped: none
- d, systemd: `e2e a::x`: failed: no
- d, systemd: `e2e ab::x`: failed: no
";
        check(&page, expected);
    }

    #[test]
    fn a_run_that_was_cut_short_keeps_what_was_known_of_tests_it_did_not_reach() {
        let not_reached = |name| (name, NOT_REACHED, Some("not reached"));
        let page = after(
            "",
            "d",
            &[("e2e a::x", "**failed**, 2 s", Some("failed: no")), ("e2e a::y", "ok, 3 s", None)],
        );
        let page =
            after(&page, "d", &[not_reached("e2e a::x"), not_reached("e2e a::y"), not_reached("e2e ab::x")]);
        let expected = "\
| | d |
| --- | --- |
| built in | x |
| last run | x |
| e2e a | 1 passed, 1 **failed**, 5 s |
| e2e ab | 1 not reached |

### Test by test

| | d |
| --- | --- |
| e2e a::x | **failed**, 2 s |
| e2e a::y | ok, 3 s |
| e2e ab::x | not reached |

- d: `e2e a::x`: failed: no
- d: `e2e ab::x`: not reached
";
        check(&page, expected);
        // Later results replace the entry.
        let page = after(&page, "d", &[("e2e ab::x", "ok, 1 s", None)]);
        assert!(page.contains("| e2e ab | 1 passed, 1 s |") && !page.contains(NOT_REACHED), "{page}");
    }

    #[test]
    fn groups_are_in_their_order_whichever_column_has_them() {
        let page = after("", "d, cgroupfs", &[("e2e ab::x", "ok, 2 s", None)]);
        let page = after(&page, "d, systemd", &[("e2e a::x", "ok, 1 s", None)]);
        assert_eq!(Table::read(&page).rows[..4], ["built in", "last run", "e2e a", "e2e ab"], "{page}");
    }

    #[test]
    fn a_removed_test_is_removed_from_the_page() {
        let page = after("", "d", &[("e2e a::x", "ok, 2 s", None)]);
        let gone = page.replace("a::x", "a::gone") + "\n- d: `e2e a::gone`: failed: no\n";
        let page = after(&gone, "d", &[("e2e a::y", "ok, 1 s", None)]);
        assert!(page.contains("| e2e a | 1 passed, 1 s |") && !page.contains("gone"), "{page}");
    }

    #[test]
    fn a_cell_is_of_the_verdict_and_its_time() {
        let cell = |verdict: Option<Verdict>| Found::new("e2e a::x".into(), verdict.as_ref(), 2.6, None).cell;
        assert_eq!(cell(Some(Verdict::Passed)), "ok, 3 s");
        assert_eq!(cell(Some(Verdict::Failed("the test failed".into(), Vec::new()))), "**failed**, 3 s");
        assert_eq!(cell(Some(Verdict::Skipped("no root".into()))), "skipped");
        assert_eq!(cell(None), NOT_REACHED);
    }
}
