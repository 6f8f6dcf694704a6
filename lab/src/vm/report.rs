//! Report over all runs: a table for the terminal, a message for the exit status, and docs/kernels.md. Pure:
//! values in, text out.

use super::boot::End;
use super::doctor::{self, Findings};
use super::page::Found;
use super::results::{Test, Transcript, Verdict};
use beelet_bpf::ProgramInfo;
use clap::ValueEnum as _;
use comfy_table::{Table, presets};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use xtask::cross::Arch;

/// Run of one kernel.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// Name of the kernel on the command line.
    pub(super) kernel: String,
    pub(super) transcript: Transcript,
    pub(super) end: End,
    /// Last lines of the console, if the machine died or was late.
    pub(super) last_words: Vec<String>,
}

/// All runs of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Summary {
    /// Processor of all runs.
    pub(super) arch: Arch,
    pub(super) plan: Vec<Test>,
    pub(super) runs: Vec<Run>,
}

impl Run {
    /// Returns the kernel's name, with its release if that adds information.
    fn title(&self) -> String {
        match self.transcript.facts.get("release") {
            Some(release) if self.kernel.starts_with("debian") => {
                format!("{} ({})", version(release), self.kernel)
            }
            Some(release) if self.kernel == super::HOST => format!("{} (no VM)", version(release)),
            _ => self.kernel.clone(),
        }
    }

    fn fact(&self, name: &str) -> &str {
        self.transcript.facts.get(name).map_or("", String::as_str)
    }
}

/// Returns the first two numbers of a release: 6.1 for `6.1.0-9-amd64`.
fn version(release: &str) -> String {
    release.split(['.', '-']).take(2).collect::<Vec<_>>().join(".")
}

impl Summary {
    /// Returns the tests that a kernel could not run, for a test run's list of skipped tests.
    pub(crate) fn left_out(&self) -> Vec<(String, String)> {
        let mut lines = Vec::new();
        for run in &self.runs {
            for (number, test) in self.plan.iter().enumerate() {
                if let Some(Verdict::Skipped(why)) = run.transcript.verdicts.get(&number) {
                    lines.push((format!("{test} on {}", run.title()), why.clone()));
                }
            }
        }
        lines
    }

