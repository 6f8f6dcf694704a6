//! Page generated from the ledger: docs/conformance.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::ledger::{Ledger, Outcome, Row, counts};

const HEAD: &str = "\
# Kubernetes' own tests

`cargo xtask conformance` generates this page from `tests/conformance/ledger.tsv`, and each run of the command updates that ledger.

Kubernetes tests a node with two suites, built from Kubernetes' sources. `e2e.test` tests a cluster whose node runs beelet.
`e2e_node.test` starts the agent itself, under the name `kubelet`.

```sh
# A cluster whose node is beelet (docs/cluster.md), and the suites of its version (Kubernetes' `make WHAT=test/e2e/e2e.test`):
KUBECONFIG=admin.conf E2E_TEST=./e2e.test cargo xtask conformance
# The same tests ten at a time, by the ginkgo command that Kubernetes builds beside them:
KUBECONFIG=admin.conf E2E_TEST=./e2e.test GINKGO=./ginkgo cargo xtask conformance --procs 10
# The node's own suite, on a machine with systemd:
E2E_NODE_TEST=./e2e_node.test cargo xtask conformance --suite node
# Results of a run that was made elsewhere:
cargo xtask conformance --results junit.xml
```

A test that skips itself (`skip`) gives the reason. A test that was still running when its run ended (`cut`) has no result yet.
";

const BESIDE: &str = "
## Beside the kubelet

Both agents ran at the same time on one two-core machine, each in its own cluster. The numbers were entered by hand in
`tests/conformance/beside.tsv`; CPU and memory are those of the agent process. `signode` means the cluster suite's sig-node tests labelled
NodeConformance or Conformance, except the slow, serial and disruptive ones.

| suite | agent | processes | tests | passed | seconds | CPU seconds | MiB resident | MiB peak | failed tests |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
";

/// Returns the page's text; `beside` has the runs for comparison with the kubelet, one per line.
pub(super) fn of(ledger: &Ledger, beside: &str) -> String {
    let mut page = HEAD.to_owned();
    for (suite, title) in [("cluster", "The cluster suite"), ("node", "The node suite")] {
        let rows: Vec<&Row> = ledger.of(suite).collect();
        if rows.is_empty() {
            continue;
        }
        let _ = write!(page, "\n## {title}\n\n{} tests: {}.\n\n", rows.len(), counts(rows.iter().copied()));
        groups(&mut page, &rows);
        not_passed(&mut page, &rows);
    }
    page.push_str(BESIDE);
    for run in beside.lines().filter(|line| !line.starts_with('#')) {
        let cells: Vec<String> = run.split('\t').map(cell).collect();
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
    page
}

/// Writes a line per subject.
fn groups(page: &mut String, rows: &[&Row]) {
    let mut groups: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        groups.entry(subject(&row.test)).or_default().push(row);
    }
    page.push_str("| subject | tests | result |\n| --- | --- | --- |\n");
    for (subject, rows) in groups {
        let _ = writeln!(page, "| {} | {} | {} |", cell(subject), rows.len(), counts(rows.into_iter()));
    }
}

/// Writes the tests that did not pass, with the reason.
fn not_passed(page: &mut String, rows: &[&Row]) {
    let rest: Vec<&&Row> = rows.iter().filter(|row| row.outcome != Outcome::Pass).collect();
    if rest.is_empty() {
        return;
    }
    page.push_str("\nNot passed:\n\n| result | test | message |\n| --- | --- | --- |\n");
    for row in rest {
        let _ = writeln!(page, "| {} | {} | {} |", row.outcome.name(), cell(&row.test), cell(&row.reason));
    }
}

/// Returns the subject of a test: its name up to the expected behaviour.
fn subject(test: &str) -> &str {
    let from = test.find("] ").map_or(0, |at| at + 2);
    let ends = [" should ", " when ", " [", " must ", " will ", " with "];
    let end = ends.iter().filter_map(|end| test[from..].find(end)).min();
    test[..end.map_or(test.len(), |end| from + end)].trim_end()
}

/// Escapes a text for a table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_subject_of_a_test_is_the_start_of_its_name() {
        let check = |test: &str, expected: &str| assert_eq!(subject(test), expected);
        check(
            "[sig-node] Probing container should be restarted [Conformance]",
            "[sig-node] Probing container",
        );
        check("[sig-node] Pods [Feature:X] A", "[sig-node] Pods");
        check("no sig", "no sig");
    }

    #[test]
    fn the_page_counts_the_subjects_and_names_what_did_not_pass() {
        let ledger = Ledger::parse(
            "cluster\tpass\t1\t[sig-node] A should a\t\ncluster\tfail\t1\t[sig-node] A should b\tx | y\n",
        );
        let page = of(&ledger.unwrap(), "# head\ncluster\tbeelet\t1\n");
        assert!(page.contains("2 tests: 1 pass, 1 fail."));
        assert!(page.contains("| [sig-node] A | 2 | 1 pass, 1 fail |"));
        assert!(page.contains("| fail | [sig-node] A should b | x \\| y |"));
        assert!(!page.contains("The node suite"));
        assert!(page.ends_with("| --- |\n| cluster | beelet | 1 |\n"), "{page}");
    }
}
