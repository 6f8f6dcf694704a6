//! Files of variables (KEP-3721): `NAME='value'`, a strict part of what a shell reads, as the kubelet's
//! `ParseEnv` takes it.
//!
//! Values stand in single quotes, may go over several lines, and mean what they say: nothing is escaped or
//! expanded. A comment may follow. A variable with blanks between `=` and the quote is empty.

/// Why a file of variables can't be read: which line, and what of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct EnvFileError {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong.
    pub what: &'static str,
}

/// The value of the first variable called `key`; None if there is none, or an empty one. What comes after it
/// isn't looked at.
///
/// # Errors
/// The first line that is no variable, up to the one that is asked for.
pub fn value(text: &str, key: &str) -> Result<Option<String>, EnvFileError> {
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    while let Some((number, line)) = lines.next() {
        let failed = |what: &'static str| EnvFileError { line: number, what };
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, rest) = line.split_once('=').ok_or_else(|| failed("there is no '='"))?;
        if name.is_empty() || name.ends_with([' ', '\t']) {
            return Err(failed("the name of a variable must stand right before '='"));
        }
        if rest.starts_with([' ', '\t']) {
            if name == key {
                return Ok(None);
            }
            continue;
        }
        let first = rest.strip_prefix('\'').ok_or_else(|| failed("a value must stand in single quotes"))?;
        let found = quoted(first, &mut lines).map_err(failed)?;
        if name == key {
            return Ok(Some(found).filter(|value| !value.is_empty()));
        }
    }
    Ok(None)
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
            let found = value(text, "A").map_err(|error| error.line);
            assert_eq!(found, expected.map(|value| value.map(str::to_owned)), "{text:?}");
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
}
