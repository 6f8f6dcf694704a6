//! Reads, splits and validates the manifests of the files that a command receives with `-f`, and collects all
//! errors.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;

use beelet_codec::document::{self, Document, DocumentError, Limits};
use beelet_codec::error::ManifestError;
use beelet_codec::parts::{self, Part};
use beelet_proto::beelet as proto;

use super::plain;

/// Manifest files of a command.
#[derive(Debug, Args)]
pub(crate) struct FilesArgs {
    /// Manifests: files, directories (their *.yaml, *.yml and *.json files) or - for standard input. A file
    /// may contain several documents and lists (`kind: List`).
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
}

/// A manifest of a file.
#[derive(Debug, PartialEq)]
pub(crate) struct Manifest {
    /// `web.yaml`, or `web.yaml:12` for a manifest that begins at line 12.
    pub(crate) name: String,
    /// Unchanged text of the document.
    pub(crate) text: String,
    /// `Pod`, `ConfigMap`, …
    pub(crate) kind: &'static str,
    /// Namespace; empty for a kind without namespaces.
    pub(crate) namespace: String,
    /// Name of the object, as in the manifest.
    pub(crate) object: String,
    /// Sentences about fields without effect.
    pub(crate) warnings: Vec<String>,
}

impl Manifest {
    /// Returns `pod/web`, as results print it.
    pub(crate) fn title(&self) -> String {
        format!("{}/{}", self.kind.to_lowercase(), self.object)
    }
}

/// Converts the manifests for a request.
pub(crate) fn to_send(manifests: &[Manifest]) -> Vec<proto::Manifest> {
    let one =
        |manifest: &Manifest| proto::Manifest { text: manifest.text.clone(), name: manifest.name.clone() };
    manifests.iter().map(one).collect()
}

/// Reads all manifests of the files.
///
/// # Errors
/// Returns all errors of all manifests, each a text of one or more lines.
pub(crate) fn read_all(files: &[PathBuf]) -> Result<Vec<Manifest>, Vec<String>> {
    let (mut manifests, mut errors) = (Vec::new(), Vec::new());
    for file in files {
        match texts_of(file) {
            Ok(texts) => texts.into_iter().for_each(|(name, text)| match text {
                Ok(text) => split_manifests(&name, &text, &mut manifests, &mut errors),
                Err(error) => errors.push(format!("{error:#}")),
            }),
            Err(error) => errors.push(format!("{error:#}")),
        }
    }
    if manifests.is_empty() && errors.is_empty() {
        let names: Vec<_> = files.iter().map(|file| name_of(file)).collect();
        errors.push(format!("no manifest found in {}", names.join(", ")));
    }
    if errors.is_empty() { Ok(manifests) } else { Err(errors) }
}

/// Prints the errors.
pub(crate) fn show_errors(errors: &[String]) {
    for line in errors.iter().flat_map(|error| error.lines()) {
        eprintln!("error: {}", plain::line(line));
    }
}

/// Returns the texts of a file or a directory, each with its name.
fn texts_of(file: &Path) -> anyhow::Result<Vec<(String, anyhow::Result<String>)>> {
    let paths = if file.is_dir() { manifests_in(file)? } else { vec![file.to_owned()] };
    Ok(paths.iter().map(|path| (name_of(path), read(path))).collect())
}

fn name_of(path: &Path) -> String {
    if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() }
}

fn manifests_in(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let failed = || format!("cannot read the directory {}", folder.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let path = entry.with_context(failed)?.path();
        let known = path.extension().is_some_and(|end| end == "yaml" || end == "yml" || end == "json");
        // A dangling link is reported, like an unreadable file.
        let is_dangling = || path.is_symlink() && !path.exists();
        if known && (path.is_file() || is_dangling()) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> anyhow::Result<String> {
    // Reads one byte more than the limit, to detect a larger file.
    let most = Limits::SCENARIO.bytes as u64 + 1;
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(most).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes))
    };
    read.with_context(|| format!("cannot read {}", name_of(path)))?;
    text_of(bytes).map_err(|byte| anyhow::anyhow!("{} is not UTF-8 text (byte {byte})", name_of(path)))
}

