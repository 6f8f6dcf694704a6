//! A page in Markdown: its links and its anchors.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A link or picture of a page.
#[derive(Debug)]
pub(crate) struct Link {
    /// The target as it is written.
    pub(crate) target: String,
    /// Bytes of the whole link.
    pub(crate) range: Range<usize>,
}

/// The parts of a page that others refer to.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// The text of the first heading.
    pub(crate) title: Option<String>,
    /// Names that a link can have after `#`.
    pub(crate) anchors: BTreeSet<String>,
    /// The links in their order.
    pub(crate) links: Vec<Link>,
}

impl Page {
    /// Parses the text of a page.
    pub(crate) fn parse(text: &str) -> Self {
        let mut page = Page::default();
        let mut heading: Option<String> = None;
        let mut seen = BTreeMap::new();
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let text = heading.take().unwrap_or_default();
                    page.anchors.insert(anchor(&text, &mut seen));
                    page.title.get_or_insert(text);
                }
                Event::Text(part) | Event::Code(part) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&part);
                    }
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(Link { target: dest_url.into_string(), range });
                }
                Event::Html(part) | Event::InlineHtml(part) => page.anchors.extend(ids(&part)),
                _ => {}
            }
        }
        page
    }
}

/// Returns the values of `id="…"`.
pub(crate) fn ids(html: &str) -> impl Iterator<Item = String> {
    html.split(" id=\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned()))
}

/// Returns a heading's anchor as mdBook and web views of repositories make it. A repeated one has a number.
fn anchor(heading: &str, seen: &mut BTreeMap<String, u32>) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
        c if c.is_whitespace() => Some('-'),
        _ => None,
    });
    let name: String = kept.collect();
    let count = seen.entry(name.clone()).or_default();
    *count += 1;
    if *count == 1 { name } else { format!("{name}-{}", *count - 1) }
}

/// Returns the path and the anchor of a target within the repository; None for the web and for mail.
pub(crate) fn parts(target: &str) -> Option<(&str, Option<&str>)> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    Some(match target.split_once('#') {
        Some((path, anchor)) => (path, Some(anchor)),
        None => (target, None),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_in_tables_are_found_and_those_in_code_are_not() {
        let text = "# A `b` (c)\n\n| x |\n| --- |\n| [one](a.md#b) |\n\n`[two](b.md)`\n\n    [three](c.md)\n\n![four](d.svg)\n";
        let page = Page::parse(text);
        let targets: Vec<&str> = page.links.iter().map(|link| link.target.as_str()).collect();
        assert_eq!(targets, ["a.md#b", "d.svg"]);
        assert_eq!(page.title.as_deref(), Some("A b (c)"));
        assert!(page.anchors.contains("a-b-c"), "{:?}", page.anchors);
    }

    #[test]
    fn a_repeated_heading_has_a_number_in_its_anchor() {
        let page = Page::parse("# First\n## Two\n## Two\n<a id=\"three\"></a>\n");
        let anchors: Vec<&str> = page.anchors.iter().map(String::as_str).collect();
        assert_eq!(anchors, ["first", "three", "two", "two-1"]);
    }
}
