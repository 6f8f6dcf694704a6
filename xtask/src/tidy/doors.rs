//! The doors that the agent's code outside its tests must use: one through which programs are started, one to
//! files in folders that others can write.

use super::{Violation, code_of};

/// The crate with both doors.
const DOORS: &str = "agent/base/src/";

/// Parts of the tree that are no part of the agent that runs.
const NOT_THE_AGENT: &[&str] =
    &["agent/testing/", "agent/build.rs", "agent/codec/build.rs", "agent/proto/build.rs", PACKAGING];
/// A module of tests alone.
const PACKAGING: &str = "agent/src/command/packaging.rs";

/// What starts a program. `Command` is also what clap calls a command line, so such a file is told apart by
/// what it uses.
const STARTS: &[&str] = &["process::Command", "std::process::{", "process::CommandExt", "Command::new("];

/// Crates that have files in folders that containers, plugins or drivers can write to: pods' folders and
/// volumes, plugins' folders, logs, those of CNI.
const SHARING: &[&str] = &[
    "agent/cri/",
    "agent/csi/",
    "agent/devices/",
    "agent/dra/",
    "agent/images/",
    "agent/logs/",
    "agent/pods/",
    "agent/volumes/",
];

/// What follows a link at the end of a path, waits for a FIFO, opens a device, or writes through a link.
const FOLLOWING: &[&str] = &[
    "File::open(",
    "File::create(",
    "OpenOptions",
    "fs::read(",
    "fs::read_to_string(",
    "fs::write(",
    "fs::copy(",
    "fs::set_permissions(",
    "fs::hard_link(",
    "remove_dir_all(",
];

/// Lines that may do it, with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    // hostPath: its author names any place of the machine; made with `create_new`, which follows no link.
    ("agent/volumes/src/host_path.rs", "fs::OpenOptions::new().create_new(true)"),
    // The Docker configuration of the node's administrator.
    ("agent/images/src/credentials.rs", "std::fs::File::open(path)"),
];

/// Returns the violations of a file of the agent.
pub(super) fn check(file: &str, text: &str) -> Vec<Violation> {
    let is_agent = file.starts_with("agent/") && !NOT_THE_AGENT.iter().any(|place| file.starts_with(place));
    let is_of_tests = file.contains("/tests/") || file.ends_with("tests.rs");
    if !is_agent || file.starts_with(DOORS) || is_of_tests {
        return Vec::new();
    }
    let is_command_line = text.contains("clap::") || text.contains("clap_complete::");
    let shares = SHARING.iter().any(|place| file.starts_with(place));
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim() == "#[cfg(test)]" {
            break;
        }
        let code = code_of(line);
        let mut say =
            |message: String| found.push(Violation { file: file.to_owned(), line: index + 1, message });
        if starts_program(code, is_command_line) {
            say("programs have one door, beelet_base::program: no word from outside becomes an option"
                .to_owned());
        }
        // What the kernel shows of processes nobody else writes.
        let is_excepted = || {
            code.contains("\"/proc/")
                || EXCEPTIONS.iter().any(|(place, exception)| file == *place && code.contains(exception))
        };
        if shares
            && let Some(name) = FOLLOWING.iter().find(|name| code.contains(**name))
            && !is_excepted()
        {
            say(format!(
                "{name}: others can write to folders of this crate's files: beelet_base::own_file, shared_folder \
                 or kernel_file"
            ));
        }
    }
    found
}

fn starts_program(code: &str, is_command_line: bool) -> bool {
    STARTS.iter().any(|form| match *form {
        "Command::new(" => code.contains(form) && !is_command_line,
        "std::process::{" => code.contains(form) && code.contains("Command"),
        form => code.contains(form),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(file: &str, text: &str) -> Vec<usize> {
        check(file, text).into_iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_program_is_started_through_its_door_alone() {
        for line in [
            "use std::process::Command;",
            "use std::process::{Child, Command};",
            "use tokio::process::Command;",
            "    let mut command = Command::new(\"mount\");",
            "    std::os::unix::process::CommandExt::exec(&mut command);",
        ] {
            assert_eq!(lines("agent/volumes/src/disk.rs", line), [1], "{line}");
            for elsewhere in [
                "agent/base/src/program/running.rs",
                "agent/testing/src/logind.rs",
                "agent/volumes/src/tests.rs",
                "agent/build.rs",
                "xtask/src/main.rs",
            ] {
                assert_eq!(lines(elsewhere, line), [0; 0], "{elsewhere}: {line}");
            }
            let tested = format!("fn f() {{}}\n#[cfg(test)]\nmod tests {{\n{line}\n}}\n");
            assert_eq!(lines("agent/volumes/src/disk.rs", &tested), [0; 0], "{line}");
        }
        assert_eq!(lines("agent/src/kubelet.rs", "use clap::Command;\nCommand::new(NAME)\n"), [0; 0]);
        assert_eq!(lines("agent/src/kubelet.rs", "use std::process::{ExitCode, id};\n"), [0; 0]);
    }

    #[test]
    fn files_that_others_can_replace_are_opened_through_their_door_alone() {
        for code in
            ["File::open(path)?", "fs::read_to_string(path)", "fs::write(path, text)", "OpenOptions::new()"]
        {
            assert_eq!(lines("agent/csi/src/records.rs", code), [1], "{code}");
            assert_eq!(lines("agent/config/src/load.rs", code), [0; 0], "{code}");
            assert_eq!(lines("agent/base/src/own_file.rs", code), [0; 0], "{code}");
        }
        assert_eq!(lines("agent/csi/src/records.rs", "kernel_file::read_to_string(path)"), [0; 0]);
        assert_eq!(lines("agent/csi/src/records.rs", "fs::metadata(path)"), [0; 0]);
        assert_eq!(lines("agent/cri/src/ownership.rs", "fs::read(format!(\"/proc/{pid}/comm\"))"), [0; 0]);
        let excepted = "    match fs::OpenOptions::new().create_new(true).write(true).open(path) {";
        assert_eq!(lines("agent/volumes/src/host_path.rs", excepted), [0; 0]);
        assert_eq!(lines("agent/volumes/src/local.rs", excepted), [1]);
    }
}
