//! Draws the screen from the state: head, table, foot and the help on top.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::app::{App, SORT_KEYS};
use super::columns::{COLUMNS, Column, Heat, Info, TREND_WIDTH, bytes, fitting, sparkline};
use super::row::Row;
use super::rows::TREND;

/// Lines above and below the table.
const HEAD: u16 = 3;
const FOOT: u16 = 2;
/// Minimum and maximum width of the name column.
const NAME: (u16, u16) = (18, 52);
/// Minimum width of the state column; a narrower one is omitted.
const LEAST_STATE: u16 = 8;
/// Width that the state column keeps before the trend column grows.
const ENOUGH_STATE: u16 = 40;
/// Width of a meter.
const METER: u16 = 22;

const FAINT: Style = Style::new().fg(Color::DarkGray);

/// Draws the whole screen.
pub(super) fn draw(app: &mut App, frame: &mut Frame<'_>) {
    let [head, table, foot] =
        Layout::vertical([Constraint::Length(HEAD), Constraint::Min(2), Constraint::Length(FOOT)])
            .areas(frame.area());
    app.table.page = usize::from(table.height.saturating_sub(1));
    app.table.scroll();
    draw_head(app, frame, head);
    let left_out = draw_table(app, frame, table);
    draw_foot(app, &left_out, frame, foot);
    if app.help.shown {
        draw_help(app, frame);
    }
}

fn draw_head(app: &App, frame: &mut Frame<'_>, area: Rect) {
    let Some(snapshot) = &app.snapshot else {
        frame.render_widget(Paragraph::new("beelet top  waiting for the agent's first snapshot…"), area);
        return;
    };
    let machine = snapshot.machine.clone().unwrap_or_default();
    let ready = snapshot.pods.iter().filter(|pod| pod.ready == Some(true)).count();
    let containers: usize =
        snapshot.pods.iter().flat_map(|pod| &pod.containers).filter(|container| container.running).count();
    let known = snapshot.pods.iter().any(|pod| pod.ready.is_some());
    let pods = if known {
        format!("{ready}/{} pods ready", snapshot.pods.len())
    } else {
        count(snapshot.pods.len(), "pod")
    };
    let source = if snapshot.by_kernel { "by BPF" } else { "from files" };
    let left_out = match snapshot.left_out {
        0 => String::new(),
        some => format!(", {some} not measured"),
    };
    let title = Line::from(vec![
        Span::styled(snapshot.node.clone(), Style::new().add_modifier(Modifier::BOLD)),
        Span::styled(format!(" ({}, {source})  ", snapshot.mode), FAINT),
        Span::raw(format!("{pods}, {}{left_out}", count(containers, "container"))),
    ]);
    let mut right = vec![Span::raw(format!("over {}", app.view.window.name()))];
    if app.frozen {
        right.insert(0, Span::styled(" FROZEN ", Style::new().fg(Color::Black).bg(Color::Yellow)));
        right.insert(1, Span::raw(" "));
    }
    let right = Line::from(right);
    let [left, end] = Layout::horizontal([Constraint::Min(0), Constraint::Length(width(&right))])
        .areas(Rect { height: 1, ..area });
    frame.render_widget(title, left);
    frame.render_widget(right, end);

    let cpus = f64::from(machine.cpus.max(1));
    let cpu = machine.cpu_10s.or(machine.cpu_1s);
    let load: Vec<String> = machine.load.iter().map(|load| format!("{load:.2}")).collect();
    let used = machine.memory_total_bytes.saturating_sub(machine.memory_available_bytes);
    let total = machine.memory_total_bytes.max(1) as f64;
    let mut lines = vec![
        meter("CPU", cpu.unwrap_or(0.0) / cpus, &format!("{:.1}/{}", cpu.unwrap_or(0.0), machine.cpus)),
        meter("Mem", used as f64 / total, &format!("{}/{}", bytes(used as f64), bytes(total))),
    ];
    lines[0].push_span(Span::styled("  load ", FAINT));
    lines[0].push_span(Span::raw(load.join(" ")));
    lines[1].push_span(Span::styled("  PSI ", FAINT));
    for (name, share) in [("cpu", machine.cpu_some), ("mem", machine.memory_some), ("io", machine.io_some)] {
        let Some(share) = share else { continue };
        lines[1].push_span(Span::styled(format!("{name} "), FAINT));
        lines[1].push_span(Span::styled(format!("{:.1}%  ", share * 100.0), heat(share, 0.1, 0.4)));
    }
    frame.render_widget(Paragraph::new(lines), Rect { y: area.y + 1, height: 2, ..area });
}

