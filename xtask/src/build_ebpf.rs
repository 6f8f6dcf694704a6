//! `cargo xtask build-ebpf`: builds the kernel programs and writes the objects to the folder from which
//! `cargo build` reads them.
//!
//! The objects are committed (`ebpf/prebuilt/`), so beelet builds without a BPF toolchain. Their bytes are
//! reproducible: they contain no path of the machine and no debug information but BTF, so `--check` can build
//! them again and compare. A record next to them names their sources and tools.

use crate::progress::Step;
use crate::setup_ebpf::{self, Toolchain};
use crate::shell;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use object::build::elf::{Builder, SectionData};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Builds the kernel programs and writes ebpf/prebuilt/, which is committed and from which `cargo build`
/// reads the objects
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing: fail unless the committed objects are equal to a build of the committed sources
    #[arg(long)]
    check: bool,
    /// Build the development object instead, whose programs log through aya-log, into target/bpf/
    #[arg(long, conflicts_with = "check")]
    log: bool,
}

/// The record of the sources and tools of the committed objects.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// SHA-256 of the names and contents of all files in ebpf/ that go into the objects.
    sources_sha256: String,
    /// SHA-256 of each object, by its file's name.
    objects_sha256: BTreeMap<String, String>,
    /// The tools that built the objects.
    toolchain: String,
}

/// The object with the programs that are attached and pinned, and with their maps.
pub const ATTACHED: &str = "beelet";
/// The names of all objects: cargo makes a binary of this name, and xtask makes `<name>.bpf.o` from it.
const OBJECTS: [&str; 3] = [ATTACHED, "beelet-check", "beelet-scheduler"];

/// Returns the file name of an object.
fn file_name(object: &str) -> String {
    format!("{object}.bpf.o")
}

/// Returns the path of a committed object.
fn prebuilt(object: &str) -> PathBuf {
    workdir::repository().join("ebpf/prebuilt").join(file_name(object))
}

fn record_path() -> PathBuf {
    workdir::repository().join("ebpf/prebuilt/beelet.bpf.json")
}

/// Runs `cargo xtask build-ebpf`.
///
/// # Errors
/// The toolchain is missing and could not be installed, the programs do not build, or (`--check`) the
/// committed objects differ from a build of the sources.
pub fn run(args: &Args) -> Result<()> {
    if args.check {
        return check();
    }
    if args.log {
        let toolchain = setup_ebpf::ensure()?;
        let object = object(&build(&toolchain, true)?, ATTACHED)?.to_vec();
        let path = workdir::repository().join("target/bpf/beelet-log.bpf.o");
        write(&path, &object)?;
        println!("{}", path.display());
        return Ok(());
    }
    let toolchain = setup_ebpf::ensure()?;
    let objects = build(&toolchain, false)?;
    let digests = objects.iter().map(|(name, bytes)| (file_name(name), hex(&Sha256::digest(bytes))));
    let record = Record {
        sources_sha256: sources_digest()?,
        objects_sha256: digests.collect(),
        toolchain: toolchain.versions,
    };
    let mut text = serde_json::to_string_pretty(&record).context("could not write the build record")?;
    text.push('\n');
    for (name, bytes) in &objects {
        write(&prebuilt(name), bytes)?;
        println!("{} ({} bytes)", prebuilt(name).display(), bytes.len());
    }
    write(&record_path(), text.as_bytes())
}

/// Returns true if the committed objects were made from the current sources. Only reads their record.
///
/// # Errors
/// A file cannot be read.
pub fn is_current() -> Result<bool> {
    let record = read_record()?;
    Ok(record.sources_sha256 == sources_digest()?)
}

