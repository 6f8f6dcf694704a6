//! State of the interactive screen and the effect of each key, independent of the terminal.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use beelet_proto::beelet::SignalSnapshot;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::causes::Causes;
use super::columns::{COLUMNS, Column};
use super::rows::{Trends, View, rows};
use super::table::Table;

/// State of the screen.
#[derive(Debug)]
pub(super) struct App {
    pub(super) view: View,
    /// Last snapshot from the agent; None before the first.
    pub(super) snapshot: Option<SignalSnapshot>,
    /// Known reasons why pods are not ready.
    causes: Arc<Causes>,
    trends: Trends,
    pub(super) table: Table,
    /// True while new snapshots are ignored.
    pub(super) frozen: bool,
    /// True while keys edit the filter.
    pub(super) typing: bool,
    pub(super) help: Help,
    /// Reason for missing snapshots, and the time of the first failure.
    pub(super) trouble: Option<(String, Instant)>,
    pub(super) done: bool,
}

impl App {
    pub(super) fn new(view: View) -> Self {
        Self {
            view,
            snapshot: None,
            causes: Arc::default(),
            trends: Trends::default(),
            table: Table::default(),
            frozen: false,
            typing: false,
            help: Help::default(),
            trouble: None,
            done: false,
        }
    }

    /// Stores a new snapshot. Returns false if the screen does not change.
    pub(super) fn update(&mut self, mut snapshot: SignalSnapshot) -> bool {
        self.trouble = None;
        self.trends.add(&snapshot);
        if self.frozen {
            return false;
        }
        self.causes.apply_to(&mut snapshot);
        self.snapshot = Some(snapshot);
        self.arrange();
        true
    }

    /// Stores reasons why pods are not ready. Returns false if the screen does not change.
    pub(super) fn learn(&mut self, causes: Arc<Causes>) -> bool {
        self.causes = causes;
        let Some(snapshot) = self.snapshot.as_mut().filter(|_| !self.frozen) else { return false };
        self.causes.apply_to(snapshot);
        self.arrange();
        true
    }

    /// Records that snapshots are missing.
    pub(super) fn lost(&mut self, why: String) {
        let since = self.trouble.as_ref().map_or_else(Instant::now, |(_, since)| *since);
        self.trouble = Some((why, since));
    }

    /// Rebuilds the rows.
    fn arrange(&mut self) {
        let snapshot = self.snapshot.as_ref();
        self.table.set(snapshot.map(|s| rows(s, &self.view, &self.trends)).unwrap_or_default());
    }

