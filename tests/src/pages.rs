//! Parser for pages of metrics, independent of this repository: Prometheus' own for Python.

use anyhow::{Context as _, Result, bail};
use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::requires::python_with;

/// Prints the families; the first argument is the format.
const SCRIPT: &str = "
import sys
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
parse = {'openmetrics': openmetrics, 'text': parser}[sys.argv[1]].text_string_to_metric_families
for family in parse(sys.stdin.read()):
    print(family.name, family.type, len(family.samples))
";

/// Pages, with the formats of each.
pub const PAGES: [(&str, &[Format]); 5] = [
    ("/metrics", &[Format::Text, Format::OpenMetrics]),
    ("/metrics/probes", &[Format::Text, Format::OpenMetrics]),
    ("/metrics/cadvisor", &[Format::Text]),
    ("/metrics/resource", &[Format::Text]),
    ("/metrics/slis", &[Format::Text]),
];

/// Format of metrics.
#[derive(Clone, Copy, Debug)]
pub enum Format {
    /// Format by default.
    Text,
    /// Format for a client that accepts it.
    OpenMetrics,
}

impl Format {
    /// Returns the `Accept` header for the format.
    #[must_use]
    pub fn accept(self) -> &'static str {
        match self {
            Self::Text => "*/*",
            Self::OpenMetrics => "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
        }
    }

    fn parser(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::OpenMetrics => "openmetrics",
        }
    }
}

/// Returns the families that the parser finds on a page: a line per family, with its type and number of
/// samples. The error contains the parser's message.
pub fn families(page: &str, format: Format) -> Result<Vec<String>> {
    let python = python_with("prometheus_client", None).context("no Python has prometheus_client")?;
    let mut child = Command::new(python)
        .args(["-c", SCRIPT, format.parser()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // The script reads everything before it prints.
    child.stdin.take().context("no standard input")?.write_all(page.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}
