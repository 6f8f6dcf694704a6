//! A page of samples in Prometheus's text format.

use std::fmt::{self, Write as _};

use super::Kind;

/// Samples in Prometheus's text format 0.0.4, with the time of the reading, as served by cAdvisor and the
/// kubelet and read by metrics-server. prometheus-client writes only OpenMetrics, without times.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
    last: &'static str,
}

impl Page {
    /// Writes a sample; help and type precede the first one of its name.
    pub fn sample(
        &mut self,
        metric: (&'static str, Kind, &str),
        labels: &[(&str, &str)],
        value: f64,
        at_ms: Option<i64>,
    ) {
        self.sample_of(metric, &LabelText::default(), labels, value, at_ms);
    }

    /// Writes a sample with shared labels and its own.
    pub fn sample_of(
        &mut self,
        (name, kind, help): (&'static str, Kind, &str),
        of: &LabelText,
        own: &[(&str, &str)],
        value: f64,
        at_ms: Option<i64>,
    ) {
        // Writing to a String never fails.
        if std::mem::replace(&mut self.last, name) != name {
            let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
        }
        self.text.push_str(name);
        if !(of.0.is_empty() && own.is_empty()) {
            self.text.push('{');
            self.text.push_str(&of.0);
            if !(of.0.is_empty() || own.is_empty()) {
                self.text.push(',');
            }
            write_labels(&mut self.text, own);
            self.text.push('}');
        }
        let _ = match at_ms {
            Some(at) => writeln!(self.text, " {value} {at}"),
            None => writeln!(self.text, " {value}"),
        };
    }

    /// Returns the page.
    #[must_use]
    pub fn finish(self) -> String {
        self.text
    }
}

/// Formatted labels, shared by all samples of an object.
#[derive(Debug, Clone, Default)]
pub struct LabelText(String);

impl LabelText {
    /// Formats the labels in their order.
    #[must_use]
    pub fn new(labels: &[(&str, &str)]) -> Self {
        let mut text = String::new();
        write_labels(&mut text, labels);
        Self(text)
    }
}

fn write_labels(text: &mut String, labels: &[(&str, &str)]) {
    for (index, (key, value)) in labels.iter().enumerate() {
        let _ = write!(text, "{}{key}=\"{}\"", if index == 0 { "" } else { "," }, Escaped(value));
    }
}

/// A label's value with backslash, quote and newline escaped.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(at) = rest.find(['\\', '"', '\n']) {
            let (before, special) = rest.split_at(at);
            f.write_str(before)?;
            f.write_str(match &special[..1] {
                "\\" => "\\\\",
                "\"" => "\\\"",
                _ => "\\n",
            })?;
            rest = &special[1..];
        }
        f.write_str(rest)
    }
}
