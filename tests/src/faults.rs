//! Fault rules for fake servers, added by a test before or during the agent's requests. Shared by the fake
//! runtime and the fake API server; each adds the faults of its protocol.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// Timeout of tests for expected events: generous, for a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Fake server that fails on demand.
pub trait Faulty {
    /// Received request.
    type Asked;
    /// Fault specific to this server.
    type Fault;

    /// Adds a rule after the existing ones. Returns the number of requests received before.
    fn add_rule(&self, rule: Rule<Self::Asked, Self::Fault>) -> usize;
}

/// Handling of a request.
#[derive(Clone)]
pub(crate) enum Act<F> {
    /// Answers as usual.
    Proceed,
    /// Executes the request, but never answers.
    LoseReply,
    /// Waits for the test, then answers as usual.
    Hold(Arc<Gate>),
    /// Executes the request, and answers when the test permits.
    HoldReply(Arc<Gate>),
    /// Fails in a way specific to the server.
    Fault(F),
}

type Condition<Q> = Box<dyn Fn(&Q) -> bool + Send + Sync>;

/// Rule for requests `Q` of a server with faults `F`.
pub struct Rule<Q, F> {
    kind: Condition<Q>,
    when: Option<Condition<Q>>,
    /// None: unlimited.
    times: Option<usize>,
    delay: Duration,
    act: Act<F>,
}

impl<Q, F> Rule<Q, F> {
    /// Returns true if the rule applies to this request, and counts the use.
    fn applies(&mut self, asked: &Q) -> bool {
        let fits =
            (self.kind)(asked) && self.times != Some(0) && self.when.as_ref().is_none_or(|when| when(asked));
        if let Some(times) = self.times.as_mut().filter(|_| fits) {
            *times -= 1;
        }
        fits
    }
}

/// Rules of a server. The first one that applies to a request decides.
pub(crate) struct Rules<Q, F>(Vec<Rule<Q, F>>);

impl<Q, F> Default for Rules<Q, F> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<Q, F: Clone> Rules<Q, F> {
    pub(crate) fn add(&mut self, rule: Rule<Q, F>) {
        self.0.push(rule);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the handling of a request, and its delay.
    pub(crate) fn decide(&mut self, asked: &Q) -> (Duration, Act<F>) {
        let rule =
            self.0.iter_mut().find_map(|rule| rule.applies(asked).then(|| (rule.delay, rule.act.clone())));
        rule.unwrap_or((Duration::ZERO, Act::Proceed))
    }
}

/// Builder of a rule: conditions, then the handling.
#[must_use = "a rule takes effect with its handling: fail, refuse, proceed, hold, …"]
pub struct Script<'a, S: Faulty> {
    server: &'a S,
    rule: Rule<S::Asked, S::Fault>,
}

impl<'a, S: Faulty> Script<'a, S> {
    /// Creates a rule for the next request of a kind.
    pub(crate) fn new(server: &'a S, kind: impl Fn(&S::Asked) -> bool + Send + Sync + 'static) -> Self {
        let rule = Rule {
            kind: Box::new(kind),
            when: None,
            times: Some(1),
            delay: Duration::ZERO,
            act: Act::Proceed,
        };
        Script { server, rule }
    }

    /// Restricts the rule to requests for which `when` returns true.
    pub fn when(mut self, when: impl Fn(&S::Asked) -> bool + Send + Sync + 'static) -> Self {
        self.rule.when = Some(Box::new(when));
        self
    }

    /// Applies the rule to the next `times` requests instead of one.
    pub fn times(mut self, times: usize) -> Self {
        self.rule.times = Some(times);
        self
    }

    /// Applies the rule to all requests, until the server is healed.
    pub fn always(mut self) -> Self {
        self.rule.times = None;
        self
    }

    /// Delays the handling (also a failure or a lost answer).
    pub fn after(mut self, delay: Duration) -> Self {
        self.rule.delay = delay;
        self
    }

    /// Adds the rule; returns the number of requests received before.
    fn lay_down(mut self, act: Act<S::Fault>) -> usize {
        self.rule.act = act;
        self.server.add_rule(self.rule)
    }

    /// Fails in a way specific to the server.
    pub(crate) fn fault(self, fault: S::Fault) {
        self.lay_down(Act::Fault(fault));
    }

    /// Answers as usual; with [`Script::after`], later.
    pub fn proceed(self) {
        self.lay_down(Act::Proceed);
    }

    /// Executes the request, but loses its answer: the API server's connection breaks, the runtime's call
    /// ends with `Unavailable`.
    pub fn lose_reply(self) {
        self.lay_down(Act::LoseReply);
    }

    /// Holds the request until the test releases it: see [`Held`].
    pub fn hold(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::Hold(Arc::clone(&gate)));
        Held { gate, since }
    }

    /// Executes the request, but holds its answer until the test releases it: see [`Held`].
    pub fn hold_reply(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::HoldReply(Arc::clone(&gate)));
        Held { gate, since }
    }
}

/// Gate at which held requests wait.
pub(crate) struct Gate {
    open: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
}

impl Gate {
    fn closed() -> Arc<Self> {
        Arc::new(Gate { open: watch::channel(false).0, waiting: watch::channel(0).0 })
    }

    pub(crate) async fn wait(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        // The sender lives as long as the gate.
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }
}

/// Held requests. Dropping the value releases them.
pub struct Held {
    gate: Arc<Gate>,
    since: usize,
}

impl Held {
    /// Waits until a request is held.
    ///
    /// # Panics
    /// If no request arrives before the timeout of tests.
    pub async fn reached(&self) {
        let mut waiting = self.gate.waiting.subscribe();
        let reached = tokio::time::timeout(PATIENCE, waiting.wait_for(|waiting| *waiting > 0)).await;
        assert!(reached.is_ok_and(|changed| changed.is_ok()), "no request was held");
    }

    /// Returns the number of the first request that the rule can have held.
    #[must_use]
    pub fn since(&self) -> usize {
        self.since
    }

    /// Releases the held requests and all later ones.
    pub fn release(self) {
        drop(self);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gate.open.send_replace(true);
    }
}
