//! Checks the links of all pages of the repository: each target and each anchor exists, and docs/SUMMARY.md
//! names each page of docs/.

use super::page::{Page, parts};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The list of the site's pages.
pub(crate) const SUMMARY: &str = "docs/SUMMARY.md";

/// A broken link, or a page without one: file, line, message.
pub(crate) type Broken = (String, usize, String);

/// Checks the pages among `files`, paths from the top folder of the repository.
pub(crate) fn check<'a>(repository: &Path, files: impl Iterator<Item = &'a str>) -> Vec<Broken> {
    let read = |file: &str| {
        let text = std::fs::read_to_string(repository.join(file)).ok()?;
        Some((file.to_owned(), (Page::parse(&text), text)))
    };
    let pages = files.filter(|file| file.ends_with(".md")).filter_map(read).collect();
    let mut broken = broken(&pages, |path| repository.join(path).exists());
    broken.extend(orphans(&pages));
    broken
}

/// Pages with their texts, by their paths from the top folder.
type Pages = BTreeMap<String, (Page, String)>;

fn broken(pages: &Pages, exists: impl Fn(&Path) -> bool) -> Vec<Broken> {
    let mut found = Vec::new();
    for (file, (page, text)) in pages {
        for link in &page.links {
            let Some((path, anchor)) = parts(&link.target) else { continue };
            let target = resolve(file, path);
            let why = match &target {
                None => Some("leads out of the repository"),
                Some(target) if !exists(target) => Some("has a target that does not exist"),
                Some(target) => {
                    let target = target.to_string_lossy();
                    let page = pages.get(target.as_ref()).map(|(page, _)| page);
                    let is_missing = |anchor: &str| page.is_some_and(|page| !page.anchors.contains(anchor));
                    anchor.is_some_and(is_missing).then_some("has an anchor that the page lacks")
                }
            };
            if let Some(why) = why {
                let line = text[..link.range.start].matches('\n').count() + 1;
                found.push((file.clone(), line, format!("the link {why}: {}", link.target)));
            }
        }
    }
    found
}

/// Finds the pages of docs/ that the summary does not name.
fn orphans(pages: &Pages) -> Vec<Broken> {
    let Some((summary, _)) = pages.get(SUMMARY) else { return Vec::new() };
    let listed: BTreeSet<PathBuf> =
        summary.links.iter().filter_map(|link| resolve(SUMMARY, &link.target)).collect();
    let of_docs = pages.keys().filter(|file| file.starts_with("docs/") && *file != SUMMARY);
    let missing = of_docs.filter(|file| !listed.contains(Path::new(file)));
    missing.map(|file| (file.clone(), 1, format!("{SUMMARY} does not name this page"))).collect()
}

/// Returns the path from the top folder of a link's target in `file`; None outside of the repository.
pub(crate) fn resolve(file: &str, target: &str) -> Option<PathBuf> {
    if target.is_empty() {
        return Some(PathBuf::from(file));
    }
    let mut path = Path::new(file).parent()?.to_path_buf();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => {
                if !path.pop() {
                    return None;
                }
            }
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(of: &[(&str, &str)]) -> Pages {
        of.iter().map(|(file, text)| ((*file).to_owned(), (Page::parse(text), (*text).to_owned()))).collect()
    }

    #[test]
    fn each_broken_link_is_found_with_its_line() {
        let check = |text: &str, expected: &[usize]| {
            let mut all = pages(&[("docs/b.md", text)]);
            all.extend(pages(&[("docs/a.md", "# A\n"), ("README.md", "# R\n")]));
            let exists =
                |path: &Path| path == Path::new("LICENSE") || all.contains_key(&*path.to_string_lossy());
            let found = broken(&all, exists);
            let lines: Vec<usize> = found.iter().map(|(_, line, _)| *line).collect();
            assert_eq!(lines, expected, "{text}: {found:?}");
        };
        check(
            "# B\n[a](a.md#a) [r](../README.md) [l](../LICENSE#x) [b](#b) [w](https://example.com/x)\n",
            &[],
        );
        check("# B\n[a](c.md)\n\n[a](a.md#c)\n\n[b](#c)\n", &[2, 4, 6]);
        check("# B\n[a](../../c.md)\n", &[2]);
    }

    #[test]
    fn a_page_that_the_summary_does_not_name_is_an_orphan() {
        let all = pages(&[(SUMMARY, "- [A](a.md)\n"), ("docs/a.md", ""), ("docs/x/b.md", ""), ("C.md", "")]);
        let names: Vec<String> = orphans(&all).into_iter().map(|(file, ..)| file).collect();
        assert_eq!(names, ["docs/x/b.md"]);
    }
}
