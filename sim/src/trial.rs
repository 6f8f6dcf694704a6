//! The simulation of a plan, on a thread of its own: the keys of a thread's hash maps come from the seed.

use std::fmt::Write as _;
use std::time::Duration;

use beelet_judge::Violation;
use beelet_judge::trace::{Event, Fact};

use crate::node::Node;
use crate::plan::Plan;
use crate::seam;

/// The result of a simulation.
pub(crate) struct Trial {
    /// The facts, in order.
    pub(crate) events: Vec<Event>,
    /// The agent's changing calls to the runtime.
    pub(crate) calls: Vec<(Duration, String)>,
    /// The broken rules.
    pub(crate) violations: Vec<Violation>,
}

impl Trial {
    /// Simulates a plan.
    ///
    /// # Panics
    /// If the simulation itself fails.
    pub(crate) fn run(plan: &Plan) -> Self {
        std::thread::scope(|scope| {
            let work = || {
                let dir = folder();
                seam::begin(plan.seed);
                let result = Node::new(plan, dir.path()).and_then(|mut node| {
                    node.run()?;
                    Ok(node.machine.core.finish())
                });
                seam::end();
                result
            };
            let thread = std::thread::Builder::new().stack_size(16 << 20).spawn_scoped(scope, work);
            let result = match thread.map(std::thread::ScopedJoinHandle::join) {
                Ok(Ok(result)) => result,
                Ok(Err(panic)) => {
                    seam::end();
                    std::panic::resume_unwind(panic)
                }
                Err(error) => Err(error),
            };
            let (events, calls, violations) = result.unwrap_or_else(|error| {
                eprintln!("cannot simulate: {error}");
                std::process::exit(2)
            });
            Self { events, calls, violations }
        })
    }

    /// Returns the trace as text: facts and calls by time.
    pub(crate) fn text(&self) -> String {
        let mut lines: Vec<(Duration, String)> = self.calls.clone();
        lines.extend(self.events.iter().map(|event| (event.at, line(&event.fact))));
        lines.sort_by_key(|(at, _)| *at);
        let mut text = String::new();
        for (at, line) in lines {
            // Writing to a string never fails.
            let _ = writeln!(text, "{:>12.3} {line}", at.as_secs_f64());
        }
        for violation in &self.violations {
            let _ = writeln!(text, "{violation}");
        }
        text
    }
}

/// Returns a fact as a line.
pub(crate) fn line(fact: &Fact) -> String {
    match fact {
        Fact::Wanted(pod) => format!("  wanted {} ({}) {:?}", pod.name, pod.uid, pod.containers),
        Fact::Status(status) => {
            let containers: Vec<String> = status
                .containers
                .iter()
                .map(|c| {
                    format!("{} {:?} x{}{}", c.name, c.state, c.restarts, if c.ready { " ready" } else { "" })
                })
                .collect();
            let uid = status.uid.rsplit('-').next().unwrap_or_default().trim_start_matches('0').to_owned();
            format!("    status of {uid}: {} {:?} [{}]", status.phase, status.reason, containers.join(", "))
        }
        other => format!("  {other:?}"),
    }
}

/// Returns a folder for the node's files: in memory, if the machine has such a file system.
fn folder() -> tempfile::TempDir {
    let mut builder = tempfile::Builder::new();
    builder.prefix("beelet-sim-");
    let made = builder.tempdir_in("/dev/shm").or_else(|_| builder.tempdir());
    made.unwrap_or_else(|error| {
        eprintln!("cannot create a folder: {error}");
        std::process::exit(2)
    })
}
