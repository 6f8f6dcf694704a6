//! Checks sizes above which a file or a type does more than one thing: 600 lines, and 15 methods in all files
//! of a crate.

use super::{circles, text};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of lines of a file.
pub(super) const LINES: usize = 600;
/// Maximum number of methods of a type, without those of its traits.
const METHODS: usize = 15;

/// The methods of a crate's types.
#[derive(Debug, Default)]
pub(super) struct Types {
    /// The files that define a type, by its name: several types may have the same name.
    defined: BTreeMap<String, BTreeSet<String>>,
    /// Number of methods, by type and file.
    methods: BTreeMap<String, BTreeMap<String, usize>>,
}

impl Types {
    /// Adds a file. Tests do not count.
    pub(super) fn add(&mut self, file: &str, text: &str) {
        if file.contains("/tests/") || file.ends_with("tests.rs") {
            return;
        }
        let code = circles::without_tests(&text::source(text).code);
        let mut header: Option<String> = None;
        let mut of: Option<String> = None;
        for line in code.lines() {
            if let Some(name) = definition(line) {
                self.defined.entry(name.to_owned()).or_default().insert(file.to_owned());
            }
            if line.starts_with("impl") {
                header = Some(String::new());
            }
            if let Some(open) = &mut header {
                open.push_str(line);
                open.push(' ');
                if line.contains('{') {
                    of = subject(open);
                    header = None;
                }
            } else if line.starts_with('}') {
                of = None;
            }
            if let Some(name) = of.as_ref().filter(|_| is_method(line)) {
                *self.methods.entry(name.clone()).or_default().entry(file.to_owned()).or_default() += 1;
            }
        }
    }

    /// Returns the types with too many methods: the file that defines the type, and its name and number of
    /// methods.
    pub(super) fn large(&self) -> Vec<(String, String)> {
        let mut large = Vec::new();
        for (name, by_file) in &self.methods {
            let mut by_type: BTreeMap<&str, usize> = BTreeMap::new();
            for (file, count) in by_file {
                *by_type.entry(self.home(name, file)).or_default() += count;
            }
            let above = by_type.into_iter().filter(|(_, count)| *count > METHODS);
            large.extend(above.map(|(file, count)| (file.to_owned(), format!("{name}: {count} methods"))));
        }
        large
    }

    /// Returns the file that defines the type of the methods in `file`: the nearest file with a type of this
    /// name.
    fn home<'a>(&'a self, name: &str, file: &'a str) -> &'a str {
        let shared = |other: &&String| {
            other
                .split('/')
                .zip(file.split('/'))
                .take_while(|(a, b)| a.trim_end_matches(".rs") == b.trim_end_matches(".rs"))
                .count()
        };
        let homes = self.defined.get(name).into_iter().flatten();
        homes.max_by_key(shared).map_or(file, String::as_str)
    }
}

/// Returns the name of the type that a line defines.
fn definition(line: &str) -> Option<&str> {
    let line =
        line.strip_prefix("pub").map_or(line, |rest| rest.split_once(' ').map_or("", |(_, rest)| rest));
    let rest = ["struct ", "enum ", "union "].iter().find_map(|keyword| line.strip_prefix(keyword))?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    Some(&rest[..end])
}

/// Returns the type of an inherent `impl`, from its header; None for a trait's `impl`.
fn subject(header: &str) -> Option<String> {
    let mut rest = header.strip_prefix("impl")?.trim_start();
    if rest.starts_with('<') {
        let mut depth = 0_i32;
        let end = rest.char_indices().position(|(_, c)| {
            depth += i32::from(c == '<') - i32::from(c == '>');
            depth == 0
        })?;
        rest = rest.get(end + 1..)?.trim_start();
    }
    let end = rest.find(['{', ' ']).unwrap_or(rest.len());
    if rest[end..].trim_start().starts_with("for ") || rest.split('{').next()?.contains(" for ") {
        return None;
    }
    let path = rest.split(['<', '{', ' ']).next()?;
    path.rsplit("::").next().filter(|name| !name.is_empty()).map(ToOwned::to_owned)
}

/// Returns true if a line of an `impl` at the top of a file begins a method.
fn is_method(line: &str) -> bool {
    let Some(rest) = line.strip_prefix("    ").filter(|rest| !rest.starts_with(' ')) else { return false };
    let Some((before, _)) = rest.split_once("fn ") else { return false };
    let is_word = |word: &str| {
        word.starts_with("pub")
            || ["async", "const", "unsafe", "extern", "\"\""].contains(&word)
            || word.ends_with(')')
    };
    before.split_whitespace().all(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_a_type_are_counted_in_all_files_without_those_of_traits() {
        let methods = |count: usize| "    pub(crate) async fn f(&self) {}\n".repeat(count);
        let mut types = Types::default();
        let define = "pub struct Large<T> {}\npub(crate) struct Small;\n";
        types.add(
            "a/src/large.rs",
            &format!("{define}impl<T: Into<u8>> Large<T>\nwhere\n    T: Copy,\n{{\n{}}}\n", methods(10)),
        );
        types.add("a/src/large/more.rs", &format!("impl super::Large<u8> {{\n{}}}\n", methods(6)));
        types.add(
            "a/src/small.rs",
            &format!("impl Small {{\n{}}}\nimpl Drop for Small {{\n{}}}\n", methods(15), methods(9)),
        );
        types.add("a/src/tests.rs", &format!("impl Small {{\n{}}}\n", methods(9)));
        assert_eq!(types.large(), [("a/src/large.rs".to_owned(), "Large: 16 methods".to_owned())]);
    }

    #[test]
    fn a_method_belongs_to_the_nearest_type_of_its_name() {
        let methods = "    fn f() {}\n".repeat(10);
        let mut types = Types::default();
        types.add("a/src/one/mod.rs", &format!("struct Same;\nimpl Same {{\n{methods}}}\n"));
        types.add("a/src/two/mod.rs", &format!("struct Same;\nimpl Same {{\n{methods}}}\n"));
        assert_eq!(types.large(), []);
        types.add("a/src/two/part.rs", &format!("impl Same {{\n{methods}}}\n"));
        assert_eq!(types.large(), [("a/src/two/mod.rs".to_owned(), "Same: 20 methods".to_owned())]);
    }
}
