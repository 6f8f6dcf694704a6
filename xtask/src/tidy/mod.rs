//! `cargo xtask tidy`: checks the invariants of ARCHITECTURE.md that the compiler can't check, in the text of
//! the files that git tracks or would add. A rule is a few lines here; each violation names its file, its
//! line and the rule.

mod circles;
mod commits;
mod doors;
mod features;
mod house;
mod numbers;
mod outside;
mod ratchet;
mod size;
mod speech;
mod text;
mod words;

use crate::docs::links;
use anyhow::{Context as _, Result, bail};
use beelet_tests_base::workdir;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Checks the rules that the compiler can't check: floors of crates, doors, links, words, subjects of commits
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write lower counts to xtask/ratchet.toml
    #[arg(long)]
    lower: bool,

    /// List the counted places of this crate (`pods`, `docs`), and exit
    #[arg(long, value_name = "CRATE")]
    list: Option<String>,

    /// Check the subjects of the commits after this one [default: after the remote's main branch]
    #[arg(long, value_name = "COMMIT")]
    since: Option<String>,
}

/// Places that may use the `unsafe` keyword: the code that calls the kernel, the helper's system calls, the test
/// process that inherits a file descriptor, the test process that filters its own system calls, and the clock of
/// the simulation.
const UNSAFE: &[&str] = &[
    "agent/bpf/",
    "agent/exec/src/sys.rs",
    "ebpf/",
    "sim/src/seam.rs",
    "tests/tests/kernel/",
    "tests/src/bin/listener.rs",
    "tests/src/confine/sys.rs",
];

/// Folders that may use bpf(2), with any library.
const BPF: &[&str] = &["agent/bpf/", "ebpf/", "tests/tests/kernel/", "tests/libbpf/"];

/// Files that may construct mounts for containers: the node's own files, whose list the measurement of disks
/// also uses; volumes; the mounts that device plugins request.
const MOUNTS: &[&str] =
    &["agent/model/src/disk.rs", "agent/volumes/src/container_mounts.rs", "agent/devices/src/options.rs"];

/// Names that a decision must not use: input, output, clocks, randomness.
const POLICY_FORBIDDEN: &[&str] = &[
    "std::fs",
    "std::net",
    "std::io::",
    "std::process",
    "std::thread",
    "Instant::now",
    "SystemTime",
    "Timestamp::now",
];

/// Files that may test a phase for being final: those that display a pod, count its start, record its end, or
/// adopt the API server's status. All others must ask whether a part of the pod still runs.
const PHASES: &[&str] = &[
    "agent/api/src/grpc/containers/debug.rs",
    "agent/cli/src/until.rs",
    "agent/cluster/src/assigned.rs",
    "agent/cluster/src/held.rs",
    "agent/model/src/",
    "agent/pods/src/manager.rs",
    "agent/pods/src/manager/",
    "agent/pods/src/records.rs",
    "agent/pods/src/startup_latency.rs",
];

/// The folder of the rules, which contain the names that they forbid.
const SELF: &str = "xtask/src/tidy/";

/// A broken rule.
#[derive(Debug, PartialEq, Eq)]
struct Violation {
    file: String,
    line: usize,
    message: String,
}

