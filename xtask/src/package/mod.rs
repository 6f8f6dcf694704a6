//! `cargo xtask package`: makes the files of a release in `package/` below cargo's target folder: packages
//! for Debian, RPM and Alpine, an archive with a static binary, an image for systemd-sysext, a container
//! image, a Helm chart, lists of the binary's components (SBOM), and the checksums of all of them.
//!
//! The packages and the archive contain the same files ([`layout`]). The same commit makes the same bytes, in
//! any folder: times are the commit's, owners are root, and the binary contains no path of the build
//! ([`paths`]).

mod archive;
mod chart;
mod deb;
mod layout;
mod nfpm;
mod paths;
mod sbom;
mod spdx;
mod sysext;
mod tree;

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
/// Makes the files of a release below target/package: packages (.deb, .rpm, .apk), an archive with a static
/// binary, a systemd-sysext image, a container image, a Helm chart, SBOMs, and the checksums of all of them
#[derive(clap::Args)]
pub struct Args {
    /// The package's revision, which follows the version: 0.1.0-REVISION
    #[arg(long, value_name = "REVISION", default_value = "1")]
    revision: String,

    /// Target processor [default: this machine's]. The Debian package for another processor contains the
    /// static binary, and an emulator runs that binary to print the manual pages
    #[arg(long, value_name = "ARCH")]
    arch: Option<Arch>,

    /// Products to make [default: all]
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    only: Vec<Product>,

    /// Package these binaries instead of building: one for the Debian package, a static one for the rest
    #[arg(long, value_name = "DEB,STATIC", value_delimiter = ',', num_args = 1)]
    binaries: Vec<PathBuf>,
}

/// A file of a release, or several of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Product {
    /// Debian package
    Deb,
    /// RPM package, with the static binary
    Rpm,
    /// Package for Alpine, with the static binary
    Apk,
    /// Archive with the static binary
    Static,
    /// Image for systemd-sysext, with the static binary
    Sysext,
    /// Container image, with the static binary
    Image,
    /// Helm chart
    Chart,
    /// Lists of components: CycloneDX and SPDX
    Sbom,
}

impl Product {
    /// Products that contain the static binary.
    const STATIC: [Product; 5] =
        [Product::Rpm, Product::Apk, Product::Static, Product::Sysext, Product::Image];
    /// Products that are the same for every processor.
    pub(crate) const COMMON: [Product; 2] = [Product::Chart, Product::Sbom];
}

/// An order of files for one processor.
pub(crate) struct Order<'a> {
    /// The package's revision.
    pub(crate) revision: &'a str,
    /// The target processor.
    pub(crate) arch: Arch,
    /// The products to make; all if empty.
    pub(crate) only: &'a [Product],
    /// Binaries to package instead of building: one for the Debian package, a static one.
    pub(crate) binaries: &'a [PathBuf],
}

/// Runs `cargo xtask package`.
pub fn run(args: &Args) -> Result<()> {
    let out = workdir::target_dir().join("package");
    let arch = args.arch.map_or_else(Arch::here, Ok)?;
    let order = Order { revision: &args.revision, arch, only: &args.only, binaries: &args.binaries };
    let made = make(&order, &out)?;
    let sums = checksums(&out, &made)?;
    workdir::write(&out.join("SHA256SUMS"), sums)?;
    for path in &made {
        let size = std::fs::metadata(path)?.len();
        println!("{:>6.1} MB  {}", megabytes(size), path.display());
    }
    println!("           {}", out.join("SHA256SUMS").display());
    Ok(())
}

