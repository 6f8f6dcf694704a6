//! Arguments that several commands have.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// The agent that a command asks.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// The agent's socket.
    #[arg(long, value_name = "PATH", env = "BEELET_SOCKET", default_value = "/run/beelet/beelet.sock")]
    pub(crate) socket: PathBuf,
}

/// How a command shows what the agent answers.
#[derive(Debug, Args)]
pub(crate) struct ShownArgs {
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) agent: AgentArgs,
}

/// An output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people.
    Table,
    /// One JSON document; of events and of the tuner's steps one per line.
    Json,
}
