//! What a guest says about its tests: the lines that `guest/run` writes, read into values. Pure: lines in,
//! values out.

use std::collections::BTreeMap;

/// A test of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Test {
    /// The test program: an integration test's name, or a crate's for its unit tests.
    pub(super) program: String,
    /// The test in it, with its modules.
    pub(super) name: String,
}

impl Test {
    /// The program, and the test's outermost module: what a row of the documentation counts.
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

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    /// Why, and the end of what it printed.
    Failed(String, Vec<String>),
    /// What the guest lacks for it.
    Skipped(String),
}

/// Something that is worth a line while the tests run.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// The test with this number ended, after so many seconds of the guest's clock.
    Ended { number: usize, seconds: f64 },
    /// A bench printed this line.
    Said(String),
}

/// Everything that one kernel said, as far as it came.
#[derive(Clone, Debug, Default)]
pub(super) struct Transcript {
    /// `release`, `cgroup`, `controllers`, …: see `guest/run`.
    pub(super) facts: BTreeMap<String, String>,
    /// What `beelet doctor` printed.
    pub(super) doctor: Vec<String>,
    /// What `beelet doctor` printed as JSON; empty where it did not.
    pub(super) doctor_json: String,
    /// The verdicts, by the tests' numbers.
    pub(super) verdicts: BTreeMap<usize, Verdict>,
    /// How long they took, by the guest's clock.
    pub(super) seconds: BTreeMap<usize, f64>,
    /// Whether the plan was gone through to its end.
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
    /// Takes in the next line. Lines that aren't ours are left alone: a serial line carries what it carries.
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

    /// The running test, if `rest` begins with its number, and what comes after that.
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

    /// Takes in what another boot of the same plan said.
    pub(super) fn append(&mut self, other: Transcript) {
        self.facts.extend(other.facts);
        (self.doctor, self.doctor_json) = (other.doctor, other.doctor_json);
        self.verdicts.extend(other.verdicts);
        self.seconds.extend(other.seconds);
        (self.done, self.running) = (other.done, other.running);
    }

    /// The test that had begun and not ended.
    #[cfg(test)]
    pub(super) fn running(&self) -> Option<usize> {
        self.running.as_ref().map(|running| running.number)
    }

    /// The run was cut short: the test that had begun, and which is now as if it had not.
    pub(super) fn forget_running(&mut self) -> Option<usize> {
        self.running.take().map(|running| running.number)
    }

    /// The machine is gone: the test that ran failed with it.
    pub(super) fn ended_early(&mut self, why: &str) {
        if let Some(running) = self.running.take() {
            let verdict = Verdict::Failed(format!("{why} while it ran"), running.output);
            self.verdicts.insert(running.number, verdict);
        }
    }
}

/// The reason in a line of `BEELET_SKIPPED`, which `beelet_tests::requires` writes: `SKIPPED <test>:
/// <reason>`. The test's own name may hold `::`, never `: `.
fn reason(line: &str) -> String {
    line.split_once(": ").map_or(line, |(_, reason)| reason).trim().to_owned()
}

/// What an exit status of a test program means, where it isn't success. `timeout -s KILL` ends with 137, some
/// with 124.
fn failure(status: &str) -> Option<String> {
    match status {
        "0" => None,
        "124" | "137" => Some("it was killed: it took too long, or memory ran out".to_owned()),
        "101" => Some("it failed".to_owned()),
        "no-result" => Some("the program ended well, but ran no such test".to_owned()),
        other => match other.parse::<i32>() {
            Ok(code) if code > 128 => Some(format!("a signal ended it (number {})", code - 128)),
            _ => Some(format!("it ended with status {other}")),
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
        check("begin 3 1\nout 3 a\nout 3 \nend 3 2 101", &failed("it failed", &["a", ""]));
        check("begin 3 1\nend 3 2 139", &failed("a signal ended it (number 11)", &[]));
        check("begin 3 1\nend 3 2 2", &failed("it ended with status 2", &[]));
        check("begin 3 1\nend 3 2 137", &failed("it was killed: it took too long, or memory ran out", &[]));
        check("begin 3 1\nend 3 2 no-result", &failed("the program ended well, but ran no such test", &[]));
    }

    #[test]
    fn a_skipped_test_names_its_reasons_without_its_own_name() {
        check(
            "begin 3 1\nskip 3 SKIPPED a::b: it needs root (run: as root)\nend 3 2 0",
            &Verdict::Skipped("it needs root (run: as root)".to_owned()),
        );
    }

    #[test]
    fn a_test_that_failed_after_a_skip_has_failed() {
        check("begin 3 1\nskip 3 SKIPPED a: b\nend 3 2 101", &failed("it failed", &[]));
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
        assert_eq!(transcript.verdicts.get(&3), Some(&failed("the VM died while it ran", &["last words"])));
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
    fn facts_and_the_doctor_are_kept_as_they_were_said() {
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
