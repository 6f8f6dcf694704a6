//! `cargo xtask fuzz`: feeds generated inputs to every parser of outside data, guided by the code that the
//! inputs reach (docs/fuzzing.md). The targets are in `fuzz/targets`, their programs in `fuzz/src/bin`.
//!
//! Stable Rust builds the programs: plain codegen options enable LLVM's pass of coverage instrumentation, and
//! the crate libfuzzer-sys contains libFuzzer (docs/decisions/0016-fuzzing.md).

use crate::progress::Step;
use crate::setup::{self, Part};
use crate::shell;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Feeds generated inputs to the parsers, and keeps every input that breaks a promise
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Targets to fuzz (see --list) [default: all, one after the other]
    targets: Vec<String>,
    /// Time for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Only list the targets
    #[arg(long)]
    list: bool,
    /// Run a single target with this input only
    #[arg(long, value_name = "FILE", conflicts_with_all = ["list", "merge"])]
    input: Option<PathBuf>,
    /// Fuzz nothing, but reduce fuzz/corpus to the fewest and smallest inputs that reach all code that inputs
    /// have reached on this machine
    #[arg(long, conflicts_with = "list")]
    merge: bool,
}

/// The flags with which LLVM counts edges and reports compared values to libFuzzer.
const FLAGS: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];
/// The time limit of an input, in seconds.
const TIMEOUT: u32 = 10;
/// The memory limit of the program, in MiB.
const MEMORY: u32 = 2048;

/// Runs `cargo xtask fuzz`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let all = targets()?;
    if args.list {
        for (name, about) in &all {
            println!("{name:<18} {about}");
        }
        return Ok(());
    }
    if let Some(unknown) = args.targets.iter().find(|name| !all.iter().any(|(known, _)| known == *name)) {
        bail!("unknown target: {unknown}; see `cargo xtask fuzz --list`");
    }
    let chosen = all.into_iter().map(|(name, _)| name);
    let chosen: Vec<String> =
        chosen.filter(|name| args.targets.is_empty() || args.targets.contains(name)).collect();
    let programs = build(&chosen)?;
    if let Some(input) = &args.input {
        let [target] = chosen.as_slice() else { bail!("--input needs the name of one target") };
        return shell::run(Command::new(programs.join(target)).args(limits()).arg(input));
    }
    let mut found = Vec::new();
    for target in &chosen {
        let program = programs.join(target);
        if args.merge {
            merge(target, &program)?;
        } else if !attempt(target, &program, args.seconds)? {
            found.push(target.as_str());
        }
    }
    if !found.is_empty() {
        bail!(
            "these targets failed: {}; their inputs are in fuzz/crashes, and `cargo xtask fuzz TARGET --input FILE` \
             reproduces one of them. Keep the inputs: `cargo xtask test` replays them from now on",
            found.join(", ")
        );
    }
    Ok(())
}

/// Returns every target with the first line of its program's documentation.
fn targets() -> Result<Vec<(String, String)>> {
    let folder = workdir::repository().join("fuzz/src/bin");
    let mut all = Vec::new();
    for entry in folder.read_dir().with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = workdir::read(&path)?;
        let about = text.lines().next().unwrap_or_default().trim_start_matches("//!").trim().to_owned();
        all.push((name, about));
    }
    all.sort();
    Ok(all)
}

/// Builds the programs of these targets; returns their folder.
fn build(targets: &[String]) -> Result<PathBuf> {
    setup::ensure(Part::Fuzz)?;
    let step = Step::start("build the targets, instrumented");
    // With an explicit --target, cargo does not apply the flags to build scripts and macros.
    let host = host()?;
    let folder = workdir::target_dir().join("fuzz");
    let mut cargo = shell::cargo();
    cargo.args(["build", "--package", "beelet-fuzz", "--features", "libfuzzer", "--profile", "fuzz"]);
    cargo.args(["--target", &host]).arg("--target-dir").arg(&folder);
    cargo.args(targets.iter().flat_map(|target| ["--bin", target]));
    cargo.env("RUSTFLAGS", FLAGS.join(" ")).env_remove("CARGO_ENCODED_RUSTFLAGS");
    step.run(&mut cargo)?;
    step.done("");
    Ok(folder.join(host).join("fuzz"))
}

