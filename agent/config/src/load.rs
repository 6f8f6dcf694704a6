//! Reads files into the two documents: kinds, fields and their positions.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::beelet::BeeletWire;
use super::documents::{BEELET, Documents, KUBELET};
use super::error::{ConfigFaults, Problem};
use super::kubelet::KubeletWire;
use super::{Config, ConfigError, FilePlace, Warning, fields, resolve, unsupported};
use beelet_codec::data;
use beelet_codec::document::{self, Document, Limits};

/// Maximum number of listed faults.
const MOST_ERRORS: usize = 100;

pub(super) fn load(path: &Path) -> Result<(Config, Vec<Warning>), ConfigFaults> {
    parse(path, &read(path)?)
}

/// Sources of settings; later ones override earlier ones.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The file; None: the defaults.
    pub file: Option<PathBuf>,
    /// Folder whose `.conf` files are merged over the file in the order of their names.
    pub drop_ins: Option<PathBuf>,
    /// Command-line settings, in their order.
    pub flags: Vec<Setting>,
}

/// A setting of the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Name of the flag, e.g. `--max-pods`.
    pub name: String,
    /// Fields of a `KubeletConfiguration`.
    pub kubelet: Map<String, Value>,
    /// Fields of a `BeeletConfiguration`.
    pub beelet: Map<String, Value>,
    /// Field of the `KubeletConfiguration` whose values from files are dropped first: a map of the command
    /// line replaces theirs.
    pub replaces: Option<&'static str>,
}

/// Maximum number of drop-in files.
const DROP_INS: usize = 256;

pub(super) fn layered(sources: Sources) -> Result<(Config, Vec<Warning>), ConfigFaults> {
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
        layers.kubelet.add(&name, None, setting.kubelet, &mut layers.faults);
        layers.beelet.add(&name, None, setting.beelet, &mut layers.faults);
    }
    layers.resolve()
}

/// Returns the files of a drop-in folder, as the kubelet's `mergeKubeletConfigurations` chooses them, but
/// without subfolders.
fn drop_ins(folder: Option<&Path>) -> Result<Vec<PathBuf>, ConfigError> {
    let Some(folder) = folder else {
        return Ok(Vec::new());
    };
    let fail = |error: &dyn std::fmt::Display| {
        error_at(folder, None, "", format!("cannot read the folder of drop-in configurations: {error}"))
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|error| fail(&error))? {
        let path = entry.map_err(|error| fail(&error))?.path();
        if path.extension().is_some_and(|extension| extension == "conf") && path.is_file() {
            files.push(path);
        }
        if files.len() > DROP_INS {
            return Err(fail(&format_args!("more than {DROP_INS} files")));
        }
    }
    files.sort();
    Ok(files)
}

/// Reads `text` as the content of `path`.
///
/// # Errors
/// As for [`Config::load`].
pub fn parse(path: &Path, text: &str) -> Result<(Config, Vec<Warning>), ConfigFaults> {
    let mut layers = Layers::default();
    layers.file(path, text)?;
    layers.resolve()
}

/// Both documents, merged from all sources.
#[derive(Default)]
struct Layers {
    kubelet: Merged<KubeletWire>,
    beelet: Merged<BeeletWire>,
    faults: ConfigFaults,
}

