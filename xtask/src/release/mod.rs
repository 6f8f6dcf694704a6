//! `cargo xtask release VERSION`: from a clean checkout to a folder that can be published.
//!
//! The command changes the version and the changelog in a commit of its own, unless the checkout has that
//! version. Then it makes the files of all processors, the APT and RPM repositories, the statements about
//! origin and vulnerabilities, and the checksums; and signs, if it gets the keys. The command publishes
//! nothing.

mod apt;
mod reproducible;
mod rpm;
mod sign;
mod statements;
mod version;

use crate::cross::Arch;
use crate::package::{self, Commit, Order, Product, checksums, megabytes};
use crate::{setup, shell};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes a folder that can be published: version, changelog, packages, repositories, SBOMs, checksums,
/// signatures
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The version: MAJOR.MINOR.PATCH. If the checkout has another one, a commit changes it
    #[arg(value_name = "VERSION")]
    version: String,

    /// The folder to make; it must not exist [default: target/release-VERSION]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Processors to build for
    #[arg(long, value_name = "ARCH", value_delimiter = ',', default_value = "amd64,arm64")]
    arch: Vec<Arch>,

    /// Products to make [default: all]
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    only: Vec<Product>,

    /// Package these binaries instead of building, for one processor
    #[arg(long, value_name = "DEB,STATIC", value_delimiter = ',', num_args = 1)]
    binaries: Vec<PathBuf>,

    /// File with a secret SSH key, which signs the checksums [default: do not sign them]
    #[arg(long, value_name = "FILE")]
    ssh_key: Option<PathBuf>,

    /// File with a secret OpenPGP key, which signs the repositories [default: do not sign them]
    #[arg(long, value_name = "FILE")]
    gpg_key: Option<PathBuf>,

    /// Build twice, in two folders below target/reproducible, and compare all files
    #[arg(long, conflicts_with = "out")]
    check_reproducible: bool,
}

/// Runs `cargo xtask release`.
pub(crate) fn run(args: &Args) -> Result<()> {
    if !version::is_version(&args.version) {
        bail!("{:?} is not a version such as 1.2.3", args.version);
    }
    if !git(&["status", "--porcelain"])?.is_empty() {
        bail!("the checkout has changes; commit or remove them: a release is built from a commit");
    }
    if package::version() != args.version {
        cut(&args.version)?;
        // This program has the old version, so it starts again with the new one.
        let mut cargo = shell::cargo();
        cargo.args(["xtask"]).args(std::env::args_os().skip(1));
        return Err(cargo.exec()).context("could not start cargo");
    }
    setup::ensure(setup::Part::Release)?;
    if args.check_reproducible {
        return reproducible::check(&repeated(args)?);
    }
    let default = || workdir::target_dir().join(format!("release-{}", args.version));
    let out = args.out.clone().unwrap_or_else(default);
    if out.exists() {
        bail!("{} exists; remove it, or name another folder with --out", out.display());
    }
    make(args, &out)?;
    report(args, &out)
}

/// Commits the version and its changelog.
fn cut(version: &str) -> Result<()> {
    let top = workdir::repository();
    let day = date("%F", None)?;
    let change = |file: &str, text: Result<String>| workdir::write(&top.join(file), text?);
    let read = |file: &str| workdir::read(&top.join(file));
    change("CHANGELOG.md", version::in_changelog(&read("CHANGELOG.md")?, version, &day))?;
    change("Cargo.toml", version::in_manifest(&read("Cargo.toml")?, version))?;
    let set = "packaging/kubernetes/observe.yaml";
    change(set, version::in_daemon_set(&read(set)?, version))?;
    shell::run(shell::cargo().args(["update", "--quiet", "--workspace", "--offline"]))?;
    git(&["commit", "--quiet", "--all", "--message", &format!("release: cut {version}")])?;
    eprintln!("committed the version {version}");
    Ok(())
}

