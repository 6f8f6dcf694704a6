//! The sources of the site. The site contains the pages of docs/, and each page and file elsewhere in the
//! repository to which they lead, below `repository/`. So a site of one version has all files of that
//! version, and needs no other web server.

use super::links::{SUMMARY, resolve};
use super::page::{Page, parts};
use anyhow::{Context as _, Result};
use beelet_tests_base::workdir;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The folder of the site for files from outside of docs/.
const ELSEWHERE: &str = "repository";

/// The sources while they are written.
pub(super) struct Sources<'a> {
    repository: &'a Path,
    out: &'a Path,
    /// Web address of the repository, for links to folders.
    web: Option<&'a str>,
    /// Pages of the site from outside of docs/: their titles by their paths in the repository.
    extra: BTreeMap<PathBuf, String>,
    /// Paths in the repository of pages to write.
    queue: Vec<PathBuf>,
}

impl<'a> Sources<'a> {
    /// Starts with no page.
    pub(super) fn new(repository: &'a Path, out: &'a Path, web: Option<&'a str>) -> Self {
        Self { repository, out, web, extra: BTreeMap::new(), queue: Vec::new() }
    }

    /// Writes the pages and files among `files` (paths in the repository) that the site needs, and the
    /// summary.
    pub(super) fn write(mut self, files: &[String]) -> Result<()> {
        for file in files.iter().filter(|file| file.starts_with("docs/") && *file != SUMMARY) {
            if file.ends_with(".md") {
                self.queue.push(PathBuf::from(file));
            } else {
                self.copy(Path::new(file))?;
            }
        }
        while let Some(page) = self.queue.pop() {
            self.page(&page)?;
        }
        let mut summary = workdir::read(&self.repository.join(SUMMARY))?;
        summary.push_str("\n# The repository\n\n");
        for (page, title) in &self.extra {
            summary.push_str(&format!("- [{title}]({})\n", in_site(page).display()));
        }
        workdir::write(&self.out.join("SUMMARY.md"), summary)
    }

    /// Writes a page with its links changed to the site's.
    fn page(&mut self, page: &Path) -> Result<()> {
        let mut text = workdir::read(&self.repository.join(page))?;
        let parsed = Page::parse(&text);
        if !page.starts_with("docs") {
            let title = parsed.title.unwrap_or_else(|| page.display().to_string());
            self.extra.insert(page.to_path_buf(), title);
        }
        for link in parsed.links.iter().rev() {
            let Some((path, anchor)) = parts(&link.target).filter(|(path, _)| !path.is_empty()) else {
                continue;
            };
            let Some(target) = resolve(&page.to_string_lossy(), path) else { continue };
            let anchor = anchor.map(|anchor| format!("#{anchor}")).unwrap_or_default();
            let old = &text[link.range.clone()];
            let new = match self.place(&target)? {
                Some(place) => old.replacen(
                    &format!("]({}", link.target),
                    &format!("]({}{anchor}", relative(&in_site(page), &place)),
                    1,
                ),
                None => match self.web {
                    Some(web) => old.replacen(
                        &format!("]({}", link.target),
                        &format!("]({}/tree/HEAD/{}", web.trim_end_matches('/'), target.display()),
                        1,
                    ),
                    None => inner(old).to_owned(),
                },
            };
            text.replace_range(link.range.clone(), &new);
        }
        workdir::write(&self.out.join(in_site(page)), text)
    }

    /// Returns the place of a target in the site, and adds the target if the site lacks it; None for a
    /// folder.
    fn place(&mut self, target: &Path) -> Result<Option<PathBuf>> {
        let full = self.repository.join(target);
        if full.is_dir() {
            let readme = target.join("README.md");
            return if self.repository.join(&readme).exists() { self.place(&readme) } else { Ok(None) };
        }
        let is_page = target.extension().is_some_and(|ext| ext == "md");
        if is_page && !target.starts_with("docs") && !self.extra.contains_key(target) {
            self.extra.insert(target.to_path_buf(), String::new());
            self.queue.push(target.to_path_buf());
        } else if !is_page {
            self.copy(target)?;
        }
        Ok(Some(in_site(target)))
    }

    fn copy(&self, file: &Path) -> Result<()> {
        let content = fs::read(self.repository.join(file))
            .with_context(|| format!("could not read {}", file.display()))?;
        workdir::write(&self.out.join(in_site(file)), content)
    }
}

/// Returns the place in the site of a file of the repository.
fn in_site(file: &Path) -> PathBuf {
    file.strip_prefix("docs").map_or_else(|_| Path::new(ELSEWHERE).join(file), Path::to_path_buf)
}

/// Returns the path from one file of the site to another.
fn relative(from: &Path, to: &Path) -> String {
    let up = "../".repeat(from.components().count() - 1);
    format!("{up}{}", to.display())
}

/// Returns the text of a link `[text](target)`.
fn inner(link: &str) -> &str {
    link.strip_prefix('[').and_then(|rest| Some(rest.rsplit_once("](")?.0)).unwrap_or(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_out_of_the_pages_lead_to_copies_and_links_to_folders_to_the_web() {
        let (repository, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |file: &str, text: &str| workdir::write(&repository.path().join(file), text).unwrap();
        write("docs/SUMMARY.md", "# Summary\n\n- [A](a.md)\n");
        write(
            "docs/a.md",
            "[l](../LICENSE) [r](../R.md#r) [f](../packaging) [a](b/c.md) [d](../packaging/x)\n",
        );
        write("docs/b/c.md", "[l](../../LICENSE) [a](../a.md) [w](https://example.com)\n");
        write("R.md", "# R\n\n[a](docs/a.md#a)\n");
        write("LICENSE", "x");
        write("packaging/x", "x");
        let files: Vec<String> =
            ["docs/SUMMARY.md", "docs/a.md", "docs/b/c.md", "R.md"].map(str::to_owned).into();
        let read = |file: &str| workdir::read(&out.path().join(file)).unwrap();
        Sources::new(repository.path(), out.path(), Some("https://example.com/x")).write(&files).unwrap();
        assert_eq!(
            read("a.md"),
            "[l](repository/LICENSE) [r](repository/R.md#r) [f](https://example.com/x/tree/HEAD/packaging) \
             [a](b/c.md) [d](repository/packaging/x)\n"
        );
        assert_eq!(read("b/c.md"), "[l](../repository/LICENSE) [a](../a.md) [w](https://example.com)\n");
        assert_eq!(read("repository/R.md"), "# R\n\n[a](../a.md#a)\n");
        assert_eq!(read("repository/packaging/x"), "x");
        assert!(read("SUMMARY.md").ends_with("- [A](a.md)\n\n# The repository\n\n- [R](repository/R.md)\n"));
        Sources::new(repository.path(), out.path(), None).write(&files).unwrap();
        assert!(read("a.md").contains(" f [a]"), "{}", read("a.md"));
    }
}
