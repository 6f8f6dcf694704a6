//! What is to go wrong: rules that a test lays down before or while the agent calls.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tonic::{Code, Status};

use super::FakeCri;
use super::calls::{Asked, Op};

/// What becomes of a call.
#[derive(Clone)]
pub(super) enum Act {
    /// It is answered as usual.
    Proceed,
    /// It fails, and nothing was done.
    Fail(Status),
    /// It is done, and then fails all the same.
    LoseReply,
    /// It is done, and then every connection breaks.
    Sever,
    /// It waits for the test, then is answered as usual.
    Hold(Arc<Gate>),
    /// It is done, and its answer waits for the test.
    HoldReply(Arc<Gate>),
}

type Condition = Box<dyn Fn(&Asked) -> bool + Send + Sync>;

/// One rule. The first that fits a call decides about it.
pub(super) struct Rule {
    /// None: any call.
    op: Option<Op>,
    when: Option<Condition>,
    /// None: always.
    times: Option<usize>,
    pub(super) delay: Duration,
    pub(super) act: Act,
}

impl Rule {
    /// Whether the rule is for this call; uses it up by one.
    pub(super) fn take(&mut self, asked: &Asked) -> bool {
        let fits = self.op.is_none_or(|op| op == asked.op())
            && self.times != Some(0)
            && self.when.as_ref().is_none_or(|when| when(asked));
        if let Some(times) = self.times.as_mut().filter(|_| fits) {
            *times -= 1;
        }
        fits
    }
}

/// A rule in the making: see [`FakeCri::on`] and [`FakeCri::on_any`].
#[must_use = "a rule takes effect when it says what is to happen: fail, delay, hold, …"]
pub struct Script<'a> {
    cri: &'a FakeCri,
    rule: Rule,
}

impl<'a> Script<'a> {
    pub(super) fn new(cri: &'a FakeCri, op: Option<Op>) -> Self {
        let rule = Rule { op, when: None, times: Some(1), delay: Duration::ZERO, act: Act::Proceed };
        Script { cri, rule }
    }

    /// Only for calls that this says yes to.
    pub fn when(mut self, when: impl Fn(&Asked) -> bool + Send + Sync + 'static) -> Self {
        self.rule.when = Some(Box::new(when));
        self
    }

    /// For the next `times` calls instead of one.
    pub fn times(mut self, times: usize) -> Self {
        self.rule.times = Some(times);
        self
    }

    /// For all calls, until [`FakeCri::heal`].
    pub fn always(mut self) -> Self {
        self.rule.times = None;
        self
    }

    /// After this time (also before it fails or loses its reply).
    pub fn after(mut self, delay: Duration) -> Self {
        self.rule.delay = delay;
        self
    }

    /// How many calls had come before.
    fn lay_down(mut self, act: Act) -> usize {
        self.rule.act = act;
        self.cri.add_rule(self.rule)
    }

    /// The call is answered as usual: with [`Script::after`], later.
    pub fn proceed(self) {
        self.lay_down(Act::Proceed);
    }

    /// The call fails, and nothing was done.
    pub fn fail(self, code: Code, message: &str) {
        self.lay_down(Act::Fail(Status::new(code, message)));
    }

    /// The call is done, but answered with `Unavailable`, as if its reply got lost.
    pub fn lose_reply(self) {
        self.lay_down(Act::LoseReply);
    }

    /// The call is done, and then all connections break, this call's too; new ones are accepted.
    pub fn break_connections(self) {
        self.lay_down(Act::Sever);
    }

    /// The call hangs until the test lets it go on: see [`Held`].
    pub fn hold(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::Hold(Arc::clone(&gate)));
        Held { gate, since }
    }

    /// The call is done, but its answer hangs until the test lets it go: see [`Held`].
    pub fn hold_reply(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::HoldReply(Arc::clone(&gate)));
        Held { gate, since }
    }
}

/// Where held calls wait.
pub(super) struct Gate {
    open: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
}

impl Gate {
    fn closed() -> Arc<Self> {
        Arc::new(Gate { open: watch::channel(false).0, waiting: watch::channel(0).0 })
    }

    pub(super) async fn wait(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        // The sender lives as long as the gate.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }
}

/// Calls that hang. Dropped, it lets them go.
pub struct Held {
    gate: Arc<Gate>,
    since: usize,
}

impl Held {
    /// Waits until a call hangs here.
    ///
    /// # Panics
    /// If none comes within the time that tests wait.
    pub async fn reached(&self) {
        let mut waiting = self.gate.waiting.subscribe();
        let reached = tokio::time::timeout(super::PATIENCE, waiting.wait_for(|waiting| *waiting > 0)).await;
        assert!(reached.is_ok_and(|changed| changed.is_ok()), "no call came to be held");
    }

    /// The number of the first call that can have come here.
    #[must_use]
    pub fn since(&self) -> usize {
        self.since
    }

    /// Lets them go on, and all that come later.
    pub fn release(self) {
        drop(self);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gate.open.send_replace(true);
    }
}
