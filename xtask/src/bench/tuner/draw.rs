//! docs/tuner.svg: the server's latency by percentile, one panel per scenario.

use super::node::Run;
use super::scenarios::Scenario;
use super::{Measured, p99};
use crate::bench::median;
use anyhow::{Context as _, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

/// Panels side by side, at most.
const COLUMNS: usize = 2;
/// Pixels of each.
const PANEL: (u32, u32) = (460, 300);

/// Draws of each scenario the run whose 99th percentile is the median.
pub(super) fn draw(file: &Path, alone: &[Run], scenarios: &[&Scenario], all: &[Measured]) -> Result<()> {
    let columns = scenarios.len().clamp(1, COLUMNS);
    let rows = scenarios.len().div_ceil(columns);
    let area =
        SVGBackend::new(file, (PANEL.0 * columns as u32, PANEL.1 * u32::try_from(rows)?)).into_drawing_area();
    area.fill(&WHITE)?;
    let runs =
        alone.iter().chain(all.iter().flat_map(|measured| measured.off.iter().chain(&measured.enforce)));
    let most = runs.map(|run| run.at(99.99)).fold(1.0, f64::max) * 1.5;
    for ((panel, scenario), measured) in area.split_evenly((rows, columns)).iter().zip(scenarios).zip(all) {
        let lines = [
            ("alone", typical(alone)),
            ("tuner off", typical(&measured.off)),
            ("tuner enforces", typical(&measured.enforce)),
        ];
        draw_panel(panel, scenario.name, &lines, most)?;
    }
    area.present().context("could not write the plot")
}

fn typical(runs: &[Run]) -> Option<&Run> {
    let middle = median(&p99(runs));
    runs.iter().find(|run| run.at(99.0) == middle)
}

/// Latency by percentile, both axes logarithmic: the further right, the rarer.
fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    name: &str,
    lines: &[(&str, Option<&Run>)],
    most: f64,
) -> Result<()> {
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
    let colours = [(70, 130, 60), (200, 60, 40), (40, 90, 180)];
    for ((name, run), (red, green, blue)) in lines.iter().zip(colours) {
        let Some(run) = run else { continue };
        let colour = RGBColor(red, green, blue);
        let points = run.latencies().iter();
        let points = points.map(|(percentile, latency)| (100.0 / (100.0 - percentile).max(0.01), *latency));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)))?
            .label(*name)
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
