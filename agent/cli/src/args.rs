//! Arguments shared by several commands.

use std::{convert::Infallible, ffi::OsString, path::PathBuf};

use beelet_proto::beelet as proto;
use clap::{
    Args, ValueEnum,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::{SOCKET, complete};

/// Parses a pod's name with or without its kind: `pod/web` is `web`.
#[allow(clippy::unnecessary_wraps)] // clap wants a parser that may fail
pub(crate) fn pod_name(text: &str) -> Result<String, Infallible> {
    let name = KINDS_OF_PODS.iter().find_map(|kind| text.strip_prefix(kind)?.strip_prefix('/'));
    Ok(name.unwrap_or(text).to_owned())
}

/// Names of the kind Pod.
const KINDS_OF_PODS: [&str; 3] = ["pod", "pods", "po"];
/// Commands whose first argument is a kind.
const TAKE_A_KIND: [&str; 3] = ["get", "describe", "delete"];

/// Returns the command line with `get KIND/NAME` split into two arguments.
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

/// Returns the error of a command line, with a hint if a name stands in the place of a kind.
#[must_use]
pub fn with_hint(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let text = |index: usize| arguments.get(index)?.to_str();
    let is_name = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c))
    };
    let is_of_kind = matches!(error.kind(), ErrorKind::InvalidSubcommand | ErrorKind::InvalidValue);
    let is_guessed = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    // The invalid word may be another one: `get pod web -o name`.
    let is_wrong = |word: &&str| {
        let wrong = error.get(ContextKind::InvalidSubcommand).or(error.get(ContextKind::InvalidValue));
        matches!(wrong, Some(ContextValue::String(wrong)) if wrong == word)
    };
    if is_of_kind
        && let Some(command) = text(1).filter(|command| TAKE_A_KIND.contains(command))
        && let Some(name) = text(2).filter(is_name).filter(is_wrong)
        // A known cluster kind needs no guess by clap: `deployment` does not mean `po`.
        && (CLUSTER.contains(&name) || is_guessed.into_iter().all(|guess| error.get(guess).is_none()))
    {
        let hint = if CLUSTER.contains(&name) {
            format!("a node has no objects of this kind; 'beelet {command} --help' lists the kinds")
        } else {
            format!("to name a pod, use 'beelet {command} pod {name}'")
        };
        for guess in is_guessed {
            error.remove(guess);
        }
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    }
    error
}

/// Kinds that exist in a cluster and not on a node.
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

/// The agent to ask.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Path of the agent's socket.
    #[arg(long, value_name = "PATH", env = "BEELET_SOCKET", default_value = SOCKET)]
    pub(crate) socket: PathBuf,
}

/// A container of a pod.
#[derive(Debug, Clone, Args)]
pub(crate) struct ContainerArgs {
    /// Name of the pod; may omit the `-NODE` suffix of static pods.
    #[arg(value_name = "POD", value_parser = pod_name, add = complete::pods())]
    pub(crate) pod: String,
    /// Name of the container. Default: the pod's default container, else its first.
    #[arg(short, long, value_name = "CONTAINER", add = complete::containers())]
    pub(crate) container: Option<String>,
    /// Namespace of the pod. Required only if two pods have the same name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    pub(crate) namespace: Option<String>,
}

impl ContainerArgs {
    /// Returns the container as the agent's API names it.
    pub(crate) fn target(&self) -> proto::ContainerTarget {
        proto::ContainerTarget {
            namespace: self.namespace.clone().unwrap_or_default(),
            pod: self.pod.clone(),
            container: self.container.clone().unwrap_or_default(),
        }
    }
}

/// Output format and agent of a command that shows an answer.
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
    /// Human-readable table.
    Table,
    /// JSON: one document, or one per line for a stream.
    Json,
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
