//! Looks at every process that enters the container: a command of the node's agent is one on its way in, for
//! a moment with the agent's own program.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::text;

/// Name of the helper's processes.
const HELPER: &str = "beelet-exec";
/// Maximum number of programs to hold at a time.
const MOST: usize = 100;

pub(super) fn run(file: &Path) -> Result<(), String> {
    let mut log = OpenOptions::new().create(true).append(true).open(file).map_err(text)?;
    let own = std::process::id().to_string();
    writeln!(log, "watching").map_err(text)?;
    // Programs of processes that may have ended since: a program that runs can't be opened for writing.
    let mut held: Vec<fs::File> = Vec::new();
    loop {
        for program in held.drain(..) {
            let again = format!("/proc/self/fd/{}", program.as_raw_fd());
            let opened = OpenOptions::new().write(true).open(again);
            let written = opened.map(|program| program.write_at(b"#!/bin/sh", 0));
            writeln!(log, "program held, opened, written: {written:?}").map_err(text)?;
        }
        for entry in fs::read_dir("/proc").map_err(text)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == "1" || name == own || name.parse::<u32>().is_err() {
                continue;
            }
            let dir = entry.path();
            // Everything is read and opened before it is judged: the process has the helper's program only
            // for a moment.
            let program = OpenOptions::new().write(true).open(dir.join("exe"));
            let readable = fs::File::open(dir.join("exe"));
            let memory = OpenOptions::new().read(true).write(true).open(dir.join("mem"));
            let link = fs::read_link(dir.join("exe"));
            let status = fs::read_to_string(dir.join("status")).unwrap_or_default();
            let files: Vec<String> = fs::read_dir(dir.join("fd"))
                .map(|all| all.flatten().filter_map(|fd| fs::read_link(fd.path()).ok()))
                .map(|all| all.map(|target| target.display().to_string()).collect())
                .unwrap_or_default();
            let environment = fs::read(dir.join("environ")).unwrap_or_default();
            let named = |status: &str| status.starts_with(&format!("Name:\t{HELPER}\n"));
            let is_helper =
                named(&status) || link.as_ref().is_ok_and(|link| link.to_string_lossy().contains(HELPER));
            // The process may have become the command by now, whose environment is the container's own.
            let is_still_helper = named(&fs::read_to_string(dir.join("status")).unwrap_or_default());
            if !is_helper {
                continue;
            }
            held.extend(readable.ok().filter(|_| held.len() < MOST));
            if let Ok(program) = program {
                let written = program.write_at(b"#!/bin/sh", 0);
                writeln!(log, "program opened, written: {written:?}").map_err(text)?;
            }
            if memory.is_ok() {
                writeln!(log, "memory opened").map_err(text)?;
            }
            let field = |name: &str| {
                status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
            };
            let (permitted, bounding, uid) = (field("CapPrm:"), field("CapBnd:"), field("Uid:"));
            writeln!(log, "seen uid={uid} permitted={permitted} bounding={bounding} files={files:?}")
                .map_err(text)?;
            if is_still_helper && !environment.is_empty() {
                writeln!(log, "environment of {} bytes", environment.len()).map_err(text)?;
            }
        }
    }
}
