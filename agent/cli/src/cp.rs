//! `beelet cp`: copies files and directories to and from a container by running `tar` in the container, as
//! `kubectl cp` does.

mod pack;
mod unpack;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, bail};
use beelet_client::{Client, ClientError};
use beelet_proto::beelet as proto;
use beelet_proto::beelet::exec_input::Input;
use beelet_proto::beelet::exec_output::Output;
use clap::Args;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::args::AgentArgs;
use super::exec::{QUEUE, awaited, send};
use super::{complete, finish, plain};

/// Maximum bytes kept of a command's standard error.
const MOST_WORDS: usize = 4 << 10;

/// Arguments of `beelet cp`.
///
/// The container needs `tar`. Files, directories and links can be copied into a container. Files, directories
/// and links that stay within the copied tree can be copied out of a container: an archive from a container
/// cannot write outside the target.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  beelet cp app.conf web:/etc/app/app.conf
  beelet cp web:/var/log/app ./logs -c main
  beelet cp site/ shop/web:/srv")]
pub struct CpArgs {
    /// Source: a local path, or POD:PATH or NAMESPACE/POD:PATH.
    #[arg(value_name = "SOURCE", add = complete::places())]
    from: Place,
    /// Target: POD:PATH if the source is local, else a local path. If the target is an existing directory,
    /// the source is copied into it.
    #[arg(value_name = "TARGET", add = complete::places())]
    to: Place,
    /// Name of the container. Default: the pod's default container, else its first.
    #[arg(short, long, value_name = "CONTAINER", add = complete::containers())]
    container: Option<String>,
    /// Namespace of the pod. Required only if two pods have the same name.
    #[arg(short, long, value_name = "NAMESPACE", add = complete::namespaces())]
    namespace: Option<String>,
    #[command(flatten)]
    agent: AgentArgs,
}

/// A local path or a path in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Here(PathBuf),
    There { namespace: Option<String>, pod: String, path: String },
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let here = || Ok(Self::Here(text.into()));
        let Some((pod, path)) = text.split_once(':') else { return here() };
        // A local path that contains a colon is written with its directory.
        if pod.starts_with(['/', '.']) {
            return here();
        }
        let (namespace, pod) = match pod.split_once('/') {
            Some((namespace, pod)) => (Some(namespace.to_owned()), pod),
            None => (None, pod),
        };
        if pod.is_empty() || pod.contains('/') || namespace.as_deref() == Some("") {
            return Err(
                "expected `POD:PATH` or `NAMESPACE/POD:PATH`; write a local path that contains a colon as `./PATH`".to_owned()
            );
        }
        if path.is_empty() {
            return Err("missing path after the colon".to_owned());
        }
        Ok(Self::There { namespace, pod: pod.to_owned(), path: path.to_owned() })
    }
}

/// Runs the copy.
#[must_use]
pub fn run(args: &CpArgs) -> ExitCode {
    finish(copy(args))
}

async fn copy(args: &CpArgs) -> anyhow::Result<()> {
    match (&args.from, &args.to) {
        (Place::There { namespace, pod, path }, Place::Here(to)) => {
            let mut there = There::connect(args, namespace.as_deref(), pod).await?;
            download(&mut there, path, to).await
        }
        (Place::Here(from), Place::There { namespace, pod, path }) => {
            let mut there = There::connect(args, namespace.as_deref(), pod).await?;
            upload(&mut there, from, path).await
        }
        _ => bail!("exactly one of SOURCE and TARGET must be in a pod (`POD:PATH`)"),
    }
}

/// A container that commands run in.
struct There {
    client: Client,
    target: proto::ContainerTarget,
}

/// A running command.
struct Command {
    input: mpsc::Sender<proto::ExecInput>,
    outputs: tonic::Streaming<proto::ExecOutput>,
    /// Output on standard error, truncated to [`MOST_WORDS`].
    words: Vec<u8>,
}

impl There {
    async fn connect(args: &CpArgs, namespace: Option<&str>, pod: &str) -> anyhow::Result<Self> {
        let namespace = namespace.or(args.namespace.as_deref()).unwrap_or_default().to_owned();
        let container = args.container.clone().unwrap_or_default();
        let target = proto::ContainerTarget { namespace, pod: pod.to_owned(), container };
        Ok(Self { client: Client::connect(&args.agent.socket).await?, target })
    }

    async fn start(&mut self, command: &[&str], stdin: bool) -> anyhow::Result<Command> {
        let (input, receiver) = mpsc::channel(QUEUE);
        let start = proto::ExecStart {
            target: Some(self.target.clone()),
            command: command.iter().map(|&word| word.to_owned()).collect(),
            stdin,
            tty: false,
        };
        send(&input, Input::Start(start)).await;
        let outputs = awaited(self.client.containers.exec(ReceiverStream::new(receiver))).await?;
        Ok(Command { input, outputs, words: Vec::new() })
    }

    /// Returns true if `path` is a directory in the container.
    async fn has_folder(&mut self, path: &str) -> anyhow::Result<bool> {
        let mut command = self.start(&["test", "-d", path], false).await?;
        match command.next().await {
            Ok(Out::Ended(code)) => Ok(code == 0),
            Ok(Out::Bytes(_)) => bail!("`test` in the container printed unexpected output"),
            // An image without `test` leaves this unknown; tar reports a missing path.
            Err(_) => Ok(false),
        }
    }
}

/// Output or end of a command.
enum Out {
    Bytes(Vec<u8>),
    Ended(i32),
}

