//! From a file to the two documents: which kind each is, which fields it has, where each stands.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::beelet::BeeletWire;
use super::error::Problem;
use super::kubelet::KubeletWire;
use super::{Config, ConfigError, FilePlace, Warning, fields, resolve, unsupported};
use beelet_codec::data;
use beelet_codec::document::{self, Document, Limits};

const KUBELET: (&str, &str) = ("kubelet.config.k8s.io/v1beta1", "KubeletConfiguration");
const BEELET: (&str, &str) = ("beelet.dev/v1alpha1", "BeeletConfiguration");

pub(super) fn load(path: &Path) -> Result<(Config, Vec<Warning>), ConfigError> {
    parse(path, &read(path)?)
}

/// Where settings come from, the later ones over the earlier ones.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The file; None: the defaults.
    pub file: Option<PathBuf>,
    /// A folder of files ending in `.conf`, which are merged over the file in the order of their names.
    pub drop_ins: Option<PathBuf>,
    /// Settings of the command line, in its order.
    pub flags: Vec<Setting>,
}

/// A setting that does not come from a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// What it is called there, e.g. `--max-pods`.
    pub name: String,
    /// Fields of a `KubeletConfiguration`.
    pub kubelet: Map<String, Value>,
    /// Fields of a `BeeletConfiguration`.
    pub beelet: Map<String, Value>,
    /// The field of the `KubeletConfiguration` of which nothing stays that files said: a map of the command
    /// line takes the place of theirs.
    pub replaces: Option<&'static str>,
}

/// The most drop-in files that are read.
const DROP_INS: usize = 256;

pub(super) fn layered(sources: Sources) -> Result<(Config, Vec<Warning>), ConfigError> {
    let mut layers = Layers::default();
    if let Some(file) = &sources.file {
        layers.file(file, &read(file)?)?;
    }
    for file in drop_ins(sources.drop_ins.as_deref())? {
        layers.file(&file, &read(&file)?)?;
    }
    for setting in sources.flags {
        let name = PathBuf::from(setting.name);
        if let Some((field, known)) = setting.replaces.zip(layers.kubelet.value.as_object_mut()) {
            known.remove(field);
        }
        layers.kubelet.add(&name, None, setting.kubelet, &mut layers.warnings)?;
        layers.beelet.add(&name, None, setting.beelet, &mut layers.warnings)?;
    }
    layers.resolve()
}

/// The files of a drop-in folder, as `mergeKubeletConfigurations` of the kubelet chooses them, but for
/// folders within it.
fn drop_ins(folder: Option<&Path>) -> Result<Vec<PathBuf>, ConfigError> {
    let Some(folder) = folder else { return Ok(Vec::new()) };
    let fail = |error: &dyn std::fmt::Display| {
        error_at(folder, None, "", format!("the folder of drop-in configurations cannot be read: {error}"))
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|error| fail(&error))? {
        let path = entry.map_err(|error| fail(&error))?.path();
        if path.extension().is_some_and(|extension| extension == "conf") && path.is_file() {
            files.push(path);
        }
        if files.len() > DROP_INS {
            return Err(fail(&format_args!("it has more than {DROP_INS} files")));
        }
    }
    files.sort();
    Ok(files)
}

/// Reads `text` as the content of `path`.
pub fn parse(path: &Path, text: &str) -> Result<(Config, Vec<Warning>), ConfigError> {
    let mut layers = Layers::default();
    layers.file(path, text)?;
    layers.resolve()
}

/// Both documents, of all sources.
#[derive(Default)]
struct Layers {
    kubelet: Merged<KubeletWire>,
    beelet: Merged<BeeletWire>,
    warnings: Vec<Warning>,
}

impl Layers {
    fn file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let documents = document::parse_within(text, Limits::MANIFEST)
            .map_err(|error| error_at(path, Some((error.line, error.column)), "", error.message))?;
        let (mut kubelet, mut beelet) = (None, None);
        for document in documents {
            let slot = match kind_of(path, &document)? {
                Kind::Kubelet => &mut kubelet,
                Kind::Beelet => &mut beelet,
            };
            let start = document.start();
            if slot.replace(document).is_some() {
                let message = "the file has two documents of this kind; keep one";
                return Err(error_at(path, Some(start), "kind", message));
            }
        }
        if let Some(document) = kubelet {
            let fields = document.value.as_object().cloned().unwrap_or_default();
            self.kubelet.add(path, Some(document), fields, &mut self.warnings)?;
        }
        if let Some(document) = beelet {
            let fields = document.value.as_object().cloned().unwrap_or_default();
            self.beelet.add(path, Some(document), fields, &mut self.warnings)?;
        }
        Ok(())
    }

    fn resolve(self) -> Result<(Config, Vec<Warning>), ConfigError> {
        let Self { kubelet, beelet, warnings } = self;
        let (kubelet_wire, beelet_wire) = (kubelet.wire()?, beelet.wire()?);
        let ours = |problem: Problem| beelet.error(&problem.field, problem.message);
        let beelet_part = resolve::beelet(&beelet_wire).map_err(ours)?;
        let node_name = resolve::node_name(&beelet_wire).map_err(ours)?;
        let mut config = resolve::kubelet(&kubelet_wire, node_name, beelet_part)
            .map_err(|problem| kubelet.error(&problem.field, problem.message))?;
        config.unread = kubelet.unread.as_object().cloned().unwrap_or_default();
        if beelet_wire.image_archives.is_none() {
            let beside = config.static_pod_path.as_deref().and_then(Path::parent);
            config.beelet.image_archives = beside.map(|folder| folder.join("images"));
        }
        Ok((config, warnings))
    }
}

