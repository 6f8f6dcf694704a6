//! docs/machines.md: what was checked on which stock machine, a column for each, and which end-to-end tests
//! ran there with which driver of cgroups, again a column for each. A run replaces what it found before.

use crate::shell;
use anyhow::Result;
use beelet_tests::workdir;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

const HEAD: &str = "\
# Stock machines

What `cargo xtask vm --machine NAME --write-docs` found: Debian as it comes, under QEMU without hardware's help, with our
package installed by apt. Each column is of the last run of that machine; what it is made of is in the first rows.
[Kernels without a distribution](kernels.md) are another page.

";
/// The cell of a machine on which a check was not made.
const NOT_THERE: &str = "not there";
/// The rows that say what a machine is, before its checks.
const FACTS: &[&str] = &["kernel", "systemd", "containerd", "made in", "checked in"];

/// The rows that say how a machine came up for end-to-end tests.
pub(super) const TESTS_FACTS: &[&str] = &["made in", "up after", "last run"];

/// The line above the end-to-end tests, which come last.
const TESTS: &str = "## End-to-end tests";
const ABOUT_TESTS: &str = "\
What `cargo xtask vm --machine NAME --driver DRIVER --e2e PREFIX,… --write-docs` found: the tests of `tests/tests/e2e`, each on
a containerd of its own, which is the machine's program, by runc with that driver of cgroups. Seconds are by the emulated
machine's own clock, which goes by its instructions while it works, so that a busy host makes no deadline come early in it;
deadlines are as many times longer as BEELET_PATIENCE says. A run replaces what was found of the groups that its tests are of;
the first rows are of the last one, which took so long by the host's own clock once the machine was made.

";

/// Cells by row and column.
#[derive(Debug, Default, PartialEq, Eq)]
struct Table {
    columns: Vec<String>,
    /// In the order in which rows came.
    rows: Vec<String>,
    cells: BTreeMap<(String, String), String>,
}

/// What end-to-end tests found on a machine.
pub(super) struct Tests {
    /// The machine and the driver.
    pub(super) column: String,
    /// What is known of the run, and then groups of tests with what came of them.
    pub(super) rows: Vec<(String, String)>,
    /// The tests that did not pass, and why.
    pub(super) reasons: Vec<(String, String)>,
}

/// Puts a machine's results into the page.
pub(super) fn write(machine: &str, results: &str, made: Duration, took: Duration) -> Result<()> {
    change(|checks, tests| {
        let mut table = Table::read(checks);
        table.clear(machine);
        table.put(machine, &checked(results, made, took));
        table.lead_with(FACTS);
        format!("{}{tests}", page_of(&table))
    })
}

/// Puts what end-to-end tests found into the page.
pub(super) fn write_tests(found: &Tests) -> Result<()> {
    change(|checks, tests| format!("{checks}{}", with_tests(tests, found)))
}