    /// Returns an error that names the failures, if any.
    pub(crate) fn verdict(&self) -> anyhow::Result<()> {
        let mut wrong = Vec::new();
        for run in &self.runs {
            wrong.extend(run.end.trouble().map(|trouble| format!("kernel {}: {trouble}", run.title())));
            let failed = self.count(run, |verdict| matches!(verdict, Some(Verdict::Failed(..))));
            if failed > 0 {
                wrong.push(format!("kernel {}: {failed} test(s) failed", run.title()));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(anyhow::anyhow!(wrong.join("; "))) }
    }

    fn count(&self, run: &Run, which: impl Fn(Option<&Verdict>) -> bool) -> usize {
        (0..self.plan.len()).filter(|number| which(run.transcript.verdicts.get(number))).count()
    }

    /// Returns the report for the terminal: the doctor's output, every test on every kernel, and the reasons
    /// below.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for run in self.runs.iter().filter(|run| !run.transcript.doctor.is_empty()) {
            let _ = writeln!(text, "\nbeelet doctor on {}:", run.title());
            for line in &run.transcript.doctor {
                let _ = writeln!(text, "  {line}");
            }
        }
        let _ = writeln!(text, "\n{}", self.table());
        for run in &self.runs {
            self.reasons(run, &mut text);
        }
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let titles = self.runs.iter().map(Run::title);
        table.set_header(["TEST".to_owned()].into_iter().chain(titles));
        for (number, test) in self.plan.iter().enumerate() {
            let verdicts = self.runs.iter().map(|run| word(run.transcript.verdicts.get(&number)).to_owned());
            table.add_row([test.to_string()].into_iter().chain(verdicts));
        }
        table
    }

    /// Writes why tests of this run failed or were skipped, and the last lines of its machine's console.
    fn reasons(&self, run: &Run, text: &mut String) {
        for (number, test) in self.plan.iter().enumerate() {
            match run.transcript.verdicts.get(&number) {
                Some(Verdict::Failed(why, output)) => {
                    let _ = writeln!(text, "\nFAILED on {}: {test}: {why}", run.title());
                    for line in output {
                        let _ = writeln!(text, "    {line}");
                    }
                }
                Some(Verdict::Skipped(why)) => {
                    let _ = writeln!(text, "skipped on {}: {test}: {why}", run.title());
                }
                Some(Verdict::Passed) | None => {}
            }
        }
        if let Some(trouble) = run.end.trouble() {
            let _ = writeln!(text, "\nkernel {}: {trouble}; last lines of its console:", run.title());
            for line in &run.last_words {
                let _ = writeln!(text, "    {line}");
            }
        }
    }

    /// Returns docs/kernels.md, updated from its last version `known`: the parts of other processors stay.
    pub(super) fn markdown(&self, known: &str) -> String {
        let mut text = format!("{INTRODUCTION}\n## Requirements of the programs\n\n");
        let _ = writeln!(text, "| program | needs | fallback |\n| --- | --- | --- |");
        for ProgramInfo { name, needs, fallback } in beelet_bpf::programs() {
            let cells = [needs.to_owned(), fallback.to_owned()];
            let _ = writeln!(text, "{}", row(&format!("`{name}`"), &cells));
        }
        for arch in Arch::value_variants() {
            let part = if *arch == self.arch { Some(self.part()) } else { part(known, *arch) };
            if let Some(part) = part {
                let _ = write!(text, "\n{}\n{}\n", head(*arch), part.trim_end());
            }
        }
        text
    }

    /// Returns the text below a processor's heading.
    fn part(&self) -> String {
        let mut text = String::new();
        let head: Vec<String> = self.runs.iter().map(Run::title).collect();
        let _ = writeln!(text, "\n### The kernels\n\n{}", row("", &head));
        let _ = writeln!(text, "{}", row("---", &vec!["---".to_owned(); head.len()]));
        for (name, label) in FACTS {
            let _ = writeln!(text, "{}", row(label, &self.cells(|run| or_dash(run.fact(name)))));
        }
        self.markdown_programs(&head, &mut text);
        self.markdown_tests(&head, &mut text);
        text
    }

    fn cells(&self, cell: impl Fn(&Run) -> String) -> Vec<String> {
        self.runs.iter().map(cell).collect()
    }

    fn markdown_programs(&self, head: &[String], text: &mut String) {
        let found: Vec<Findings> =
            self.runs.iter().map(|run| doctor::read(&run.transcript.doctor_json)).collect();
        let _ = writeln!(text, "\n### Support by kernel\n\n{}", row("program", head));
        let _ = writeln!(text, "{}", row("---", &vec!["---".to_owned(); head.len()]));
        let mut reasons = Vec::new();
        for ProgramInfo { name, .. } in beelet_bpf::programs() {
            let cell = |findings: &Findings| match findings.get(name) {
                Some(Ok(detail)) if detail.starts_with(beelet_bpf::NOT_NEEDED) => {
                    beelet_bpf::NOT_NEEDED.to_owned()
                }
                Some(Ok(_)) => "yes".to_owned(),
                Some(Err(_)) => "**fallback**".to_owned(),
                None => "-".to_owned(),
            };
            let _ =
                writeln!(text, "{}", row(&format!("`{name}`"), &found.iter().map(cell).collect::<Vec<_>>()));
            for (findings, title) in found.iter().zip(head) {
                if let Some(Err(why)) = findings.get(name) {
                    reasons.push(format!("- `{name}` on {title}: {why}\n"));
                }
            }
        }
        if !reasons.is_empty() {
            let _ = writeln!(text, "\n{}", reasons.concat().trim_end());
        }
        for (_, title) in found.iter().zip(head).filter(|(findings, _)| findings.is_empty()) {
            let _ = writeln!(text, "\n`beelet doctor --bpf` did not answer on {title}.");
        }
    }

    fn markdown_tests(&self, head: &[String], text: &mut String) {
        let _ = writeln!(text, "\n### Test results\n\n{}", row("tests", head));
        let _ = writeln!(text, "{}", row("---", &vec!["---".to_owned(); head.len()]));
        let groups: BTreeSet<String> = self.plan.iter().map(Test::group).collect();
        for group in groups {
            let cells = self.cells(|run| self.counts(run, &group));
            let _ = writeln!(text, "{}", row(&format!("`{group}`"), &cells));
        }
        let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for run in &self.runs {
            for (number, test) in self.plan.iter().enumerate() {
                let Some(why) = shortcoming(run.transcript.verdicts.get(&number)) else { continue };
                reasons.entry(format!("`{test}`: {why}")).or_default().push(run.title());
            }
        }
        for (position, (test, kernels)) in reasons.iter().enumerate() {
            let _ =
                writeln!(text, "{}- {} {test}", if position == 0 { "\n" } else { "" }, kernels.join(", "));
        }
    }

    /// Returns every test of the plan with its result in this run.
    pub(super) fn found(&self, run: &Run) -> Vec<Found> {
        let transcript = &run.transcript;
        let found = |(number, test): (usize, &Test)| {
            let verdict = transcript.verdicts.get(&number);
            let seconds = transcript.seconds.get(&number).copied().unwrap_or_default();
            Found::new(test.to_string(), verdict, seconds, shortcoming(verdict))
        };
        self.plan.iter().enumerate().map(found).collect()
    }

    /// Returns how many tests of a group passed, were skipped, failed, or were not reached.
    fn counts(&self, run: &Run, group: &str) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let numbers = self.plan.iter().enumerate().filter(|(_, test)| test.group() == group);
        for (number, _) in numbers {
            *counts.entry(word(run.transcript.verdicts.get(&number))).or_default() += 1;
        }
        let order = [("ok", "passed"), ("skip", "skipped"), ("FAIL", "**failed**"), ("-", "not reached")];
        let part = |(word, label)| counts.get(word).map(|count| format!("{count} {label}"));
        order.into_iter().filter_map(part).collect::<Vec<_>>().join(", ")
    }
}

