//! Parser for a guest's report about its tests, the lines that `guest/run` writes. Pure: lines in, values
//! out.

use std::collections::BTreeMap;

/// Test of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Test {
    /// Test program: an integration test's name, or a crate's for its unit tests.
    pub(super) program: String,
    /// Test in the program, with its modules.
    pub(super) name: String,
}

impl Test {
    /// Returns the program and the test's outermost module, which a row of the documentation counts.
    pub(super) fn group(&self) -> String {
        let module = self.name.split_once("::").map(|(module, _)| module);
        module.map_or_else(|| self.program.clone(), |module| format!("{} {module}", self.program))
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.program, self.name)
    }
}

/// Result of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    /// Failure with its cause and the end of the output.
    Failed(String, Vec<String>),
    /// Requirement that the guest lacks.
    Skipped(String),
}

/// Event that is worth a line while the tests run.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// The test with this number ended after this many seconds of the guest's clock.
    Ended { number: usize, seconds: f64 },
    /// A bench printed this line.
    Said(String),
}

/// Report of one kernel, as far as it was received.
#[derive(Clone, Debug, Default)]
pub(super) struct Transcript {
    /// `release`, `cgroup`, `controllers`, …: see `guest/run`.
    pub(super) facts: BTreeMap<String, String>,
    /// Output of `beelet doctor`.
    pub(super) doctor: Vec<String>,
    /// Output of `beelet doctor` as JSON; empty if it has none.
    pub(super) doctor_json: String,
    /// Verdicts by test number.
    pub(super) verdicts: BTreeMap<usize, Verdict>,
    /// Durations of the tests, by the guest's clock.
    pub(super) seconds: BTreeMap<usize, f64>,
    /// True if the plan was completed.
    pub(super) done: bool,
    running: Option<Running>,
}

#[derive(Clone, Debug)]
struct Running {
    number: usize,
    since: f64,
    output: Vec<String>,
    skipped: Vec<String>,
}

impl Transcript {
    /// Parses the next line. Ignores unknown lines: other output may appear on a serial line.
    pub(super) fn line(&mut self, line: &str) -> Option<Event> {
        let line = line.trim_end_matches(['\r', '\n']);
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "fact" => {
                let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
                self.facts.insert(name.to_owned(), value.trim().to_owned());
            }
            "doctor" => self.doctor.push(rest.to_owned()),
            "doctor-json" => {
                self.doctor_json.push_str(rest);
                self.doctor_json.push('\n');
            }
            "begin" => self.begin(rest),
            "out" => {
                if let Some((running, text)) = self.running_and(rest) {
                    running.output.push(text);
                }
            }
            "skip" => {
                if let Some((running, text)) = self.running_and(rest) {
                    running.skipped.push(reason(&text));
                }
            }
            "said" => return Some(Event::Said(rest.to_owned())),
            "end" => return self.end(rest),
            "done" => self.done = true,
            _ => {}
        }
        None
    }

    fn begin(&mut self, rest: &str) {
        let mut words = rest.split(' ');
        let number = words.next().and_then(|word| word.parse().ok());
        let since = words.next().and_then(|word| word.parse().ok()).unwrap_or(0.0);
        self.running =
            number.map(|number| Running { number, since, output: Vec::new(), skipped: Vec::new() });
    }

    /// Returns the running test and the rest of the line, if `rest` begins with the test's number.
    fn running_and(&mut self, rest: &str) -> Option<(&mut Running, String)> {
        let (number, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let number: usize = number.parse().ok()?;
        let running = self.running.as_mut().filter(|running| running.number == number)?;
        Some((running, text.to_owned()))
    }

    fn end(&mut self, rest: &str) -> Option<Event> {
        let mut words = rest.split(' ');
        let number: usize = words.next()?.parse().ok()?;
        let until: f64 = words.next()?.parse().ok()?;
        let status = words.next()?;
        let running = self.running.take().filter(|running| running.number == number)?;
        let verdict = match (failure(status), running.skipped.is_empty()) {
            (None, true) => Verdict::Passed,
            (None, false) => Verdict::Skipped(running.skipped.join("; ")),
            (Some(why), _) => Verdict::Failed(why, running.output),
        };
        self.verdicts.insert(number, verdict);
        self.seconds.insert(number, until - running.since);
        Some(Event::Ended { number, seconds: until - running.since })
    }

    /// Adds the report of another boot of the same plan.
    pub(super) fn append(&mut self, other: Transcript) {
        self.facts.extend(other.facts);
        (self.doctor, self.doctor_json) = (other.doctor, other.doctor_json);
        self.verdicts.extend(other.verdicts);
        self.seconds.extend(other.seconds);
        (self.done, self.running) = (other.done, other.running);
    }

    /// Returns the test that has begun but not ended.
    #[cfg(test)]
    pub(super) fn running(&self) -> Option<usize> {
        self.running.as_ref().map(|running| running.number)
    }

    /// Discards the running test of an interrupted run, as if it had not begun; returns its number.
    pub(super) fn forget_running(&mut self) -> Option<usize> {
        self.running.take().map(|running| running.number)
    }

    /// Marks the running test as failed, because the machine ended.
    pub(super) fn ended_early(&mut self, why: &str) {
        if let Some(running) = self.running.take() {
            let verdict = Verdict::Failed(format!("{why} during the test"), running.output);
            self.verdicts.insert(running.number, verdict);
        }
    }
}

