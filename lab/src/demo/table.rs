//! Live table of pods: redrawn in place on a terminal, printed again on every change elsewhere.

use beelet_tests::pods::Watch;
use console::{Term, style};
use std::time::Instant;

/// Table with its last content.
pub(super) struct Table {
    term: Term,
    since: Instant,
    drawn: Vec<String>,
}

impl Table {
    pub(super) fn new() -> Table {
        Table { term: Term::stdout(), since: Instant::now(), drawn: Vec::new() }
    }

    /// Draws the pods if they differ from the last content.
    pub(super) fn draw(&mut self, watch: &Watch) {
        let rows = rows(watch);
        if rows == self.drawn {
            return;
        }
        let terminal = self.term.is_term();
        if terminal && !self.drawn.is_empty() {
            let _ = self.term.clear_last_lines(self.drawn.len() + 1); // on an error the old table scrolls away
        }
        println!("  {}", style(format!("after {:.2} s", self.since.elapsed().as_secs_f64())).dim());
        for row in &rows {
            println!("{row}");
        }
        self.drawn = rows;
    }
}

/// Returns a heading and a line per pod.
fn rows(watch: &Watch) -> Vec<String> {
    let mut rows = vec![format!(
        "  {:<16} {:<11} {:<10} {:<6} {:<9} {}",
        "POD", "QOS", "PHASE", "READY", "RESTARTS", "IP"
    )];
    for pod in watch.pods.values() {
        let name = pod.pod.metadata.name.as_deref().unwrap_or_default();
        let ready = if pod.ready() { style("yes").green() } else { style("no").yellow() };
        let (qos, phase, restarts) = (pod.qos(), pod.phase(), pod.restarts());
        let ip = pod.ip().unwrap_or("-");
        rows.push(format!("  {name:<16} {qos:<11} {phase:<10} {ready:<6} {restarts:<9} {ip}"));
    }
    rows
}
