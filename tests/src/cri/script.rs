//! What is to go wrong in the fake runtime beside what every fake server can ([`crate::faults`]).

use std::sync::Arc;

use prost::Message;
use tonic::{Code, Status};

use super::FakeCri;
use super::calls::{Asked, Op};
use crate::faults;

/// What becomes of a call.
pub(super) type Act = faults::Act<Fault>;

/// How only a runtime goes wrong.
#[derive(Clone)]
pub enum Fault {
    /// The call fails, and nothing was done.
    Fail(Status),
    /// It is done, and then every connection breaks.
    Sever,
    /// It is done, and the test makes the answer's bytes of those that would be.
    Rewrite(Rewrite),
}

/// Makes the body of an answer (one message, framed as gRPC has it) of the encoded message that would be
/// answered.
type Rewrite = Arc<dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync>;

/// A message as gRPC frames it: not compressed, its length, itself.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(message.len() + 5);
    frame.push(0);
    frame.extend(length.to_be_bytes());
    frame.extend_from_slice(message);
    frame
}

/// A rule in the making: see [`FakeCri::on`] and [`FakeCri::on_any`].
pub type Script<'a> = faults::Script<'a, FakeCri>;

impl Script<'_> {
    /// The call fails, and nothing was done.
    pub fn fail(self, code: Code, message: &str) {
        self.fault(Fault::Fail(Status::new(code, message)));
    }

    /// The call is done, and then all connections break, this call's too; new ones are accepted.
    pub fn break_connections(self) {
        self.fault(Fault::Sever);
    }

    /// The call is done, but what is answered is not what came of it: `alter` changes the message, which must
    /// be of the type that the call answers with.
    pub fn alter<M: Message + Default + 'static>(self, alter: impl Fn(&mut M) + Send + Sync + 'static) {
        let rewrite = move |honest: Vec<u8>| {
            let mut message = M::decode(&*honest).unwrap_or_default();
            alter(&mut message);
            framed(&message.encode_to_vec())
        };
        self.fault(Fault::Rewrite(Arc::new(rewrite)));
    }

    /// The call is done, and answered with a message of these bytes, whatever they mean.
    pub fn answer_message(self, message: &[u8]) {
        let frame = framed(message);
        self.fault(Fault::Rewrite(Arc::new(move |_| frame.clone())));
    }

    /// The call is done, and the body of the answer is these bytes: not even a message.
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

/// A rule for the next call of `op`; None: of any kind.
pub(super) fn on(cri: &FakeCri, op: Option<Op>) -> Script<'_> {
    Script::new(cri, move |asked| op.is_none_or(|op| op == asked.op()))
}
