//! Checks the links of the built site: each one leads to a file of the site, and to an anchor of that file.

use super::links::resolve;
use super::page::{ids, parts};
use anyhow::{Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Pages whose links are not checked: the one that contains all others, for printing, whose anchors have the
/// names of their pages before them; and the one for a missing page, whose links start at the server's top.
const SPECIAL: [&str; 2] = ["print.html", "404.html"];

/// Returns the number of pages, and a line per broken link.
pub(super) fn check(site: &Path) -> Result<(usize, Vec<String>)> {
    let mut pages = BTreeMap::new();
    collect(site, site, &mut pages)?;
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        pages.iter().map(|(name, text)| (name.as_str(), ids(text).collect())).collect();
    let mut broken = Vec::new();
    for (name, text) in pages.iter().filter(|(name, _)| !SPECIAL.contains(&name.as_str())) {
        for target in targets(text) {
            let Some((path, anchor)) = parts(target) else { continue };
            let found = resolve(name, path).filter(|path| site.join(path).exists());
            let is_right = found.is_some_and(|path| {
                let anchors = anchors.get(&*path.to_string_lossy());
                anchor
                    .is_none_or(|anchor| anchors.is_none_or(|all| anchor.is_empty() || all.contains(anchor)))
            });
            if !is_right {
                broken.push(format!("{name}: {target}"));
            }
        }
    }
    Ok((pages.len(), broken))
}

fn collect(site: &Path, folder: &Path, pages: &mut BTreeMap<String, String>) -> Result<()> {
    let said = || format!("could not read {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(said)? {
        let path = entry.with_context(said)?.path();
        if path.is_dir() {
            collect(site, &path, pages)?;
        } else if path.extension().is_some_and(|ext| ext == "html") {
            let text = std::fs::read_to_string(&path).with_context(said)?;
            pages.insert(path.strip_prefix(site)?.to_string_lossy().into_owned(), text);
        }
    }
    Ok(())
}

/// Returns the targets of a page's links, pictures and scripts.
fn targets(html: &str) -> impl Iterator<Item = &str> {
    let of = |attribute: &'static str| {
        html.split(attribute).skip(1).filter_map(|rest| Some(rest.split_once('"')?.0))
    };
    of(" href=\"").chain(of(" src=\"")).filter(|target| !target.starts_with("data:"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use beelet_tests_base::workdir;

    #[test]
    fn a_link_to_a_missing_page_or_anchor_is_found() {
        let site = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| workdir::write(&site.path().join(file), text).unwrap();
        write(
            "a/b.html",
            "<h1 id=\"x\">x</h1><a href=\"../c.html#y\">c</a><img src=\"d.svg\"><a href=\"#x\">x</a>",
        );
        write("a/d.svg", "");
        write("c.html", "<h1 id=\"y\">y</h1><a href=\"a/b.html#z\">b</a><a href=\"e.html\">e</a>");
        let (pages, broken) = check(site.path()).unwrap();
        assert_eq!(
            (pages, broken.as_slice()),
            (2, &["c.html: a/b.html#z", "c.html: e.html"].map(str::to_owned)[..])
        );
    }
}
