//! `cargo xtask`: the library does the work, so that lab/ can share its steps.

use std::process::ExitCode;

fn main() -> ExitCode {
    xtask::main()
}
