//! docs/machines.md: what was checked on which stock machine, a column for each. A run replaces its own
//! column.

use crate::shell;
use anyhow::Result;
use beelet_tests::workdir;
use std::collections::BTreeMap;
use std::fmt::Write as _;
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
const FACTS: &[&str] = &["kernel", "systemd", "containerd", "checked in"];

/// Cells by row and machine.
#[derive(Debug, Default, PartialEq, Eq)]
struct Page {
    machines: Vec<String>,
    /// In the order in which rows came.
    rows: Vec<String>,
    cells: BTreeMap<(String, String), String>,
}

/// Puts a machine's results into the page.
pub(super) fn write(machine: &str, results: &str, took: Duration) -> Result<()> {
    let file = shell::repository().join("docs/machines.md");
    let mut page = Page::read(&std::fs::read_to_string(&file).unwrap_or_default());
    page.replace(machine, results, took);
    workdir::write(&file, page.text())?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

impl Page {
    fn read(text: &str) -> Page {
        let mut page = Page::default();
        let mut lines = text.lines().filter(|line| line.starts_with('|')).map(cells_of);
        let Some(head) = lines.next() else { return page };
        page.machines = head.into_iter().skip(1).collect();
        for row in lines.skip(1) {
            let Some((name, cells)) = row.split_first() else { continue };
            page.rows.push(name.clone());
            for (machine, cell) in page.machines.iter().zip(cells) {
                if cell != NOT_THERE {
                    page.cells.insert((name.clone(), machine.clone()), cell.clone());
                }
            }
        }
        page
    }

    fn replace(&mut self, machine: &str, results: &str, took: Duration) {
        self.cells.retain(|(_, known), _| known != machine);
        if !self.machines.iter().any(|known| known == machine) {
            self.machines.push(machine.to_owned());
            self.machines.sort();
        }
        let facts = results.lines().find_map(|line| line.strip_prefix("fact ")).unwrap_or_default();
        let mut facts: Vec<String> = facts.split(", ").map(str::to_owned).collect();
        facts.resize(FACTS.len() - 1, String::new());
        facts.push(format!("{} s", took.as_secs()));
        let facts = FACTS.iter().map(|name| (*name).to_owned()).zip(facts);
        let checks = results.lines().filter_map(outcome);
        for (row, cell) in facts.chain(checks).collect::<Vec<_>>() {
            if !self.rows.contains(&row) {
                self.rows.push(row.clone());
            }
            self.cells.insert((row, machine.to_owned()), cell);
        }
        let cells = &self.cells;
        self.rows.retain(|row| cells.keys().any(|(known, _)| known == row));
    }

    fn text(&self) -> String {
        let mut text = HEAD.to_owned();
        let _ = writeln!(
            text,
            "| | {} |\n|{}",
            self.machines.join(" | "),
            " --- |".repeat(self.machines.len() + 1)
        );
        for row in &self.rows {
            let cell = |machine: &String| {
                self.cells.get(&(row.clone(), machine.clone())).map_or(NOT_THERE, String::as_str)
            };
            let cells: Vec<&str> = self.machines.iter().map(cell).collect();
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
        let took = Duration::from_secs(9);
        let mut page = Page::default();
        page.replace("debian-12", "fact 6.1, systemd 252, containerd 1.6\nok a\nFAIL b: no | pipe\n", took);
        page.replace(
            "debian-13",
            "fact 6.12, systemd 257, containerd 1.7\nok a\nskip c: none here\ndone\n",
            took,
        );
        let text = page.text();
        assert_eq!(Page::read(&text), page);
        for line in [
            "| | debian-12 | debian-13 |",
            "| kernel | 6.1 | 6.12 |",
            "| checked in | 9 s | 9 s |",
            "| a | ok | ok |",
            "| b | **failed**: no / pipe | not there |",
            "| c | not there | left out: none here |",
        ] {
            assert!(text.lines().any(|known| known == line), "{line}\n{text}");
        }
        page.replace("debian-12", "fact 6.1, systemd 252, containerd 1.6\nok a\nok b\n", took);
        assert!(page.text().contains("| b | ok | not there |"));
    }
}
