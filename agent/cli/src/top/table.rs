//! The rows of the interactive screen: the cursor and the part that is on the screen.

use super::row::Row;

/// The rows, and the position of the cursor.
#[derive(Debug)]
pub(super) struct Table {
    /// The rows, in order.
    pub(super) rows: Vec<Row>,
    /// Key of the row under the cursor: the cursor stays with its pod when the order changes.
    pub(super) selected: Option<String>,
    /// True once the user has moved the cursor; until then it stays at the first row.
    pub(super) moved: bool,
    /// The first row on the screen.
    pub(super) offset: usize,
    /// Number of rows that fit the screen, as of the last drawing.
    pub(super) page: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self { rows: Vec::new(), selected: None, moved: false, offset: 0, page: 1 }
    }
}

impl Table {
    /// Replaces the rows and restores the selection.
    pub(super) fn set(&mut self, rows: Vec<Row>) {
        let at = if self.moved { self.cursor() } else { 0 };
        self.rows = rows;
        let there = |key: &String| self.rows.iter().any(|row| row.key == *key);
        if !self.moved || !self.selected.as_ref().is_some_and(there) {
            // The selected row disappeared: the cursor keeps its position.
            self.selected =
                self.rows.get(at.min(self.rows.len().saturating_sub(1))).map(|row| row.key.clone());
        }
        self.scroll();
    }

    /// Returns the index of the selected row.
    pub(super) fn cursor(&self) -> usize {
        let selected = self.selected.as_ref();
        self.rows.iter().position(|row| Some(&row.key) == selected).unwrap_or(0)
    }

    /// Moves the cursor to a row, or to the last one.
    pub(super) fn go(&mut self, to: usize) {
        self.moved = true;
        let last = self.rows.len().saturating_sub(1);
        self.selected = self.rows.get(to.min(last)).map(|row| row.key.clone());
        self.scroll();
    }

    /// Scrolls so that the cursor is visible.
    pub(super) fn scroll(&mut self) {
        let cursor = self.cursor();
        let page = self.page.max(1);
        self.offset = self.offset.clamp((cursor + 1).saturating_sub(page), cursor);
        self.offset = self.offset.min(self.rows.len().saturating_sub(page));
    }
}
