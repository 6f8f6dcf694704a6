//! `cargo xtask docs`: builds the site from docs/ with mdBook, and checks all links: in the pages, and in the
//! HTML that mdBook made of them.

mod charts;
mod html;
pub(crate) mod links;
mod page;
mod pictures;
mod sources;

use crate::{progress::Step, tidy, tools};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the site in target/site/VERSION from docs/, with a search, and checks all links
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Web address of the repository; without it, links to the repository's folders become plain text
    #[arg(long, value_name = "URL")]
    repository: Option<String>,

    /// Only check the links of the pages
    #[arg(long)]
    check: bool,

    /// Draw docs/pictures from a run of the demo instead; needs what the demo needs
    #[arg(long, conflicts_with_all = ["check", "repository"])]
    screenshots: bool,

    /// Draw the charts in docs/pictures from the kept results of the benches density and footprint instead
    #[arg(long, conflicts_with_all = ["check", "repository", "screenshots"])]
    charts: bool,
}

/// Runs `cargo xtask docs`.
pub(crate) fn run(args: &Args) -> Result<()> {
    if args.screenshots {
        return pictures::draw();
    }
    if args.charts {
        return charts::draw();
    }
    let repository = workdir::repository();
    let files = tidy::tracked(&repository)?;
    let broken = links::check(&repository, files.iter().map(String::as_str));
    for (file, line, message) in &broken {
        eprintln!("{file}:{line}: {message}");
    }
    if !broken.is_empty() {
        bail!("{} links are broken", broken.len());
    }
    if args.check {
        return Ok(());
    }
    let site = build(&repository, &files, args.repository.as_deref())?;
    println!("{}", site.join("index.html").display());
    Ok(())
}

/// Builds the site of this version and the page that leads to it; returns the site's folder.
fn build(repository: &Path, files: &[String], web: Option<&str>) -> Result<PathBuf> {
    let mdbook = tools::MDBOOK.ensure()?;
    let (book, all) = (workdir::target_dir().join("book"), workdir::target_dir().join("site"));
    let site = all.join(env!("CARGO_PKG_VERSION"));
    for folder in [&book, &site] {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("could not remove {}", folder.display()))?;
        }
    }
    let step = Step::start("build the site");
    sources::Sources::new(repository, &book.join("docs"), web).write(files)?;
    workdir::write(&book.join("book.toml"), workdir::read(&repository.join("book.toml"))?)?;
    step.run(Command::new(mdbook).arg("build").arg(&book).arg("--dest-dir").arg(&site))?;
    let (pages, broken) = html::check(&site)?;
    if !broken.is_empty() {
        bail!("the site has broken links:\n{}", broken.join("\n"));
    }
    let version = env!("CARGO_PKG_VERSION");
    let redirect = format!(
        "<!doctype html><title>beelet</title><meta http-equiv=\"refresh\" content=\"0; url={version}/index.html\">\n\
         <a href=\"{version}/index.html\">beelet {version}</a>\n"
    );
    workdir::write(&all.join("index.html"), redirect)?;
    step.done(&format!("{pages} pages, all links lead to a page"));
    Ok(site)
}