/// Runs `cargo xtask tidy`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let repository = workdir::repository();
    let mut violations = Vec::new();
    let files = tracked(&repository)?;
    violations.extend(house::check(&repository)?);
    violations.extend(features::check(&repository)?);
    let broken = links::check(&repository, files.iter().map(String::as_str));
    violations.extend(broken.into_iter().map(|(file, line, message)| Violation { file, line, message }));
    let (words, numbers) = (words::Words::new()?, numbers::Numbers::new()?);
    let mut counts = Counts::new(&files);
    for file in &files {
        let Ok(text) = std::fs::read_to_string(repository.join(file)) else { continue }; // not text
        violations.extend(check(file, &text));
        violations.extend(numbers.check(file, &text));
        violations.extend(doors::check(file, &text));
        violations.extend(outside::check(file, &text));
        if !file.starts_with(SELF) {
            violations.extend(words.check(file, &text));
            counts.add(file, &text);
        }
        violations.extend(check_machine_paths(file, &text, &repository));
    }
    let counted = counts.finish();
    if let Some(name) = &args.list {
        list(&counted, name);
        return Ok(());
    }
    violations.extend(ratchet::check(&repository, &counted, args.lower)?);
    for broken in commits::check(&repository, args.since.as_deref(), &files)? {
        let commits::Broken { commit, why } = broken;
        violations.push(Violation {
            file: "commit".to_owned(),
            line: 1,
            message: format!("{commit}: {why}"),
        });
    }
    for violation in &violations {
        eprintln!("{}:{}: {}", violation.file, violation.line, violation.message);
    }
    match violations.len() {
        0 => {
            eprintln!("tidy: {} files, no violations", files.len());
            Ok(())
        }
        count => bail!("tidy: {count} violation(s)"),
    }
}

/// Prints the ratchet's places of one crate, sorted by file and line.
fn list(counted: &ratchet::Counted, name: &str) {
    let of_crate = counted.iter().filter(|((of, _), _)| of == name);
    let mut lines: Vec<_> = of_crate
        .flat_map(|((_, pattern), places)| {
            places.iter().map(move |place| (&place.file, place.line, *pattern, &place.words))
        })
        .collect();
    lines.sort_unstable();
    for (file, line, pattern, words) in lines {
        println!("{file}:{line}: {pattern}: {words}");
    }
}

/// Collects the counts of the ratchet, file by file.
struct Counts {
    crates: BTreeSet<String>,
    counted: ratchet::Counted,
    drawn: BTreeMap<String, circles::Crate>,
    types: BTreeMap<String, size::Types>,
}

impl Counts {
    fn new(files: &[String]) -> Counts {
        let crates = ratchet::crates(files);
        Counts { crates, counted: BTreeMap::new(), drawn: BTreeMap::new(), types: BTreeMap::new() }
    }

    fn add(&mut self, file: &str, text: &str) {
        let Some(name) = ratchet::crate_of(file, &self.crates) else { return };
        for speech::Hit { pattern, line, words } in speech::hits(file, text) {
            self.count(&name, pattern, file, line, words);
        }
        if file.ends_with(".rs") {
            let lines = text.lines().count();
            if lines > size::LINES {
                self.count(&name, "long-file", file, lines, format!("{lines} lines"));
            }
            self.types.entry(name.clone()).or_default().add(file, text);
        }
        let folder = self.crates.iter().filter(|folder| file.starts_with(&format!("{folder}/src/")));
        if let Some(folder) = folder.max_by_key(|folder| folder.len())
            && let Some(inner) = file.strip_prefix(&format!("{folder}/src/"))
        {
            self.drawn.entry(name).or_default().add(inner, file, text);
        }
    }

    fn count(&mut self, name: &str, pattern: &'static str, file: &str, line: usize, words: String) {
        let place = ratchet::Place { file: file.to_owned(), line, words };
        self.counted.entry((name.to_owned(), pattern)).or_default().push(place);
    }

    /// Returns all counts, with those of circles and large types, which need all files.
    fn finish(mut self) -> ratchet::Counted {
        for (name, types) in std::mem::take(&mut self.types) {
            for (file, size) in types.large() {
                self.count(&name, "many-methods", &file, 1, size);
            }
        }
        for (name, drawn) in std::mem::take(&mut self.drawn) {
            for files in drawn.circles() {
                let first = files.first().copied().unwrap_or_default();
                self.count(&name, "circle", first, 1, files.join(" <-> "));
                for file in &files {
                    self.count(&name, "file-in-circle", file, 1, files.join(" <-> "));
                }
            }
        }
        self.counted
    }
}

/// Returns the files that git tracks or would add.
pub(crate) fn tracked(repository: &Path) -> Result<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard"]).current_dir(repository);
    let output = git.output().context("could not start git")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(ToOwned::to_owned).collect())
}

