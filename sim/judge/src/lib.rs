//! The judge of the simulation: reads a trace of facts and returns the broken rules. A rule names its source,
//! where the kubelet's behaviour is the contract. Must never use the agent's code: a judge that shares the
//! agent's mistakes acquits them.
//!
//! [`Judge::observe`] checks the rules that always hold, at each fact; [`Judge::finish`] checks the rules
//! that must come about, once the last fault is over and the node had time to converge.

pub mod rules;
pub mod trace;

mod ledger;

pub use self::rules::Judge;

use std::fmt;
use std::time::Duration;

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Name of the rule.
    pub rule: &'static str,
    /// Time since the start of the simulation.
    pub at: Duration,
    /// The subject and the observed facts.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>12.3}s {}: {}", self.at.as_secs_f64(), self.rule, self.detail)
    }
}

#[cfg(test)]
mod tests;
