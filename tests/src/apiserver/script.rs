//! What is to go wrong in the fake API server beside what every fake server can ([`crate::faults`]).

use std::sync::Arc;

use serde_json::Value;

use super::path::{Verb, fits};
use super::{Asked, FakeApi};
use crate::faults;

/// What becomes of a request.
pub(super) type Act = faults::Act<Fault>;

/// How only an API server goes wrong.
#[derive(Clone)]
pub enum Fault {
    /// The request is refused with this status, and nothing was done.
    Refuse {
        /// The HTTP status.
        code: u16,
        /// Why.
        message: String,
        /// The advice to wait so many seconds.
        retry_after: Option<u64>,
    },
    /// Its connection breaks, and nothing was done.
    Drop,
    /// It is done, and the test changes the answer.
    Alter(Alter),
    /// It is done, and the answer's body is these bytes.
    Body(Vec<u8>),
}

/// Changes the body of an answer.
type Alter = Arc<dyn Fn(&mut Value) + Send + Sync>;

/// A rule in the making: see [`FakeApi::on`] and [`FakeApi::on_any`].
pub type Script<'a> = faults::Script<'a, FakeApi>;

impl Script<'_> {
    /// It is refused with this HTTP status, and nothing was done.
    pub fn refuse(self, code: u16, message: &str) {
        self.fault(Fault::Refuse { code, message: message.to_owned(), retry_after: None });
    }

    /// It is refused with 429 and the advice to wait so many seconds.
    pub fn throttle(self, seconds: u64) {
        let message = "the server has received too many requests and has asked us to try again later";
        let message = message.to_owned();
        self.fault(Fault::Refuse { code: 429, message, retry_after: Some(seconds) });
    }

    /// Its connection breaks, and nothing was done.
    pub fn drop_connection(self) {
        self.fault(Fault::Drop);
    }

    /// It is done, and the answer's object is what `alter` makes of it.
    pub fn alter(self, alter: impl Fn(&mut Value) + Send + Sync + 'static) {
        self.fault(Fault::Alter(Arc::new(alter)));
    }

    /// A list is answered as if nothing were there: what a server does that was restored from an empty
    /// backup.
    pub fn answer_empty_list(self) {
        self.alter(|list| list["items"] = Value::Array(Vec::new()));
    }

    /// It is done, and the answer's body is these bytes, whatever they mean.
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

/// A rule for the next request of a verb whose path is `pattern`; None: any.
pub(super) fn on<'a>(api: &'a FakeApi, verb: Option<Verb>, pattern: Option<&str>) -> Script<'a> {
    let pattern = pattern.map(str::to_owned);
    Script::new(api, move |asked| {
        verb.is_none_or(|verb| verb == asked.verb)
            && pattern.as_ref().is_none_or(|pattern| fits(pattern, &asked.path))
    })
}