/// Makes all files in the folder `out`.
fn make(args: &Args, out: &Path) -> Result<()> {
    let commit = Commit::of_checkout();
    let mut files = Vec::new();
    for (index, arch) in args.arch.iter().enumerate() {
        // Files for every processor are made with the first one.
        let all = <Product as clap::ValueEnum>::value_variants();
        let wanted = |product: &&Product| args.only.is_empty() || args.only.contains(product);
        let only: Vec<Product> = all.iter().filter(wanted).copied().collect();
        let only: Vec<Product> =
            only.into_iter().filter(|product| index == 0 || !Product::COMMON.contains(product)).collect();
        let order = Order { revision: "1", arch: *arch, only: &only, binaries: &args.binaries };
        files.extend(package::make(&order, out)?);
    }
    let key = args.gpg_key.as_ref().map(|key| sign::Gpg::import(key, commit.seconds)).transpose()?;
    let ends = |end: &'static str| files.iter().filter(move |path| path.to_string_lossy().ends_with(end));
    let of_arch = |path: &PathBuf| {
        let name = path.to_string_lossy().into_owned();
        args.arch.iter().find(|arch| name.ends_with(&format!("_{}.deb", arch.name()))).map(|arch| arch.name())
    };
    let debs: Vec<(&str, PathBuf)> =
        ends(".deb").filter_map(|path| Some((of_arch(path)?, path.clone()))).collect();
    if !debs.is_empty() {
        let date = date("%a, %d %b %Y %H:%M:%S UTC", Some(commit.seconds))?;
        apt::build(&out.join("apt"), &debs, &date, key.as_ref())?;
    }
    let rpms: Vec<PathBuf> = ends(".rpm").cloned().collect();
    if !rpms.is_empty() {
        rpm::build(&out.join("rpm"), &rpms, commit.seconds, key.as_ref())?;
    }
    if let Some(key) = &key {
        key.export(&out.join("beelet-archive-key.asc"))?;
    }
    let top = workdir::repository();
    let changelog = workdir::read(&top.join("CHANGELOG.md"))?;
    let notes = version::section(&changelog, &args.version)
        .with_context(|| format!("CHANGELOG.md has no section of version {}", args.version))?;
    workdir::write(&out.join("NOTES.md"), format!("{notes}\n"))?;
    let time = date("%FT%TZ", Some(commit.seconds))?;
    if let Some(document) = statements::vex(&workdir::read(&top.join("packaging/vex.json"))?, &time)? {
        workdir::write(
            &out.join(format!("beelet-{}.openvex.json", args.version)),
            format!("{document:#}\n"),
        )?;
    }
    let statement = statements::provenance(out, &listed(out)?, &commit, &rustc()?)?;
    workdir::write(&out.join(format!("beelet-{}.intoto.json", args.version)), format!("{statement:#}\n"))?;
    let sums = checksums(out, &listed(out)?)?;
    workdir::write(&out.join("SHA256SUMS"), sums)?;
    if let Some(key) = &args.ssh_key {
        sign::ssh(key, &out.join("SHA256SUMS"))?;
    }
    Ok(())
}

/// Prints the files with their sizes, and the steps that are left.
fn report(args: &Args, out: &Path) -> Result<()> {
    for path in listed(out)? {
        let size = std::fs::metadata(&path)?.len();
        println!("{:>8.3} MB  {}", megabytes(size), path.strip_prefix(out).unwrap_or(&path).display());
    }
    println!("{}", out.display());
    for (key, what) in
        [(&args.gpg_key, "the repositories: --gpg-key"), (&args.ssh_key, "the checksums: --ssh-key")]
    {
        if key.is_none() {
            println!("not signed: {what}");
        }
    }
    println!("left to do: git tag --sign v{}, push the tag, publish the folder", args.version);
    Ok(())
}

/// Returns the arguments for each of two builds.
fn repeated(args: &Args) -> Result<Vec<OsString>> {
    let mut all = vec![OsString::from(&args.version)];
    let list = |items: Vec<String>| OsString::from(items.join(","));
    let names = args.arch.iter().map(|arch| arch.name().to_owned()).collect();
    all.extend(["--arch".into(), list(names)]);
    if !args.only.is_empty() {
        let name =
            |product: &Product| Some(clap::ValueEnum::to_possible_value(product)?.get_name().to_owned());
        all.extend(["--only".into(), list(args.only.iter().filter_map(name).collect())]);
    }
    // A relative path would start in the clone.
    let full =
        |path: &PathBuf| path.canonicalize().with_context(|| format!("could not find {}", path.display()));
    for (name, path) in [("--ssh-key", &args.ssh_key), ("--gpg-key", &args.gpg_key)] {
        if let Some(path) = path {
            all.extend([name.into(), full(path)?.into_os_string()]);
        }
    }
    if !args.binaries.is_empty() {
        let paths: Vec<PathBuf> = args.binaries.iter().map(full).collect::<Result<_>>()?;
        let paths = paths.iter().map(|path| path.display().to_string()).collect();
        all.extend(["--binaries".into(), list(paths)]);
    }
    Ok(all)
}

/// Returns the files in the folder and below, sorted.
fn listed(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    let said = || format!("could not list {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(said)? {
        let path = entry.with_context(said)?.path();
        if path.is_dir() {
            all.extend(listed(&path)?);
        } else {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

/// Formats a time (seconds since 1970, or now) in UTC with date(1).
fn date(format: &str, seconds: Option<u64>) -> Result<String> {
    let mut command = Command::new("date");
    command.args(["-u", &format!("+{format}")]).env("LC_ALL", "C");
    if let Some(seconds) = seconds {
        command.args(["-d", &format!("@{seconds}")]);
    }
    printed(&mut command)
}

fn rustc() -> Result<String> {
    printed(Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("--version"))
}

fn git(arguments: &[&str]) -> Result<String> {
    printed(Command::new("git").args(arguments).current_dir(workdir::repository()))
}

/// Returns the output of a program without the last line's end.
fn printed(command: &mut Command) -> Result<String> {
    let shown = shell::display(command);
    let output = command.output().with_context(|| format!("could not start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}