fn count(count: usize, of: &str) -> String {
    format!("{count} {of}{}", if count == 1 { "" } else { "s" })
}

fn heat(share: f64, warm: f64, hot: f64) -> Style {
    style(if share >= hot {
        Heat::Hot
    } else if share >= warm {
        Heat::Warm
    } else {
        Heat::Normal
    })
}

/// Draws a meter such as `CPU [||||||      1.2/4]`, as htop does.
fn meter(name: &str, share: f64, text: &str) -> Line<'static> {
    let room = usize::from(METER);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a share of a small width
    let full = (share.clamp(0.0, 1.0) * room as f64).round() as usize;
    let bar = format!("{:|<full$}{:room$}", "", "", room = room - full);
    // The text overlays the right end of the bar.
    let start = room.saturating_sub(text.chars().count());
    let shown: String = bar.chars().take(start).chain(text.chars()).take(room).collect();
    let (used, free): (String, String) =
        (shown.chars().take(full).collect(), shown.chars().skip(full).collect());
    Line::from(vec![
        Span::raw(format!("{name} [")),
        Span::styled(
            used,
            heat(share, 0.8, 0.95).patch(if share < 0.8 {
                Style::new().fg(Color::Green)
            } else {
                Style::new()
            }),
        ),
        Span::raw(free),
        Span::raw("]"),
    ])
}

fn width(line: &Line<'_>) -> u16 {
    u16::try_from(line.width()).unwrap_or(u16::MAX)
}

/// Draws the table and returns the titles of the columns that do not fit.
fn draw_table(app: &App, frame: &mut Frame<'_>, area: Rect) -> Vec<&'static str> {
    let longest = app.table.rows.iter().map(|row| label(row).chars().count()).max().unwrap_or(0);
    let longest = u16::try_from(longest).unwrap_or(u16::MAX).clamp(NAME.0, NAME.1);
    // Names take at most three tenths of the screen if columns would not fit otherwise.
    let by_kernel = app.snapshot.as_ref().is_none_or(|snapshot| snapshot.by_kernel);
    let columns = fitting(area.width, longest.min(NAME.0.max(area.width / 10 * 3)), by_kernel);
    let taken: u16 = columns.iter().map(|info| info.width + 1).sum();
    let free = area.width.saturating_sub(taken);
    let (name, state) = match free.checked_sub(longest + 1).filter(|rest| *rest >= LEAST_STATE) {
        Some(rest) => (longest, rest),
        None => (free, 0),
    };
    let wide = fitting(u16::MAX, longest, by_kernel).into_iter().map(|info| info.title);
    let is_shown = |title: &&str| columns.iter().any(|info| info.title == *title);
    let mut left_out: Vec<&'static str> = wide.filter(|title| !is_shown(title)).collect();
    if state == 0 {
        left_out.push(Column::State.title());
    }
    let longest_trend = u16::try_from(TREND).unwrap_or(TREND_WIDTH) - TREND_WIDTH;
    let more = state.saturating_sub(ENOUGH_STATE).min(longest_trend);
    let shape = Shape { columns, name, state: state - more, trend: TREND_WIDTH + more };
    let line = |y: u16| Rect { y: area.y + y, height: 1, ..area };
    frame.render_widget(head_line(app, &shape), line(0));
    let shown = app.table.rows.iter().enumerate().skip(app.table.offset).take(app.table.page);
    for (y, (index, row)) in (1..).zip(shown) {
        let selected = index == app.table.cursor();
        frame.render_widget(row_line(row, &shape, selected), line(y));
    }
    if app.table.rows.is_empty() && app.snapshot.is_some() {
        let why =
            if app.view.filter.is_empty() { "no pods" } else { "no row matches the filter; Esc clears it" };
        frame.render_widget(Span::styled(why, FAINT), line(1));
    }
    left_out
}

/// Displayed columns, and the widths of the flexible ones.
struct Shape {
    columns: Vec<&'static Info>,
    name: u16,
    /// Width of the state column; 0 hides it.
    state: u16,
    trend: u16,
}

impl Shape {
    fn width(&self, info: &Info) -> usize {
        usize::from(if info.column == Column::Trend { self.trend } else { info.width })
    }
}

fn head_line(app: &App, shape: &Shape) -> Line<'static> {
    let base = Style::new().fg(Color::Black).bg(Color::Green);
    let of = |column: Column| {
        if column == app.view.sort { base.bg(Color::Cyan).add_modifier(Modifier::BOLD) } else { base }
    };
    let mut spans = vec![Span::styled(fit(Column::Name.title(), shape.name), of(Column::Name))];
    for info in &shape.columns {
        let text = format!(" {:>width$}", info.title, width = shape.width(info));
        spans.push(Span::styled(text, of(info.column)));
    }
    if shape.state > 0 {
        spans.push(Span::styled(format!(" {}", fit(Column::State.title(), shape.state)), of(Column::State)));
    }
    Line::from(spans)
}