    /// Handles a key or a resize. Returns false if the screen does not change.
    pub(super) fn event(&mut self, event: &Event) -> bool {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                self.key(*key);
                true
            }
            Event::Resize(..) => true,
            _ => false,
        }
    }

    fn key(&mut self, key: KeyEvent) {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            match key.code {
                KeyCode::Char('c') => self.done = true,
                KeyCode::Char('d') => self.table.go(self.table.cursor() + self.table.page / 2),
                KeyCode::Char('u') if self.typing => self.filter(String::clear),
                KeyCode::Char('u') => self.table.go(self.table.cursor().saturating_sub(self.table.page / 2)),
                _ => {}
            }
        } else if self.typing {
            self.typed(key.code);
        } else if self.help.shown {
            self.help.key(key.code);
        } else {
            self.command(key.code);
        }
    }

    fn typed(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter(String::clear);
            }
            KeyCode::Backspace => self.filter(|filter| {
                filter.pop();
            }),
            KeyCode::Char(letter) => self.filter(|filter| filter.push(letter)),
            KeyCode::Up => self.table.go(self.table.cursor().saturating_sub(1)),
            KeyCode::Down => self.table.go(self.table.cursor() + 1),
            _ => {}
        }
    }

    fn command(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char('q') => self.done = true,
            KeyCode::Esc => self.filter(String::clear),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help.shown = true,
            KeyCode::Char('/') | KeyCode::F(4) => self.typing = true,
            KeyCode::Char('f' | 'p') => self.frozen = !self.frozen,
            KeyCode::Char('w') => {
                self.view.window = self.view.window.next();
                self.arrange();
            }
            KeyCode::Char('e') => {
                self.view.all_expanded = !self.view.all_expanded;
                self.view.expanded.clear();
                self.arrange();
            }
            KeyCode::Char('i') => {
                self.view.reversed = !self.view.reversed;
                self.arrange();
            }
            KeyCode::Enter | KeyCode::Char(' ') => self.toggle(),
            KeyCode::Right | KeyCode::Char('l' | '+') => self.expand(true),
            KeyCode::Left | KeyCode::Char('-') => self.expand(false),
            KeyCode::Up | KeyCode::Char('k') => self.table.go(self.table.cursor().saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.table.go(self.table.cursor() + 1),
            KeyCode::PageUp => self.table.go(self.table.cursor().saturating_sub(self.table.page)),
            KeyCode::PageDown => self.table.go(self.table.cursor() + self.table.page),
            KeyCode::Home | KeyCode::Char('g') => self.table.go(0),
            KeyCode::End | KeyCode::Char('G') => self.table.go(usize::MAX),
            KeyCode::Char('<' | ',') => self.sort_by_neighbour(false),
            KeyCode::Char('>' | '.') => self.sort_by_neighbour(true),
            KeyCode::Char(letter) => {
                if let Some((_, column)) = SORT_KEYS.iter().find(|(key, _)| *key == letter) {
                    self.sort(*column);
                }
            }
            _ => {}
        }
    }

    fn filter(&mut self, change: impl FnOnce(&mut String)) {
        change(&mut self.view.filter);
        self.arrange();
    }

    /// Sorts by the column, or reverses the order if it is the current one.
    fn sort(&mut self, column: Column) {
        self.view.reversed = self.view.sort == column && !self.view.reversed;
        self.view.sort = column;
        self.arrange();
    }

    fn sort_by_neighbour(&mut self, right: bool) {
        let all: Vec<Column> = [Column::Name]
            .into_iter()
            .chain(COLUMNS.iter().map(|info| info.column))
            .chain([Column::State])
            .collect();
        let at = all.iter().position(|column| *column == self.view.sort).unwrap_or(0);
        let step = if right { 1 } else { all.len() - 1 };
        self.view.reversed = false;
        self.view.sort = all[(at + step) % all.len()];
        self.arrange();
    }

    fn toggle(&mut self) {
        let expanded = self.table.rows.get(self.table.cursor()).is_some_and(|row| row.expanded);
        self.expand(!expanded);
    }

    /// Shows or hides the containers of the pod under the cursor, or of the pod whose container is under it.
    fn expand(&mut self, show: bool) {
        let Some(row) = self.table.rows.get(self.table.cursor()) else { return };
        self.table.moved = true;
        let uid = if row.is_pod { row.key.clone() } else { pod_of(&row.key).to_owned() };
        if self.view.all_expanded && !show {
            // Expands all other pods.
            let others = self.table.rows.iter().filter(|row| row.is_pod).map(|row| row.key.clone());
            self.view.expanded = others.collect::<HashSet<_>>();
            self.view.all_expanded = false;
        }
        if show {
            self.view.expanded.insert(uid);
        } else {
            self.view.expanded.remove(&uid);
            self.table.selected = Some(uid);
        }
        self.arrange();
    }
}

/// The page of keys.
#[derive(Debug, Default)]
pub(super) struct Help {
    pub(super) shown: bool,
    /// Number of lines by which the page is scrolled.
    pub(super) offset: u16,
}

impl Help {
    /// Handles a key while the help is shown.
    fn key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Down | KeyCode::Char('j') => self.offset += 1,
            KeyCode::Up | KeyCode::Char('k') => self.offset = self.offset.saturating_sub(1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.offset += 10,
            KeyCode::PageUp => self.offset = self.offset.saturating_sub(10),
            _ => *self = Self::default(),
        }
    }
}

/// Returns the pod's part of a key.
fn pod_of(key: &str) -> &str {
    key.split_once('/').map_or(key, |(uid, _)| uid)
}

/// Sort keys; upper case letters as in top(1) where it has them.
pub(super) const SORT_KEYS: &[(char, Column)] = &[
    ('N', Column::Name),
    ('P', Column::Cpu),
    ('c', Column::Cpu),
    ('T', Column::Throttled),
    ('t', Column::Throttled),
    ('r', Column::P99),
    ('M', Column::Memory),
    ('m', Column::Memory),
    ('L', Column::MemoryShare),
    ('C', Column::CpuPressure),
    ('x', Column::Retransmits),
    ('R', Column::Restarts),
    ('y', Column::Ready),
    ('A', Column::Age),
];

#[cfg(test)]
mod tests {
    use super::super::rows::tests::{snapshot, view};
    use super::*;

    fn app() -> App {
        let mut app = App::new(view());
        app.table.page = 3;
        app.update(snapshot(&[
            ("a", "x", 0.1, 5.0),
            ("a", "y", 0.9, 1.0),
            ("b", "z", 0.5, 2.0),
            ("b", "w", 0.4, 9.0),
        ]));
        app
    }

