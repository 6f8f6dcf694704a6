//! What is to go wrong: rules that a test lays down before or while the agent asks.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::path::{Verb, fits};
use super::{Asked, FakeApi};
use crate::cri::{Gate, Held};

/// What becomes of a request.
#[derive(Clone)]
pub(super) enum Act {
    /// It is answered as usual.
    Proceed,
    /// It is refused with this status, and nothing was done.
    Refuse { code: u16, message: String, retry_after: Option<u64> },
    /// Its connection breaks, and nothing was done.
    Drop,
    /// It is done, and its connection breaks.
    LoseReply,
    /// It waits for the test, then is answered as usual.
    Hold(Arc<Gate>),
    /// It is done, and its answer waits for the test.
    HoldReply(Arc<Gate>),
    /// It is done, and the test changes the answer.
    Alter(Alter),
    /// It is done, and the answer's body is these bytes.
    Body(Vec<u8>),
}

/// Changes the body of an answer.
pub(super) type Alter = Arc<dyn Fn(&mut Value) + Send + Sync>;

type Condition = Box<dyn Fn(&Asked) -> bool + Send + Sync>;

/// One rule. The first that fits a request decides about it.
pub(super) struct Rule {
    /// None: any.
    verb: Option<Verb>,
    pattern: Option<String>,
    when: Option<Condition>,
    /// None: always.
    times: Option<usize>,
    pub(super) delay: Duration,
    pub(super) act: Act,
}

impl Rule {
    /// Returns true if the rule is for this request; uses it up by one.
    pub(super) fn take(&mut self, asked: &Asked) -> bool {
        let matches = self.verb.is_none_or(|verb| verb == asked.verb)
            && self.pattern.as_ref().is_none_or(|pattern| fits(pattern, &asked.path))
            && self.times != Some(0)
            && self.when.as_ref().is_none_or(|when| when(asked));
        if let Some(times) = self.times.as_mut().filter(|_| matches) {
            *times -= 1;
        }
        matches
    }
}

/// A rule in the making: see [`FakeApi::on`] and [`FakeApi::on_any`].
#[must_use = "a rule takes effect when it says what is to happen: refuse, proceed, hold, …"]
pub struct Script<'a> {
    api: &'a FakeApi,
    rule: Rule,
}

impl<'a> Script<'a> {
    pub(super) fn new(api: &'a FakeApi, verb: Option<Verb>, pattern: Option<&str>) -> Self {
        let pattern = pattern.map(str::to_owned);
        let rule =
            Rule { verb, pattern, when: None, times: Some(1), delay: Duration::ZERO, act: Act::Proceed };
        Script { api, rule }
    }

    /// Only for requests that this says yes to.
    pub fn when(mut self, when: impl Fn(&Asked) -> bool + Send + Sync + 'static) -> Self {
        self.rule.when = Some(Box::new(when));
        self
    }

    /// For the next `times` requests instead of one.
    pub fn times(mut self, times: usize) -> Self {
        self.rule.times = Some(times);
        self
    }

    /// For all requests, until [`FakeApi::heal`].
    pub fn always(mut self) -> Self {
        self.rule.times = None;
        self
    }

    /// After this time (also before it is refused or its connection breaks).
    pub fn after(mut self, delay: Duration) -> Self {
        self.rule.delay = delay;
        self
    }

    /// How many requests had come before.
    fn lay_down(mut self, act: Act) -> usize {
        self.rule.act = act;
        self.api.add_rule(self.rule)
    }

    /// It is answered as usual: with [`Script::after`], later.
    pub fn proceed(self) {
        self.lay_down(Act::Proceed);
    }

    /// It is refused with this HTTP status, and nothing was done.
    pub fn refuse(self, code: u16, message: &str) {
        self.lay_down(Act::Refuse { code, message: message.to_owned(), retry_after: None });
    }

    /// It is refused with 429 and the advice to wait so many seconds.
    pub fn throttle(self, seconds: u64) {
        let message = "the server has received too many requests and has asked us to try again later";
        let message = message.to_owned();
        self.lay_down(Act::Refuse { code: 429, message, retry_after: Some(seconds) });
    }

    /// Its connection breaks, and nothing was done.
    pub fn drop_connection(self) {
        self.lay_down(Act::Drop);
    }

    /// It is done, and its connection breaks before the answer.
    pub fn lose_reply(self) {
        self.lay_down(Act::LoseReply);
    }

    /// It is done, and the answer's object is what `alter` makes of it.
    pub fn alter(self, alter: impl Fn(&mut Value) + Send + Sync + 'static) {
        self.lay_down(Act::Alter(Arc::new(alter)));
    }

    /// A list is answered as if nothing were there: what a server does that was restored from an empty
    /// backup.
    pub fn answer_empty_list(self) {
        self.alter(|list| list["items"] = Value::Array(Vec::new()));
    }

    /// It is done, and the answer's body is these bytes, whatever they mean.
    pub fn answer_body(self, body: impl Into<Vec<u8>>) {
        self.lay_down(Act::Body(body.into()));
    }

    /// It hangs until the test lets it go on.
    pub fn hold(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::Hold(Arc::clone(&gate)));
        Held::new(gate, since)
    }

    /// It is done, but its answer hangs until the test lets it go.
    pub fn hold_reply(self) -> Held {
        let gate = Gate::closed();
        let since = self.lay_down(Act::HoldReply(Arc::clone(&gate)));
        Held::new(gate, since)
    }
}
