//! From a file to the two documents: which kind each is, which fields it has, where each stands.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::beelet::BeeletWire;
use super::error::Problem;
use super::kubelet::KubeletWire;
use super::{Config, ConfigError, Place, Warning, fields, resolve, unsupported};
use beelet_codec::data;
use beelet_codec::document::{self, Document, Limits};

const KUBELET: (&str, &str) = ("kubelet.config.k8s.io/v1beta1", "KubeletConfiguration");
const BEELET: (&str, &str) = ("beelet.dev/v1alpha1", "BeeletConfiguration");

pub(super) fn load(path: &Path) -> Result<(Config, Vec<Warning>), ConfigError> {
    parse(path, &read(path)?)
}

/// Reads `text` as the content of `path`.
pub fn parse(path: &Path, text: &str) -> Result<(Config, Vec<Warning>), ConfigError> {
    let documents = document::parse_within(text, Limits::MANIFEST)
        .map_err(|error| error_at(path, Some((error.line, error.column)), "", error.message))?;
    let (mut kubelet, mut beelet) = (None, None);
    for document in &documents {
        let slot = match kind_of(path, document)? {
            Kind::Kubelet => &mut kubelet,
            Kind::Beelet => &mut beelet,
        };
        if slot.replace(document).is_some() {
            let message = "the file has two documents of this kind; keep one";
            return Err(error_at(path, Some(document.start()), "kind", message));
        }
    }
    let mut warnings = Vec::new();
    let kubelet_wire: KubeletWire = wire(path, kubelet, &mut warnings)?;
    let beelet_wire: BeeletWire = wire(path, beelet, &mut warnings)?;
    let place = |document: Option<&Document>, problem: &Problem| {
        let position = document.and_then(|document| document.locate(&problem.field));
        error_at(path, position, &problem.field, problem.message.clone())
    };
    let beelet_part = resolve::beelet(&beelet_wire).map_err(|problem| place(beelet, &problem))?;
    let node_name = resolve::node_name(&beelet_wire).map_err(|problem| place(beelet, &problem))?;
    let config = resolve::kubelet(&kubelet_wire, node_name, beelet_part)
        .map_err(|problem| place(kubelet, &problem))?;
    Ok((config, warnings))
}

fn read(path: &Path) -> Result<String, ConfigError> {
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

/// The fields of `document` that have an effect. The others are warned about, or refused where nobody knows them.
fn wire<T: DeserializeOwned + Default>(
    path: &Path,
    document: Option<&Document>,
    warnings: &mut Vec<Warning>,
) -> Result<T, ConfigError> {
    let Some(document) = document else { return Ok(T::default()) };
    let used = fields::names_of::<T>();
    let is_kubelet = used == fields::names_of::<KubeletWire>();
    let mut known = Map::new();
    for (name, value) in document.value.as_object().into_iter().flatten() {
        let position = document.locate(name);
        if matches!(name.as_str(), "apiVersion" | "kind") {
            continue;
        } else if used.contains(&name.as_str()) {
            known.insert(name.clone(), value.clone());
        } else if let Some(reason) = unsupported::reason(name).filter(|_| is_kubelet) {
            let message = format!("has no effect: {reason}");
            warnings.push(Warning { place: Place::new(path, position), field: name.clone(), message });
        } else {
            let others = unsupported::names().filter(|_| is_kubelet);
            let hint = match fields::closest(name, used.iter().copied().chain(others)) {
                Some(field) => format!("; did you mean {field}?"),
                None => String::new(),
            };
            return Err(error_at(path, position, name, format!("there is no such field{hint}")));
        }
    }
    data::read(&Value::Object(known))
        .map_err(|problem| error_at(path, document.locate(&problem.path), &problem.path, problem.message))
}

fn error_at(
    path: &Path,
    position: Option<(u64, u64)>,
    field: &str,
    message: impl Into<String>,
) -> ConfigError {
    ConfigError { place: Place::new(path, position), field: field.to_owned(), message: message.into() }
}
