//! `cargo xtask package`: makes the files of a release in `package/` below cargo's target folder: a Debian
//! package, an archive with a static binary, a container image, a list of the binary's components (SBOM), and
//! the checksums of all of them.
//!
//! The package and the archive contain the same files ([`layout`]). The same commit makes the same bytes:
//! times are the commit's, owners are root.

mod archive;
mod deb;
mod layout;
mod sbom;

use crate::cross::{self, Arch};
use crate::{
    progress::Step,
    qemu::{self, Qemu},
    shell,
};
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::{images, workdir};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;

pub use self::deb::{Packed, build as build_deb};
pub use self::layout::files;

/// The cargo profile of released binaries.
const PROFILE: &str = "dist";
/// The image's name, which packaging/kubernetes uses.
const IMAGE: &str = "localhost/beelet:latest";

/// Makes the files of a release below target/package: a .deb, an archive with a static binary, a container
/// image, an SBOM, and their checksums
#[derive(clap::Args)]
pub struct Args {
    /// The package's revision, which follows the version: 0.1.0-REVISION
    #[arg(long, value_name = "REVISION", default_value = "1")]
    revision: String,

    /// Target processor [default: this machine's]. The Debian package for another processor contains the
    /// static binary, and an emulator runs that binary to print the manual pages
    #[arg(long, value_name = "ARCH")]
    arch: Option<Arch>,

    /// Products to make: deb, static (the archive), image (needs static), sbom [default: all]
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    only: Vec<Product>,

    /// Package these binaries instead of building: one for the Debian package, a static one for the rest
    #[arg(long, value_name = "DEB,STATIC", value_delimiter = ',', num_args = 1)]
    binaries: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Product {
    Deb,
    Static,
    Image,
    Sbom,
}

/// Runs `cargo xtask package`.
pub fn run(args: &Args) -> Result<()> {
    let wants = |product| args.only.is_empty() || args.only.contains(&product);
    let out = workdir::target_dir().join("package");
    std::fs::create_dir_all(&out).with_context(|| format!("could not make {}", out.display()))?;
    let commit = Commit::of_checkout();
    let here = Arch::here()?;
    let arch = args.arch.unwrap_or(here);
    let mut made = Vec::new();
    if wants(Product::Deb) {
        deb::require()?;
        let linked = if arch == here { Linked::ToGlibc } else { Linked::Statically };
        let binary = stripped(&built(args.binaries.first(), arch, linked, &commit)?, arch, &out)?;
        let files = files(&binary, || runnable(&binary, arch))?;
        made.push(build_deb(&files, arch, &args.revision, Packed::Xz, &out, commit.seconds)?);
    }
    if wants(Product::Static) || wants(Product::Image) {
        let built = built(args.binaries.get(1), arch, Linked::Statically, &commit)?;
        let binary = stripped(&built, arch, &out)?;
        if !images::is_static(&binary)? {
            bail!("{} is not static", binary.display());
        }
        if wants(Product::Static) {
            let files = files(&binary, || runnable(&binary, arch))?;
            made.push(archive::build(&files, arch, &out, commit.seconds)?);
        }
        if wants(Product::Image) {
            made.push(image(&binary, arch, &out)?);
        }
    }
    if wants(Product::Sbom) {
        made.push(sbom::build(&out)?);
    }
    let sums = checksums(&made)?;
    workdir::write(&out.join("SHA256SUMS"), sums)?;
    for path in &made {
        let size = std::fs::metadata(path)?.len();
        println!("{:>6.1} MB  {}", megabytes(size), path.display());
    }
    println!("           {}", out.join("SHA256SUMS").display());
    Ok(())
}

/// The commit that the binary prints as its origin, and whose time all packaged files have.
struct Commit {
    /// Hash and date; None without git, or if git does not track this folder's `Cargo.lock`.
    name: Option<String>,
    /// Seconds since 1970.
    seconds: u64,
}

impl Commit {
    fn of_checkout() -> Commit {
        let git = |arguments: &[&str]| {
            let output =
                Command::new("git").args(arguments).current_dir(workdir::repository()).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let found = || {
            git(&["ls-files", "--error-unmatch", "Cargo.lock"])?;
            let name = git(&["log", "-1", "--abbrev=12", "--format=%h %cs"])?;
            let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
            let name = if changed { format!("{name}, with changes") } else { name };
            Some((name, git(&["log", "-1", "--format=%ct"])?.parse().ok()?))
        };
        match found() {
            Some((name, seconds)) => Commit { name: Some(name), seconds },
            None => Commit { name: None, seconds: 0 },
        }
    }
}

/// The way in which a binary is linked to its libc.
#[derive(Clone, Copy, Debug)]
enum Linked {
    /// glibc as a shared library, of this machine's version or newer.
    ToGlibc,
    /// musl inside the binary.
    Statically,
}

/// Returns the command that starts this program on this machine.
fn runnable(program: &Path, arch: Arch) -> Result<Command> {
    if arch == Arch::here()? {
        return Ok(Command::new(program));
    }
    let mut command = Qemu::user(&qemu::folder(), arch)?.command();
    command.arg(program);
    Ok(command)
}

/// Builds the agent, or returns the given one.
fn built(given: Option<&PathBuf>, arch: Arch, linked: Linked, commit: &Commit) -> Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.clone());
    }
    let mut cargo = shell::cargo();
    cargo.args([
        "build",
        "--locked",
        "--package",
        "beelet",
        "--package",
        "beelet-exec",
        "--profile",
        PROFILE,
    ]);
    let mut dir = workdir::target_dir();
    let libc = match linked {
        Linked::ToGlibc => "glibc",
        Linked::Statically => {
            cross::target_musl(&mut cargo, arch)?;
            dir.push(arch.musl());
            "musl"
        }
    };
    if let Some(name) = &commit.name {
        cargo.env("BEELET_COMMIT", name);
    }
    let step = Step::start(format!("build the agent for {}, with {libc}", arch.name()));
    shell::run(&mut cargo)?;
    step.done("built");
    Ok(dir.join(PROFILE).join("beelet"))
}

