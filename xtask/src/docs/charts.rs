//! The charts of the site: bars of the agent's use by number of pods, beside a kubelet's, as SVG. The data is
//! what `cargo xtask bench density --json` and `bench footprint --json` print, kept in docs/.

use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Width and height of a panel, in pixels: a caption, then bars.
const PANEL: usize = 430;
const CAPTION: usize = 44;
/// Height of a bar, and space between two sizes of a node.
const BAR: usize = 20;
const GAP: usize = 14;
/// Left edge and longest length of a bar; labels are on both sides.
const LEFT: usize = 92;
const LONGEST: usize = 250;
/// Colours of the agent, the kubelet, the text and the bound.
const OURS: &str = "#285ab4";
const THEIRS: &str = "#c83c28";
const TEXT: &str = "#24292f";
const BOUND: &str = "#8a929c";
/// A white edge around a label, over the line of the bound.
const HALO: &str = " paint-order=\"stroke\" stroke=\"#ffffff\" stroke-width=\"4\"";

/// A row of the benches' JSON.
#[derive(Debug, Deserialize)]
struct Row {
    row: String,
    p50: f64,
    #[serde(default)]
    bound: Option<f64>,
    #[serde(default)]
    compare: BTreeMap<String, f64>,
}

/// A chart: its name, its title, and its panels as the beginning of their rows' names with a caption.
struct Chart {
    name: &'static str,
    title: &'static str,
    panels: [(&'static str, &'static str); 2],
}

const CHARTS: [Chart; 2] = [
    Chart {
        name: "density",
        title: "CPU and memory on nodes of 100, 500 and 1,000 pods",
        panels: [("cpu_", "CPU at rest, % of one core"), ("rss_", "resident memory, MiB")],
    },
    Chart {
        name: "footprint",
        title: "CPU and memory on nodes of 1, 20 and 110 pods",
        panels: [("cpu_", "CPU at rest, seconds per minute"), ("rss_", "resident memory, MiB")],
    },
];

/// A node's size, and what the agent and the kubelet took on it.
struct Bars {
    pods: usize,
    ours: f64,
    theirs: Option<f64>,
}

/// Draws docs/pictures/density.svg and footprint.svg from docs/density.json and footprint.json.
pub(super) fn draw() -> Result<()> {
    let docs = workdir::repository().join("docs");
    for chart in &CHARTS {
        let drawn = chart.svg(&docs)?;
        workdir::write(&docs.join("pictures").join(format!("{}.svg", chart.name)), drawn)?;
    }
    Ok(())
}

impl Chart {
    fn svg(&self, docs: &Path) -> Result<String> {
        let file = docs.join(format!("{}.json", self.name));
        let text = workdir::read(&file)?;
        let parsed: Result<Vec<Row>, _> =
            text.lines().filter(|line| line.starts_with('{')).map(serde_json::from_str).collect();
        let rows = parsed.with_context(|| format!("{} is not what the bench prints", file.display()))?;
        let mut body = String::new();
        let mut high = 0;
        for (index, (start, caption)) in self.panels.iter().enumerate() {
            let bars = bars(&rows, start);
            if bars.is_empty() {
                bail!("{} has no row {start}", file.display());
            }
            let bound = rows.iter().find(|row| row.row.starts_with(start)).and_then(|row| row.bound);
            high = high.max(panel(&mut body, index * PANEL, caption, &bars, bound));
        }
        let wide = PANEL * self.panels.len();
        Ok(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{wide}\" height=\"{high}\" viewBox=\"0 0 {wide} {high}\" \
             role=\"img\">\n<title>{}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
             <g font-family=\"DejaVu Sans, Verdana, sans-serif\" font-size=\"12\" fill=\"{TEXT}\">\n{body}</g>\n</svg>\n",
            self.title
        ))
    }
}

/// Returns the bars of the rows whose names are `start` and a number of pods.
fn bars(rows: &[Row], start: &str) -> Vec<Bars> {
    let pods = |row: &Row| row.row.strip_prefix(start)?.split('_').next()?.parse().ok();
    let bars = |row: &Row| {
        Some(Bars { pods: pods(row)?, ours: row.p50, theirs: row.compare.get("kubelet").copied() })
    };
    let mut all: Vec<Bars> = rows.iter().filter_map(bars).collect();
    all.sort_by_key(|bars| bars.pods);
    all
}

