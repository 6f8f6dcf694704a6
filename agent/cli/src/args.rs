//! Arguments that several commands have.

use std::{convert::Infallible, ffi::OsString, path::PathBuf};

use anyhow::Context as _;
use beelet_proto::beelet as proto;
use clap::{
    Args, ValueEnum,
    error::{ContextKind, ContextValue, ErrorKind},
};
use serde_json::Value;

use crate::{SOCKET, complete};

/// A pod's name as other commands print it: `pod/web` is `web`.
#[allow(clippy::unnecessary_wraps)] // clap wants a parser that may fail
pub(crate) fn pod_name(text: &str) -> Result<String, Infallible> {
    let name = KINDS_OF_PODS.iter().find_map(|kind| text.strip_prefix(kind)?.strip_prefix('/'));
    Ok(name.unwrap_or(text).to_owned())
}

/// What a pod may be called.
const KINDS_OF_PODS: [&str; 3] = ["pod", "pods", "po"];
/// The commands whose first argument is a kind.
const TAKE_A_KIND: [&str; 3] = ["get", "describe", "delete"];

/// The command line with `get KIND/NAME` taken apart.
pub fn kinds(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let takes_one = arguments.get(1).is_some_and(|command| TAKE_A_KIND.iter().any(|one| command == one));
    let apart =
        arguments.get(2).filter(|_| takes_one).and_then(|argument| argument.to_str()?.split_once('/'));
    if let Some((kind, name)) = apart.filter(|(kind, _)| kind.chars().all(|c| c.is_ascii_alphabetic())) {
        let both = [kind, name].map(OsString::from);
        drop(arguments.splice(2..3, both));
    }
    arguments
}

/// The error of a command line; where a name stands in the place of a kind it says how a pod is asked for.
#[must_use]
pub fn with_hint(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let text = |index: usize| arguments.get(index)?.to_str();
    let is_name = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
    };
    let is_of_kind = matches!(error.kind(), ErrorKind::InvalidSubcommand | ErrorKind::InvalidValue);
    let is_guessed = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    // The word that is wrong may be another one: `get pod web -o name`.
    let is_wrong = |word: &&str| {
        let wrong = error.get(ContextKind::InvalidSubcommand).or(error.get(ContextKind::InvalidValue));
        matches!(wrong, Some(ContextValue::String(wrong)) if wrong == word)
    };
    if is_of_kind
        && let Some(command) = text(1).filter(|command| TAKE_A_KIND.contains(command))
        && let Some(name) = text(2).filter(is_name).filter(is_wrong)
        // What is known need not be guessed: `deployment` is none of `po`.
        && (CLUSTER.contains(&name) || is_guessed.into_iter().all(|guess| error.get(guess).is_none()))
    {
        let hint = if CLUSTER.contains(&name) {
            format!("a node has no such objects; 'beelet {command} --help' lists the kinds that it has")
        } else {
            format!("a pod is meant by 'beelet {command} pod {name}'")
        };
        for guess in is_guessed {
            error.remove(guess);
        }
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    }
    error
}

/// What people ask a cluster for.
const CLUSTER: [&str; 24] = [
    "all",
    "cronjob",
    "cronjobs",
    "daemonset",
    "daemonsets",
    "deploy",
    "deployment",
    "deployments",
    "ds",
    "endpoints",
    "ing",
    "ingress",
    "job",
    "jobs",
    "namespace",
    "namespaces",
    "ns",
    "pv",
    "pvc",
    "sa",
    "service",
    "services",
    "statefulset",
    "svc",
];

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
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods())]
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
    /// JSON: one document; of what happens one after the other one per line.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_have_its_kind_before_it() {
        let check = |line: &str, expected: &str| {
            let taken = kinds(line.split(' ').map(OsString::from)).join(std::ffi::OsStr::new(" "));
            assert_eq!(taken, OsString::from(expected));
        };
        check("beelet get pod/web -o wide", "beelet get pod web -o wide");
        check("beelet delete configmap/book", "beelet delete configmap book");
        check("beelet delete -f a/b.yaml", "beelet delete -f a/b.yaml");
        check("beelet delete ./b.yaml", "beelet delete ./b.yaml");
        check("beelet apply -f pods/web", "beelet apply -f pods/web");
        check("beelet", "beelet");
        for text in ["web", "pod/web", "pods/web", "po/web"] {
            assert_eq!(pod_name(text), Ok("web".to_owned()));
        }
        assert_eq!(pod_name("podweb"), Ok("podweb".to_owned()));
    }
}