impl Command {
    /// Returns the next output on standard output, or the exit code.
    async fn next(&mut self) -> anyhow::Result<Out> {
        loop {
            let output = self.outputs.message().await.map_err(no_answer)?;
            match output.and_then(|output| output.output) {
                Some(Output::Stdout(bytes)) => return Ok(Out::Bytes(bytes)),
                Some(Output::Stderr(bytes)) => {
                    let room = MOST_WORDS.saturating_sub(self.words.len());
                    self.words.extend(bytes.iter().take(room));
                }
                Some(Output::ExitCode(code)) => return Ok(Out::Ended(code)),
                None => bail!("the agent ended the command without an exit code"),
            }
        }
    }

    /// Converts the exit code and the standard error to a result.
    fn ended(&self, code: i32) -> anyhow::Result<()> {
        let words = String::from_utf8_lossy(&self.words);
        let words = plain::line(words.trim()).into_owned();
        match code {
            0 => Ok(()),
            126 | 127 => Err(no_tar(&words)),
            _ => bail!("tar in the container failed ({code}): {words}"),
        }
    }
}

/// Returns the error of a command that could not start; each runtime words a missing program differently.
fn no_tar(words: &str) -> anyhow::Error {
    if words.contains("executable file not found")
        || words.contains("no such file")
        || words.contains("not found")
    {
        return anyhow::anyhow!(
            "the container has no `tar`; to copy one file, use `beelet exec POD -- cat PATH > FILE` or \
             `beelet exec -i POD -- sh -c 'cat > PATH' < FILE`"
        );
    }
    anyhow::anyhow!("{}", plain::line(words))
}

#[allow(clippy::needless_pass_by_value)] // as map_err has it
fn no_answer(status: tonic::Status) -> anyhow::Error {
    match ClientError::from(status) {
        ClientError::Status(status) => no_tar(status.message()),
        error => error.into(),
    }
}

/// Splits a path in the container into the directory for tar and the name in it; "." stands for the content
/// of the directory.
fn split(path: &str) -> anyhow::Result<(&str, &str)> {
    let trimmed = path.trim_end_matches('/');
    let (folder, name) = match trimmed.rsplit_once('/') {
        _ if trimmed.is_empty() => ("/", "."),
        Some(("", name)) => ("/", name),
        Some((folder, name)) => (folder, name),
        None => (".", trimmed),
    };
    if name == ".." {
        bail!("{path:?} ends in `..`: name the folder itself");
    }
    Ok((folder, name))
}

async fn download(there: &mut There, from: &str, to: &Path) -> anyhow::Result<()> {
    let (folder, name) = split(from)?;
    let unpacker = unpack::Unpacker::new(name, to)?;
    // A file is copied by content, because each file of a ConfigMap volume is a link.
    let create = if there.has_folder(from).await? { "cf" } else { "chf" };
    let mut command = there.start(&["tar", create, "-", "-C", folder, "--", name], false).await?;
    let (pieces, received) = mpsc::channel(QUEUE);
    let unpacking = tokio::task::spawn_blocking(move || unpacker.unpack(received));
    let code = loop {
        match command.next().await {
            Ok(Out::Bytes(bytes)) => {
                // The unpacker has ended; its result has the cause.
                if pieces.send(Ok(bytes)).await.is_err() {
                    break 0;
                }
            }
            Ok(Out::Ended(code)) => break code,
            Err(error) => return Err(error),
        }
    };
    drop(pieces);
    let unpacked = unpacking.await?;
    // The exit code goes first: tar's own output explains a truncated archive.
    command.ended(code)?;
    let left_out = unpacked.with_context(|| format!("cannot copy {from}"))?;
    for line in left_out {
        eprintln!("{}", plain::line(&line));
    }
    Ok(())
}

async fn upload(there: &mut There, from: &Path, to: &str) -> anyhow::Result<()> {
    let is_into = to.ends_with('/') || there.has_folder(to).await?;
    let name = from.canonicalize().with_context(|| format!("cannot read {}", from.display()))?;
    let name = name.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("{} has no file name in UTF-8", from.display()))?;
    let (folder, name) = if is_into { (to, name) } else { split(to)? };
    let packer = pack::Packer::new(from, name);
    // Modification times are those of the copy, as with `kubectl cp`.
    let mut command = there.start(&["tar", "-xmf", "-", "-C", folder], true).await?;
    let input = command.input.clone();
    let packing = tokio::task::spawn_blocking(move || packer.pack(&input));
    let code = loop {
        match command.next().await? {
            Out::Bytes(_) => {}
            Out::Ended(code) => break code,
        }
    };
    command.ended(code)?;
    packing.await?.with_context(|| format!("cannot copy {}", from.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_here_or_in_a_pod() {
        let there = |namespace: Option<&str>, pod: &str, path: &str| {
            Some(Place::There {
                namespace: namespace.map(str::to_owned),
                pod: pod.to_owned(),
                path: path.to_owned(),
            })
        };
        let here = |path: &str| Some(Place::Here(path.into()));
        for (text, expected) in [
            ("web:/etc/app", there(None, "web", "/etc/app")),
            ("shop/web:logs", there(Some("shop"), "web", "logs")),
            ("file", here("file")),
            ("a/b/c", here("a/b/c")),
            ("./a:b", here("./a:b")),
            ("/a:b", here("/a:b")),
            (":/x", None),
            ("web:", None),
            ("a/b/c:/x", None),
            ("/", here("/")),
        ] {
            assert_eq!(text.parse().ok(), expected, "{text}");
        }
    }

    #[test]
    fn a_path_there_is_a_folder_and_a_name() {
        for (path, expected) in [
            ("/etc/app.conf", Some(("/etc", "app.conf"))),
            ("/etc", Some(("/", "etc"))),
            ("/", Some(("/", "."))),
            ("logs/", Some((".", "logs"))),
            ("/srv/.", Some(("/srv", "."))),
            ("/srv/..", None),
        ] {
            assert_eq!(split(path).ok(), expected, "{path}");
        }
    }
}