/// Returns the heading of a processor's part.
fn head(arch: Arch) -> String {
    format!("## {}", arch.name())
}

/// Returns a processor's part of a page, if it exists.
fn part(page: &str, arch: Arch) -> Option<String> {
    let lines = page.lines().skip_while(|line| *line != head(arch)).skip(1);
    let part: Vec<&str> = lines.take_while(|line| !line.starts_with("## ")).collect();
    (!part.is_empty()).then(|| part.join("\n"))
}

/// Returns why a test did not pass, for a page; None if it passed.
fn shortcoming(verdict: Option<&Verdict>) -> Option<String> {
    let why = match verdict {
        Some(Verdict::Passed) => return None,
        Some(Verdict::Skipped(why)) => format!("skipped: {why}"),
        Some(Verdict::Failed(why, output)) => format!("failed: {}", panic_in(output).unwrap_or(why)),
        None => "not reached".to_owned(),
    };
    Some(why.replace('|', "\\|"))
}

/// Returns the first line of a test's panic message.
fn panic_in(output: &[String]) -> Option<&str> {
    let at = output.iter().position(|line| line.contains("panicked at "))?;
    let said = output.get(at + 1)?.trim();
    said.char_indices().nth(PANIC).map_or(Some(said), |(end, _)| said.get(..end))
}

/// Returns a verdict as one word.
pub(super) fn word(verdict: Option<&Verdict>) -> &'static str {
    match verdict {
        Some(Verdict::Passed) => "ok",
        Some(Verdict::Failed(..)) => "FAIL",
        Some(Verdict::Skipped(_)) => "skip",
        None => "-",
    }
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

fn row(first: &str, cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {first} | {} |", cells.join(" | "))
}

