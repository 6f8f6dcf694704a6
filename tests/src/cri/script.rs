//! Faults of the fake runtime beyond those of all fake servers ([`crate::faults`]).

use std::sync::Arc;

use prost::Message;
use tonic::{Code, Status};

use super::FakeCri;
use super::calls::{Asked, Op};
use crate::faults;

/// Action for a call.
pub(super) type Act = faults::Act<Fault>;

/// Fault specific to a runtime.
#[derive(Clone)]
pub enum Fault {
    /// The call fails without an effect.
    Fail(Status),
    /// The call takes effect, and then every connection breaks.
    Sever,
    /// The call takes effect, and the test replaces the bytes of the answer.
    Rewrite(Rewrite),
}

/// Function from the encoded answer to the replaced body (one message in gRPC framing).
type Rewrite = Arc<dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync>;

/// Frames a message for gRPC: flag "not compressed", length, message.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(message.len() + 5);
    frame.push(0);
    frame.extend(length.to_be_bytes());
    frame.extend_from_slice(message);
    frame
}

/// Unfinished rule: see [`FakeCri::on`] and [`FakeCri::on_any`].
pub type Script<'a> = faults::Script<'a, FakeCri>;

impl Script<'_> {
    /// Fails the call without an effect.
    pub fn fail(self, code: Code, message: &str) {
        self.fault(Fault::Fail(Status::new(code, message)));
    }

    /// Executes the call, and then breaks all connections, including its own; new ones are accepted.
    pub fn break_connections(self) {
        self.fault(Fault::Sever);
    }

    /// Executes the call, but changes the answer with `alter`, whose message type must be that of the answer.
    pub fn alter<M: Message + Default + 'static>(self, alter: impl Fn(&mut M) + Send + Sync + 'static) {
        let rewrite = move |honest: Vec<u8>| {
            let mut message = M::decode(&*honest).unwrap_or_default();
            alter(&mut message);
            framed(&message.encode_to_vec())
        };
        self.fault(Fault::Rewrite(Arc::new(rewrite)));
    }

    /// Executes the call, and answers with these bytes as the message, which may be invalid.
    pub fn answer_message(self, message: &[u8]) {
        let frame = framed(message);
        self.fault(Fault::Rewrite(Arc::new(move |_| frame.clone())));
    }

    /// Executes the call, and answers with these bytes as the body, possibly without a valid message.
    pub fn answer_body(self, body: Vec<u8>) {
        self.fault(Fault::Rewrite(Arc::new(move |_| body.clone())));
    }
}

impl faults::Faulty for FakeCri {
    type Asked = Asked;
    type Fault = Fault;

    fn add_rule(&self, rule: faults::Rule<Asked, Fault>) -> usize {
        let mut state = self.shared.lock();
        state.rules.add(rule);
        state.calls.len()
    }
}

/// Begins a rule for the next call of `op`, or of any kind if None.
pub(super) fn on(cri: &FakeCri, op: Option<Op>) -> Script<'_> {
    Script::new(cri, move |asked| op.is_none_or(|op| op == asked.op()))
}