/// Draws a panel, and returns its height. All bars of a panel have one scale, from zero.
fn panel(body: &mut String, left: usize, caption: &str, all: &[Bars], bound: Option<f64>) -> usize {
    let most = all.iter().flat_map(|bars| [bars.ours, bars.theirs.unwrap_or(0.0)]).fold(0.0, f64::max);
    let most = bound.map_or(most, |bound| most.max(bound));
    let length = |value: f64| (value / most * LONGEST as f64).round().max(1.0);
    let text = |body: &mut String, x: usize, y: usize, rest: &str, text: &str| {
        let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\"{rest}>{text}</text>");
    };
    text(body, left + 16, 26, " font-size=\"14\" font-weight=\"bold\"", caption);
    if let Some(bound) = bound {
        let x = left + LEFT + length(bound) as usize;
        let rows: usize = all.iter().map(|bars| 1 + usize::from(bars.theirs.is_some())).sum();
        let end = CAPTION + rows * BAR + all.len() * GAP;
        let _ = writeln!(
            body,
            "<path d=\"M{x} {}V{end}\" stroke=\"{BOUND}\" stroke-dasharray=\"4 3\"/>",
            CAPTION - 6
        );
        let (middle, words) =
            (format!(" text-anchor=\"middle\" fill=\"{BOUND}\""), format!("bound {}", number(bound)));
        text(body, x, end + 14, &middle, &words);
    }
    let mut y = CAPTION;
    for bars in all {
        let rows = [("beelet", OURS, Some(bars.ours)), ("kubelet", THEIRS, bars.theirs)];
        let rows: Vec<_> =
            rows.into_iter().filter_map(|(name, colour, value)| Some((name, colour, value?))).collect();
        let middle = y + rows.len() * BAR / 2 + 4;
        text(body, left + LEFT - 10, middle, " text-anchor=\"end\"", &pods(bars.pods));
        for (name, colour, value) in rows {
            let wide = length(value);
            let _ = writeln!(
                body,
                "<rect x=\"{}\" y=\"{y}\" width=\"{wide}\" height=\"{}\" fill=\"{colour}\"/>",
                left + LEFT,
                BAR - 2
            );
            let x = left + LEFT + wide as usize + 6;
            text(body, x, y + 13, HALO, &format!("{} {name}", number(value)));
            y += BAR;
        }
        y += GAP;
    }
    y + 26
}

fn pods(count: usize) -> String {
    match count {
        1 => "1 pod".to_owned(),
        1000.. => format!("{},{:03} pods", count / 1000, count % 1000),
        _ => format!("{count} pods"),
    }
}

/// Formats a value with three digits at most.
fn number(value: f64) -> String {
    let digits = if value >= 100.0 { 0 } else { usize::from(value < 1.0) + 1 };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_charts_are_what_the_kept_data_draws() {
        let docs = workdir::repository().join("docs");
        for chart in &CHARTS {
            let kept = workdir::read(&docs.join("pictures").join(format!("{}.svg", chart.name))).unwrap();
            assert!(kept == chart.svg(&docs).unwrap(), "{}: run `cargo xtask docs --charts`", chart.name);
        }
    }

    #[test]
    fn bars_have_the_order_of_the_sizes_and_one_scale() {
        let rows = r#"[{"row":"cpu_1000","p50":4.0,"bound":5.0,"compare":{"kubelet":8.0}},{"row":"cpu_20_pods","p50":2.0},
                       {"row":"rss_20","p50":1.0},{"row":"cpu_high","p50":9.0}]"#;
        let rows: Vec<Row> = serde_json::from_str(rows).unwrap();
        let all = bars(&rows, "cpu_");
        assert_eq!(all.iter().map(|bars| bars.pods).collect::<Vec<_>>(), [20, 1000]);
        let mut body = String::new();
        panel(&mut body, 0, "CPU", &all, Some(5.0));
        for width in [LONGEST, LONGEST / 2, LONGEST.div_ceil(4)] {
            assert!(body.contains(&format!("width=\"{width}\"")), "{body}");
        }
        assert!(body.contains("1,000 pods") && body.contains("bound 5"), "{body}");
    }

    #[test]
    fn a_number_has_three_digits_at_most() {
        for (value, text) in [(151.4, "151"), (48.5, "48.5"), (4.0, "4"), (0.25, "0.25"), (0.0, "0")] {
            assert_eq!(number(value), text);
        }
    }
}