/// Maximum number of characters of a panic message on a page.
const PANIC: usize = 200;

/// Facts that `guest/run` reports about a kernel, with their labels in the documentation.
const FACTS: &[(&str, &str)] = &[
    ("release", "release"),
    ("cgroup", "cgroups"),
    ("controllers", "cgroup v2 controllers"),
    ("btf", "BTF"),
    ("psi", "pressure (PSI)"),
    ("lsm", "security modules"),
];

const INTRODUCTION: &str = "\
# Kernels

<!-- Generated by `cargo xtask vm --write-docs`, with --arch arm64 for that part; do not edit, run that again. -->

This page shows which of beelet's kernel programs load and attach on which kernel, and the fallback where one cannot. Each kernel
was booted in a VM (and, in the column \"no VM\", on the machine that generated this page) to run `beelet doctor` and then every
test that depends on the kernel. Each processor has its own part, generated by `cargo xtask vm --arch ARCH --write-docs`.
`cargo xtask vm --help` explains how to run it; `beelet doctor` checks your own machine. Features that these bare guests lack
(project quotas, tcp_diag, swap, AppArmor, systemd) are tested on [stock machines](machines.md).
";

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn run(kernel: &str, lines: &str, end: End) -> Run {
        let mut transcript = Transcript::default();
        for line in lines.lines() {
            transcript.line(line);
        }
        Run { kernel: kernel.to_owned(), transcript, end, last_words: vec!["Oops".to_owned()] }
    }

    fn summary(runs: Vec<Run>) -> Summary {
        let test = |name: &str| Test { program: "kernel".into(), name: name.into() };
        Summary { arch: Arch::Amd64, plan: vec![test("x::a"), test("x::b")], runs }
    }

    /// Returns the doctor's output for the first program.
    fn doctor(state: &str) -> String {
        let name = beelet_bpf::programs().next().unwrap().name;
        format!(
            r#"doctor-json {{"canRun":true,"findings":[{{"check":"{name}","state":"{state}","detail":"as found"}}]}}"#
        )
    }

    fn good() -> Run {
        let json = doctor("ok");
        let lines =
            format!("fact release 6.1.0-9\n{json}\nbegin 0 1\nend 0 2 0\nbegin 1 2\nend 1 3 0\ndone 0");
        run("6.1", &lines, End::Done)
    }

    fn bad() -> Run {
        let json = doctor("degraded");
        let lines = format!(
            "fact release 7.3.4-1-x\n{json}\nbegin 0 1\nskip 0 SKIPPED x::a: it needs x|y\nend 0 2 0\n\
             begin 1 2\nout 1 panicked\nend 1 3 101\ndone 1"
        );
        run("debian", &lines, End::Done)
    }

    #[test]
    fn runs_without_failures_are_no_error() {
        assert!(summary(vec![good()]).verdict().is_ok());
        assert!(summary(vec![good()]).left_out().is_empty());
    }

    #[test]
    fn failures_are_named_with_their_kernel_and_output() {
        let summary = summary(vec![good(), bad()]);
        assert_eq!(summary.verdict().unwrap_err().to_string(), "kernel 7.3 (debian): 1 test(s) failed");
        let left_out = [("kernel x::a on 7.3 (debian)".to_owned(), "it needs x|y".to_owned())];
        assert_eq!(summary.left_out(), left_out);
        let text = summary.text();
        assert!(
            text.contains("FAILED on 7.3 (debian): kernel x::b: the test failed\n    panicked\n"),
            "{text}"
        );
    }

    #[test]
    fn a_machine_that_died_is_an_error_with_its_last_words() {
        let summary = summary(vec![run("6.1", "begin 0 1\nend 0 2 0", End::Died("status 0".into()))]);
        assert_eq!(
            summary.verdict().unwrap_err().to_string(),
            "kernel 6.1: the machine died at each boot: status 0"
        );
        let text = summary.text();
        assert!(text.contains("last lines of its console:\n    Oops\n"), "{text}");
        assert!(summary.markdown("").contains("| `kernel x` | 1 passed, 1 not reached |"));
    }

    #[test]
    fn a_late_machine_is_an_error_that_says_how_late() {
        let summary = summary(vec![run("6.1", "", End::Late(Duration::from_secs(90)))]);
        let error = summary.verdict().unwrap_err().to_string();
        assert_eq!(error, "kernel 6.1: the machine was still running after 90 s");
    }

    #[test]
    fn a_machine_that_was_stopped_is_an_error_that_keeps_what_it_found() {
        let summary = summary(vec![run("6.1", "begin 0 1\nend 0 2 0", End::Stopped("SIGTERM"))]);
        assert_eq!(summary.verdict().unwrap_err().to_string(), "kernel 6.1: interrupted by SIGTERM");
        assert!(summary.markdown("").contains("| `kernel x` | 1 passed, 1 not reached |"));
    }

    #[test]
    fn the_documentation_has_what_works_what_stands_in_and_what_was_tested() {
        let text = summary(vec![good(), bad()]).markdown("");
        let program = beelet_bpf::programs().next().unwrap();
        for line in [
            "| release | 6.1.0-9 | 7.3.4-1-x |",
            "| program | 6.1 | 7.3 (debian) |",
            &format!("| `{}` | yes | **fallback** |", program.name),
            &format!("- `{}` on 7.3 (debian): as found", program.name),
            &format!("| `{}` | {} | {} |", program.name, program.needs, program.fallback),
            "| `kernel x` | 2 passed | 1 skipped, 1 **failed** |",
            "- 7.3 (debian) `kernel x::a`: skipped: it needs x\\|y",
            "- 7.3 (debian) `kernel x::b`: failed: the test failed",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\nis not in\n{text}");
        }
    }

    #[test]
    fn a_run_replaces_its_own_processors_part_and_leaves_the_others() {
        let arm64 = Run { kernel: "debian-12".into(), ..good() };
        let arm64 = Summary { arch: Arch::Arm64, ..summary(vec![arm64]) };
        let page = arm64.markdown(&summary(vec![bad()]).markdown(""));
        let page = summary(vec![good()]).markdown(&page);
        let parts: Vec<&str> = page.lines().filter(|line| line.starts_with("## ")).collect();
        assert_eq!(parts, ["## Requirements of the programs", "## amd64", "## arm64"]);
        let kernels: Vec<&str> = page.lines().filter(|line| line.starts_with("|  |")).collect();
        assert_eq!(kernels, ["|  | 6.1 |", "|  | 6.1 (debian-12) |"]);
        assert_eq!(arm64.markdown(&page), page);
    }

    #[test]
    fn a_test_has_its_time_and_the_reason_why_it_did_not_pass() {
        let lines = "begin 0 1\nend 0 2.5 0\nbegin 1 3\nout 1 thread 'x' panicked at a.rs:1:2:\n\
                     out 1  it is 3 | 4\nend 1 7 101";
        let check = |lines: &str, expected: [(&str, &str, Option<&str>); 2]| {
            let run = run("debian-13", lines, End::Done);
            let found = summary(vec![run.clone()]).found(&run);
            let shown = found.iter().map(|found| (&*found.name, &*found.cell, found.why.as_deref()));
            assert_eq!(shown.collect::<Vec<_>>(), expected);
        };
        let failed = ("kernel x::b", "**failed**, 4 s", Some("failed: it is 3 \\| 4"));
        check(lines, [("kernel x::a", "ok, 2 s", None), failed]);
        let not_reached =
            ["kernel x::a", "kernel x::b"].map(|name| (name, "not reached", Some("not reached")));
        check("", not_reached);
    }

    #[test]
    fn a_doctor_without_an_answer_is_mentioned() {
        let text = summary(vec![run("6.1", "done 0", End::Done)]).markdown("");
        assert!(text.contains("`beelet doctor --bpf` did not answer on 6.1.\n"), "{text}");
    }
}
