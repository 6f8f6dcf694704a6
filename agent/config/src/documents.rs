//! Both documents with every value that is in effect, as the resolvers leave them: printed, they can be read
//! again.

use beelet_codec::data;
use serde_json::{Map, Value};

use super::beelet::BeeletWire;
use super::kubelet::KubeletWire;
use super::unsupported;

/// Version and kind of the kubelet's document.
pub(super) const KUBELET: (&str, &str) = ("kubelet.config.k8s.io/v1beta1", "KubeletConfiguration");
/// Version and kind of our own.
pub(super) const BEELET: (&str, &str) = ("beelet.dev/v1alpha1", "BeeletConfiguration");

/// The resolved documents, without version and kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Documents {
    kubelet: Value,
    beelet: Value,
}

impl Documents {
    /// Keeps both as they are after they were resolved.
    pub(super) fn new(kubelet: &KubeletWire, beelet: &BeeletWire) -> Self {
        // Plain structs of strings, numbers and maps: the writer has nothing to refuse.
        let value = |document: Result<Value, _>| document.unwrap_or_default();
        Self { kubelet: value(data::to_value(kubelet)), beelet: value(data::to_value(beelet)) }
    }

    /// The text of both.
    pub(super) fn print(&self) -> String {
        let mut text = String::new();
        for ((version, kind), body) in [(KUBELET, &self.kubelet), (BEELET, &self.beelet)] {
            let body = beelet_codec::yaml(body);
            let body = body.unwrap_or_else(|error| format!("# cannot be printed: {error}\n"));
            text += &format!("---\napiVersion: {version}\nkind: {kind}\n{body}");
        }
        text
    }

    /// The kubelet's document, with its fields that have no effect: those of `unread` as they were written,
    /// the others with the kubelet's defaults.
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
