//! Parts of a text with one object each: its documents, and the items of a list. A part keeps its text, with
//! comments, and the number of its first line in the file.
//!
//! This module must never change the meaning of a part: an item whose text cannot be cut out of its list is
//! generated from its value.

use crate::document::{self, Document, Limits};

/// A document of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<'t> {
    /// Number of lines of the file above the document.
    pub above: u64,
    /// Text of the document.
    pub text: &'t str,
}

/// An item of a list.
#[derive(Clone, Debug)]
pub struct Item {
    /// Value of the item, with its places in the file.
    pub document: Document,
    /// Text with the same meaning.
    pub text: String,
}

/// Returns the documents of `text` with content. A text of one document is one whole part.
#[must_use]
pub fn documents(text: &str) -> Vec<Part<'_>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut parts: Vec<Part<'_>> = Vec::new();
    let (mut start, mut above, mut at, mut is_filled) = (0, 0, 0, false);
    for (number, line) in (0..).zip(text.split_inclusive('\n')) {
        // YAML forbids markers inside a text of several lines.
        if is_filled && is_marker(line, "---") {
            parts.push(Part { above, text: &text[start..at] });
            (start, above, is_filled) = (at, number, false);
        }
        is_filled |= is_content(line);
        at += line.len();
    }
    if is_filled {
        parts.push(Part { above, text: &text[start..] });
    }
    if let [one] = &mut parts[..] {
        *one = Part { above: 0, text };
    }
    parts.into_iter().map(without_marker).collect()
}