impl Layers {
    fn file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let documents = document::parse_repeating(text, Limits::MANIFEST)
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
            let mut fields = document.value.as_object().cloned().unwrap_or_default();
            make_absolute(&mut fields, path);
            for (field, place) in document.repeated() {
                let message = "duplicate field; the last value counts".to_owned();
                let place = FilePlace::new(path, Some(place));
                self.faults.warnings.push(Warning { place, field, message });
            }
            self.kubelet.add(path, Some(document), fields, &mut self.faults);
        }
        if let Some(document) = beelet {
            let fields = document.value.as_object().cloned().unwrap_or_default();
            for (field, place) in document.repeated() {
                let message = "duplicate field; keep one";
                self.faults.errors.push(error_at(path, Some(place), &field, message));
            }
            self.beelet.add(path, Some(document), fields, &mut self.faults);
        }
        Ok(())
    }

    /// Checks all settings. Records each fault and removes its setting, so that it hides no other fault. The
    /// check ends at a second fault of a removed setting, which is its absence.
    fn resolve(mut self) -> Result<(Config, Vec<Warning>), ConfigFaults> {
        let mut recorded = BTreeSet::new();
        loop {
            let mut partly = Vec::new();
            let resolved = self.resolve_once(&mut partly);
            let may_go_on = match &resolved {
                Ok(_) => false,
                Err((_, problem)) if self.forgive(problem) => true,
                Err((whose, problem)) => {
                    recorded.insert((*whose, problem.field.clone())) && self.record(*whose, problem)
                }
            };
            if may_go_on && self.faults.errors.len() < MOST_ERRORS {
                continue;
            }
            let partly = partly.into_iter().map(|problem: Problem| {
                let ConfigError { place, field, message } =
                    self.kubelet.error(&problem.field, problem.message);
                Warning { place, field, message }
            });
            self.faults.warnings.extend(partly);
            return match resolved {
                Ok(config) if self.faults.errors.is_empty() => Ok((config, self.faults.warnings)),
                _ => Err(self.faults),
            };
        }
    }

    /// Records a fault and removes its setting. Returns false if the setting is missing.
    fn record(&mut self, whose: Whose, problem: &Problem) -> bool {
        let Problem { field, message } = problem;
        let (error, removed) = match whose {
            Whose::Kubelet => (self.kubelet.error(field, message.clone()), self.kubelet.remove(field)),
            Whose::Beelet => (self.beelet.error(field, message.clone()), self.beelet.remove(field)),
        };
        self.faults.errors.push(error);
        removed
    }

    /// Removes an unknown nested field of the kubelet's document with a warning, as the kubelet does. Returns
    /// false for other faults.
    fn forgive(&mut self, problem: &Problem) -> bool {
        let is_unknown = problem.message.starts_with("unknown field ");
        if !is_unknown || !self.kubelet.remove_exactly(&problem.field) {
            return false;
        }
        let ConfigError { place, field, .. } = self.kubelet.error(&problem.field, String::new());
        self.faults.warnings.push(Warning { place, field, message: UNKNOWN_FIELD.to_owned() });
        true
    }

    /// Checks all settings up to the first fault. Adds settings with a partial effect to `partly`.
    fn resolve_once(&self, partly: &mut Vec<Problem>) -> Result<Config, (Whose, Problem)> {
        let (theirs, ours) = (|problem| (Whose::Kubelet, problem), |problem| (Whose::Beelet, problem));
        let mut kubelet_wire = self.kubelet.wire().map_err(theirs)?;
        let mut beelet_wire = self.beelet.wire().map_err(ours)?;
        let names_archives = beelet_wire.image_archives.is_some();
        let beelet_part = resolve::beelet(&mut beelet_wire).map_err(ours)?;
        let node_name = resolve::node_name(&mut beelet_wire).map_err(ours)?;
        let mut config =
            resolve::kubelet(&mut kubelet_wire, node_name, beelet_part, partly).map_err(theirs)?;
        config.unread = self.kubelet.unread.as_object().cloned().unwrap_or_default();
        if !names_archives {
            let beside = config.static_pod_path.as_deref().and_then(Path::parent);
            let archives = beside.map(|folder| folder.join("images"));
            beelet_wire.image_archives =
                archives.as_ref().map(|folder| folder.to_string_lossy().into_owned()).or(Some(String::new()));
            config.beelet.image_archives = archives;
        }
        config.documents = Documents::new(&kubelet_wire, &beelet_wire);
        Ok(config)
    }
}

/// The document of a fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Whose {
    Kubelet,
    Beelet,
}

/// Resolves relative paths against the folder of their file (the kubelet's `KubeletConfigurationPathRefs` and
/// `resolveRelativePaths`).
fn make_absolute(fields: &mut Map<String, Value>, file: &Path) {
    let Ok(file) = std::path::absolute(file) else {
        return;
    };
    let Some(folder) = file.parent() else { return };
    let absolute = |value: &mut Value| {
        if let Some(path) = value.as_str().filter(|path| !path.is_empty() && !path.starts_with('/')) {
            *value = Value::String(folder.join(path).to_string_lossy().into_owned());
        }
    };
    for name in ["staticPodPath", "tlsCertFile", "tlsPrivateKeyFile", "resolvConf", "podLogsDir"] {
        fields.get_mut(name).into_iter().for_each(absolute);
    }
    let x509 = fields.get_mut("authentication").and_then(|value| value.get_mut("x509"));
    x509.and_then(|value| value.get_mut("clientCAFile")).into_iter().for_each(absolute);
}

