//! What is to go wrong in a fake server: rules that a test lays down before or while the agent asks. What the
//! fake runtime and the fake API server have in common; each adds the faults that only its protocol has.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// How long a test waits for an event that must come: generous, for a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A fake server that goes wrong on demand.
pub trait Faulty {
    /// A request that came.
    type Asked;
    /// A fault that only this server has.
    type Fault;

    /// Adds a rule behind those that there are. Returns how many requests had come before.
    fn add_rule(&self, rule: Rule<Self::Asked, Self::Fault>) -> usize;
}

/// What becomes of a request.
#[derive(Clone)]
pub(crate) enum Act<F> {
    /// It is answered as usual.
    Proceed,
    /// It is done, and its answer never comes.
    LoseReply,
    /// It waits for the test, then is answered as usual.
    Hold(Arc<Gate>),
    /// It is done, and its answer waits for the test.
    HoldReply(Arc<Gate>),
    /// It goes wrong as only this server can.
    Fault(F),
}

type Condition<Q> = Box<dyn Fn(&Q) -> bool + Send + Sync>;

/// One rule for requests `Q` of a server with faults `F`.
pub struct Rule<Q, F> {
    kind: Condition<Q>,
    when: Option<Condition<Q>>,
    /// None: always.
    times: Option<usize>,
    delay: Duration,
    act: Act<F>,
}

impl<Q, F> Rule<Q, F> {
    /// Returns true if the rule is for this request; uses it up by one.
    fn take(&mut self, asked: &Q) -> bool {
        let fits =
            (self.kind)(asked) && self.times != Some(0) && self.when.as_ref().is_none_or(|when| when(asked));
        if let Some(times) = self.times.as_mut().filter(|_| fits) {
            *times -= 1;
        }
        fits
    }
}

/// A server's rules. The first that fits a request decides about it.
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

    /// What becomes of a request, and how much later.
    pub(crate) fn decide(&mut self, asked: &Q) -> (Duration, Act<F>) {
        let rule =
            self.0.iter_mut().find_map(|rule| rule.take(asked).then(|| (rule.delay, rule.act.clone())));
        rule.unwrap_or((Duration::ZERO, Act::Proceed))
    }
}

/// A rule in the making: what is to happen, and to which requests.
#[must_use = "a rule takes effect when it says what is to happen: fail, refuse, proceed, hold, …"]
pub struct Script<'a, S: Faulty> {
    server: &'a S,
    rule: Rule<S::Asked, S::Fault>,
}

impl<'a, S: Faulty> Script<'a, S> {
    /// A rule for the next request of a kind.
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

    /// Only for requests that this says yes to.
    pub fn when(mut self, when: impl Fn(&S::Asked) -> bool + Send + Sync + 'static) -> Self {
        self.rule.when = Some(Box::new(when));
        self
    }

    /// For the next `times` requests instead of one.
    pub fn times(mut self, times: usize) -> Self {
        self.rule.times = Some(times);
        self
    }

    /// For all requests, until the server is healed.
    pub fn always(mut self) -> Self {
        self.rule.times = None;
        self
    }

    /// After this time (also before it fails or its answer is lost).
    pub fn after(mut self, delay: Duration) -> Self {
        self.rule.delay = delay;
        self
    }

    /// How many requests had come before.
    fn lay_down(mut self, act: Act<S::Fault>) -> usize {
        self.rule.act = act;
        self.server.add_rule(self.rule)
    }

    /// It goes wrong as only this server can.
    pub(crate) fn fault(self, fault: S::Fault) {
        self.lay_down(Act::Fault(fault));
    }

    /// It is answered as usual: with [`Script::after`], later.
    pub fn proceed(self) {
        self.lay_down(Act::Proceed);
    }

    /// It is done, and its answer gets lost: the API server's connection breaks, the runtime's call ends with
    /// `Unavailable`.
    pub fn lose_reply(self) {
        self.lay_down(Act::LoseReply);
    }

    /// It hangs until the test lets it go on: see [`Held`].
    pub fn hold(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::Hold(Arc::clone(&gate)));
        Held { gate, since }
    }

    /// It is done, but its answer hangs until the test lets it go: see [`Held`].
    pub fn hold_reply(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::HoldReply(Arc::clone(&gate)));
        Held { gate, since }
    }
}

/// Where held requests wait.
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

/// Requests that hang. Dropped, it lets them go.
pub struct Held {
    gate: Arc<Gate>,
    since: usize,
}

impl Held {
    /// Waits until a request hangs here.
    ///
    /// # Panics
    /// If none comes within the time that tests wait.
    pub async fn reached(&self) {
        let mut waiting = self.gate.waiting.subscribe();
        let reached = tokio::time::timeout(PATIENCE, waiting.wait_for(|waiting| *waiting > 0)).await;
        assert!(reached.is_ok_and(|changed| changed.is_ok()), "no request came to be held");
    }

    /// The number of the first request that can have come here.
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