fn row_line(row: &Row, shape: &Shape, selected: bool) -> Line<'static> {
    let plain = if row.is_pod { Style::new() } else { Style::new().fg(Color::Gray) };
    let mut spans = vec![Span::styled(fit(&label(row), shape.name), plain)];
    for info in &shape.columns {
        let (mut text, heat) = (info.cell)(row);
        if info.column == Column::Trend {
            text = sparkline(&row.trend, usize::from(shape.trend));
        }
        let style = match info.column {
            // A reversed colour would fill the whole cell.
            Column::Trend if selected => Style::new(),
            Column::Trend => Style::new().fg(Color::Cyan),
            _ => style(heat),
        };
        spans.push(Span::styled(format!(" {text:>width$}", width = shape.width(info)), style));
    }
    if shape.state > 0 {
        let why = if row.why.is_empty() || row.why == row.state {
            row.state.clone()
        } else {
            format!("{}  {}", row.state, row.why)
        };
        let heat = if row.state == "Running" { Heat::Dim } else { Heat::Warm };
        spans.push(Span::styled(format!(" {}", fit(&why, shape.state)), style(heat)));
    }
    let line = Line::from(spans);
    if selected { line.style(Style::new().add_modifier(Modifier::REVERSED)) } else { line }
}

/// Returns a pod's name with a mark for expanded or collapsed, or a container's name, indented.
fn label(row: &Row) -> String {
    match (row.is_pod, row.expanded) {
        (true, true) => format!("▾ {}", row.name),
        (true, false) => format!("▸ {}", row.name),
        (false, _) => format!("    {}", row.name),
    }
}