/// A document merged from all its sources: maps are merged, all other values replaced (RFC 7386).
struct Merged<T> {
    value: Value,
    /// Fields without an effect.
    unread: Value,
    /// Index of the source that set each field last.
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
        faults: &mut ConfigFaults,
    ) {
        let (known, unread) = known::<T>(path, document.as_ref(), fields, faults);
        self.origins.extend(known.keys().map(|field| (field.clone(), self.sources.len())));
        self.sources.push((path.to_owned(), document));
        merge(&mut self.value, known);
        merge(&mut self.unread, unread);
    }

    fn wire(&self) -> Result<T, Problem> {
        data::read(&self.value).map_err(|problem| Problem::new(problem.path, problem.message))
    }

    /// Removes the setting at `field`, or the nearest one around it. Returns false if it is missing.
    fn remove(&mut self, field: &str) -> bool {
        remove(&mut self.value, field, false)
    }

    /// Removes the setting at `field`. Returns false if it is missing.
    fn remove_exactly(&mut self, field: &str) -> bool {
        remove(&mut self.value, field, true)
    }

    /// Returns an error at the source that set `field` last.
    fn error(&self, field: &str, message: String) -> ConfigError {
        let name = field.split(['.', '[']).next().unwrap_or(field);
        let last = self.origins.get(name).and_then(|index| self.sources.get(*index));
        let Some((path, document)) = last.or(self.sources.first()) else {
            return error_at(Path::new("the defaults"), None, field, message);
        };
        error_at(path, document.as_ref().and_then(|document| document.locate(field)), field, message)
    }
}

/// Removes the node at `path`, or, unless `exactly`, the nearest one above it; removes a list as a whole. The
/// longest key wins, since keys contain dots (`evictionHard.memory.available`).
fn remove(value: &mut Value, path: &str, exactly: bool) -> bool {
    let Some(map) = value.as_object_mut() else {
        return false;
    };
    let begins = |key: &&String| {
        path.strip_prefix(key.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    let Some(key) = map.keys().filter(begins).max_by_key(|key| key.len()).cloned() else {
        return false;
    };
    let rest = path[key.len()..].trim_start_matches('.');
    let inner = !rest.is_empty() && map.get_mut(&key).is_some_and(|inner| remove(inner, rest, exactly));
    inner || (rest.is_empty() || !exactly) && map.remove(&key).is_some()
}

/// Applies a merge patch. The depth is bounded by that of a document.
fn merge(into: &mut Value, fields: Map<String, Value>) {
    let mut pending = vec![(into, fields)];
    while let Some((into, fields)) = pending.pop() {
        if !into.is_object() {
            *into = Value::Object(Map::new());
        }
        let Some(known) = into.as_object_mut() else {
            return;
        };
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
        fail(format!("cannot open the configuration: {error}; name an existing file with --config"))
    })?;
    let mut bytes = Vec::new();
    let limit = Limits::MANIFEST.bytes as u64;
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| fail(format!("cannot read the configuration: {error}")))?;
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

/// Message for an unknown field.
const UNKNOWN_FIELD: &str = "unknown field";

/// Returns the fields with an effect, and those without. Adds the latter and unknown fields to `faults`: as
/// warnings for a `KubeletConfiguration`, whose strict decoding falls back to a lenient one in the kubelet,
/// and as errors for a `BeeletConfiguration`.
fn known<T: DeserializeOwned>(
    path: &Path,
    document: Option<&Document>,
    fields: Fields,
    faults: &mut ConfigFaults,
) -> (Fields, Fields) {
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
            if !unsupported::is_unset(&name, &value) {
                let message = format!("has no effect: {reason}");
                let place = FilePlace::new(path, position);
                faults.warnings.push(Warning { place, field: name.clone(), message });
            }
            unread.insert(name, value);
        } else {
            let others = unsupported::names().filter(|_| is_kubelet);
            let hint = match fields::closest(&name, used.iter().copied().chain(others)) {
                Some(field) => format!("; did you mean {field}?"),
                None => String::new(),
            };
            let error = error_at(path, position, &name, format!("{UNKNOWN_FIELD}{hint}"));
            if is_kubelet {
                let ConfigError { place, field, message } = error;
                faults.warnings.push(Warning { place, field, message });
            } else {
                faults.errors.push(error);
            }
        }
    }
    (known, unread)
}

pub(super) fn error_at(
    path: &Path,
    position: Option<(u64, u64)>,
    field: &str,
    message: impl Into<String>,
) -> ConfigError {
    ConfigError { place: FilePlace::new(path, position), field: field.to_owned(), message: message.into() }
}