/// Makes the ordered files in the folder `out`, and returns their paths.
pub(crate) fn make(order: &Order, out: &Path) -> Result<Vec<PathBuf>> {
    let wants = |product| order.only.is_empty() || order.only.contains(&product);
    std::fs::create_dir_all(out).with_context(|| format!("could not make {}", out.display()))?;
    let commit = Commit::of_checkout();
    let (here, arch, seconds) = (Arch::here()?, order.arch, commit.seconds);
    let work = workdir::target_dir().join("packing");
    let mut made = Vec::new();
    if wants(Product::Deb) {
        deb::require()?;
        let linked = if arch == here { Linked::ToGlibc } else { Linked::Statically };
        let binary = stripped(&built(order.binaries.first(), arch, linked, &commit)?, arch, &work)?;
        let files = files(&binary, || runnable(&binary, arch))?;
        made.push(build_deb(&files, arch, order.revision, Packed::Xz, out, seconds)?);
    }
    if Product::STATIC.into_iter().any(wants) {
        let built = built(order.binaries.get(1), arch, Linked::Statically, &commit)?;
        let binary = stripped(&built, arch, &work)?;
        require_static(&binary, arch)?;
        require_static(&binary.with_file_name(layout::HELPER), arch)?;
        let files = files(&binary, || runnable(&binary, arch))?;
        for product in Product::STATIC.into_iter().filter(|product| wants(*product)) {
            made.push(match product {
                Product::Rpm => nfpm::build(nfpm::Format::Rpm, &files, arch, order.revision, out, seconds)?,
                Product::Apk => nfpm::build(nfpm::Format::Apk, &files, arch, order.revision, out, seconds)?,
                Product::Sysext => sysext::build(&files, arch, out, seconds)?,
                Product::Image => image(&binary, arch, out)?,
                _ => archive::build(&files, arch, out, seconds)?,
            });
        }
    }
    if wants(Product::Chart) {
        made.push(chart::build(out, seconds)?);
    }
    if wants(Product::Sbom) {
        let list = sbom::build(out, seconds)?;
        made.push(spdx::build(&list, out, &commit)?);
        made.push(list);
    }
    Ok(made)
}

/// The commit that the binary prints as its origin, and whose time all packaged files have.
pub(crate) struct Commit {
    /// Short hash and date; None without git, or if git does not track this folder's `Cargo.lock`.
    pub(crate) name: Option<String>,
    /// The whole hash, as [`Commit::name`].
    pub(crate) hash: Option<String>,
    /// Seconds since 1970.
    pub(crate) seconds: u64,
}

impl Commit {
    /// Returns the commit of the checkout.
    pub(crate) fn of_checkout() -> Commit {
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
            let seconds = git(&["log", "-1", "--format=%ct"])?.parse().ok()?;
            Some(Commit { name: Some(name), hash: git(&["log", "-1", "--format=%H"]), seconds })
        };
        found().unwrap_or(Commit { name: None, hash: None, seconds: 0 })
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
    let (libc, library) = match linked {
        Linked::ToGlibc => ("glibc", None),
        Linked::Statically => {
            dir.push(arch.musl());
            ("musl", Some(cross::target_musl(&mut cargo, arch)?))
        }
    };
    if let Some(name) = &commit.name {
        cargo.env("BEELET_COMMIT", name);
    }
    paths::hide(&mut cargo, library)?;
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
    cross::strip(binary, &copy)?;
    let helper = binary.with_file_name(layout::HELPER);
    cross::strip(&helper, &copy.with_file_name(layout::HELPER))?;
    Ok(copy)
}

/// Ensures that a binary needs no loader, and that its addresses are not fixed, so the kernel can randomize
/// them. rustc gives static binaries for arm64 fixed addresses.
fn require_static(binary: &Path, arch: Arch) -> Result<()> {
    // e_type, ET_DYN
    const TYPE: std::ops::Range<usize> = 16..18;
    const RELOCATABLE: &[u8] = &[3, 0];
    if !images::is_static(binary)? {
        bail!("{} is not static", binary.display());
    }
    let program = std::fs::read(binary).with_context(|| format!("could not read {}", binary.display()))?;
    if arch == Arch::Amd64 && program.get(TYPE) != Some(RELOCATABLE) {
        bail!("{} has fixed addresses: the linker did not make a static-pie", binary.display());
    }
    Ok(())
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
    let image = images::cached_for(arch.name(), &format!("localhost/beelet:{}", version()), &files, &config)?;
    let path = out.join(format!("beelet-{}-{}-oci.tar", version(), arch.machine()));
    std::fs::copy(&image.path, &path).with_context(|| format!("could not write {}", path.display()))?;
    Ok(path)
}

/// Returns the checksums of files in `folder` or below, in the format of `sha256sum --check`.
pub(crate) fn checksums(folder: &Path, files: &[PathBuf]) -> Result<String> {
    let line = |path: &PathBuf| {
        let name = path.strip_prefix(folder).unwrap_or(path);
        Ok(format!("{}  {}\n", sha256(path)?, name.display()))
    };
    files.iter().map(line).collect()
}

/// Returns a file's SHA-256 in hexadecimal.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let content = std::fs::read(path).with_context(|| format!("could not read {}", path.display()))?;
    Ok(Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the version of the workspace.
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Returns a version as dpkg and rpm order it: a pre-release has a `~` there, and is older than its release.
fn with_tilde(version: &str) -> String {
    version.replacen('-', "~", 1)
}

/// Returns decimal megabytes.
#[allow(clippy::cast_precision_loss)] // printed with one decimal
pub(crate) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
