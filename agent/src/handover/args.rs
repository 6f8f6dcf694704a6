//! Arguments of `beelet handover`, and the two agents.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use beelet_cri::{Runtime, ownership};
use beelet_units::duration;
use clap::Args;

/// Arguments of `beelet handover`.
#[derive(Debug, Args)]
pub(crate) struct HandoverArgs {
    /// Report what the next agent would take over and what would restart, and why. Changes nothing. Without a
    /// direction: from the agent that runs now to the other.
    #[arg(long, required_unless_present_any = ["from_kubelet", "to_kubelet"])]
    pub(super) check: bool,
    /// Stop the kubelet, start beelet.
    #[arg(long, conflicts_with = "to_kubelet")]
    pub(super) from_kubelet: bool,
    /// Stop beelet, start the kubelet.
    #[arg(long)]
    pub(super) to_kubelet: bool,
    /// Configuration of beelet.
    #[arg(long, value_name = "FILE", env = "BEELET_CONFIG", default_value = beelet_config::DEFAULT_PATH)]
    pub(super) config: PathBuf,
    /// Kubeconfig of the node, on a node of a cluster.
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// The kubelet's --root-dir.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub(super) root_dir: PathBuf,
    /// Version of the kubelet, e.g. 1.36. Default: the answer of `kubelet --version`.
    #[arg(long, value_name = "VERSION")]
    pub(super) kubelet_version: Option<String>,
    /// Program that starts and stops the kubelet, with the word `start` or `stop`. Default: systemctl, with
    /// --kubelet-unit.
    #[arg(long, value_name = "PROGRAM")]
    pub(super) kubelet_control: Option<PathBuf>,
    /// Unit of the kubelet.
    #[arg(long, value_name = "UNIT", default_value = "kubelet.service")]
    pub(super) kubelet_unit: String,
    /// Program that starts and stops beelet, with the word `start` or `stop`. Default: systemctl, with
    /// --beelet-unit.
    #[arg(long, value_name = "PROGRAM")]
    pub(super) beelet_control: Option<PathBuf>,
    /// Unit of beelet.
    #[arg(long, value_name = "UNIT", default_value = "beelet.service")]
    pub(super) beelet_unit: String,
    /// Time for each agent to stop or to account for every pod. After that the old agent comes back.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse)]
    pub(super) timeout: Duration,
    /// Time without a restart after which the hand-over is complete.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration::parse)]
    pub(super) settle: Duration,
    /// Act although pods would restart, lose volumes, be left alone, or be stopped.
    #[arg(long)]
    pub(super) force: bool,
}

/// An agent of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agent {
    Beelet,
    Kubelet,
}

impl Agent {
    /// Returns the other agent.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Beelet => Self::Kubelet,
            Self::Kubelet => Self::Beelet,
        }
    }

    /// Returns the name for messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Beelet => "beelet",
            Self::Kubelet => "the kubelet",
        }
    }
}

/// Returns the kubelet that drives the runtime, if any.
pub(super) fn of_kubelet(runtime: &Runtime) -> Result<Option<ownership::Kubelet>> {
    ownership::kubelet_on(runtime.socket()).context("cannot search for a kubelet")
}