fn check() -> Result<()> {
    let step = Step::start("the committed BPF object and its sources");
    let record = read_record()?;
    let mut committed = BTreeMap::new();
    for name in OBJECTS {
        let path = prebuilt(name);
        let bytes = std::fs::read(&path).with_context(|| format!("could not read {}", path.display()))?;
        let digest = hex(&Sha256::digest(&bytes));
        let recorded = record.objects_sha256.get(&file_name(name)).map_or("none", String::as_str);
        if digest != recorded {
            bail!(
                "{} (sha256 {digest}) differs from the object in the record beelet.bpf.json ({recorded}); run \
                 `cargo xtask build-ebpf` and commit ebpf/prebuilt/",
                path.display()
            );
        }
        committed.insert(name, bytes);
    }
    if record.sources_sha256 != sources_digest()? {
        bail!(
            "the sources of the kernel programs have changed since the objects in ebpf/prebuilt/ were built; \
             run `cargo xtask build-ebpf` and commit ebpf/prebuilt/"
        );
    }
    step.done("the record matches");
    let toolchain = setup_ebpf::ensure()?;
    if toolchain.versions != record.toolchain {
        bail!(
            "cannot compare the objects' bytes: {} built the committed ones, but this machine has {}; use the former, or \
             run `cargo xtask build-ebpf` and commit ebpf/prebuilt/",
            record.toolchain,
            toolchain.versions
        );
    }
    if build(&toolchain, false)? != committed {
        bail!(
            "the objects in ebpf/prebuilt/ differ from a build of their sources with {}; run `cargo xtask build-ebpf` and \
             commit ebpf/prebuilt/",
            record.toolchain
        );
    }
    println!("the objects in ebpf/prebuilt/ are byte for byte equal to a build of the sources");
    Ok(())
}

fn read_record() -> Result<Record> {
    let path = record_path();
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!("could not read {}; run `cargo xtask build-ebpf` and commit ebpf/prebuilt/", path.display())
    })?;
    serde_json::from_str(&text).with_context(|| format!("{} is not a build record", path.display()))
}

/// Returns the object with this name.
pub fn object<'a>(objects: &'a Objects, name: &str) -> Result<&'a [u8]> {
    objects.get(name).map(Vec::as_slice).with_context(|| format!("no kernel object {name} was built"))
}

/// The bytes of objects, by name.
pub type Objects = BTreeMap<&'static str, Vec<u8>>;

/// Compiles, links and strips the kernel programs.
pub fn build(toolchain: &Toolchain, log: bool) -> Result<Objects> {
    let step = Step::start("kernel programs");
    let target = workdir::repository().join("target/bpf").join(if log { "log" } else { "plain" });
    let mut path = std::ffi::OsString::from(&toolchain.linker_dir);
    if let Some(inherited) = std::env::var_os("PATH") {
        path.push(":");
        path.push(inherited);
    }
    let mut cargo = shell::cargo();
    cargo
        .args(["build", "--locked", "--package", "beelet-ebpf", "--profile", "bpf", "-Z", "build-std=core"])
        .args(["--target", "bpfel-unknown-none", "--target-dir"])
        .arg(&target)
        .env("PATH", path)
        // Stable rustc builds `core` only with this variable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags(toolchain)?.join("\x1f"))
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_BUILD_TARGET")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    if log {
        cargo.args(["--features", "log"]);
    }
    if toolchain.library_elsewhere {
        cargo.env("__CARGO_TESTS_ONLY_SRC_ROOT", &toolchain.library);
    }
    step.run(&mut cargo)?;
    let mut objects = Objects::new();
    for name in OBJECTS {
        let linked = target.join("bpfel-unknown-none/bpf").join(name);
        let bytes = std::fs::read(&linked).with_context(|| format!("could not read {}", linked.display()))?;
        let object = strip(&bytes).with_context(|| format!("could not strip {}", linked.display()))?;
        refuse_paths(&object, toolchain)?;
        objects.insert(name, object);
    }
    step.done(&format!("{} bytes", objects.values().map(Vec::len).sum::<usize>()));
    Ok(objects)
}

