//! Finds circles of files inside a crate: files that depend on each other, so a reader needs all of them.
//! Cargo forbids circles of crates. Inside a crate, an arrow leads from a file to each file whose paths it
//! names.

use super::text;
use std::collections::{BTreeMap, BTreeSet};

/// A module's path in its crate.
type Path = Vec<String>;

/// A file with the paths that it names.
#[derive(Debug)]
struct Module {
    file: String,
    /// Paths from the crate's root.
    named: BTreeSet<Path>,
    /// Names that the file re-exports, with their origins.
    shown: BTreeMap<String, Path>,
}

/// The files of a crate's library (or program, if there is no library) by module, each with its text.
#[derive(Debug, Default)]
pub(super) struct Crate {
    modules: BTreeMap<Path, Module>,
}

impl Crate {
    /// Adds a file, whose name is relative to the crate's `src/`. Skips tests and the programs in `bin/`.
    pub(super) fn add(&mut self, name: &str, file: &str, text: &str) {
        let parts: Vec<&str> = name.strip_suffix(".rs").unwrap_or(name).split('/').collect();
        let is_left_out = parts.first() == Some(&"bin") || parts.contains(&"tests") || !name.ends_with(".rs");
        if is_left_out {
            return;
        }
        let mut path: Path = parts.iter().map(|part| (*part).to_owned()).collect();
        let is_root = matches!(parts.as_slice(), ["lib" | "main"]);
        if is_root || parts.last() == Some(&"mod") {
            path.pop();
        }
        if is_root && parts == ["main"] && self.modules.contains_key(&path) {
            return;
        }
        let code = without_tests(&text::source(text).code);
        let mut module = Module { file: file.to_owned(), named: BTreeSet::new(), shown: BTreeMap::new() };
        module.read(&code, &path);
        self.modules.insert(path, module);
    }

    /// Returns the files of each circle.
    pub(super) fn circles(&self) -> Vec<Vec<&str>> {
        let arrows: BTreeMap<&Path, BTreeSet<&Path>> =
            self.modules.iter().map(|(path, module)| (path, self.arrows(path, module))).collect();
        let reached: BTreeMap<&Path, BTreeSet<&Path>> =
            arrows.keys().map(|path| (*path, reach(path, &arrows))).collect();
        let mut found: BTreeSet<Vec<&str>> = BTreeSet::new();
        for (path, below) in &reached {
            let tied =
                below.iter().filter(|other| reached.get(**other).is_some_and(|back| back.contains(path)));
            let files: BTreeSet<&str> = tied.map(|other| self.modules[*other].file.as_str()).collect();
            if files.len() > 1 {
                found.insert(files.into_iter().collect());
            }
        }
        found.into_iter().collect()
    }

    /// Returns the modules that a module needs, without the modules above and below it, which have the same
    /// subject.
    fn arrows(&self, path: &Path, module: &Module) -> BTreeSet<&Path> {
        let targets = module.named.iter().filter_map(|named| self.resolve(named, 0));
        targets.filter(|target| !path.starts_with(target) && !target.starts_with(path)).collect()
    }

    /// Returns the module that defines the item of a path. Follows `pub use`.
    fn resolve(&self, named: &Path, depth: usize) -> Option<&Path> {
        let length = (0..=named.len()).rev().find(|length| self.modules.contains_key(&named[..*length]))?;
        let (path, module) = self.modules.get_key_value(&named[..length])?;
        let shown = named.get(length).and_then(|name| module.shown.get(name));
        match shown.filter(|_| depth < 8) {
            Some(target) => {
                let target: Path = target.iter().chain(&named[length + 1..]).cloned().collect();
                self.resolve(&target, depth + 1)
            }
            None => Some(path),
        }
    }
}

impl Module {
    /// Reads the paths in the file's code.
    fn read(&mut self, code: &str, own: &Path) {
        for statement in code.split(';') {
            let (before, tree) = match statement.rsplit_once("use ") {
                Some((before, tree)) if is_use(before) => (before, Some(tree)),
                _ => (statement, None),
            };
            let inline = before.match_indices("crate::").chain(before.match_indices("super::"));
            for (at, _) in inline {
                let path = before[at..].split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next();
                let is_rest = before[..at].ends_with("super::") || before[..at].ends_with(['$', '_']);
                if let Some(path) = path.filter(|_| !is_rest) {
                    self.named.extend(absolute(path, own));
                }
            }
            let Some(tree) = tree else { continue };
            let is_shown = before.trim_end().ends_with("pub") || before.trim_end().ends_with(')');
            for (path, name) in leaves(tree) {
                let Some(path) = absolute(&path, own) else { continue };
                if is_shown {
                    self.shown.insert(name, path.clone());
                }
                self.named.insert(path);
            }
        }
    }
}

/// Returns true if a `use` after this text is the keyword at the start of a statement.
fn is_use(before: &str) -> bool {
    let last = before.rsplit('\n').next().unwrap_or_default().trim();
    last.is_empty() || last.starts_with("pub")
}

