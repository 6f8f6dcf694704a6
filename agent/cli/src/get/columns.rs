//! Lines in columns, aligned as kubectl does: left, three blanks apart, never truncated. A cell may contain
//! arbitrary text and stays on its line.

use console::measure_text_width;

use crate::plain;

/// Column widths of a table that grows line by line; a column never shrinks.
#[derive(Debug)]
pub(crate) struct Columns {
    titles: Vec<String>,
    widths: Vec<usize>,
    has_titles: bool,
}

impl Columns {
    pub(crate) fn new(titles: &[&str]) -> Self {
        let widths = titles.iter().map(|title| measure_text_width(title)).collect();
        Self { titles: titles.iter().map(|title| (*title).to_owned()).collect(), widths, has_titles: true }
    }

    /// Sets whether the table has its line of titles. Without it, the titles do not count for the widths.
    pub(crate) fn titled(mut self, has_titles: bool) -> Self {
        self.has_titles = has_titles;
        if !has_titles {
            self.widths.fill(0);
        }
        self
    }

    /// Widens every column to fit `row`.
    pub(crate) fn fit(&mut self, row: &[String]) {
        for (width, cell) in self.widths.iter_mut().zip(row) {
            *width = (*width).max(measure_text_width(&plain::line(cell)));
        }
    }

    /// Returns a complete table: titles and rows, each column as wide as its widest cell.
    pub(crate) fn table(mut self, rows: &[Vec<String>]) -> String {
        rows.iter().for_each(|row| self.fit(row));
        self.header() + &rows.iter().map(|row| self.line(row)).collect::<String>()
    }

    /// Returns the line of titles, empty if the table has none.
    pub(crate) fn header(&self) -> String {
        if self.has_titles { self.line(&self.titles) } else { String::new() }
    }

    pub(crate) fn line(&self, row: &[String]) -> String {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&self.widths) {
            let cell = plain::line(cell);
            line += &cell;
            line += &" ".repeat(width.saturating_sub(measure_text_width(&cell)) + 3);
        }
        line.truncate(line.trim_end().len());
        line.push('\n');
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_have_no_tail() {
        let mut columns = Columns::new(&["NAME", "AGE"]);
        let rows = [["a".to_owned(), "5m".to_owned()], ["a-longer-one".to_owned(), "1d".to_owned()]];
        rows.iter().for_each(|row| columns.fit(row));
        let text = columns.header() + &columns.line(&rows[0]) + &columns.line(&rows[1]);
        assert_eq!(text, "NAME           AGE\na              5m\na-longer-one   1d\n");
    }

    #[test]
    fn a_cell_cannot_leave_its_line_or_steer_the_terminal() {
        let rows = [vec!["a\nweb   Running".to_owned(), "\u{1b}[1Ax".to_owned()]];
        let text = Columns::new(&["NAME", "AGE"]).table(&rows);
        assert_eq!(text, "NAME               AGE\na\\nweb   Running   \\u{1b}[1Ax\n");
    }
}
