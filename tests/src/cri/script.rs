//! What is to go wrong: rules that a test lays down before or while the agent calls.

use std::sync::Arc;
use std::time::Duration;

use prost::Message;
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
    /// It is done, and the test makes the answer's bytes of those that would be.
    Rewrite(Rewrite),
}

/// Makes the body of an answer (one message, framed as gRPC has it) of the encoded message that would be
/// answered.
pub(super) type Rewrite = Arc<dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync>;

/// A message as gRPC frames it: not compressed, its length, itself.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(message.len() + 5);
    frame.push(0);
    frame.extend(length.to_be_bytes());
    frame.extend_from_slice(message);
    frame
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
    /// Returns true if the rule is for this call; uses it up by one.
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

    /// The call is done, but what is answered is not what came of it: `alter` changes the message, which must
    /// be of the type that the call answers with.
    pub fn alter<M: Message + Default + 'static>(self, alter: impl Fn(&mut M) + Send + Sync + 'static) {
        let rewrite = move |honest: Vec<u8>| {
            let mut message = M::decode(&*honest).unwrap_or_default();
            alter(&mut message);
            framed(&message.encode_to_vec())
        };
        self.lay_down(Act::Rewrite(Arc::new(rewrite)));
    }

    /// The call is done, and answered with a message of these bytes, whatever they mean.
    pub fn answer_message(self, message: &[u8]) {
        let frame = framed(message);
        self.lay_down(Act::Rewrite(Arc::new(move |_| frame.clone())));
    }

    /// The call is done, and the body of the answer is these bytes: not even a message.
    pub fn answer_body(self, body: Vec<u8>) {
        self.lay_down(Act::Rewrite(Arc::new(move |_| body.clone())));
    }

    /// The call hangs until the test lets it go on: see [`Held`].
    pub fn hold(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::Hold(Arc::clone(&gate)));
        Held::new(gate, since)
    }

    /// The call is done, but its answer hangs until the test lets it go: see [`Held`].
    pub fn hold_reply(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::HoldReply(Arc::clone(&gate)));
        Held { gate, since }
    }
}

/// Where held calls, and requests to the fake API server, wait.
pub(crate) struct Gate {
    open: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
}

impl Gate {
    pub(crate) fn closed() -> Arc<Self> {
        Arc::new(Gate { open: watch::channel(false).0, waiting: watch::channel(0).0 })
    }

    pub(crate) async fn wait(&self) {
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
    pub(crate) fn new(gate: Arc<Gate>, since: usize) -> Held {
        Held { gate, since }
    }

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
