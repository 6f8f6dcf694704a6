//! Plot docs/tuner.svg: the server's latency by percentile, with a panel per scenario. A run measures some
//! scenarios in half an hour to more than an hour, so the data is kept in docs/tuner.json: a run replaces its
//! own panels, and draws all of them.

use super::node::Run;
use super::scenarios::{SCENARIOS, Scenario};
use super::{Measured, p99};
use crate::bench::median;
use anyhow::{Context as _, Result};
use beelet_tests::workdir;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum number of panels per row.
const COLUMNS: usize = 2;
/// Size of a panel in pixels.
const PANEL: (u32, u32) = (460, 300);

/// Latencies in milliseconds by percentile, in ascending order.
type Line = Vec<(f64, f64)>;
/// Lines by scenario and mode of the tuner.
type Panels = BTreeMap<String, BTreeMap<String, Line>>;

/// Lines of a panel with their colours, in drawing order.
const LINES: [(&str, RGBColor); 3] = [
    ("alone", RGBColor(70, 130, 60)),
    ("tuner off", RGBColor(200, 60, 40)),
    ("tuner enforces", RGBColor(40, 90, 180)),
];

/// Draws into `tuner.svg` of the folder: for each measured scenario the run with the median 99th percentile,
/// and the kept data of the others.
pub(super) fn draw(folder: &Path, alone: &[Run], scenarios: &[&Scenario], all: &[Measured]) -> Result<()> {
    let kept = folder.join("tuner.json");
    let mut panels = if kept.exists() { read(&kept)? } else { Panels::new() };
    for (scenario, measured) in scenarios.iter().zip(all) {
        let runs = LINES.iter().zip([alone, &measured.off, &measured.enforce]);
        let lines = runs.filter_map(|((name, _), runs)| Some((*name, typical(runs)?)));
        let lines = lines.map(|(name, run)| (name.to_owned(), run.latencies().to_vec())).collect();
        panels.insert(scenario.name.to_owned(), lines);
    }
    workdir::write(&kept, text(&panels)?)?;
    draw_panels(&folder.join("tuner.svg"), &panels)
}

fn read(file: &Path) -> Result<Panels> {
    let text = workdir::read(file)?;
    serde_json::from_str(&text)
        .with_context(|| format!("cannot parse the data of earlier runs in {}", file.display()))
}

/// Formats JSON with a line per scenario.
fn text(panels: &Panels) -> Result<String> {
    let line = |(scenario, lines)| {
        Ok(format!("  {}: {}", serde_json::to_string(scenario)?, serde_json::to_string(lines)?))
    };
    let lines: Vec<String> = panels.iter().map(line).collect::<Result<_>>()?;
    Ok(format!("{{\n{}\n}}\n", lines.join(",\n")))
}

fn draw_panels(file: &Path, panels: &Panels) -> Result<()> {
    let known = SCENARIOS.iter().filter_map(|scenario| Some((scenario.name, panels.get(scenario.name)?)));
    let known: Vec<_> = known.collect();
    let columns = known.len().clamp(1, COLUMNS);
    let rows = known.len().div_ceil(columns);
    let area =
        SVGBackend::new(file, (PANEL.0 * columns as u32, PANEL.1 * u32::try_from(rows)?)).into_drawing_area();
    area.fill(&WHITE)?;
    for (panel, (name, lines)) in area.split_evenly((rows, columns)).iter().zip(known) {
        draw_panel(panel, name, lines)?;
    }
    area.present().context("cannot write the plot")
}

fn typical(runs: &[Run]) -> Option<&Run> {
    let middle = median(&p99(runs));
    runs.iter().find(|run| run.at(99.0) == middle)
}

/// Draws latency by percentile, both axes logarithmic: rarer requests are further right.
fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    name: &str,
    lines: &BTreeMap<String, Line>,
) -> Result<()> {
    let last = lines.values().filter_map(|line| line.last());
    let most = last.map(|(_, latency)| *latency).fold(1.0, f64::max) * 1.5;
    let mut chart = ChartBuilder::on(area)
        .caption(name, ("sans-serif", 16))
        .margin(10)
        .margin_right(24)
        .x_label_area_size(38)
        .y_label_area_size(52)
        .build_cartesian_2d((1.0..10_000.0).log_scale(), (0.5..most).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("one request in")
        .y_desc("latency, ms")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y}"))
        .draw()?;
    for (name, colour) in LINES {
        let Some(line) = lines.get(name) else { continue };
        let points =
            line.iter().map(|(percentile, latency)| (100.0 / (100.0 - percentile).max(0.01), *latency));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_run_measured_is_kept_and_drawn() {
        let folder = tempfile::tempdir().unwrap();
        let line = |latency| vec![(50.0, 1.0), (99.0, latency)];
        let panel = |latency| BTreeMap::from([("tuner off".to_owned(), line(latency))]);
        let known = Panels::from([("quota".to_owned(), panel(30.0)), ("crowd".to_owned(), panel(4.0))]);
        std::fs::write(folder.path().join("tuner.json"), text(&known).unwrap()).unwrap();
        let quota = SCENARIOS.iter().find(|scenario| scenario.name == "quota").unwrap();
        draw(folder.path(), &[], &[quota], &[Measured::default()]).unwrap();
        let kept = read(&folder.path().join("tuner.json")).unwrap();
        assert_eq!(kept["crowd"], known["crowd"]);
        assert!(kept["quota"].is_empty(), "this run measured nothing");
        let drawn = std::fs::read_to_string(folder.path().join("tuner.svg")).unwrap();
        assert!(drawn.contains("crowd") && drawn.contains("tuner off"), "{drawn}");
    }
}