/// Checks the rules that need only a file's name and text.
fn check(file: &str, text: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    if !file.ends_with(".rs") {
        return found;
    }
    let mut say =
        |line: usize, message: String| found.push(Violation { file: file.to_owned(), line, message });
    let within = |places: &[&str]| places.iter().any(|place| file.starts_with(place));
    let mut in_tests = file.contains("/tests/") || file.ends_with("tests.rs");
    // agent/testing is on a lower floor than codec, and simulates the writers of objects.
    let names_objects =
        within(&["agent/"]) && !within(&["agent/codec/", "agent/testing/"]) && text.contains("k8s_openapi::");
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        in_tests |= line.trim() == "#[cfg(test)]";
        let code = code_of(line);
        if is_unsafe(code) && !within(UNSAFE) && !file.starts_with(SELF) {
            say(
                number,
                "only agent/bpf, agent/exec/src/sys.rs and ebpf may use unsafe: use a safe wrapper (rustix)"
                    .to_owned(),
            );
        }
        // A line does not show the type that is read or written, so a file that names objects calls none of
        // these.
        let of_serde = ["serde_json::from_", "serde_json::to_", "Deserializer::from_", "Serializer::new"];
        let of_objects = !in_tests && names_objects && !code.contains("Value");
        if of_objects && of_serde.iter().any(|name| code.contains(name)) {
            say(
                number,
                "only agent/codec reads and writes Kubernetes objects: use ApiType, or data".to_owned(),
            );
        }
        let bpf = ["aya::", "aya_obj::", "libbpf_rs::", "SYS_bpf"];
        if bpf.iter().any(|name| code.contains(name)) && !within(BPF) && !file.starts_with(SELF) {
            say(number, "only agent/bpf calls bpf(2)".to_owned());
        }
        if !in_tests
            && within(&["agent/"])
            && !within(&["agent/cri/", "agent/proto/"])
            && code.contains("_service_client::")
        {
            say(number, "only agent/cri calls the container runtime".to_owned());
        }
        // A remedy in a message may name the folder; a path to open must come from agent/cgroups.
        let advice = code.contains("mount -t cgroup2");
        if !in_tests
            && within(&["agent/"])
            && !within(&["agent/cgroups/"])
            && code.contains("/sys/fs/cgroup")
            && !advice
        {
            say(number, "only agent/cgroups writes cgroup files: get the path from that crate".to_owned());
        }
        if !in_tests && within(&["agent/"]) && !within(MOUNTS) && code.contains("cri::Mount {") {
            let message = "no disk usage counts this mounted file of the node, so its size has no limit: \
                           use model::disk::WritableFile";
            say(number, message.to_owned());
        }
        // A file imports `has_ended` alone or in a list.
        let of_phase = code.trim() == "has_ended," || code.contains("status::") && code.contains("has_ended");
        if within(&["agent/"]) && !within(PHASES) && !in_tests && of_phase {
            say(number, "a pod in a final phase may still run: use model::ended::Ended".to_owned());
        }
        if file.starts_with("agent/policy/src/") && !in_tests {
            for name in POLICY_FORBIDDEN.iter().filter(|name| code.contains(**name)) {
                say(
                    number,
                    format!("a decision is a pure function of its arguments and must not use {name}"),
                );
            }
        }
    }
    found
}