/// Converts the bytes to text, or returns the position of the first invalid byte, counted from 1. For a file
/// above the limit only the size matters, because the cut may split a character.
fn text_of(bytes: Vec<u8>) -> Result<String, usize> {
    if bytes.len() > Limits::SCENARIO.bytes {
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    String::from_utf8(bytes).map_err(|error| error.utf8_error().valid_up_to().saturating_add(1))
}

/// Adds the manifests of one text. An error in one document does not hide the others.
fn split_manifests(name: &str, text: &str, manifests: &mut Vec<Manifest>, errors: &mut Vec<String>) {
    if text.len() > Limits::SCENARIO.bytes {
        errors.push(format!("{name}: larger than the limit of {} bytes per file", Limits::SCENARIO.bytes));
        return;
    }
    let parts = parts::documents(text);
    let mut add = |document: &Document, text: &str, is_one: bool| match manifest(name, document, text, is_one)
    {
        Ok(manifest) => manifests.push(manifest),
        Err(error) => errors.push(error.to_string()),
    };
    let mut unread = Vec::new();
    for part in &parts {
        match documents_of(*part) {
            Ok(None) => {}
            Ok(Some(document)) => match list_of(&document, *part) {
                Some(items) => items.iter().for_each(|item| add(&item.document, &item.text, false)),
                None => add(&document, part.text, parts.len() == 1),
            },
            Err(error) => unread.push(ManifestError::syntax(name, &error).to_string()),
        }
    }
    errors.extend(unread);
}

/// Returns the document of a part, or None if the part is empty.
fn documents_of(part: Part<'_>) -> Result<Option<Document>, DocumentError> {
    let documents = document::parse_below(part.above, part.text, Limits::SCENARIO)?;
    let mut documents = documents.into_iter().filter(|document| !document.value.is_null());
    Ok(documents.next())
}

/// Returns the items of a `kind: List`.
fn list_of(document: &Document, part: Part<'_>) -> Option<Vec<parts::Item>> {
    let kind = document.value.get("kind")?.as_str()?;
    let is_list = matches!(kind, "List" | "PodList" | "ConfigMapList" | "SecretList");
    is_list.then(|| parts::items(document, part)).flatten()
}

fn manifest(name: &str, document: &Document, text: &str, is_one: bool) -> Result<Manifest, ManifestError> {
    if text.len() > Limits::MANIFEST.bytes {
        let most = Limits::MANIFEST.bytes;
        let message = format!("has {} bytes; the limit is {most}", text.len());
        return Err(ManifestError::new(name, document, vec![beelet_codec::error::Problem::new("", message)]));
    }
    let read = beelet_manifests::read_document(document, name)?;
    let metadata = read.object.metadata();
    let kind = read.object.kind();
    let namespace = match kind {
        "PriorityClass" | "RuntimeClass" => String::new(),
        _ => metadata.namespace.clone().unwrap_or_else(|| "default".to_owned()),
    };
    let name = if is_one { name.to_owned() } else { format!("{name}:{}", document.start().0) };
    let object = metadata.name.clone().unwrap_or_default();
    Ok(Manifest { name, text: text.to_owned(), kind, namespace, object, warnings: read.warnings })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apart(text: &str) -> (Vec<Manifest>, Vec<String>) {
        let (mut manifests, mut errors) = (Vec::new(), Vec::new());
        split_manifests("a.yaml", text, &mut manifests, &mut errors);
        (manifests, errors)
    }

    const POD: &str =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers: [{name: c, image: 'x:1'}]\n";

    #[test]
    fn bytes_that_are_no_text_are_named_by_their_place() {
        assert_eq!(text_of(b"caf\xc3\xa9".to_vec()), Ok("café".to_owned()));
        assert_eq!(text_of(b"caf\xe9: 1".to_vec()), Err(4));
        // The size error wins, wherever the text is cut.
        let large = "é".repeat(Limits::SCENARIO.bytes / 2 + 1).into_bytes();
        assert!(text_of(large[..Limits::SCENARIO.bytes + 1].to_vec()).is_ok());
    }

    #[test]
    fn a_file_of_one_document_stays_as_it_is_written() {
        let text = format!("# mine\n---\n{POD}---\n# no more\n");
        let (manifests, errors) = apart(&text);
        assert_eq!((manifests[0].text.as_str(), manifests[0].name.as_str()), (text.as_str(), "a.yaml"));
        assert_eq!((manifests.len(), errors.len()), (1, 0));
    }

    #[test]
    fn documents_and_items_of_lists_keep_their_comments_and_have_the_lines_of_the_file() {
        let map =
            "# a map\napiVersion: v1\nkind: ConfigMap # small\nmetadata: {name: m}\ndata: {a: '0644'}\n";
        let list = format!(
            "apiVersion: v1\nkind: List\nitems:\n- {}",
            map.replace('\n', "\n  ").replace("# a map\n  ", "")
        );
        let (manifests, errors) = apart(&format!("{POD}---\n{map}---\n{}\n", list.trim_end()));
        assert_eq!(errors, Vec::<String>::new());
        let told: Vec<_> = manifests.iter().map(|one| (one.name.as_str(), one.title())).collect();
        let expected = [("a.yaml:1", "pod/web"), ("a.yaml:8", "configmap/m"), ("a.yaml:16", "configmap/m")];
        assert_eq!(told, expected.map(|(name, title)| (name, title.to_owned())));
        assert_eq!(manifests[1].text, map);
        assert_eq!(manifests[2].text, map.replace("# a map\n", ""));
    }

    #[test]
    fn what_is_wrong_in_one_document_hides_nothing_of_the_others() {
        let wrong = POD.replace("web", "Web");
        let (manifests, errors) =
            apart(&format!("{POD}---\na: [\n---\n{wrong}---\n{}", POD.replace("image", "imago")));
        assert_eq!(manifests.len(), 1);
        let starts = ["a.yaml:11:18: metadata.name: \"Web\" is not a name", "a.yaml:19:", "a.yaml:7:"];
        for start in starts {
            assert!(errors.iter().any(|error| error.starts_with(start)), "{start}: {errors:?}");
        }
    }

    #[test]
    fn every_file_that_cannot_be_read_is_told() {
        let folder = std::env::temp_dir().join("beelet-no-such-folder");
        let errors = read_all(&[folder.join("a.yaml"), folder.join("b.yaml")]).unwrap_err();
        assert_eq!(errors.len(), 2);
        assert!(errors[1].contains("b.yaml"), "{errors:?}");
    }

    #[test]
    fn a_link_of_a_folder_that_leads_to_nothing_is_told() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yaml"), POD).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("b.yaml")).unwrap();
        let errors = read_all(&[folder.path().to_owned()]).unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains("b.yaml"), "{errors:?}");
    }

    #[test]
    fn what_has_no_effect_is_told_with_the_line_of_the_file() {
        let text = format!("{POD}---\n{}", POD.replace("[{name", "[{comand: x, name").replace("web", "two"));
        let (manifests, _) = apart(&text);
        assert_eq!(manifests[1].warnings.len(), 1);
        assert!(manifests[1].warnings[0].starts_with("line 11: spec.containers[0].comand"), "{manifests:?}");
    }
}
