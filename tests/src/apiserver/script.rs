//! Faults of the fake API server, in addition to those of every fake server ([`crate::faults`]).

use std::sync::Arc;

use serde_json::Value;

use super::path::{Verb, fits};
use super::{Asked, FakeApi};
use crate::faults;

/// Handling of a request.
pub(super) type Act = faults::Act<Fault>;

/// Fault specific to an API server.
#[derive(Clone)]
pub enum Fault {
    /// Refuses the request with this status, without executing it.
    Refuse {
        /// The HTTP status.
        code: u16,
        /// Message.
        message: String,
        /// Seconds of the `Retry-After` header.
        retry_after: Option<u64>,
    },
    /// Breaks the connection, without executing the request.
    Drop,
    /// Executes the request, and lets the test change the answer.
    Alter(Alter),
    /// Executes the request, and sends these bytes as the answer's body.
    Body(Vec<u8>),
}

/// Change of the body of an answer.
type Alter = Arc<dyn Fn(&mut Value) + Send + Sync>;

/// Builder of a rule: see [`FakeApi::on`] and [`FakeApi::on_any`].
pub type Script<'a> = faults::Script<'a, FakeApi>;

impl Script<'_> {
    /// Refuses the request with this HTTP status, without executing it.
    pub fn refuse(self, code: u16, message: &str) {
        self.fault(Fault::Refuse { code, message: message.to_owned(), retry_after: None });
    }

    /// Refuses the request with 429 and a `Retry-After` of this many seconds.
    pub fn throttle(self, seconds: u64) {
        let message = "the server has received too many requests and has asked us to try again later";
        let message = message.to_owned();
        self.fault(Fault::Refuse { code: 429, message, retry_after: Some(seconds) });
    }

    /// Breaks the connection, without executing the request.
    pub fn drop_connection(self) {
        self.fault(Fault::Drop);
    }

    /// Executes the request, and changes the answer's object with `alter`.
    pub fn alter(self, alter: impl Fn(&mut Value) + Send + Sync + 'static) {
        self.fault(Fault::Alter(Arc::new(alter)));
    }

    /// Answers a list as if it were empty, like a server restored from an empty backup.
    pub fn answer_empty_list(self) {
        self.alter(|list| list["items"] = Value::Array(Vec::new()));
    }

    /// Executes the request, and sends these bytes as the answer's body.
    pub fn answer_body(self, body: impl Into<Vec<u8>>) {
        self.fault(Fault::Body(body.into()));
    }
}

impl faults::Faulty for FakeApi {
    type Asked = Asked;
    type Fault = Fault;

    fn add_rule(&self, rule: faults::Rule<Asked, Fault>) -> usize {
        let mut state = self.shared.lock();
        state.rules.add(rule);
        state.asked.len()
    }
}

/// Begins a rule for the next request with this verb and a path that matches `pattern`; None: any.
pub(super) fn on<'a>(api: &'a FakeApi, verb: Option<Verb>, pattern: Option<&str>) -> Script<'a> {
    let pattern = pattern.map(str::to_owned);
    Script::new(api, move |asked| {
        verb.is_none_or(|verb| verb == asked.verb)
            && pattern.as_ref().is_none_or(|pattern| fits(pattern, &asked.path))
    })
}