/// Returns true if a line is this marker of a document's beginning or end.
fn is_marker(line: &str, marker: &str) -> bool {
    line.strip_prefix(marker).is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

/// Returns true if a line has content: more than a comment, a directive or a marker.
fn is_content(line: &str) -> bool {
    let said = match line.strip_prefix("---") {
        Some(rest) if is_marker(line, "---") => rest,
        _ if is_marker(line, "...") || line.starts_with('%') => "",
        _ => line,
    };
    let said = said.trim();
    !said.is_empty() && !said.starts_with('#')
}

/// Removes the line `---` at the beginning of a part.
fn without_marker(part: Part<'_>) -> Part<'_> {
    match part.text.split_once('\n') {
        Some((line, rest)) if part.above > 0 && line.trim_end() == "---" => {
            Part { above: part.above + 1, text: rest }
        }
        _ => part,
    }
}

/// Returns the items of `list`, a list of objects (`kind: List`) from `part`.
#[must_use]
pub fn items(list: &Document, part: Part<'_>) -> Option<Vec<Item>> {
    let lines: Vec<&str> = part.text.split_inclusive('\n').collect();
    let documents = list.items("items")?;
    let starts: Vec<usize> = documents.iter().map(|item| first_line(&lines, item, part)).collect();
    let ends = starts.iter().skip(1).copied().chain([lines.len()]);
    let texts: Vec<String> = documents
        .iter()
        .zip(starts.iter().zip(ends))
        .map(|(item, (start, end))| text_of(item, &lines, *start..end))
        .collect();
    Some(documents.into_iter().zip(texts).map(|(document, text)| Item { document, text }).collect())
}

/// Returns the index of the first line of an item, including the comments above it.
fn first_line(lines: &[&str], item: &Document, part: Part<'_>) -> usize {
    let line = item.start().0.saturating_sub(part.above + 1);
    let line = usize::try_from(line).unwrap_or(usize::MAX).min(lines.len());
    let comments = lines[..line].iter().rev().take_while(|line| line.trim_start().starts_with('#'));
    line - comments.count()
}

/// Returns an item's text, cut out of the list's, or generated if the cut text would have another meaning.
fn text_of(item: &Document, lines: &[&str], range: std::ops::Range<usize>) -> String {
    let indent = usize::try_from(item.start().1.saturating_sub(1)).unwrap_or_default();
    let cut = lines.get(range).map(|lines| cut_out(lines, indent));
    let says_the_same = |text: &String| {
        let read = document::parse_within(text, Limits::MANIFEST);
        matches!(read.as_deref(), Ok([one]) if one.value == item.value)
    };
    // JSON is YAML, with the same meaning for every reader.
    cut.filter(says_the_same).unwrap_or_else(|| format!("{:#}\n", item.value))
}

/// Returns the lines of an item, `indent` characters less indented, up to the end of the list.
fn cut_out(lines: &[&str], indent: usize) -> String {
    let mut text = String::new();
    let mut is_first = true;
    for line in lines {
        let spaces = line.len() - line.trim_start_matches(' ').len();
        let words = line.trim();
        let is_comment = words.is_empty() || words.starts_with('#');
        if !is_comment && is_first {
            // The dash is part of the indent.
            text.extend(line.chars().skip(indent));
            is_first = false;
        } else if is_comment || spaces >= indent {
            text.push_str(&line[spaces.min(indent)..]);
        } else {
            break;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str, expected: &[(u64, &str)]) {
        let parts: Vec<_> = documents(text).iter().map(|part| (part.above, part.text)).collect();
        assert_eq!(parts, expected, "{text}");
    }

    #[test]
    fn a_document_keeps_its_comments_and_its_line() {
        check("# mine\nkind: Pod\n", &[(0, "# mine\nkind: Pod\n")]);
        check("---\nkind: Pod\n---\n# no more\n", &[(0, "---\nkind: Pod\n---\n# no more\n")]);
        check("a: 1 # one\n---\n# two\nb: 2\n", &[(0, "a: 1 # one\n"), (2, "# two\nb: 2\n")]);
        check("a: 1\r\n---\r\n---\nb: 2", &[(0, "a: 1\r\n"), (2, "---\nb: 2")]);
        check("# all\n---\na: 1\n--- {b: 2}\n", &[(0, "# all\n---\na: 1\n"), (3, "--- {b: 2}\n")]);
        check("a: |\n  ---\n  x\n...\n---\nb: 2\n", &[(0, "a: |\n  ---\n  x\n...\n"), (5, "b: 2\n")]);
        check("---x: 1\n", &[(0, "---x: 1\n")]);
        check("# nothing\n---\n", &[]);
        check("", &[]);
    }

    fn check_items(text: &str, expected: &[(u64, &str)]) {
        let part = Part { above: 10, text };
        let list = &document::parse_below(part.above, text, Limits::MANIFEST).unwrap()[0];
        let items = items(list, part).unwrap();
        let items: Vec<_> = items.iter().map(|item| (item.document.start().0, item.text.as_str())).collect();
        assert_eq!(items, expected, "{text}");
    }

    #[test]
    fn an_item_of_a_list_keeps_its_comments_and_its_line() {
        check_items(
            "kind: List\nitems:\n# first\n- kind: Pod # a pod\n  a: |\n    x\n\n    y\n  # second\n- kind: Map\nmetadata: {}\n",
            &[(14, "# first\nkind: Pod # a pod\na: |\n  x\n\n  y\n"), (20, "# second\nkind: Map\n")],
        );
        check_items(
            "items:\n  -\n    a: 1\n  -   b: 2\n      c: 3\n",
            &[(13, "a: 1\n"), (14, "b: 2\nc: 3\n")],
        );
    }

    #[test]
    fn an_item_that_cannot_be_cut_out_is_written_anew() {
        check_items(
            "{kind: List, items: [{a: 1}, {a: 2}]}",
            &[(11, "{\n  \"a\": 1\n}\n"), (11, "{\n  \"a\": 2\n}\n")],
        );
        check_items("items:\n- &x {a: 1}\n- *x\n", &[(12, "{a: 1}\n"), (13, "{\n  \"a\": 1\n}\n")]);
        assert!(
            items(&document::parse("items: 1").unwrap()[0], Part { above: 0, text: "items: 1" }).is_none()
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[-:{}\\[\\],&*!|>'\"%@`#? \n\ta-c0-9.~<\u{e9}]{0,200}") {
            for part in documents(&text) {
                for list in document::parse_below(part.above, part.text, Limits::MANIFEST).unwrap_or_default() {
                    let _ = items(&list, part);
                }
            }
        }

        #[test]
        fn items_say_what_the_list_says(dashes in "(items:\n)(( {0,3}- (a: 1|b: \\[1\\]|- c)\n)( {0,6}(#|d: 2|- x)\n){0,2}){1,3}") {
            let Ok(list) = document::parse(&dashes) else { return Ok(()) };
            for item in items(&list[0], Part { above: 0, text: &dashes }).unwrap_or_default() {
                prop_assert_eq!(&document::parse(&item.text).unwrap()[0].value, &item.document.value);
            }
        }
    }
}
