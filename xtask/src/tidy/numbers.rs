//! Checks sums with numbers from outside. Code adds a variable length to a time with `After` in
//! `base::clock`, and converts seconds to a `Duration` with `units::bounds`. `Instant + Duration` panics if
//! the sum overflows the type, and a pod may have `terminationGracePeriodSeconds: 9223372036854775807`.
//!
//! A rule about text does not know types, so it recognises the usual names of times and lengths. The clippy
//! lint `arithmetic_side_effects` knows types; the modules without such sums enable it.

use anyhow::Result;
use regex::Regex;

use super::{Violation, code_of};

/// Folders whose seconds come from the agent's user (settings, scenarios and arguments) and are checked when
/// read.
const OWN_SECONDS: &[&str] = &["agent/config/", "agent/plan/", "agent/cli/", "agent/units/src/bounds.rs"];

/// The rule's patterns.
pub(super) struct Numbers {
    /// A time on the left of a sum, and the rest of the line.
    of_time: Regex,
    /// A length on the right of a sum.
    of_length: Regex,
    /// Constants and literals, which need no check.
    constant: Regex,
    /// Seconds that are converted to a length.
    seconds: Regex,
}

impl Numbers {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            of_time: Regex::new(
                r"(?:\bnow\(\)|\b(?:now|began|begun|started|started_at|since|last|deadline|origin))\s*\+=?\s*(.*)",
            )?,
            of_length: Regex::new(
                r"\+=?\s*(?:\w+\.)*(?:grace|period|timeout|delay|pause|patience|interval|back_off|ttl|lifetime|within)\b(?:[^(:]|$)",
            )?,
            constant: Regex::new(
                r"^(?:(?:\w+::)*[A-Z][A-Z0-9_]+\b|Duration::from_\w+\([\d_]+\)|[\d_]+\b|[iu]\d+::MAX)",
            )?,
            seconds: Regex::new(r"\bDuration::from_secs\(\s*(.*)")?,
        })
    }

    /// Finds the sums and conversions of a file that can overflow.
    pub(super) fn check(&self, file: &str, text: &str) -> Vec<Violation> {
        let is_ours = file.starts_with("agent/") && file.ends_with(".rs");
        if !is_ours
            || file.contains("/tests/")
            || file.ends_with("tests.rs")
            || file.contains("agent/testing/")
        {
            return Vec::new();
        }
        let code = text.lines().take_while(|line| line.trim() != "#[cfg(test)]").enumerate();
        let wrong = code.filter_map(|(index, line)| Some((index, self.wrong(file, code_of(line))?)));
        wrong
            .map(|(index, message)| Violation {
                file: file.to_owned(),
                line: index + 1,
                message: message.to_owned(),
            })
            .collect()
    }

    fn wrong(&self, file: &str, code: &str) -> Option<&'static str> {
        let rest = |pattern: &Regex| Some(pattern.captures(code)?.get(1)?.as_str().to_owned());
        let is_bare = rest(&self.of_time).is_some_and(|rest| !self.constant.is_match(&rest));
        if is_bare || self.of_length.is_match(code) {
            return Some(
                "a sum with a variable length may overflow: use base::clock::After, or saturating_add",
            );
        }
        let is_own = OWN_SECONDS.iter().any(|place| file.starts_with(place));
        let seconds = rest(&self.seconds).filter(|_| !is_own)?;
        let is_bounded = self.constant.is_match(&seconds)
            || seconds.contains(".as_secs()")
            || seconds.contains(".into())");
        (!is_bounded).then_some("seconds from outside need bounds: use units::bounds")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_with_lengths_from_outside_are_found() {
        let numbers = Numbers::new().unwrap();
        let check = |code: &str, expected: bool| {
            let found = numbers.check("agent/pods/src/worker.rs", code);
            assert_eq!(!found.is_empty(), expected, "{code}: {found:?}");
        };
        check("let by = now + patience(grace);", true);
        check("let by = Instant::now() + pause;", true);
        check("sleep_until(last + self.period).await", true);
        check("let until = began + holds;", true);
        check("by += self.grace;", true);
        check("grace.saturating_add(MARGIN) + self.timeout", true);
        check("let due = Duration::from_secs(seconds);", true);
        check("Duration::from_secs(u64::try_from(seconds).unwrap_or(0))", true);
        check("let by = now.after(patience(grace));", false);
        check("let by = Instant::now() + PATIENCE;", false);
        check("let by = Instant::now() + Duration::from_secs(10);", false);
        check("now + 2 * super::SECOND", false);
        check("let next = last + 1;", false);
        check("// now + grace", false);
        check("const LONG: Duration = Duration::from_secs(60 * 60);", false);
        check("const LONG: Duration = Duration::from_secs(u32::MAX as u64);", false);
        check("Duration::from_secs(self.began.elapsed().as_secs())", false);
        check("#[cfg(test)]\nmod tests { fn f() { now + grace } }", false);
    }

    #[test]
    fn tests_and_code_outside_the_agent_may_add() {
        let numbers = Numbers::new().unwrap();
        for file in
            ["agent/pods/src/status/tests.rs", "agent/tests/cli.rs", "tests/src/agent.rs", "agent/a.md"]
        {
            assert_eq!(numbers.check(file, "now + grace"), [], "{file}");
        }
        assert_eq!(numbers.check("agent/config/src/node.rs", "Duration::from_secs(lease)"), []);
    }
}
