//! Files of variables (KEP-3721): `NAME='value'`, a strict part of what a shell reads, as the kubelet's
//! `ParseEnv` takes it.
//!
//! Values stand in single quotes, may go over several lines, and mean what they say: nothing is escaped or
//! expanded. A comment may follow. A variable with blanks between `=` and the quote is empty.

use std::collections::{BTreeMap, BTreeSet};

/// Why a file of variables can't be read: which line, and what of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct EnvFileError {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong.
    pub what: &'static str,
}

/// The values that a file has for some variables. Read once for all of them: a container may ask one file for
/// thousands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvFile {
    /// Of each variable that was asked for and is there, the first value; None if that is empty.
    values: BTreeMap<String, Option<String>>,
    /// The first line that is no variable.
    broken: Option<EnvFileError>,
}

impl EnvFile {
    /// Reads the variables called as in `wanted`.
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

    /// The value of the first variable called `key`, which was among those wanted; None if there is none, or
    /// an empty one. What comes after it doesn't count.
    ///
    /// # Errors
    /// The first line that is no variable, up to the one that is asked for.
    pub fn value(&self, key: &str) -> Result<Option<&str>, &EnvFileError> {
        match (self.values.get(key), &self.broken) {
            (Some(value), _) => Ok(value.as_deref()),
            (None, Some(broken)) => Err(broken),
            (None, None) => Ok(None),
        }
    }
}

/// The variable that begins in a line, if one does; its value may be lines away. None for the value where
/// blanks follow the `=`.
fn variable<'t>(
    line: &'t str,
    lines: &mut impl Iterator<Item = (usize, &'t str)>,
) -> Result<Option<(&'t str, Option<String>)>, &'static str> {
    let line = line.trim_start_matches([' ', '\t']);
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let (name, rest) = line.split_once('=').ok_or("there is no '='")?;
    if name.is_empty() || name.ends_with([' ', '\t']) {
        return Err("the name of a variable must stand right before '='");
    }
    if rest.starts_with([' ', '\t']) {
        return Ok(Some((name, None)));
    }
    let first = rest.strip_prefix('\'').ok_or("a value must stand in single quotes")?;
    Ok(Some((name, Some(quoted(first, lines)?))))
}

/// A value to its closing quote, which may be lines away.
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
            return if is_over { Ok(value) } else { Err("something follows the closing quote") };
        }
        value.push_str(line);
        value.push('\n');
        line = lines.next().ok_or("the quote is not closed")?.1;
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
        // What stands behind the variable is not read.
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
    fn a_file_has_all_variables_that_it_is_asked_for_up_to_its_first_broken_line() {
        let file = EnvFile::read("A='1'\nB='2'\nC=' 3'\nnonsense\nD='4'", &["A", "C", "D"].into());
        assert_eq!((file.value("A"), file.value("C")), (Ok(Some("1")), Ok(Some(" 3"))));
        assert_eq!(file.value("D").map_err(|error| error.line), Err(4));
    }
}
