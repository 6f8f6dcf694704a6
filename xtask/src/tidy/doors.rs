//! Checks that the agent's code outside its tests uses three doors: the door for starting programs, the door
//! for files in folders that other programs can write to, and the door for blocking work, which a simulation
//! replaces.

use super::{Violation, code_of};

/// The crate with both doors.
const DOORS: &str = "agent/base/src/";

/// Paths below `agent/` that are not part of the running agent.
const NOT_THE_AGENT: &[&str] =
    &["agent/testing/", "agent/build.rs", "agent/codec/build.rs", "agent/proto/build.rs", PACKAGING];
/// A module that contains only tests.
const PACKAGING: &str = "agent/src/command/packaging.rs";

/// Code that starts a program. clap has a type `Command` too, so `Command::new(` does not count in a file
/// that uses clap.
const STARTS: &[&str] = &["process::Command", "std::process::{", "process::CommandExt", "Command::new("];

/// Code that leaves the threads of a simulation.
const LEAVING: &[&str] = &["task::spawn_blocking", "thread::spawn(", "thread::Builder::new()"];

/// Files that may use their own threads: each thread ends before its function does, or is absent in a
/// simulation (docs/decisions/0028-simulation.md).
const OWN_THREADS: &[&str] = &[
    "agent/bpf/src/",
    "agent/cli/src/",
    "agent/cluster/src/lease.rs",
    "agent/codec/src/document.rs",
    "agent/logs/src/changes.rs",
    "agent/probes/src/manager.rs",
    "agent/src/kubelet/lock_file.rs",
    "agent/volumes/src/mounts.rs",
];

/// Crates that have files in folders that containers, plugins or drivers can write to: the folders of pods,
/// volumes, plugins, logs and CNI.
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

/// Calls that follow a link at the end of a path, wait for a FIFO, open a device, or write through a link.
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

/// Lines that may contain such a call, each with the reason.
const EXCEPTIONS: &[(&str, &str)] = &[
    // hostPath: the pod's author may name any path of the machine, and `create_new` follows no link.
    ("agent/volumes/src/host_path.rs", "fs::OpenOptions::new().create_new(true)"),
    // The Docker configuration of the node's administrator.
    ("agent/images/src/credentials.rs", "std::fs::File::open(path)"),
];

/// Finds the violations in a file of the agent.
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
            say("use beelet_base::program to start a program: it lets no word from outside become an option"
                .to_owned());
        }
        if LEAVING.iter().any(|form| code.contains(form)) && !OWN_THREADS.iter().any(|f| file.starts_with(f))
        {
            say("use beelet_base::blocking for work that may block: a simulation runs it on its own thread"
                .to_owned());
        }
        // Only the kernel writes the files in /proc.
        let is_excepted = || {
            code.contains("\"/proc/")
                || EXCEPTIONS.iter().any(|(place, exception)| file == *place && code.contains(exception))
        };
        if shares
            && let Some(name) = FOLLOWING.iter().find(|name| code.contains(**name))
            && !is_excepted()
        {
            say(format!(
                "{name}: other programs can write to the folders of this crate's files; use beelet_base::own_file, \
                 shared_folder or kernel_file"
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
    fn only_the_door_for_programs_starts_programs() {
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
    fn only_the_door_for_blocking_work_starts_threads() {
        for line in ["use tokio::task::spawn_blocking;", "    std::thread::spawn(work);"] {
            assert_eq!(lines("agent/stats/src/lib.rs", line), [1], "{line}");
            assert_eq!(lines("agent/base/src/blocking.rs", line), [0; 0], "{line}");
            assert_eq!(lines("agent/cluster/src/lease.rs", line), [0; 0], "{line}");
        }
        assert_eq!(lines("agent/stats/src/lib.rs", "use beelet_base::blocking::spawn_blocking;"), [0; 0]);
    }

    #[test]
    fn only_the_door_for_files_opens_files_that_other_programs_can_replace() {
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
