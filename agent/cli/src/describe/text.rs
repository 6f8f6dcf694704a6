//! Text laid out as `kubectl describe` does.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::plain;

/// Width of the first column of a level.
const LABEL: usize = 22;

/// Lines of `label: value`, indented by two blanks per level.
#[derive(Default)]
pub(super) struct Text(pub(super) String);

impl Text {
    /// Writes a value; further lines of the value are aligned with the first one.
    pub(super) fn line(&mut self, level: usize, label: &str, value: &str) {
        let (label, mut values) = (format!("{label}:"), value.lines());
        let first = values.next().unwrap_or_default();
        self.push(&format!(
            "{:indent$}{label:<width$}{first}",
            "",
            indent = level * 2,
            width = LABEL - level * 2
        ));
        for value in values {
            self.push(&format!("{:LABEL$}{value}", ""));
        }
    }

    /// Writes a line with escaped control characters and without trailing blanks.
    pub(super) fn push(&mut self, line: &str) {
        self.0.push_str(plain::line(line).trim_end());
        self.0.push('\n');
    }

    pub(super) fn set(&mut self, level: usize, label: &str, value: Option<&str>) {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            self.line(level, label, value);
        }
    }

    /// Writes one value per line, the label before the first.
    pub(super) fn list(&mut self, level: usize, label: &str, values: impl IntoIterator<Item = String>) {
        let mut values = values.into_iter();
        self.line(level, label, &values.next().unwrap_or_else(|| "<none>".to_owned()));
        for value in values.collect::<Vec<_>>().iter().flat_map(|value| value.lines()) {
            self.push(&format!("{:LABEL$}{value}", ""));
        }
    }

    /// Writes the labels and annotations.
    pub(super) fn metadata(&mut self, meta: &ObjectMeta) {
        let pairs = |map: &Option<BTreeMap<String, String>>, sign: &str| -> Vec<String> {
            map.iter().flatten().map(|(key, value)| format!("{key}{sign}{}", value.trim_end())).collect()
        };
        self.list(0, "Labels", pairs(&meta.labels, "="));
        self.list(0, "Annotations", pairs(&meta.annotations, ": "));
    }
}
