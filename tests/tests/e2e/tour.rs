//! docs/tour.md, command by command, as a reader would type them: each command must succeed, and its output
//! must have each line that the page shows.

#![allow(clippy::unwrap_used, clippy::panic)] // a failure in a helper fails the test

use std::path::Path;
use std::process::Command;

use beelet_tests::agent::Agent;
use beelet_tests::containerd::Containerd;
use beelet_tests::{images, require, workdir};

use crate::node::installed;

/// The image that the reader gets from a registry.
const IMAGE: &str = "docker.io/library/redis:7";
/// The agent that the reader starts; the test starts its own.
const AGENT: &str = "beelet run";

/// A command of the page, with the output that the page shows.
struct Shown<'a> {
    command: &'a str,
    lines: Vec<&'a str>,
}

fn commands(page: &str) -> Vec<Shown<'_>> {
    let mut all: Vec<Shown<'_>> = Vec::new();
    for line in page.lines() {
        match (line.strip_prefix("    # "), line.strip_prefix("    "), all.last_mut()) {
            (Some(command), _, _) => all.push(Shown { command, lines: Vec::new() }),
            (None, Some(text), Some(last)) => last.lines.push(text),
            _ => {}
        }
    }
    all
}

/// Returns true if the words of a page's line equal those of an output's line, except for numbers and their
/// units, which differ between runs. `…` stands for any words.
fn are_shown(shown: &[&str], output: &[&str]) -> bool {
    let is_number =
        |word: &str| word == "-" || (word.contains(|c: char| c.is_ascii_digit()) && !word.contains('/'));
    match (shown, output) {
        ([], []) => true,
        (["…", rest @ ..], _) => {
            rest.is_empty() || (0..output.len()).any(|from| are_shown(rest, &output[from..]))
        }
        ([one, shown @ ..], [other, output @ ..]) => {
            (one == other || (is_number(one) && is_number(other))) && are_shown(shown, output)
        }
        _ => false,
    }
}

#[test]
fn every_command_of_the_tour_works_as_documented() {
    require!(containerd, bpf, redis);
    let containerd = Containerd::start_for_test().unwrap();
    let folder = containerd.dir().join("tour");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(workdir::repository().join("examples/redis.yaml"), folder.join("redis.yaml")).unwrap();
    std::fs::copy(images::redis(IMAGE).unwrap().path, folder.join("redis.tar")).unwrap();
    let page = std::fs::read_to_string(workdir::repository().join("docs/tour.md")).unwrap();
    let shown = commands(&page);
    assert_eq!(shown.len(), 10);
    let silent: Vec<_> =
        shown.iter().filter(|shown| shown.lines.is_empty()).map(|shown| shown.command).collect();
    assert!(
        silent.iter().all(|command| command.starts_with(AGENT)),
        "the page shows no output of {silent:?}"
    );
    let mut agent = None;
    for shown in &shown {
        match (shown.command.starts_with(AGENT), &agent) {
            // The agent runs on the test's own containerd, confined as by its unit.
            (true, _) => agent = Some(Agent::start(installed(&containerd)).unwrap()),
            (false, None) => check(shown, &folder, &Command::new(beelet_tests::agent::binary().unwrap())),
            (false, Some(agent)) => check(shown, &folder, &agent.cli(&[])),
        }
    }
}

/// Runs a command of the page in the reader's shell; `beelet` is the program with its environment.
fn check(shown: &Shown<'_>, folder: &Path, beelet: &Command) {
    let command = shown.command;
    let mut shell = Command::new("sh");
    let program = beelet.get_program().to_string_lossy().into_owned();
    shell.arg("-c").arg(command.replacen("beelet", &program, 1)).current_dir(folder);
    shell.envs(beelet.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let output = shell.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("# {command}\n{text}");
    assert!(output.status.success(), "{command}: {}\n{text}", output.status);
    let mut output = text.lines();
    for line in &shown.lines {
        let shown: Vec<&str> = line.split_whitespace().collect();
        let is_it = |output: &str| are_shown(&shown, &output.split_whitespace().collect::<Vec<_>>());
        assert!(output.any(is_it), "{command}: no {line:?} in:\n{text}");
    }
}