/// Returns a copy without symbols, with one of the helper next to it. The original keeps its symbols, for the
/// analysis of a core dump.
fn stripped(binary: &Path, arch: Arch, out: &Path) -> Result<PathBuf> {
    let kind = if images::is_static(binary)? { "static" } else { "dynamic" };
    let dir = out.join("stripped").join(format!("{}-{kind}", arch.name()));
    std::fs::create_dir_all(&dir).with_context(|| format!("could not make {}", dir.display()))?;
    let copy = dir.join("beelet");
    cross::strip(binary, &copy, arch)?;
    let helper = binary.with_file_name(layout::HELPER);
    cross::strip(&helper, &copy.with_file_name(layout::HELPER), arch)?;
    Ok(copy)
}

/// Returns the image of the DaemonSet in packaging/kubernetes, which contains only the binary.
fn image(binary: &Path, arch: Arch, out: &Path) -> Result<PathBuf> {
    let program = std::fs::read(binary).with_context(|| format!("could not read {}", binary.display()))?;
    let folder = |path: &str| (path.to_owned(), images::Entry::Folder(0o755));
    let files = [
        folder("usr"),
        folder("usr/bin"),
        ("usr/bin/beelet".to_owned(), images::Entry::File(program, 0o755)),
    ];
    let config = json!({ "Entrypoint": ["/usr/bin/beelet"], "Cmd": ["observe"] });
    let image = images::cached_for(arch.name(), IMAGE, &files, &config)?;
    let path = out.join(format!("beelet-{}-{}-oci.tar", version(), arch.machine()));
    std::fs::copy(&image.path, &path).with_context(|| format!("could not write {}", path.display()))?;
    Ok(path)
}

/// Returns the checksums in the format of `sha256sum --check`.
fn checksums(files: &[PathBuf]) -> Result<String> {
    let line = |path: &PathBuf| {
        let content = std::fs::read(path).with_context(|| format!("could not read {}", path.display()))?;
        let sum: String = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(format!("{sum}  {name}\n"))
    };
    files.iter().map(line).collect()
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

#[allow(clippy::cast_precision_loss)] // printed with one decimal
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
