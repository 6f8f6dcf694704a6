//! Arguments that several commands have.

use std::path::PathBuf;

use anyhow::Context as _;
use beelet_proto::beelet as proto;
use clap::{Args, ValueEnum};
use serde_json::Value;

use crate::complete;

/// Where the agent's socket is, if nobody says where.
pub(crate) const SOCKET: &str = "/run/beelet/beelet.sock";

/// The agent that a command asks.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// The agent's socket.
    #[arg(long, value_name = "PATH", env = "BEELET_SOCKET", default_value = SOCKET)]
    pub(crate) socket: PathBuf,
}

/// A container of a pod.
#[derive(Debug, Clone, Args)]
pub(crate) struct ContainerArgs {
    /// The pod, with or without the node's name at its end.
    #[arg(value_name = "POD", add = complete::pods())]
    pub(crate) pod: String,
    /// The container; else the pod's default or first one.
    #[arg(short, long, value_name = "CONTAINER", add = complete::containers())]
    pub(crate) container: Option<String>,
    /// The pod's namespace; needed only where two pods have the name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    pub(crate) namespace: Option<String>,
}

impl ContainerArgs {
    /// The same as the agent is asked for it.
    pub(crate) fn target(&self) -> proto::ContainerTarget {
        proto::ContainerTarget {
            namespace: self.namespace.clone().unwrap_or_default(),
            pod: self.pod.clone(),
            container: self.container.clone().unwrap_or_default(),
        }
    }
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

/// An output format of Kubernetes objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectOutput {
    /// For people.
    Table,
    /// One object, with all its fields; of several a List.
    Json,
    /// The same as YAML.
    Yaml,
}

impl ObjectOutput {
    /// The text of an object, or of the table that stands for it.
    pub(crate) fn text(self, object: &Value, table: impl FnOnce() -> String) -> anyhow::Result<String> {
        match self {
            Self::Table => Ok(table()),
            Self::Json => Ok(format!("{object:#}\n")),
            Self::Yaml => beelet_codec::yaml(object).context("cannot write it as YAML"),
        }
    }
}
