//! Both documents with all effective values, as the resolvers leave them. Their printed form is a valid
//! configuration.

use beelet_codec::data;
use serde_json::{Map, Value};

use super::beelet::BeeletWire;
use super::kubelet::KubeletWire;
use super::unsupported;

/// Version and kind of the kubelet's document.
pub(super) const KUBELET: (&str, &str) = ("kubelet.config.k8s.io/v1beta1", "KubeletConfiguration");
/// Version and kind of beelet's own document.
pub(super) const BEELET: (&str, &str) = ("beelet.dev/v1alpha1", "BeeletConfiguration");

/// The resolved documents, without version and kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Documents {
    kubelet: Value,
    beelet: Value,
}

impl Documents {
    /// Stores both resolved documents.
    pub(super) fn new(kubelet: &KubeletWire, beelet: &BeeletWire) -> Self {
        // Serializing plain structs of strings, numbers and maps can't fail.
        let value = |document: Result<Value, _>| document.unwrap_or_default();
        Self { kubelet: value(data::to_value(kubelet)), beelet: value(data::to_value(beelet)) }
    }

    /// Returns both documents as YAML.
    pub(super) fn print(&self) -> String {
        let mut text = String::new();
        for ((version, kind), body) in [(KUBELET, &self.kubelet), (BEELET, &self.beelet)] {
            let body = beelet_codec::yaml(body);
            let body = body.unwrap_or_else(|error| format!("# cannot be printed: {error}\n"));
            text += &format!("---\napiVersion: {version}\nkind: {kind}\n{body}");
        }
        text
    }

    /// Returns the kubelet's document including the fields without an effect: those of `unread` with their
    /// written value, the others with the kubelet's default.
    pub(super) fn kubelet(&self, unread: &Map<String, Value>) -> Value {
        let mut value = self.kubelet.clone();
        if let Some(object) = value.as_object_mut() {
            object.extend(unsupported::defaults());
            object.extend(unsupported::set(unread));
            let (version, kind) = KUBELET;
            object.insert("kind".to_owned(), kind.into());
            object.insert("apiVersion".to_owned(), version.into());
        }
        value
    }
}