/// Returns exactly `width` characters; truncated text ends with `…`.
fn fit(text: &str, width: u16) -> String {
    let width = usize::from(width);
    let length = text.chars().count();
    if length <= width {
        return format!("{text:width$}");
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    if width == 0 { String::new() } else { kept + "…" }
}

fn style(heat: Heat) -> Style {
    match heat {
        Heat::Dim => FAINT,
        Heat::Normal => Style::new(),
        Heat::Warm => Style::new().fg(Color::Yellow),
        Heat::Hot => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

/// Draws one line for the selected row and one for the keys.
fn draw_foot(app: &App, left_out: &[&str], frame: &mut Frame<'_>, area: Rect) {
    let first = Rect { height: 1, ..area };
    let second = Rect { y: area.y + 1, height: 1, ..area };
    if let Some((why, since)) = &app.trouble {
        let text = format!("{why} (for {} s)", since.elapsed().as_secs());
        frame.render_widget(Span::styled(text, style(Heat::Hot)), first);
    } else if let Some(row) = app.table.rows.get(app.table.cursor()) {
        frame.render_widget(details(row), first);
    }
    if app.typing || !app.view.filter.is_empty() {
        let mut spans = vec![Span::raw("filter: "), Span::raw(app.view.filter.clone())];
        if app.typing {
            spans.push(Span::styled(" ", Style::new().add_modifier(Modifier::REVERSED)));
        }
        let hint =
            if app.typing { "   Enter keeps it, Esc clears it" } else { "   / changes it, Esc clears it" };
        spans.push(Span::styled(hint, FAINT));
        frame.render_widget(Line::from(spans), second);
        return;
    }
    let keys = [
        ("q", "quit"),
        ("?", "help"),
        ("/", "filter"),
        ("<>", "sort"),
        ("⏎", "containers"),
        ("e", "all"),
        ("f", "freeze"),
        ("w", "window"),
    ];
    let spans = keys.iter().flat_map(|(key, what)| {
        [
            Span::styled(*key, Style::new().add_modifier(Modifier::BOLD)),
            Span::styled(format!(" {what}  "), FAINT),
        ]
    });
    let keys = Line::from_iter(spans);
    let room = area.width.saturating_sub(width(&keys));
    let hint = no_room_for(left_out, usize::from(room));
    frame.render_widget(keys, second);
    let taken = u16::try_from(hint.chars().count()).unwrap_or(u16::MAX).min(area.width);
    let end = Rect { x: area.x + area.width - taken, width: taken, ..second };
    frame.render_widget(Span::styled(hint, FAINT), end);
}

/// Returns the hidden columns by name, or their number if the names do not fit.
fn no_room_for(left_out: &[&str], room: usize) -> String {
    let names = format!("hidden: {}", left_out.join(" "));
    let number = format!("hidden: {}", count(left_out.len(), "column"));
    let fits = |text: &String| !left_out.is_empty() && text.chars().count() <= room;
    [names, number].into_iter().find(fits).unwrap_or_default()
}

/// Returns the details of a row that the table lacks.
fn details(row: &Row) -> Line<'static> {
    let numbers = &row.numbers;
    let mut parts = Vec::new();
    if !row.why.is_empty() {
        parts.push(row.why.clone());
    } else if row.state != "Running" {
        parts.push(row.state.clone());
    }
    parts.extend(row.waited.iter().cloned());
    if let Some(limit) = numbers.memory_limit {
        parts.push(format!("memory limit {}", bytes(limit as f64)));
    }
    if let Some(limit) = numbers.cpu_limit {
        parts.push(format!("CPU limit {limit:.2}"));
    }
    if numbers.oom_kills > 0 {
        parts.push(format!("{} OOM kills", numbers.oom_kills));
    }
    let names = ["cpu", "memory", "io"].into_iter().zip(numbers.stalled);
    let full: Vec<String> = names
        .filter_map(|(name, share)| Some((name, share?.1)))
        .filter(|(_, full)| *full >= 0.001)
        .map(|(name, full)| format!("{name} {:.1}%", full * 100.0))
        .collect();
    if !full.is_empty() {
        parts.push(format!("all stalled: {}", full.join(", ")));
    }
    Line::from(vec![
        Span::styled(row.name.clone(), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw("  "),
        Span::raw(parts.join("; ")),
    ])
}

/// Width of the help including its frame; fits an 80-column terminal.
const HELP: u16 = 78;

fn draw_help(app: &mut App, frame: &mut Frame<'_>) {
    let lines = help_lines();
    let area = frame.area();
    let height = u16::try_from(lines.len() + 2).unwrap_or(u16::MAX).min(area.height);
    let width = HELP.min(area.width);
    let popup = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    let hidden = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_sub(height.saturating_sub(2));
    app.help.offset = app.help.offset.min(hidden);
    let title =
        if hidden > 0 { " help: ↑ ↓ scroll, any other key closes " } else { " help: any key closes " };
    frame.render_widget(Clear, popup);
    let text = Paragraph::new(lines).block(Block::bordered().title(title)).scroll((app.help.offset, 0));
    frame.render_widget(text, popup);
}

fn help_lines() -> Vec<Line<'static>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let entry = |key: &str, what: &str| {
        Line::from(vec![Span::styled(format!(" {key:<12}"), bold), Span::raw(what.to_owned())])
    };
    let mut lines = vec![
        entry("↑ ↓ j k", "move; PgUp PgDn Ctrl-U Ctrl-D, Home g, End G"),
        entry("Enter Space", "show or hide the pod's containers; → ← show, hide; e all"),
        entry("/", "filter by name or state; Esc clears"),
        entry("< >", "sort by the column to the left or right; i reverses the order"),
        entry("f", "freeze the table; the trend continues"),
        entry("w", "window: 1 s, 10 s, 1 min"),
        entry("q Ctrl-C", "quit"),
        Line::default(),
        Line::styled(" Columns (and the key that sorts by one)", bold),
    ];
    lines.extend(COLUMNS.iter().map(|info| {
        let key = SORT_KEYS.iter().rev().find(|(_, column)| *column == info.column);
        let key = key.map_or_else(|| " ".to_owned(), |(key, _)| key.to_string());
        Line::from(vec![Span::styled(format!(" {key} {:<11}", info.title), bold), Span::raw(info.help)])
    }));
    lines
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{Event, KeyCode, KeyEvent};

    use super::super::rows::tests::{snapshot, view};
    use super::*;

    fn screen(app: &mut App, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(app, frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn app() -> App {
        let mut app = App::new(view());
        let mut snapshot = snapshot(&[
            ("shop", "web-node-1", 0.9, 1200.0),
            ("shop", "a-pod-with-a-very-long-name-node-1", 0.1, 5.0),
        ]);
        snapshot.pods[1].ready = Some(false);
        snapshot.pods[1].not_ready = "ContainersNotReady: containers with unready status: [app]".into();
        app.update(snapshot);
        app
    }

    #[test]
    fn everything_important_is_there_at_80_by_24() {
        let lines = screen(&mut app(), 80, 24);
        let text = lines.join("\n");
        assert!(lines[0].starts_with("node-1 (run, by BPF)  1/2 pods ready, 4 containers"), "{text}");
        assert!(lines[0].ends_with("over 10s"), "{text}");
        assert!(
            lines[1].starts_with("CPU [||||||||") && lines[1].contains("1.5/4]  load 0.50 1.00 1.50"),
            "{text}"
        );
        assert!(lines[2].contains("4.0G/16G]  PSI cpu 10.0%  mem 0.0%  io 2.0%"), "{text}");
        for title in ["POD / CONTAINER", "RDY", "CPU%", "RQ99", "MEM", "LIM%", "CPU~"] {
            assert!(lines[3].contains(title), "{title} is missing:\n{text}");
        }
        assert!(lines[4].starts_with("▸ shop/web-node-1") && lines[4].contains("180.0"), "{text}");
        assert!(lines[5].starts_with("▸ shop/a-pod-with-") && lines[5].contains('…'), "{text}");
        assert!(lines[5].contains("NO"), "{text}");
        assert!(lines[22].starts_with("shop/web-node-1  memory limit 128M"), "{text}");
        assert!(lines[23].starts_with("q quit"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_wide_terminal_shows_every_column_whole_names_and_why() {
        let lines = screen(&mut app(), 200, 60);
        let text = lines.join("\n");
        for info in COLUMNS {
            assert!(lines[3].contains(info.title), "{} is missing:\n{text}", info.title);
        }
        assert!(lines[5].starts_with("▸ shop/a-pod-with-a-very-long-name-node-1 "), "{text}");
        assert!(lines[5].contains("Running  ContainersNotReady"), "{text}");
    }

    #[test]
    fn what_there_is_no_room_for_is_said_at_the_foot() {
        let foot = |width: u16| screen(&mut app(), width, 24)[23].clone();
        assert!(foot(110).contains("  hidden: "), "{}", foot(110));
        assert!(foot(80).ends_with("w window"), "{}", foot(80));
        assert!(!foot(200).contains("hidden"), "{}", foot(200));
        assert_eq!(no_room_for(&["AGE", "STATE"], 17), "hidden: AGE STATE");
        assert_eq!(no_room_for(&["AGE", "STATE"], 16), "");
        assert_eq!(no_room_for(&["RX/s", "TX/s", "AGE", "STATE"], 22), "hidden: 4 columns");
        assert_eq!(no_room_for(&[], 99), "");
    }

    #[test]
    fn a_trend_of_nothing_is_no_block_of_colour_in_the_row_that_is_selected() {
        let mut app = app();
        let mut terminal = Terminal::new(TestBackend::new(200, 24)).unwrap();
        terminal.draw(|frame| draw(&mut app, frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let selected = (0..200).map(|x| &buffer[(x, 4)]);
        let coloured = selected.filter(|cell| cell.symbol() == " " && cell.fg == Color::Cyan).count();
        assert_eq!(coloured, 0);
        assert!(buffer[(0, 4)].modifier.contains(Modifier::REVERSED), "another row is selected");
    }

    #[test]
    fn no_size_makes_it_panic() {
        for (width, height) in [(1, 1), (2, 4), (10, 5), (30, 6), (79, 3), (500, 200)] {
            let mut app = app();
            app.help.shown = true;
            screen(&mut app, width, height);
            app.help.shown = false;
            app.view.filter = "x".into();
            screen(&mut app, width, height);
        }
    }

    #[test]
    fn the_help_names_every_column_and_scrolls_where_it_is_longer_than_the_screen() {
        let mut app = app();
        app.help.shown = true;
        let text = screen(&mut app, 100, 40).join("\n");
        for info in COLUMNS {
            assert!(text.contains(info.title), "{} is missing:\n{text}", info.title);
        }
        let small = screen(&mut app, 80, 24).join("\n");
        assert!(small.contains("scroll") && !small.contains("AGE"), "{small}");
        for _ in 0..30 {
            app.event(&Event::Key(KeyEvent::from(KeyCode::Down)));
        }
        assert!(screen(&mut app, 80, 24).join("\n").contains("AGE"));
    }

    #[test]
    fn no_line_of_the_help_is_cut() {
        for line in help_lines() {
            assert!(line.width() <= usize::from(HELP) - 2, "{} characters: {line}", line.width());
        }
    }

    #[test]
    fn what_is_wrong_is_said_at_the_foot() {
        let mut app = app();
        app.lost("the agent stopped; waiting for it".into());
        assert!(screen(&mut app, 80, 24)[22].starts_with("the agent stopped; waiting for it (for 0 s)"));
        let mut empty = App::new(view());
        assert!(screen(&mut empty, 80, 24)[0].contains("waiting for the agent"));
        empty.update(snapshot(&[]));
        assert!(screen(&mut empty, 80, 24)[4].contains("no pods"));
    }
}