/// Returns the line without its comment. A `//` inside a string also cuts the line; in practice the rest has
/// nothing that the rules search for.
fn code_of(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// Returns true if a line has unsafe code, not only the word (in a string, for instance).
fn is_unsafe(code: &str) -> bool {
    ["unsafe {", "unsafe fn", "unsafe impl", "unsafe trait", "unsafe extern", "unsafe("]
        .iter()
        .any(|form| code.contains(form))
        || code.trim_end().ends_with("unsafe")
}

/// Finds lines that name the folder of this checkout.
fn check_machine_paths(file: &str, text: &str, repository: &Path) -> Vec<Violation> {
    let Some(parent) = repository.parent().filter(|parent| !is_common(parent)) else { return Vec::new() };
    let needle = format!("{}/", parent.display());
    let lines = text.lines().enumerate().filter(|(_, line)| line.contains(&needle));
    let say = |(index, _)| Violation {
        file: file.to_owned(),
        line: index + 1,
        message: format!("names a folder of this machine, {needle}"),
    };
    lines.map(say).collect()
}

/// Returns true for a folder that every machine has.
fn is_common(path: &Path) -> bool {
    [
        "/", "/home", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/usr", "/usr/src", "/var",
        "/var/lib", "/var/tmp",
    ]
    .iter()
    .any(|common| path == Path::new(common))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_finds_its_violations_only() {
        let check = |file: &str, text: &str, expected: &[usize]| {
            let lines: Vec<usize> = check(file, text).into_iter().map(|violation| violation.line).collect();
            assert_eq!(lines, expected, "{file}: {text}");
        };
        check("agent/pods/src/worker.rs", "fn f() {\n    unsafe { g() }\n}\n", &[2]);
        check("agent/bpf/src/sys.rs", "unsafe { g() }\n", &[]);
        check("agent/exec/src/sys.rs", "unsafe { g() }\n", &[]);
        check("agent/exec/src/enter.rs", "unsafe { g() }\n", &[1]);
        check("agent/pods/src/worker.rs", "// an unsafe thing\nlet unsafe_name = 1;\n", &[]);
        check("agent/probes/src/lib.rs", "use aya::Ebpf;\n", &[1]);
        check("agent/pods/src/lib.rs", "use cri::runtime_service_client::RuntimeServiceClient;\n", &[1]);
        check("agent/cri/src/lib.rs", "use cri::runtime_service_client::RuntimeServiceClient;\n", &[]);
        check("agent/pods/src/lib.rs", "let x = \"/sys/fs/cgroup/cpu\";\n", &[1]);
        check("agent/devices/src/lib.rs", "use beelet_model::status::{has_ended, runtime_id};\n", &[1]);
        check("agent/devices/src/lib.rs", "let gone = entry.ended().is_some();\n", &[]);
        check("agent/cli/src/until.rs", "use beelet_model::status::has_ended;\n", &[]);
        check(
            "agent/pods/src/lib.rs",
            "#[cfg(test)]\nmod tests { const X: &str = \"/sys/fs/cgroup\"; }\n",
            &[],
        );
        let reads = "use k8s_openapi::List;\nlet x = serde_json::from_value(y);\n";
        check("agent/pods/src/lib.rs", reads, &[2]);
        check("agent/pods/src/tests.rs", reads, &[]);
        check("agent/codec/src/object.rs", reads, &[]);
        check("agent/cri/src/lib.rs", "let x = serde_json::from_value(y);\n", &[]);
        check(
            "agent/pods/src/lib.rs",
            "use k8s_openapi::List;\nlet x: Value = serde_json::from_slice(y);\n",
            &[],
        );
        check("agent/pods/src/hosts.rs", "Some(cri::Mount { host_path, ..x })\n", &[1]);
        check("agent/pods/src/hosts.rs", "fn mount() -> Option<cri::Mount> {\n", &[]);
        check("agent/model/src/disk.rs", "cri::Mount { host_path, ..x }\n", &[]);
        check("agent/policy/src/probe.rs", "let now = Instant::now();\n", &[1]);
        check("agent/probes/src/lib.rs", "let now = Instant::now();\n", &[]);
    }

    #[test]
    fn the_checkouts_own_folder_must_not_be_named() {
        let repository = Path::new("/some/where/beelet");
        assert_eq!(check_machine_paths("a.md", "in /some/where/else", repository).len(), 1);
        assert_eq!(check_machine_paths("a.md", "in /tmp/x", Path::new("/tmp/beelet")).len(), 0);
    }
}
