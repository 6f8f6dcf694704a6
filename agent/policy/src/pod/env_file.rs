//! Files of variables (KEP-3721): `NAME='value'`, a strict subset of shell syntax, as the kubelet's
//! `ParseEnv` accepts it.
//!
//! Values stand in single quotes, may span several lines, and are literal: nothing is escaped or expanded. A
//! comment may follow. A variable with blanks between `=` and the quote is empty.

use std::collections::{BTreeMap, BTreeSet};

/// A syntax error in a file of variables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct EnvFileError {
    /// Line number, from 1.
    pub line: usize,
    /// The error.
    pub what: &'static str,
}

/// A file's values for some variables, read once for all of them: a container may request thousands from one
/// file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvFile {
    /// First value of each requested variable that the file has; `None` if the value is empty.
    values: BTreeMap<String, Option<String>>,
    /// The first invalid line.
    broken: Option<EnvFileError>,
}

impl EnvFile {
    /// Reads the variables named in `wanted`.
    #[must_use]
    pub fn read(text: &str, wanted: &BTreeSet<&str>) -> Self {
        let mut file = Self { values: BTreeMap::new(), broken: None };
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
        while let Some((number, line)) = lines.next() {
            match variable(line, &mut lines) {
                Ok(Some((name, value))) if wanted.contains(name) => {
                    let value = value.filter(|value| !value.is_empty());
                    file.values.entry(name.to_owned()).or_insert(value);
                }
                Ok(_) => {}
                Err(what) => {
                    file.broken = Some(EnvFileError { line: number, what });
                    break;
                }
            }
        }
        file
    }

    /// Returns the value of the first variable named `key`, which must be among those wanted; `None` for a
    /// missing or an empty one. Lines after it do not count.
    ///
    /// # Errors
    /// The first invalid line before the variable.
    pub fn value(&self, key: &str) -> Result<Option<&str>, &EnvFileError> {
        match (self.values.get(key), &self.broken) {
            (Some(value), _) => Ok(value.as_deref()),
            (None, Some(broken)) => Err(broken),
            (None, None) => Ok(None),
        }
    }
}

/// Reads the variable that begins in a line, if any; its value may span further lines. The value is `None` if
/// blanks follow the `=`.
fn variable<'t>(
    line: &'t str,
    lines: &mut impl Iterator<Item = (usize, &'t str)>,
) -> Result<Option<(&'t str, Option<String>)>, &'static str> {
    let line = line.trim_start_matches([' ', '\t']);
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let (name, rest) = line.split_once('=').ok_or("missing '='")?;
    if name.is_empty() || name.ends_with([' ', '\t']) {
        return Err("the variable's name must be directly before '='");
    }
    if rest.starts_with([' ', '\t']) {
        return Ok(Some((name, None)));
    }
    let first = rest.strip_prefix('\'').ok_or("the value must be in single quotes")?;
    Ok(Some((name, Some(quoted(first, lines)?))))
}

/// Reads a value up to its closing quote, which may be on a later line.
fn quoted<'t>(
    first: &'t str,
    lines: &mut impl Iterator<Item = (usize, &'t str)>,
) -> Result<String, &'static str> {
    let (mut value, mut line) = (String::new(), first);
    loop {
        if let Some((end, after)) = line.split_once('\'') {
            value.push_str(end);
            let after = after.trim_start_matches([' ', '\t']);
            let is_over = after.is_empty() || after.starts_with('#');
            return if is_over { Ok(value) } else { Err("unexpected text after the closing quote") };
        }
        value.push_str(line);
        value.push('\n');
        line = lines.next().ok_or("missing closing quote")?.1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_read_as_the_kubelet_does() {
        let check = |text: &str, expected: Result<Option<&str>, usize>| {
            let file = EnvFile::read(text, &["A", "C"].into());
            assert_eq!(file.value("A").map_err(|error| error.line), expected, "{text:?}");
        };
        check("A='1'", Ok(Some("1")));
        check("\n# note\n \tB='x'\n  A='1 $(B) \\n' # note\n", Ok(Some("1 $(B) \\n")));
        check("A='one\r\ntwo\n\n' \nB='", Ok(Some("one\ntwo\n\n")));
        check("A='1'\nA='2'", Ok(Some("1")));
        check("A=''", Ok(None));
        check("A= '1'\nA='2'", Ok(None));
        check("B='1'", Ok(None));
        check("", Ok(None));
        // Text after the variable is not read.
        check("A='1'\nnonsense", Ok(Some("1")));
        check("nonsense\nA='1'", Err(1));
        check("B='1'\nA =2", Err(2));
        check("='1'", Err(1));
        check("A=1", Err(1));
        check("A=\"1\"", Err(1));
        check("A='1'2", Err(1));
        check("B='1\n\nA='1'", Err(1));
        check("A='1", Err(1));
    }

    #[test]
    fn a_file_has_all_wanted_variables_up_to_its_first_invalid_line() {
        let file = EnvFile::read("A='1'\nB='2'\nC=' 3'\nnonsense\nD='4'", &["A", "C", "D"].into());
        assert_eq!((file.value("A"), file.value("C")), (Ok(Some("1")), Ok(Some(" 3"))));
        assert_eq!(file.value("D").map_err(|error| error.line), Err(4));
    }
}