/// Returns the path from the crate's root; None for more `super` than `own` has parents.
fn absolute(path: &str, own: &Path) -> Option<Path> {
    let parts: Vec<&str> = path.split("::").filter(|part| !part.is_empty()).collect();
    let ups = parts.iter().take_while(|part| **part == "super").count();
    let (mut from, rest) = match *parts.first()? {
        "crate" => (Path::new(), &parts[1..]),
        "self" => (own.clone(), &parts[1..]),
        _ if ups > 0 => (own[..own.len().checked_sub(ups)?].to_vec(), &parts[ups..]),
        // A submodule, or another crate, whose name is not the name of a module.
        _ => (own.clone(), &parts[..]),
    };
    from.extend(rest.iter().map(|part| (*part).to_owned()));
    Some(from)
}

/// Returns the paths of a `use` tree with their local names: `a::{b, c as d}` has `a::b` as `b` and `a::c` as
/// `d`.
fn leaves(tree: &str) -> Vec<(String, String)> {
    let tree = tree.trim();
    let Some((prefix, inner)) = tree.split_once('{') else {
        let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
        let own = path.rsplit("::").next().unwrap_or_default();
        let name = if name.is_empty() { own } else { name };
        return vec![(path.trim().to_owned(), name.trim().to_owned())];
    };
    let inner = inner.rsplit_once('}').map_or(inner, |(inner, _)| inner);
    let (mut depth, mut start, mut parts) = (0_i32, 0, Vec::new());
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    let parts = parts.into_iter().filter(|part| !part.trim().is_empty());
    let within = parts.flat_map(leaves).map(|(path, name)| {
        let path = path.strip_prefix("self").filter(|rest| rest.is_empty()).unwrap_or(&path).to_owned();
        (format!("{}{path}", prefix.trim()), name)
    });
    within.collect()
}

/// Returns the code up to the tests' module, without other lines that only tests compile.
pub(super) fn without_tests(code: &str) -> String {
    let mut kept = String::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let tested = lines.next().unwrap_or_default();
            if tested.trim_end().ends_with('{') && tested.contains("mod ") {
                break;
            }
            continue;
        }
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}

/// Returns the modules that can be reached from a module.
fn reach<'a>(from: &'a Path, arrows: &BTreeMap<&'a Path, BTreeSet<&'a Path>>) -> BTreeSet<&'a Path> {
    let mut found = BTreeSet::new();
    let mut open = vec![from];
    while let Some(next) = open.pop() {
        for target in arrows.get(next).into_iter().flatten() {
            if found.insert(*target) {
                open.push(target);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(files: &[(&str, &str)], expected: &[&[&str]]) {
        let mut all = Crate::default();
        for (name, text) in files {
            all.add(name, name, text);
        }
        assert_eq!(all.circles(), expected, "{files:?}");
    }

    #[test]
    fn files_that_name_each_other_are_a_circle() {
        check(
            &[("a.rs", "use crate::b::X;\n"), ("b.rs", "fn f() { crate::a::g() }\n")],
            &[&["a.rs", "b.rs"]],
        );
        check(
            &[("a.rs", "use super::b::X;\n"), ("b.rs", "use crate::{c, d::Y};\n"), ("d.rs", "use crate::a;")],
            &[&["a.rs", "b.rs", "d.rs"]],
        );
        check(&[("a.rs", "use crate::b::X;\n"), ("b.rs", "use std::a::X;\n")], &[]);
        check(&[("a.rs", "use crate::b::X;\n"), ("b.rs", "// use crate::a;\nlet x = \"crate::a::b\";")], &[]);
    }

    #[test]
    fn tests_and_submodules_make_no_circle() {
        check(
            &[("a.rs", "use crate::b::X;\n"), ("b.rs", "#[cfg(test)]\nmod tests {\nuse crate::a;\n}\n")],
            &[],
        );
        check(&[("a/mod.rs", "mod b;\nuse b::X;\n"), ("a/b.rs", "use super::Y;\n")], &[]);
        check(&[("lib.rs", "mod a;\nuse a::X;\n"), ("a.rs", "use crate::Y;\n")], &[]);
        check(&[("a.rs", "use crate::tests::X;\n"), ("tests.rs", "use crate::a;\n")], &[]);
    }

    #[test]
    fn names_are_followed_to_the_file_that_defines_them() {
        let root =
            ("lib.rs", "mod a;\nmod b;\npub use a::Error;\npub(crate) use self::b::{self as c, Y as Z};\n");
        check(
            &[root, ("a.rs", "use crate::Z;\n"), ("b.rs", "use crate::{Error, other};\n")],
            &[&["a.rs", "b.rs"]],
        );
        check(
            &[root, ("a.rs", "use crate::c::Y;\n"), ("b.rs", "use crate::Error::{self, A};\n")],
            &[&["a.rs", "b.rs"]],
        );
        check(&[root, ("a.rs", "use crate::Unknown;\n"), ("b.rs", "use crate::Error;\n")], &[]);
    }
}