/// One kind of document, as all its sources together say it: maps are merged, everything else is replaced
/// (RFC 7386).
struct Merged<T> {
    value: Value,
    /// The fields that have no effect.
    unread: Value,
    /// Which of the sources has the last word on a field.
    origins: BTreeMap<String, usize>,
    sources: Vec<(PathBuf, Option<Document>)>,
    wire: PhantomData<T>,
}

impl<T> Default for Merged<T> {
    fn default() -> Self {
        Self {
            value: Value::Object(Map::new()),
            unread: Value::Object(Map::new()),
            origins: BTreeMap::new(),
            sources: Vec::new(),
            wire: PhantomData,
        }
    }
}

impl<T: DeserializeOwned + Default> Merged<T> {
    fn add(
        &mut self,
        path: &Path,
        document: Option<Document>,
        fields: Map<String, Value>,
        warnings: &mut Vec<Warning>,
    ) -> Result<(), ConfigError> {
        let (known, unread) = known::<T>(path, document.as_ref(), fields, warnings)?;
        self.origins.extend(known.keys().map(|field| (field.clone(), self.sources.len())));
        self.sources.push((path.to_owned(), document));
        merge(&mut self.value, known);
        merge(&mut self.unread, unread);
        Ok(())
    }

    fn wire(&self) -> Result<T, ConfigError> {
        data::read(&self.value).map_err(|problem| self.error(&problem.path, problem.message))
    }

    /// An error of the source that has the last word on `field`.
    fn error(&self, field: &str, message: String) -> ConfigError {
        let name = field.split(['.', '[']).next().unwrap_or(field);
        let last = self.origins.get(name).and_then(|index| self.sources.get(*index));
        let Some((path, document)) = last.or(self.sources.first()) else {
            return error_at(Path::new("the defaults"), None, field, message);
        };
        error_at(path, document.as_ref().and_then(|document| document.locate(field)), field, message)
    }
}

/// A merge patch. What is merged is no deeper than a document may be.
fn merge(into: &mut Value, fields: Map<String, Value>) {
    let mut pending = vec![(into, fields)];
    while let Some((into, fields)) = pending.pop() {
        if !into.is_object() {
            *into = Value::Object(Map::new());
        }
        let Some(known) = into.as_object_mut() else { return };
        let mut nested = BTreeMap::new();
        for (name, value) in fields {
            match value {
                Value::Null => drop(known.remove(&name)),
                Value::Object(inner) if known.get(&name).is_some_and(Value::is_object) => {
                    nested.insert(name, inner);
                }
                value => drop(known.insert(name, value)),
            }
        }
        for (name, value) in known.iter_mut() {
            if let Some(inner) = nested.remove(name) {
                pending.push((value, inner));
            }
        }
    }
}

pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
    let fail = |message: String| error_at(path, None, "", message);
    let file = File::open(path).map_err(|error| {
        fail(format!("the configuration cannot be opened: {error}. Name an existing file with --config"))
    })?;
    let mut bytes = Vec::new();
    let limit = Limits::MANIFEST.bytes as u64;
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| fail(format!("the configuration cannot be read: {error}")))?;
    if bytes.len() as u64 > limit {
        return Err(fail(format!("the configuration has more than {limit} bytes; is this the right file?")));
    }
    String::from_utf8(bytes).map_err(|_| fail("the configuration is not UTF-8 text".to_owned()))
}

enum Kind {
    Kubelet,
    Beelet,
}

fn kind_of(path: &Path, document: &Document) -> Result<Kind, ConfigError> {
    let field = |name: &str| document.value.get(name).and_then(Value::as_str).unwrap_or_default();
    match (field("apiVersion"), field("kind")) {
        KUBELET => Ok(Kind::Kubelet),
        BEELET => Ok(Kind::Beelet),
        (version, kind) => {
            let message = format!(
                "apiVersion {version:?} with kind {kind:?} is not a configuration of this program; it reads \
                 {} {} and {} {}",
                KUBELET.0, KUBELET.1, BEELET.0, BEELET.1
            );
            Err(error_at(path, Some(document.start()), "", message))
        }
    }
}

/// The fields of a document.
type Fields = Map<String, Value>;

/// The fields that have an effect, and those that have none: they are warned about. A field that nobody knows
/// is refused.
fn known<T: DeserializeOwned>(
    path: &Path,
    document: Option<&Document>,
    fields: Fields,
    warnings: &mut Vec<Warning>,
) -> Result<(Fields, Fields), ConfigError> {
    let used = fields::names_of::<T>();
    let is_kubelet = used == fields::names_of::<KubeletWire>();
    let (mut known, mut unread) = (Map::new(), Map::new());
    for (name, value) in fields {
        let position = document.and_then(|document| document.locate(&name));
        if matches!(name.as_str(), "apiVersion" | "kind") {
            continue;
        } else if used.contains(&name.as_str()) {
            known.insert(name, value);
        } else if let Some(reason) = unsupported::reason(&name).filter(|_| is_kubelet) {
            let message = format!("has no effect: {reason}");
            warnings.push(Warning { place: FilePlace::new(path, position), field: name.clone(), message });
            unread.insert(name, value);
        } else {
            let others = unsupported::names().filter(|_| is_kubelet);
            let hint = match fields::closest(&name, used.iter().copied().chain(others)) {
                Some(field) => format!("; did you mean {field}?"),
                None => String::new(),
            };
            return Err(error_at(path, position, &name, format!("there is no such field{hint}")));
        }
    }
    Ok((known, unread))
}

pub(super) fn error_at(
    path: &Path,
    position: Option<(u64, u64)>,
    field: &str,
    message: impl Into<String>,
) -> ConfigError {
    ConfigError { place: FilePlace::new(path, position), field: field.to_owned(), message: message.into() }
}
