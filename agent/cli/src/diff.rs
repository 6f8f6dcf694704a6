//! `beelet diff -f`: the changes that `apply` would make to the agent's manifests.

use std::process::ExitCode;

use beelet_proto::beelet as proto;
use clap::Args;
use similar::TextDiff;

use super::args::AgentArgs;
use super::files::{self, FilesArgs, Manifest};
use super::{USAGE, code, finish, plain};
use beelet_client::Client;

/// Arguments of `beelet diff`.
///
/// Exit codes: 0 without differences, 1 with differences or if the agent did not answer, 2 if a file is
/// invalid.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  beelet diff -f web.yaml\n  beelet diff -f shop/ && echo up to date")]
pub struct DiffArgs {
    #[command(flatten)]
    files: FilesArgs,
    #[command(flatten)]
    agent: AgentArgs,
}

/// Prints the differences.
#[must_use]
pub fn run(args: &DiffArgs) -> ExitCode {
    let manifests = match files::read_all(&args.files.files) {
        Ok(manifests) => manifests,
        Err(errors) => {
            files::show_errors(&errors);
            return ExitCode::from(USAGE);
        }
    };
    finish(async {
        let text = diff(args, &manifests).await?;
        print!("{}", plain::lines(&text));
        Ok(code(text.is_empty()))
    })
}

async fn diff(args: &DiffArgs, manifests: &[Manifest]) -> anyhow::Result<String> {
    let mut client = Client::connect(&args.agent.socket).await?;
    let request = proto::ApplyRequest { manifests: files::to_send(manifests), dry_run: true, prune: None };
    let answer = client.manifests.apply(request).await?;
    Ok(manifests.iter().zip(&answer.applied).map(|(new, old)| difference(new, old)).collect())
}

/// Returns the change of one manifest in the format of `diff -u`; empty without a change.
fn difference(new: &Manifest, old: &proto::Applied) -> String {
    let before = old.before.as_deref().unwrap_or_default();
    if before == new.text {
        return String::new();
    }
    if new.kind == "Secret" {
        return format!("{} differs from {} (content hidden)\n", new.title(), old.file);
    }
    let header = if old.before.is_some() { old.file.as_str() } else { "/dev/null" };
    TextDiff::from_lines(before, new.text.as_str()).unified_diff().header(header, &new.name).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: &'static str, before: Option<&str>, text: &str, expected: &str) {
        let new = Manifest {
            name: "web.yaml:3".to_owned(),
            text: text.to_owned(),
            kind,
            namespace: "default".to_owned(),
            object: "web".to_owned(),
            warnings: Vec::new(),
        };
        let (file, before) = ("/m/web.yaml".to_owned(), before.map(str::to_owned));
        let old = proto::Applied { file, before, ..Default::default() };
        assert_eq!(difference(&new, &old), expected);
    }

    #[test]
    fn a_change_is_shown_by_its_lines_and_a_secret_is_not() {
        check("Pod", Some("a: 1\n"), "a: 1\n", "");
        let changed = "--- /m/web.yaml\n+++ web.yaml:3\n@@ -1,2 +1,2 @@\n a: 1\n-b: 2\n+b: 3\n";
        check("Pod", Some("a: 1\nb: 2\n"), "a: 1\nb: 3\n", changed);
        check("Pod", None, "a: 1\n", "--- /dev/null\n+++ web.yaml:3\n@@ -0,0 +1 @@\n+a: 1\n");
        let secret = "secret/web differs from /m/web.yaml (content hidden)\n";
        check("Secret", Some("data: {a: eA==}\n"), "data: {a: eQ==}\n", secret);
    }
}