/// Returns the reason in a line of `BEELET_SKIPPED`, which `beelet_tests::requires` writes: `SKIPPED <test>:
/// <reason>`. The test's name may contain `::`, but not `: `.
fn reason(line: &str) -> String {
    line.split_once(": ").map_or(line, |(_, reason)| reason).trim().to_owned()
}

/// Describes a test program's exit status, unless it is a success. `timeout -s KILL` exits with 137, some
/// versions with 124.
fn failure(status: &str) -> Option<String> {
    match status {
        "0" => None,
        "124" | "137" => Some("the test was killed: it timed out or ran out of memory".to_owned()),
        "101" => Some("the test failed".to_owned()),
        "no-result" => Some("the program succeeded but did not run the test".to_owned()),
        other => match other.parse::<i32>() {
            Ok(code) if code > 128 => Some(format!("the test was killed by signal {}", code - 128)),
            _ => Some(format!("the test exited with status {other}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &str) -> Transcript {
        let mut transcript = Transcript::default();
        for line in lines.lines() {
            transcript.line(line);
        }
        transcript
    }

    #[track_caller]
    fn check(lines: &str, expected: &Verdict) {
        assert_eq!(read(lines).verdicts.get(&3), Some(expected), "{lines}");
    }

    fn failed(why: &str, output: &[&str]) -> Verdict {
        Verdict::Failed(why.to_owned(), output.iter().map(|line| (*line).to_owned()).collect())
    }

    #[test]
    fn a_test_ends_as_its_status_says() {
        check("begin 3 1.00\nend 3 2.50 0", &Verdict::Passed);
        check("begin 3 1.00\r\nend 3 2.50 0\r\n", &Verdict::Passed);
        check("begin 3 1\nout 3 a\nout 3 \nend 3 2 101", &failed("the test failed", &["a", ""]));
        check("begin 3 1\nend 3 2 139", &failed("the test was killed by signal 11", &[]));
        check("begin 3 1\nend 3 2 2", &failed("the test exited with status 2", &[]));
        check(
            "begin 3 1\nend 3 2 137",
            &failed("the test was killed: it timed out or ran out of memory", &[]),
        );
        check("begin 3 1\nend 3 2 no-result", &failed("the program succeeded but did not run the test", &[]));
    }

    #[test]
    fn a_skipped_test_names_its_reasons_without_its_own_name() {
        check(
            "begin 3 1\nskip 3 SKIPPED a::b: root is required (remedy: run as root)\nend 3 2 0",
            &Verdict::Skipped("root is required (remedy: run as root)".to_owned()),
        );
    }

    #[test]
    fn a_test_that_failed_after_a_skip_has_failed() {
        check("begin 3 1\nskip 3 SKIPPED a: b\nend 3 2 101", &failed("the test failed", &[]));
    }

    #[test]
    fn lines_of_others_and_of_other_tests_change_nothing() {
        check("[  1.2] noise\nbegin 3 1\nout 4 x\n\nend 4 2 101\nbegin 3 1\nend 3 2 0", &Verdict::Passed);
    }

    #[test]
    fn a_machine_that_dies_takes_its_running_test_with_it() {
        let mut transcript = read("begin 1 0\nend 1 1 0\nbegin 3 1\nout 3 last words");
        assert_eq!(transcript.running(), Some(3));
        assert!(!transcript.done);
        transcript.ended_early("the VM died");
        assert_eq!(
            transcript.verdicts.get(&3),
            Some(&failed("the VM died during the test", &["last words"]))
        );
        assert_eq!(transcript.verdicts.get(&1), Some(&Verdict::Passed));
    }

    #[test]
    fn a_test_that_is_forgotten_has_no_verdict() {
        let mut transcript = read("begin 1 0\nend 1 1 0\nbegin 3 1\nout 3 last words");
        assert_eq!((transcript.forget_running(), transcript.forget_running()), (Some(3), None));
        transcript.ended_early("the VM died");
        assert_eq!(transcript.verdicts.len(), 1);
    }

    #[test]
    fn facts_and_the_doctors_output_are_kept_verbatim() {
        let transcript = read(
            "fact release 6.1.0-9\nfact controllers\ndoctor  a  b\ndoctor-json {\ndoctor-json }\ndone 0",
        );
        assert_eq!(transcript.facts["release"], "6.1.0-9");
        assert_eq!(transcript.facts["controllers"], "");
        assert_eq!(transcript.doctor, [" a  b"]);
        assert_eq!(transcript.doctor_json, "{\n}\n");
        assert!(transcript.done);
    }

    #[test]
    fn a_tests_time_is_that_between_its_begin_and_end() {
        let mut transcript = Transcript::default();
        transcript.line("begin 0 10.5");
        assert_eq!(transcript.line("end 0 12.75 0"), Some(Event::Ended { number: 0, seconds: 2.25 }));
    }
}
