//! docs/tour.md, command by command, as a reader would type them: each has to succeed, and what the page
//! shows of a command's output has to be in it.

#![allow(clippy::unwrap_used, clippy::panic)] // a test's helpers may panic as the test itself may

use std::path::Path;
use std::process::Command;

use beelet_tests::agent::Agent;
use beelet_tests::containerd::Containerd;
use beelet_tests::{images, require, workdir};

use crate::node::installed;

/// The image that the reader has from elsewhere.
const IMAGE: &str = "docker.io/library/redis:7";

/// Words that the output of a command must have, by how the command begins.
const SHOWN: &[(&str, &[&str])] = &[
    ("beelet images import", &["docker.io/library/redis:7 imported"]),
    ("beelet apply", &["pod/redis created", "is ready"]),
    ("beelet exec redis -- redis-cli set", &["OK"]),
    ("beelet top", &["default/redis-testnode", "Running", "RQ99"]),
    ("beelet get pods", &["0/1", "6379"]),
    ("beelet describe", &["Ready", "False", "6379"]),
    ("beelet restart", &["runs again"]),
    ("beelet delete", &["pod/redis", "deleted"]),
];

#[test]
fn every_command_of_the_tour_does_what_the_page_says() {
    require!(containerd, bpf, redis);
    let containerd = Containerd::start_for_test().unwrap();
    let folder = containerd.dir().join("tour");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(workdir::repository().join("examples/redis.yaml"), folder.join("redis.yaml")).unwrap();
    std::fs::copy(images::redis(IMAGE).unwrap().path, folder.join("redis.tar")).unwrap();
    let page = std::fs::read_to_string(workdir::repository().join("docs/tour.md")).unwrap();
    let commands: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("    # ")).collect();
    assert_eq!(commands.len(), 10, "{commands:?}");
    let mut agent = None;
    for command in commands {
        match (command.starts_with("beelet run"), &agent) {
            // On the test's own containerd, as its unit runs it.
            (true, _) => agent = Some(Agent::start(installed(&containerd)).unwrap()),
            (false, None) => check(command, &folder, &Command::new(beelet_tests::agent::binary().unwrap())),
            (false, Some(agent)) => check(command, &folder, &agent.cli(&[])),
        }
    }
}

/// Runs a command of the page in the reader's shell; `beelet` is the program with its surroundings.
fn check(command: &str, folder: &Path, beelet: &Command) {
    let mut shell = Command::new("sh");
    let program = beelet.get_program().to_string_lossy().into_owned();
    shell.arg("-c").arg(command.replacen("beelet", &program, 1)).current_dir(folder);
    shell.envs(beelet.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let output = shell.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("# {command}\n{text}");
    assert!(output.status.success(), "{command}: {}\n{text}", output.status);
    let shown = SHOWN.iter().filter(|(begin, _)| command.starts_with(begin));
    for word in shown.flat_map(|(_, words)| *words) {
        assert!(text.contains(word), "{command}: no {word:?} in:\n{text}");
    }
}
