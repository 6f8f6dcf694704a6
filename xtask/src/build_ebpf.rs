//! `cargo xtask build-ebpf`: builds the kernel programs and puts the object where `cargo build` takes it
//! from.
//!
//! The objects are committed (`ebpf/prebuilt/`), so that nobody needs a BPF toolchain to build beelet. Their
//! bytes are reproducible: no path of the machine and no debug information but BTF is in them, and so
//! `--check` can build them again and compare. Beside them lies a record of what they were made from.

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

/// Builds the kernel programs and writes ebpf/prebuilt/ (committed: `cargo build` takes the object from
/// there)
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing: fail unless the committed object is what the committed sources give
    #[arg(long)]
    check: bool,
    /// Build the development object instead, whose programs log through aya-log, into target/bpf/
    #[arg(long, conflicts_with = "check")]
    log: bool,
}

/// What the committed object was made from.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// SHA-256 over the names and contents of everything in ebpf/ that goes into the objects.
    sources_sha256: String,
    /// SHA-256 of each object, by its file's name.
    objects_sha256: BTreeMap<String, String>,
    /// The tools whose bytes these are.
    toolchain: String,
}

/// The programs that are attached and pinned, with their maps.
pub const ATTACHED: &str = "beelet";
/// Every object: the binary that cargo makes, of which `<name>.bpf.o` is made.
const OBJECTS: [&str; 3] = [ATTACHED, "beelet-check", "beelet-scheduler"];

/// The file's name of an object.
fn file_name(object: &str) -> String {
    format!("{object}.bpf.o")
}

/// A committed object.
fn prebuilt(object: &str) -> PathBuf {
    workdir::repository().join("ebpf/prebuilt").join(file_name(object))
}

fn record_path() -> PathBuf {
    workdir::repository().join("ebpf/prebuilt/beelet.bpf.json")
}

/// The command line's entry.
///
/// # Errors
/// The toolchain is missing and could not be installed, the programs do not build, or (`--check`) the
/// committed object is not what the sources give.
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

/// Returns true if the committed object was made from the sources as they are now, by its record alone.
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
                "{} (sha256 {digest}) is not the object that its record beelet.bpf.json names ({recorded}). Run \
                 `cargo xtask build-ebpf` and commit ebpf/prebuilt/",
                path.display()
            );
        }
        committed.insert(name, bytes);
    }
    if record.sources_sha256 != sources_digest()? {
        bail!(
            "the sources of the kernel programs have changed since the objects in ebpf/prebuilt/ were built. \
             Run `cargo xtask build-ebpf` and commit ebpf/prebuilt/"
        );
    }
    step.done("the record fits");
    let toolchain = setup_ebpf::ensure()?;
    if toolchain.versions != record.toolchain {
        bail!(
            "the committed objects were built by {}, but here is {}: their bytes cannot be compared. Use the former, or \
             run `cargo xtask build-ebpf` and commit ebpf/prebuilt/",
            record.toolchain,
            toolchain.versions
        );
    }
    if build(&toolchain, false)? != committed {
        bail!(
            "the objects in ebpf/prebuilt/ are not what their sources give with {}. Run `cargo xtask build-ebpf` and \
             commit ebpf/prebuilt/",
            record.toolchain
        );
    }
    println!("the objects in ebpf/prebuilt/ are, byte for byte, what the sources give");
    Ok(())
}

fn read_record() -> Result<Record> {
    let path = record_path();
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!("could not read {}; run `cargo xtask build-ebpf` and commit ebpf/prebuilt/", path.display())
    })?;
    serde_json::from_str(&text).with_context(|| format!("{} is not a build record", path.display()))
}

/// One of several objects.
pub fn object<'a>(objects: &'a Objects, name: &str) -> Result<&'a [u8]> {
    objects.get(name).map(Vec::as_slice).with_context(|| format!("no kernel object {name} was built"))
}

/// The bytes of objects, by name.
pub type Objects = BTreeMap<&'static str, Vec<u8>>;

/// Compiles, links and strips.
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
        // Stable rustc builds `core` only if it is told that this is meant.
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

/// The flags for the programs and `core`. Names of folders are mapped to fixed ones: the bytes must not
/// depend on where the repository, cargo's registry or the sources of `core` lie.
fn rustflags(toolchain: &Toolchain) -> Result<Vec<String>> {
    let map = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    let mut flags = vec![
        // aya-ebpf asks for it to choose `struct pt_regs`, which these programs never touch: one object for
        // all.
        "--cfg=bpf_target_arch=\"x86_64\"".to_owned(),
        "-Cdebuginfo=2".to_owned(), // BTF is made from it
        "-Clink-arg=--btf".to_owned(),
        map(&cargo_home()?, "/cargo"),
        map(&toolchain.library, "/rust/library"),
        map(&workdir::repository(), "/beelet"),
    ];
    // The folder below is named after the registry's address, which is a mirror's on some machines. The last
    // one that fits counts.
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

/// Takes DWARF out. What the kernel and the loaders read (code, maps, BTF, its line information) stays.
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
        bail!("the object has no .BTF section: was it linked with --btf?");
    }
    // LLVM keeps section names in `.strtab`, the writer wants a table of their own.
    let names = elf.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = object::elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut stripped = Vec::new();
    elf.write(&mut stripped)?;
    Ok(stripped)
}

/// No folder of this machine may be in the object.
fn refuse_paths(object: &[u8], toolchain: &Toolchain) -> Result<()> {
    for path in [workdir::repository(), cargo_home()?, toolchain.library.clone()] {
        let needle = path.to_string_lossy().into_owned();
        if object.windows(needle.len()).any(|window| window == needle.as_bytes()) {
            bail!("the object holds this machine's path {needle}: a --remap-path-prefix is missing");
        }
    }
    Ok(())
}

/// SHA-256 over names and contents of what goes into the object, in a fixed order.
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

/// Writes a file whole: to a temporary beside it, then renamed.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().with_context(|| format!("{} has no folder", path.display()))?;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("could not make the folder {}", folder.display()))?;
    let temporary = folder.join(format!(".{}.part", path.file_name().unwrap_or_default().to_string_lossy()));
    std::fs::write(&temporary, bytes).with_context(|| format!("could not write {}", temporary.display()))?;
    std::fs::rename(&temporary, path).with_context(|| format!("could not write {}", path.display()))
}