    fn press(app: &mut App, keys: &str) {
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                key => KeyCode::Char(key),
            };
            assert!(app.event(&Event::Key(KeyEvent::from(code))));
        }
    }

    fn names(app: &App) -> Vec<&str> {
        app.table.rows.iter().map(|row| row.name.as_str()).collect()
    }

    #[test]
    fn keys_sort_and_the_same_key_again_turns_the_order() {
        let mut app = app();
        assert_eq!(names(&app), ["a/y", "b/z", "b/w", "a/x"]);
        press(&mut app, "r");
        assert_eq!(names(&app), ["b/w", "a/x", "b/z", "a/y"]);
        press(&mut app, "r");
        assert_eq!(names(&app), ["a/y", "b/z", "a/x", "b/w"]);
        press(&mut app, "N");
        assert_eq!(names(&app), ["a/x", "a/y", "b/w", "b/z"]);
        press(&mut app, "<");
        assert_eq!(app.view.sort, Column::State);
        press(&mut app, ">>");
        assert_eq!(app.view.sort, Column::Ready);
    }

    #[test]
    fn the_cursor_stays_with_its_pod_and_on_the_screen() {
        let mut app = app();
        press(&mut app, "jj");
        assert_eq!((app.table.cursor(), app.table.rows[app.table.cursor()].name.as_str()), (2, "b/w"));
        press(&mut app, "r");
        assert_eq!((app.table.cursor(), app.table.rows[app.table.cursor()].name.as_str()), (0, "b/w"));
        press(&mut app, "G");
        assert_eq!((app.table.cursor(), app.table.offset), (3, 1));
        press(&mut app, "j");
        assert_eq!(app.table.cursor(), 3);
        // After the pod's removal the cursor stays at its position.
        app.update(snapshot(&[("a", "x", 0.1, 5.0), ("b", "z", 0.5, 2.0)]));
        assert_eq!((app.table.cursor(), app.table.offset), (1, 0));
        app.update(snapshot(&[]));
        press(&mut app, "jkG\n-");
        assert_eq!(app.table.cursor(), 0);
    }

    #[test]
    fn containers_are_shown_for_one_pod_or_for_all() {
        let mut app = app();
        press(&mut app, "\n");
        assert_eq!(names(&app)[..4], ["a/y", "app", "sidecar", "b/z"]);
        press(&mut app, "j-");
        assert_eq!(
            (app.table.rows.len(), app.table.cursor()),
            (4, 0),
            "a hidden container moves the cursor to its pod"
        );
        press(&mut app, "e");
        assert_eq!(app.table.rows.len(), 12);
        press(&mut app, "-");
        assert_eq!(names(&app)[..3], ["a/y", "b/z", "app"]);
        press(&mut app, "ee");
        assert_eq!(app.table.rows.len(), 4);
    }

    #[test]
    fn a_filter_is_typed_kept_and_cleared() {
        let mut app = app();
        press(&mut app, "/b/q");
        assert!(app.typing && !app.done && app.table.rows.is_empty());
        app.event(&Event::Key(KeyEvent::from(KeyCode::Backspace)));
        press(&mut app, "\n");
        assert_eq!((names(&app), app.typing), (vec!["b/z", "b/w"], false));
        press(&mut app, "\u{1b}");
        assert_eq!(app.table.rows.len(), 4);
    }

    #[test]
    fn frozen_nothing_new_is_shown_until_it_is_thawed() {
        let mut app = app();
        press(&mut app, "f");
        assert!(!app.update(snapshot(&[])));
        assert_eq!(app.table.rows.len(), 4);
        press(&mut app, "f");
        assert!(app.update(snapshot(&[])));
        assert!(app.table.rows.is_empty());
    }

    #[test]
    fn it_ends_by_q_and_by_ctrl_c_also_while_typing() {
        let mut quit = app();
        press(&mut quit, "q");
        let mut interrupted = app();
        press(&mut interrupted, "/");
        interrupted.event(&Event::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(quit.done && interrupted.done);
        let mut helped = app();
        press(&mut helped, "?");
        assert!(helped.help.shown);
        press(&mut helped, "q");
        assert!(!helped.help.shown && !helped.done);
    }

    #[test]
    fn trouble_goes_with_the_next_snapshot() {
        let mut app = app();
        app.lost("the agent stopped".into());
        let since = app.trouble.as_ref().unwrap().1;
        app.lost("the agent does not answer".into());
        assert_eq!(app.trouble.as_ref().unwrap().1, since);
        app.update(snapshot(&[]));
        assert!(app.trouble.is_none());
    }
}