fn host() -> Result<String> {
    let output = Command::new("rustc").arg("-vV").output().context("could not start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}

/// Returns the folders with the inputs of a target: the committed inputs, unpacked, and those that reached
/// new code on this machine.
fn corpora(target: &str) -> Result<[PathBuf; 2]> {
    let folder = workdir::target_dir().join("fuzz");
    let [committed, grown] = ["committed", "grown"].map(|kind| folder.join(kind).join(target));
    let _ = std::fs::remove_dir_all(&committed);
    make(&committed)?;
    make(&grown)?;
    let packed = packed(target);
    if packed.exists() {
        let file = File::open(&packed).with_context(|| format!("cannot open {}", packed.display()))?;
        let unpacked = tar::Archive::new(GzDecoder::new(file)).unpack(&committed);
        unpacked.with_context(|| format!("cannot unpack {}", packed.display()))?;
    }
    Ok([committed, grown])
}

/// Returns the archive of the committed inputs: hundreds of small files, mostly of the same words.
fn packed(target: &str) -> PathBuf {
    workdir::repository().join(format!("fuzz/corpus/{target}.tar.gz"))
}

fn make(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

fn limits() -> Vec<String> {
    vec![format!("-timeout={TIMEOUT}"), format!("-rss_limit_mb={MEMORY}")]
}

/// Fuzzes a target for some seconds; returns true if no input broke a promise.
fn attempt(target: &str, program: &Path, seconds: u64) -> Result<bool> {
    let step = Step::start(format!("fuzz {target}"));
    let [committed, grown] = corpora(target)?;
    let crashes = workdir::repository().join("fuzz/crashes").join(target);
    make(&crashes)?;
    let log = workdir::target_dir().join(format!("fuzz/{target}.log"));
    let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut command = Command::new(program);
    command.args(limits()).args(["-print_final_stats=1", &format!("-max_total_time={seconds}")]);
    // With the / at its end, libFuzzer takes the prefix as a folder.
    command.arg(format!("-artifact_prefix={}/", crashes.display()));
    let dictionary = workdir::repository().join(format!("fuzz/dictionaries/{target}.dict"));
    if dictionary.exists() {
        command.arg(format!("-dict={}", dictionary.display()));
    }
    // libFuzzer writes new inputs to the first folder.
    command.args([&grown, &committed, &crashes]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    let status = command.status().with_context(|| format!("could not start {}", program.display()))?;
    // git does not track an empty folder.
    let _ = std::fs::remove_dir(&crashes);
    let text = String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()).into_owned();
    let stat = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("stat::")?.strip_prefix(name));
        line.map_or("?", |value| value.trim_start_matches(':').trim()).to_owned()
    };
    let outcome = format!(
        "{} executions, {} per second",
        stat("number_of_executed_units"),
        stat("average_exec_per_sec")
    );
    if status.success() {
        step.done(&outcome);
        return Ok(true);
    }
    drop(step);
    let end: Vec<&str> = text.lines().rev().take(60).collect();
    end.iter().rev().for_each(|line| eprintln!("{line}"));
    eprintln!("{target}: {outcome}; the whole output is in {}", log.display());
    Ok(false)
}

/// Replaces the committed inputs by the fewest inputs that reach the same code; the number of hits does not
/// matter.
fn merge(target: &str, program: &Path) -> Result<()> {
    let step = Step::start(format!("merge the inputs of {target}"));
    let [committed, grown] = corpora(target)?;
    let merged = workdir::target_dir().join("fuzz/merged").join(target);
    let _ = std::fs::remove_dir_all(&merged);
    make(&merged)?;
    let mut command = Command::new(program);
    command.args(limits()).args(["-set_cover_merge=1", "-use_counters=0"]);
    step.run(command.args([&merged, &committed, &grown]))?;
    let (count, bytes) = pack(&merged, &packed(target))?;
    step.done(&format!("{count} inputs, {bytes} bytes packed"));
    Ok(())
}

/// Packs a folder's files so that the same files result in the same bytes; returns the number of files and
/// the size of the archive.
fn pack(folder: &Path, archive: &Path) -> Result<(usize, u64)> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    // Sorted by content, similar inputs are adjacent and compress well.
    paths.sort_by_cached_key(|path| std::fs::read(path).unwrap_or_default());
    if let Some(folder) = archive.parent() {
        make(folder)?;
    }
    let written = || -> std::io::Result<u64> {
        let mut tar = tar::Builder::new(GzEncoder::new(File::create(archive)?, Compression::best()));
        for (number, path) in paths.iter().enumerate() {
            let input = std::fs::read(path)?;
            let mut header = tar::Header::new_ustar();
            header.set_size(input.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, number.to_string(), input.as_slice())?;
        }
        tar.into_inner()?.finish()?.metadata().map(|file| file.len())
    };
    let bytes = written().with_context(|| format!("cannot write {}", archive.display()))?;
    Ok((paths.len(), bytes))
}
