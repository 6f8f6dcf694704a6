//! The rules, by subject. A function checks one rule against the state before a fact, or at the end; its
//! comment has the source.

mod end;
mod given;
mod starts;
mod statuses;
mod stops;

use std::cell::RefCell;
use std::time::Duration;

use crate::Violation;
use crate::ledger::{Instance, Ledger, PodState};
use crate::trace::{End, Event, Fact};

/// Time in which the agent notices a change of a pod's object, of a container or of itself.
const REACTION: Duration = Duration::from_secs(10);
/// Tolerance for grace periods: their seconds are rounded, and a hook or an earlier attempt uses a part.
const ROUNDING: u64 = 2;
/// First delay of a restart (kubelet: `backOffPeriod`, pkg/kubelet/kubelet.go).
const BACK_OFF: Duration = Duration::from_secs(10);
/// Maximum delay of a restart (kubelet: `MaxCrashLoopBackOff`).
const BACK_OFF_MAX: Duration = Duration::from_secs(300);
/// Running time after which earlier crashes no longer count (client-go's Backoff: twice the maximum).
const BACK_OFF_RESET: Duration = Duration::from_secs(600);
/// Time in which the node converges after the last fault: one maximum back-off, plus the time of its work.
pub const SETTLED: Duration = Duration::from_secs(600);

/// Properties of the node that the rules need.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// Allocatable CPU in thousandths.
    pub cpu: u64,
    /// Number of devices.
    pub devices: u64,
}

/// Judges a trace.
#[derive(Debug)]
pub struct Judge {
    node: Node,
    ledger: Ledger,
    violations: Vec<Violation>,
}

/// The state of a node at one time, for the rules.
struct View<'a> {
    node: Node,
    ledger: &'a Ledger,
    now: Duration,
    broken: RefCell<Vec<Violation>>,
}

impl View<'_> {
    /// Records a broken rule.
    fn breaks(&self, rule: &'static str, detail: String) {
        self.broken.borrow_mut().push(Violation { rule, at: self.now, detail });
    }
}

impl Judge {
    /// Creates a judge of a node that has not started yet.
    #[must_use]
    pub fn new(node: Node) -> Self {
        Self { node, ledger: Ledger::default(), violations: Vec::new() }
    }

    /// Checks a fact, and applies it.
    pub fn observe(&mut self, event: &Event) {
        self.check(event.at, |view| match &event.fact {
            Fact::AgentFailed { why } => view.breaks("the-agent-lives", why.clone()),
            Fact::Created { container, sandbox, name, devices } => {
                given::devices_are_given_once(view, container, sandbox, name, devices);
            }
            Fact::Started { container, asked } => starts::check(view, container, *asked),
            Fact::StopAsked { container, grace } => stops::check(view, container, *grace),
            Fact::Exited { container, by: End::Force, .. } => stops::grace_is_given(view, container),
            Fact::Status(status) => statuses::check(view, status),
            _ => {}
        });
        self.ledger.apply(event);
        if let Fact::Started { .. } | Fact::Cpu { .. } = event.fact {
            self.check(event.at, given::room_is_given_once);
        }
    }

    /// Checks the rules that must come about, at the end of a trace, and returns all broken rules.
    #[must_use]
    pub fn finish(mut self, at: Duration) -> Vec<Violation> {
        let recent = |since: Duration| since.saturating_add(SETTLED) > at;
        if self.ledger.faults_ended.is_none_or(recent) {
            return self.violations;
        }
        self.check(at, end::the_api_server_is_up_to_date);
        let pods: Vec<PodState> = self.ledger.pods.values().cloned().collect();
        for pod in &pods {
            self.check(at, |view| match pod.ends_since() {
                Some(since) if recent(since.saturating_add(Duration::from_secs(pod.spec.grace))) => {}
                Some(_) => end::ended_pods_leave_nothing(view, pod),
                None if recent(pod.changed) => {}
                None => end::wanted_pods_run(view, pod),
            });
        }
        self.violations
    }

    fn check(&mut self, now: Duration, rules: impl FnOnce(&View<'_>)) {
        let view = View { node: self.node, ledger: &self.ledger, now, broken: RefCell::default() };
        rules(&view);
        self.violations.extend(view.broken.into_inner());
    }
}

fn describe(instance: &Instance) -> String {
    format!("{} ({})", instance.name, short(&instance.id))
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
