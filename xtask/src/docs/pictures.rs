//! The pictures of the README and of the site: what a terminal shows, as SVG. The demo runs in a terminal of
//! its own; a terminal emulator reads its output, and each cell of the screen becomes text with its colours.

use crate::progress::Step;
use crate::{lab, shell};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Size of the terminal, in cells.
const SIZE: (u16, u16) = (13, 112);
/// Size of a cell of 14 px text, in hundredths of a pixel.
const CELL: (usize, usize) = (843, 1900);
/// Space around the text, in pixels.
const MARGIN: usize = 14;
/// Time in which `beelet top` gathers a trend.
const TIME_OF_TOP: Duration = Duration::from_secs(20);

/// The colours of a terminal: background, text, then the eight normal and the eight bright ones.
const BACKGROUND: &str = "#1b1f27";
const TEXT: &str = "#d6dae3";
const COLOURS: [&str; 16] = [
    "#3b4252", "#e06c75", "#8cc570", "#e0b05c", "#6aa8ee", "#c58be0", "#5cc0cc", "#d6dae3", "#6b7489",
    "#f08a92", "#a6d98b", "#f2c77e", "#8abff8", "#d7a6ee", "#7fd6e0", "#ffffff",
];

/// Runs the demo and draws `docs/pictures/demo.svg` and `top.svg`.
pub(super) fn draw() -> Result<()> {
    let folder = workdir::repository().join("docs/pictures");
    let step = Step::start("draw the demo");
    let shown = screen_of(&shown_by(lab::command_line("demo").arg("--keep"))?);
    let drawn = part(&shown, "A listener inside", 12).and_then(|lines| {
        workdir::write(
            &folder.join("demo.svg"),
            svg(&lines, "The demo closes and opens a listener inside a pod"),
        )?;
        top(&shown, &folder.join("top.svg"))
    });
    shell::run(lab::command_line("demo").arg("--stop"))?;
    drawn?;
    step.done("docs/pictures");
    Ok(())
}

/// Draws `beelet top` of the demo that runs.
fn top(demo: &[Vec<Cell>], to: &Path) -> Result<()> {
    let text: Vec<String> =
        demo.iter().map(|line| line.iter().map(|cell| cell.text.as_str()).collect()).collect();
    let socket = text
        .iter()
        .flat_map(|line| line.split_whitespace())
        .find_map(|word| word.strip_prefix("BEELET_SOCKET="));
    let socket = socket.context("the demo named no socket")?;
    let program = std::env::var_os("BEELET_BIN")
        .map_or_else(|| workdir::target_dir().join("debug/beelet"), PathBuf::from);
    let (rows, columns) = SIZE;
    let inner = format!("stty rows {rows} cols {columns}; exec {} top --socket {socket}", program.display());
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &inner, "/dev/null"]).env("TERM", "xterm-256color");
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("could not start script")?;
    let (mut keys, mut output) =
        (child.stdin.take().context("no input")?, child.stdout.take().context("no output")?);
    let typist = std::thread::spawn(move || {
        std::thread::sleep(TIME_OF_TOP);
        let _ = keys.write_all(b"q");
        keys
    });
    let mut bytes = Vec::new();
    output.read_to_end(&mut bytes).context("could not read the output of beelet top")?;
    drop(typist.join());
    child.wait().context("could not wait for beelet top")?;
    // The program leaves its screen at the end.
    const LEAVE: &[u8] = b"\x1b[?1049l";
    let end = bytes.windows(LEAVE.len()).position(|window| window == LEAVE).unwrap_or(bytes.len());
    let screen = screen_of(&bytes[..end]);
    workdir::write(to, svg(&screen, "beelet top: usage and waits of the demo's pods"))
}

/// Returns the output of a program, with colours.
fn shown_by(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.env("CLICOLOR_FORCE", "1").stderr(Stdio::inherit()).output();
    let output = output.context("could not start the demo")?;
    if !output.status.success() {
        bail!("the demo ended with {}: {}", output.status, String::from_utf8_lossy(&output.stdout));
    }
    // A terminal starts a new line at its left edge.
    Ok(String::from_utf8_lossy(&output.stdout).replace('\n', "\r\n").into_bytes())
}

/// A cell of the screen.
#[derive(Clone, Debug, PartialEq, Default)]
struct Cell {
    text: String,
    colour: Option<String>,
    background: Option<String>,
    is_bold: bool,
}

/// Returns the lines that a terminal shows after this output; the terminal is high enough for all of them.
fn screen_of(output: &[u8]) -> Vec<Vec<Cell>> {
    let lines = output.iter().filter(|byte| **byte == b'\n').count() + 1;
    let is_screen = output.windows(8).any(|window| window == b"\x1b[?1049h");
    let (rows, columns) =
        if is_screen { SIZE } else { (u16::try_from(lines).unwrap_or(u16::MAX).max(SIZE.0), 400) };
    let size = |cells: u16| NonZeroU16::new(cells).unwrap_or(NonZeroU16::MIN);
    let mut parser = vt100::Parser::new(size(rows), size(columns), 0);
    parser.process(output);
    let screen = parser.screen();
    let line =
        |row| (0..columns).map(|column| screen.cell(row, column).map(cell).unwrap_or_default()).collect();
    (0..rows).map(line).collect()
}

