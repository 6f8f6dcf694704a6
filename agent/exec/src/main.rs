//! `beelet-exec`: runs the commands of exec probes for the agent. See docs/probes.md.

use std::{path::Path, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [socket] = arguments.as_slice() else {
        eprintln!("usage: beelet-exec SOCKET");
        return ExitCode::FAILURE;
    };
    match beelet_exec::serve(Path::new(socket)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("beelet-exec: {error:#}");
            ExitCode::FAILURE
        }
    }
}
