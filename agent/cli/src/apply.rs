//! `beelet apply -f`: manifests into the agent's folder, checked first.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use beelet_proto::beelet as proto;
use beelet_proto::beelet::apply_response::Result as Applied;
use clap::Args;

use super::args::AgentArgs;
use super::{USAGE, failed, plain};
use beelet_client::Client;
use beelet_codec::document::{self, Limits};

/// Arguments of `beelet apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// The manifests: files, folders (their *.yaml, *.yml and *.json), or - for standard input. One file may hold several
    /// documents.
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Only check them. Needs no agent.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// A manifest to apply.
struct Text {
    name: String,
    text: String,
}

/// Applies them, all or none if any is wrong.
#[must_use]
pub fn run(args: &ApplyArgs) -> ExitCode {
    let texts = match read_all(&args.files) {
        Ok(texts) => texts,
        Err(error) => {
            eprintln!("error: {}", plain::lines(&format!("{error:#}")));
            return ExitCode::from(USAGE);
        }
    };
    // All are checked before the first one is written.
    let errors: Vec<String> = texts
        .iter()
        .filter_map(|text| {
            beelet_manifests::read(&text.text, &text.name).err().map(|error| error.to_string())
        })
        .collect();
    if !errors.is_empty() {
        errors.iter().for_each(|error| eprintln!("error: {}", plain::lines(&error.to_string())));
        return ExitCode::from(USAGE);
    }
    if args.dry_run {
        texts.iter().for_each(|text| println!("{}: valid", text.name));
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(apply(args, texts)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

async fn apply(args: &ApplyArgs, texts: Vec<Text>) -> anyhow::Result<()> {
    let mut client = Client::connect(&args.agent.socket).await?;
    for Text { name, text } in texts {
        let request = proto::ApplyRequest { text, name: name.clone(), dry_run: false };
        let applied = client.apply(request).await?;
        for warning in &applied.warnings {
            eprintln!("warning: {}", plain::line(&format!("{name}: {warning}")));
        }
        let result = match applied.result() {
            Applied::Created => "created",
            Applied::Configured => "configured",
            Applied::Unchanged | Applied::Unspecified => "unchanged",
        };
        println!("{}/{} {result}", applied.kind.to_lowercase(), applied.name);
    }
    Ok(())
}

/// All manifests of the files, one document each.
fn read_all(files: &[PathBuf]) -> anyhow::Result<Vec<Text>> {
    let mut texts = Vec::new();
    for file in files {
        if file.is_dir() {
            for path in manifests_in(file)? {
                texts.extend(split(&path.display().to_string(), read(&path)?)?);
            }
        } else {
            texts.extend(split(&file.display().to_string(), read(file)?)?);
        }
    }
    if texts.is_empty() {
        bail!("there is no manifest in the files given");
    }
    Ok(texts)
}

fn manifests_in(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let failed = || format!("cannot read the folder {}", folder.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let path = entry.with_context(failed)?.path();
        let known = path.extension().is_some_and(|end| end == "yaml" || end == "yml" || end == "json");
        if known && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> anyhow::Result<String> {
    // More than a manifest may have by one: enough to tell.
    let most = Limits::SCENARIO.bytes as u64 + 1;
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(most).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most).read_to_string(&mut text))
    };
    read.with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text)
}

/// A file of one document as it is written; of several, each by itself.
fn split(name: &str, text: String) -> anyhow::Result<Vec<Text>> {
    let documents = document::parse_within(&text, Limits::SCENARIO);
    let documents = documents.map_err(|error| anyhow::anyhow!("{name}: {error}"))?;
    let mut documents: Vec<_> = documents.into_iter().filter(|document| !document.value.is_null()).collect();
    if documents.len() == 1 {
        documents.clear();
        return Ok(vec![Text { name: name.to_owned(), text }]);
    }
    let one = |(index, document): (usize, document::Document)| {
        // JSON is YAML, and says the same to every reader.
        let text = format!("{:#}\n", document.value);
        Text { name: format!("{name} (document {})", index + 1), text }
    };
    Ok(documents.into_iter().enumerate().map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_one_document_stays_as_it_is_written() {
        let text = "# mine\nkind: Pod\n";
        let texts = split("a.yaml", text.to_owned()).unwrap();
        assert_eq!((texts.len(), texts[0].text.as_str()), (1, text));
    }

    #[test]
    fn several_documents_become_a_manifest_each() {
        let texts = split(
            "a.yaml",
            "kind: Pod\n---\n# nothing\n---\nkind: ConfigMap\ndata: {a: '0644'}\n".to_owned(),
        )
        .unwrap();
        let names: Vec<&str> = texts.iter().map(|text| text.name.as_str()).collect();
        assert_eq!(names, ["a.yaml (document 1)", "a.yaml (document 2)"]);
        assert!(texts[1].text.contains("\"0644\""));
        assert!(split("a.yaml", "a: [".to_owned()).is_err());
    }
}