fn cell(of: &vt100::Cell) -> Cell {
    let (mut colour, mut background) = (hex(of.fgcolor()), hex(of.bgcolor()));
    if of.inverse() {
        (colour, background) = (
            Some(background.unwrap_or_else(|| BACKGROUND.to_owned())),
            Some(colour.unwrap_or_else(|| TEXT.to_owned())),
        );
    }
    let text = if of.has_contents() { of.contents().to_owned() } else { " ".to_owned() };
    Cell { text, colour, background, is_bold: of.bold() }
}

fn hex(colour: vt100::Color) -> Option<String> {
    match colour {
        vt100::Color::Default => None,
        vt100::Color::Rgb(r, g, b) => Some(format!("#{r:02x}{g:02x}{b:02x}")),
        vt100::Color::Idx(index @ 0..16) => Some(COLOURS[usize::from(index)].to_owned()),
        vt100::Color::Idx(index @ 16..232) => {
            let level = |part: u8| if part == 0 { 0 } else { 55 + 40 * part };
            let index = index - 16;
            Some(format!("#{:02x}{:02x}{:02x}", level(index / 36), level(index / 6 % 6), level(index % 6)))
        }
        vt100::Color::Idx(index) => {
            let level = 8 + 10 * (index - 232);
            Some(format!("#{level:02x}{level:02x}{level:02x}"))
        }
    }
}

/// Returns the lines from the one with this text on, up to a number.
fn part(lines: &[Vec<Cell>], start: &str, count: usize) -> Result<Vec<Vec<Cell>>> {
    let text = |line: &Vec<Cell>| line.iter().map(|cell| cell.text.as_str()).collect::<String>();
    let at = lines.iter().position(|line| text(line).contains(start));
    let at = at.with_context(|| format!("the demo printed no line with {start:?}"))?;
    Ok(lines[at..].iter().take(count).cloned().collect())
}

/// Draws lines of cells; blanks at the ends of lines and empty lines at the end are left out.
fn svg(lines: &[Vec<Cell>], title: &str) -> String {
    let blank = |cell: &Cell| cell.text.trim().is_empty() && cell.background.is_none();
    let width = |line: &Vec<Cell>| line.iter().rposition(|cell| !blank(cell)).map_or(0, |last| last + 1);
    let rows = lines.iter().rposition(|line| width(line) > 0).map_or(0, |last| last + 1);
    let columns = lines.iter().map(width).max().unwrap_or(0);
    let (wide, high) = (columns * CELL.0 / 100 + 2 * MARGIN, rows * CELL.1 / 100 + 2 * MARGIN);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{wide}\" height=\"{high}\" viewBox=\"0 0 {wide} {high}\" role=\"img\">\n\
         <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{BACKGROUND}\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"14\" xml:space=\"preserve\">\n"
    );
    for (row, line) in lines.iter().take(rows).enumerate() {
        let top = MARGIN + row * CELL.1 / 100;
        let mut from = 0;
        while from < width(line) {
            let style = |cell: &Cell| (cell.colour.clone(), cell.background.clone(), cell.is_bold);
            let end = line[from..width(line)].iter().position(|cell| style(cell) != style(&line[from]));
            let to = end.map_or(width(line), |length| from + length);
            run(&mut text, &line[from..to], MARGIN + from * CELL.0 / 100, top);
            from = to;
        }
    }
    text.push_str("</g>\n</svg>\n");
    text
}

/// Draws cells of one style. Each run has its own length, so that another font keeps the columns.
fn run(text: &mut String, cells: &[Cell], left: usize, top: usize) {
    let wide = cells.len() * CELL.0 / 100;
    let Some(first) = cells.first() else { return };
    if let Some(background) = &first.background {
        let high = CELL.1 / 100 + 1;
        let _ = writeln!(
            text,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{wide}\" height=\"{high}\" fill=\"{background}\"/>"
        );
    }
    let content: String = cells.iter().map(|cell| cell.text.as_str()).collect();
    if content.trim().is_empty() {
        return;
    }
    let content =
        content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace(' ', "\u{a0}");
    let (colour, weight) =
        (first.colour.as_deref().unwrap_or(TEXT), if first.is_bold { " font-weight=\"bold\"" } else { "" });
    let base = top + 14;
    let _ = writeln!(
        text,
        "<text x=\"{left}\" y=\"{base}\" textLength=\"{wide}\" lengthAdjust=\"spacingAndGlyphs\" fill=\"{colour}\"{weight}>{content}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_and_special_characters_of_a_terminal_are_drawn() {
        let lines = screen_of(b"\x1b[1;31mA<B\x1b[0m c\r\n\r\n\x1b[7mx\x1b[0m\r\n");
        let drawn = svg(&lines, "t");
        assert!(drawn.contains("fill=\"#e06c75\" font-weight=\"bold\">A&lt;B</text>"), "{drawn}");
        assert!(drawn.contains(&format!("fill=\"{TEXT}\">\u{a0}c</text>")), "{drawn}");
        assert!(drawn.contains(&format!("fill=\"{TEXT}\"/>\n<text")), "{drawn}");
        // Three lines of text, and none of the empty ones below.
        assert!(drawn.contains(&format!("height=\"{}\"", 3 * CELL.1 / 100 + 2 * MARGIN)), "{drawn}");
    }

    #[test]
    fn the_part_begins_at_its_line() {
        let lines = screen_of(b"one\r\ntwo\r\nthree\r\n");
        assert_eq!(part(&lines, "two", 1).unwrap().len(), 1);
        assert!(part(&lines, "four", 1).is_err());
    }
}
