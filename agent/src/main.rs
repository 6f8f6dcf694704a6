//! The `beelet` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    beelet::command::main()
}