/// Returns the flags for the programs and `core`. The flags map names of folders to fixed names, because the
/// bytes must not depend on the folders of the repository, cargo's registry or the sources of `core`.
fn rustflags(toolchain: &Toolchain) -> Result<Vec<String>> {
    let map = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    let mut flags = vec![
        // aya-ebpf chooses `struct pt_regs` by it. The programs never use pt_regs, so the object works on
        // every architecture.
        "--cfg=bpf_target_arch=\"x86_64\"".to_owned(),
        "-Cdebuginfo=2".to_owned(), // the linker makes BTF from it
        "-Clink-arg=--btf".to_owned(),
        map(&cargo_home()?, "/cargo"),
        map(&toolchain.library, "/rust/library"),
        map(&workdir::repository(), "/beelet"),
    ];
    // The registry's address names the folder below, and some machines use a mirror. rustc applies the last
    // mapping that matches.
    if let Ok(registries) = std::fs::read_dir(cargo_home()?.join("registry/src")) {
        flags.extend(registries.flatten().map(|registry| map(&registry.path(), "/cargo/registry")));
    }
    Ok(flags)
}

fn cargo_home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("CARGO_HOME").filter(|home| !home.is_empty()) {
        return Ok(PathBuf::from(home));
    }
    let home = std::env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?;
    Ok(PathBuf::from(home).join(".cargo"))
}

/// Removes DWARF. The parts that the kernel and the loaders read (code, maps, BTF, its line information)
/// stay.
fn strip(linked: &[u8]) -> Result<Vec<u8>> {
    let mut elf = Builder::read(linked)?;
    let is_debug = |name: &[u8]| name.starts_with(b".debug") || name.starts_with(b".rel.debug");
    let mut gone = Vec::new();
    for section in &mut elf.sections {
        if is_debug(section.name.as_slice()) {
            section.delete = true;
            gone.push(section.id());
        }
    }
    for symbol in &mut elf.symbols {
        if symbol.section.is_some_and(|section| gone.contains(&section)) {
            symbol.delete = true;
        }
    }
    if !elf.sections.iter().any(|s| s.name.as_slice() == b".BTF" && matches!(s.data, SectionData::Data(_))) {
        bail!("the object has no .BTF section: it was probably linked without --btf");
    }
    // LLVM keeps section names in `.strtab`, but the writer needs a separate table for them.
    let names = elf.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = object::elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    elf.write(&mut stripped)?;
    Ok(stripped)
}

/// Fails if the object contains a path of this machine.
fn refuse_paths(object: &[u8], toolchain: &Toolchain) -> Result<()> {
    for path in [workdir::repository(), cargo_home()?, toolchain.library.clone()] {
        let needle = path.to_string_lossy().into_owned();
        if object.windows(needle.len()).any(|window| window == needle.as_bytes()) {
            bail!("the object contains this machine's path {needle}: a --remap-path-prefix is missing");
        }
    }
    Ok(())
}

/// Returns the SHA-256 of the names and contents of the files that go into the objects, in a fixed order.
fn sources_digest() -> Result<String> {
    let top = workdir::repository();
    let mut files = vec!["ebpf/Cargo.toml".into(), "ebpf/abi/Cargo.toml".into()];
    for folder in ["ebpf/src", "ebpf/abi/src"] {
        files_below(&top, Path::new(folder), &mut files)?;
    }
    files.sort();
    let mut digest = Sha256::new();
    for file in files {
        let path = top.join(&file);
        let bytes = std::fs::read(&path).with_context(|| format!("could not read {}", path.display()))?;
        digest.update(file.to_string_lossy().as_bytes());
        digest.update([0]);
        digest.update((bytes.len() as u64).to_le_bytes());
        digest.update(&bytes);
    }
    Ok(hex(&digest.finalize()))
}

/// Adds the files below `folder`, as paths from `top`.
fn files_below(top: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let path = top.join(folder);
    let entries =
        std::fs::read_dir(&path).with_context(|| format!("could not read the folder {}", path.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("could not read the folder {}", path.display()))?;
        let name = folder.join(entry.file_name());
        if entry.path().is_dir() {
            files_below(top, &name, files)?;
        } else {
            files.push(name);
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file atomically: writes a temporary file next to it and renames that.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().with_context(|| format!("{} has no folder", path.display()))?;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("could not make the folder {}", folder.display()))?;
    let temporary = folder.join(format!(".{}.part", path.file_name().unwrap_or_default().to_string_lossy()));
    std::fs::write(&temporary, bytes).with_context(|| format!("could not write {}", temporary.display()))?;
    std::fs::rename(&temporary, path).with_context(|| format!("could not write {}", path.display()))
}