/// Writes the page anew from its two parts.
fn change(by: impl FnOnce(&str, &str) -> String) -> Result<()> {
    let file: PathBuf = shell::repository().join("docs/machines.md");
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let (checks, tests) = text.find(&format!("\n{TESTS}\n")).map_or((&*text, ""), |at| text.split_at(at));
    workdir::write(&file, by(checks, tests))?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

fn page_of(checks: &Table) -> String {
    format!("{HEAD}{}", checks.text())
}

/// The part about end-to-end tests with these in it.
fn with_tests(tests: &str, found: &Tests) -> String {
    let mut table = Table::read(tests);
    table.put(&found.column, &found.rows);
    table.rows.sort();
    table.lead_with(TESTS_FACTS);
    let groups: BTreeSet<&String> = found.rows.iter().map(|(group, _)| group).collect();
    let of_these = |line: &str| {
        let rest = line.strip_prefix("- ").and_then(|line| line.strip_prefix(&found.column));
        let test = rest.and_then(|rest| rest.strip_prefix(": `")).unwrap_or_default();
        let begins =
            |group: &&String| test.strip_prefix(group.as_str()).is_some_and(|rest| rest.starts_with("::"));
        groups.iter().any(begins)
    };
    let kept = tests.lines().filter(|line| line.starts_with("- ") && !of_these(line)).map(str::to_owned);
    let new = found.reasons.iter().map(|(test, why)| format!("- {}: `{test}`: {why}", found.column));
    let reasons: BTreeSet<String> = kept.chain(new).collect();
    let mut text = format!("\n{TESTS}\n\n{ABOUT_TESTS}{}", table.text());
    if !reasons.is_empty() {
        let _ = writeln!(text, "\n{}", reasons.into_iter().collect::<Vec<_>>().join("\n"));
    }
    text
}

/// The rows of a machine that was checked.
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

    /// Forgets a column's cells.
    fn clear(&mut self, column: &str) {
        self.cells.retain(|(_, known), _| known != column);
    }

    /// Sets cells of a column, and keeps its others.
    fn put(&mut self, column: &str, rows: &[(String, String)]) {
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

    /// Puts these rows before all others.
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

/// A check and what came of it.
fn outcome(line: &str) -> Option<(String, String)> {
    let plain = |text: &str| text.replace('|', "/").trim().to_owned();
    if let Some(name) = line.strip_prefix("ok ") {
        return Some((plain(name), "ok".to_owned()));
    }
    for (word, shown) in [("FAIL ", "**failed**"), ("skip ", "left out")] {
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
            page.put(machine, &checked(results, times.0, times.1));
        };
        put(&mut page, "debian-12", "fact 6.1, systemd 252, containerd 1.6\nok a\nFAIL b: no | pipe\n");
        put(
            &mut page,
            "debian-13",
            "fact 6.12, systemd 257, containerd 1.7\nok a\nskip c: none here\ndone\n",
        );
        let text = page_of(&page);
        assert_eq!(Table::read(&text), page);
        for line in [
            "| | debian-12 | debian-13 |",
            "| kernel | 6.1 | 6.12 |",
            "| made in | 3 s | 3 s |",
            "| checked in | 9 s | 9 s |",
            "| a | ok | ok |",
            "| b | **failed**: no / pipe | not there |",
            "| c | not there | left out: none here |",
        ] {
            assert!(text.lines().any(|known| known == line), "{line}\n{text}");
        }
        put(&mut page, "debian-12", "fact 6.1, systemd 252, containerd 1.6\nok a\nok b\n");
        assert!(page.text().contains("| b | ok | not there |"));
    }

    #[test]
    fn what_is_known_of_the_last_run_comes_before_the_groups() {
        let rows = ["e2e a", "last run", "up after", "made in"].map(|row| (row.to_owned(), "x".to_owned()));
        let page =
            with_tests("", &Tests { column: "d".to_owned(), rows: rows.to_vec(), reasons: Vec::new() });
        let rows = Table::read(&page).rows;
        assert_eq!(rows, ["made in", "up after", "last run", "e2e a"]);
    }

    #[test]
    fn a_run_of_some_tests_replaces_these_and_leaves_the_others() {
        let found = |column: &str, group: &str, cell: &str, reasons: &[(&str, &str)]| Tests {
            column: column.to_owned(),
            rows: vec![(group.to_owned(), cell.to_owned())],
            reasons: reasons.iter().map(|(test, why)| ((*test).into(), (*why).into())).collect(),
        };
        let page = with_tests(
            "",
            &found("d, systemd", "e2e a", "2 failed", &[("e2e a::x", "no"), ("e2e a::y", "no")]),
        );
        let page = with_tests(&page, &found("d, systemd", "e2e ab", "1 failed", &[("e2e ab::x", "no")]));
        let page = with_tests(&page, &found("d, cgroupfs", "e2e a", "1 failed", &[("e2e a::x", "why")]));
        let page =
            with_tests(&page, &found("d, systemd", "e2e a", "1 passed, 1 failed", &[("e2e a::y", "so")]));
        let expected = "| | d, cgroupfs | d, systemd |\n| --- | --- | --- |\n| e2e a | 1 failed | 1 passed, 1 failed |\n\
                        | e2e ab | not there | 1 failed |\n\n- d, cgroupfs: `e2e a::x`: why\n- d, systemd: `e2e a::y`: so\n\
                        - d, systemd: `e2e ab::x`: no\n";
        assert_eq!(page, format!("\n{TESTS}\n\n{ABOUT_TESTS}{expected}"));
    }
}
