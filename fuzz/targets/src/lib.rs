//! The targets of `cargo xtask fuzz`: one function per kind of input from outside, which calls the entry
//! points that the agent itself uses. Each target accepts any bytes, and panics if a promise is broken. The
//! promises are more than the absence of panics: a written value reads back, the order of arrival changes
//! nothing, an output is bounded.
//!
//! A file here has the name of the crate whose inputs it tests; targets for several crates, or for policy
//! alone, are in this file. `fuzz/corpus` has the useful inputs and `fuzz/crashes` has every input that ever
//! broke a promise: the test below replays both.

// A target panics to report a broken promise.
#![allow(clippy::panic, clippy::unwrap_used)]

pub mod authority;
pub mod base;
pub mod cgroups;
pub mod config;
pub mod devices;
pub mod dra;
pub mod eviction;
pub mod images;
pub mod kernel;
pub mod logs;
pub mod manifests;
pub mod node;
pub mod probes;
pub mod runtime;
pub mod spec;
pub mod state;
pub mod stats;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use arbitrary::Unstructured;
use beelet_plan::{Input, WHATS};
use beelet_policy::{
    devices::{Devices, checkpoint::Data},
    dra::checkpoint as claims,
    pod::variables::{self as expansion, Budget, TooLong, Unexpanded},
    volumes::{flex_volume, migration, remote_disk},
};
use beelet_units::{duration, quantity::Quantity};
use k8s_openapi::api::core::v1::{EnvVar, Volume};
use serde_json::Value;

pub use crate::{
    authority::http2_authority,
    base::{archive, mount_table},
    cgroups::mountinfo,
    config::config,
    devices::device_plugin,
    dra::claim_devices,
    images::{credentials, image_reference},
    kernel::{btf, ring_records},
    logs::log_lines,
    manifests::manifest,
    probes::probes,
    runtime::stream_frames,
    spec::pod_request,
};

/// A function that tests an input, and panics if a promise is broken.
pub type Target = fn(&[u8]);

/// All targets by name; a target's program in `fuzz/src/bin` and its folders of inputs have the same name.
pub const TARGETS: &[(&str, Target)] = &[
    ("amounts", amounts),
    ("archive", archive),
    ("btf", btf),
    ("checkpoint", checkpoint),
    ("claim_devices", claim_devices),
    ("claims_record", claims_record),
    ("config", config),
    ("credentials", credentials),
    ("device_plugin", device_plugin),
    ("disk_programs", disk_programs),
    ("expand", expand),
    ("http2_authority", http2_authority),
    ("image_reference", image_reference),
    ("log_lines", log_lines),
    ("manifest", manifest),
    ("mount_table", mount_table),
    ("mountinfo", mountinfo),
    ("plan", plan),
    ("pod_request", pod_request),
    ("probes", probes),
    ("proc_files", proc_files),
    ("ring_records", ring_records),
    ("state_records", state_records),
    ("stream_frames", stream_frames),
];

/// Tests the output of the programs that attach disks to a node (`flexVolume` drivers and iscsiadm), and the
/// volumes for these disks: an error message is short, and no name leads out of a folder.
pub fn disk_programs(input: &[u8]) {
    if let Err(flex_volume::Refusal::Failed(why)) = flex_volume::read_answer("mount", input, &[]) {
        assert!(why.len() < 16 << 10, "a message of {} bytes", why.len());
    }
    let text = String::from_utf8_lossy(input);
    let _ = remote_disk::transport(&text);
    if let Ok(settings) = remote_disk::interface_like(&text, "iqn.x") {
        assert!(settings.keys().all(|key| key.starts_with("iface.")), "{settings:?}");
    }
    if let Some(folder) = flex_volume::folder_of(&text) {
        let program = flex_volume::program_of(&folder);
        assert!(is_one_part(&folder) && is_one_part(program), "{folder:?}");
    }
    let Ok(Value::Object(mut volume)) = serde_json::from_slice(input) else { return };
    volume.insert("name".to_owned(), "data".into());
    let Ok(volume) = serde_json::from_value::<Volume>(Value::Object(volume)) else { return };
    if let Some(Ok(found)) = remote_disk::of_pod(&volume, "shop") {
        let folder = found.disk.folder();
        assert!(folder.split('/').count() <= 2 && folder.split('/').all(is_one_part), "{folder:?}");
        assert!(remote_disk::is_unique_name(&found.disk.unique_name()), "{found:?}");
    }
    if let Some(Ok(found)) = migration::of_pod(&volume, "shop") {
        let csi = found.spec.and_then(|spec| spec.csi);
        assert!(csi.is_some_and(|csi| !csi.driver.is_empty()), "the migrated volume has no driver");
    }
}

fn is_one_part(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

/// Tests quantities and durations, one per line: a printed value reads back as the same value, and sums do
/// not depend on an order.
pub fn amounts(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut sum = Quantity::ZERO;
    for line in text.lines() {
        if let Ok(quantity) = Quantity::parse(line) {
            let shown = quantity.to_string();
            assert_eq!(Quantity::parse(&shown), Ok(quantity), "{line:?} is shown as {shown:?}");
            let json: Quantity = serde_json::from_value(Value::String(line.to_owned())).unwrap();
            assert_eq!(json, quantity, "{line:?} in JSON");
            assert_eq!(sum + quantity, quantity + sum);
            assert!(quantity.saturating_sub(quantity).is_zero());
            let (small, large) = (quantity.min(sum), quantity.max(sum));
            assert!(small.value() <= large.value() && small.milli_value() <= large.milli_value());
            sum = sum + quantity;
        }
        if let Ok(read) = duration::parse(line) {
            let shown = duration::format(read);
            assert_eq!(duration::parse(&shown), Ok(read), "{line:?} is shown as {shown:?}");
        }
    }
}

/// Tests the expansion of `$(VAR)` in the first line, with the definitions `NAME=VALUE` in the other lines,
/// against Kubernetes' own code; then a chain of variables, each of which may refer to those before it,
/// within the budget; and a probe's command of all lines.
pub fn expand(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (text, rest) = text.split_once('\n').unwrap_or((text, ""));
    let defined: Vec<(&str, &str)> = rest.lines().filter_map(|line| line.split_once('=')).collect();
    let value_of = |name: &str| {
        defined.iter().find(|(defined, _)| *defined == name).map(|(_, value)| Cow::Borrowed(*value))
    };
    let expected = reference_expansion(text, &value_of, usize::MAX).unwrap();
    let expanded = expansion::expand(text, value_of, &mut { Budget::CONTAINER });
    assert_eq!(expanded, shorter(expected.clone(), 1 << 20), "{text:?}");
    match expansion::expand_strict(text, value_of, &mut { Budget::PATH }) {
        Ok(strictly) => assert_eq!(strictly, expected),
        Err(Unexpanded::Undefined(name)) => assert_eq!(value_of(&name), None),
        Err(Unexpanded::TooLong(_)) => assert!(expected.len() > 4096),
    }
    chain(&defined);
    let variable = |(name, value): &(&str, &str)| EnvVar {
        name: (*name).to_owned(),
        value: Some((*value).to_owned()),
        value_from: None,
    };
    let (command, env): (Vec<String>, Vec<EnvVar>) =
        (rest.lines().map(str::to_owned).collect(), defined.iter().map(variable).collect());
    if let Ok(command) = expansion::expand_probe_command(&command, &env) {
        assert!(command.iter().map(String::len).sum::<usize>() <= 1 << 20);
    }
}

fn shorter(text: String, most: usize) -> Result<String, TooLong> {
    if text.len() <= most { Ok(text) } else { Err(TooLong::Text { most }) }
}

/// Expands every variable with those before it, twice so that values grow: all values together never exceed
/// their budget, and each value equals that of Kubernetes' own code, or is too long.
fn chain(defined: &[(&str, &str)]) {
    let (mut values, mut budget, mut taken) = (BTreeMap::<&str, String>::new(), Budget::CONTAINER, 0);
    for (name, text) in defined.iter().chain(defined) {
        let value_of = |name: &str| values.get(name).map(|value| Cow::Borrowed(value.as_str()));
        let expected = reference_expansion(text, &value_of, 1 << 20);
        match expansion::expand(text, value_of, &mut budget) {
            Ok(value) => {
                taken += value.len();
                assert!(taken <= 16 << 20 && value.len() <= 1 << 20, "{taken} bytes");
                assert_eq!(expected.as_ref(), Some(&value), "{text:?}");
                values.insert(name, value);
            }
            Err(TooLong::Text { .. }) => assert_eq!(expected, None, "{text:?}"),
            Err(TooLong::Together { .. }) => {
                assert!(expected.is_none_or(|value| taken + value.len() > 16 << 20), "{text:?}");
            }
        }
    }
}

/// Does the work of `Expand` and `tryReadVariableName` of Kubernetes' third_party/forked/golang/expansion,
/// byte by byte; returns None for more than `most` bytes.
fn reference_expansion<'v>(
    text: &str,
    value_of: &dyn Fn(&str) -> Option<Cow<'v, str>>,
    most: usize,
) -> Option<String> {
    let input = text.as_bytes();
    let (mut out, mut checkpoint, mut cursor) = (Vec::new(), 0, 0);
    while cursor < input.len() {
        if input[cursor] == b'$' && cursor + 1 < input.len() {
            out.extend_from_slice(&input[checkpoint..cursor]);
            let after = &input[cursor + 1..];
            let (read, is_name, advance): (&[u8], bool, usize) = match after[0] {
                b'$' => (&after[..1], false, 1),
                b'(' => match after.iter().skip(1).position(|byte| *byte == b')') {
                    Some(length) => (&after[1..=length], true, length + 2),
                    None => (b"$(", false, 1),
                },
                _ => (&input[cursor..cursor + 2], false, 1),
            };
            if is_name {
                let name = std::str::from_utf8(read).unwrap();
                out.extend_from_slice(
                    value_of(name).unwrap_or_else(|| format!("$({name})").into()).as_bytes(),
                );
            } else {
                out.extend_from_slice(read);
            }
            cursor += advance;
            checkpoint = cursor + 1;
            if out.len() > most {
                return None;
            }
        }
        cursor += 1;
    }
    out.extend_from_slice(input.get(checkpoint..).unwrap_or_default());
    (out.len() <= most).then(|| String::from_utf8(out).unwrap())
}

/// Tests a device checkpoint's data in JSON, under a matching checksum, so that the agent accepts the file:
/// the written checkpoint reads back, and a second write has the same bytes.
pub fn checkpoint(input: &[u8]) {
    let _ = Data::read(input);
    let Ok(data) = serde_json::from_slice::<Data>(input) else { return };
    let mut file = br#"{"Data":"#.to_vec();
    file.extend_from_slice(input);
    file.extend(format!(r#","Checksum":{}}}"#, data.checksum()).into_bytes());
    let devices = Devices::read(&file, Duration::ZERO).unwrap();
    let written = devices.checkpoint().write().unwrap();
    let again = Devices::read(&written, Duration::ZERO).unwrap();
    assert_eq!(again.checkpoint().write().unwrap(), written);
    for pod in devices.holders.pods() {
        assert_eq!(devices.holders.held(pod), again.holders.held(pod));
    }
    assert!(devices.inventory.resources().eq(again.inventory.resources()));
}

/// Tests the record of resource claims, and its data under a matching checksum: the written record reads
/// back.
pub fn claims_record(input: &[u8]) {
    let _ = claims::read(input);
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok(ledger) = claims::read(&claims::seal(text.to_owned()).unwrap()) else { return };
    assert_eq!(claims::read(&claims::write(&ledger).unwrap()).unwrap(), ledger);
}

/// Tests a scenario of `beelet plan` in JSON: the answer is one line of JSON, the same each time, and the
/// same for the tree that the YAML parser would return.
pub fn plan(input: &[u8]) {
    for what in WHATS {
        let answer = what.answer(Input::Json(input));
        let Ok(line) = &answer else { continue };
        assert!(serde_json::from_str::<Value>(line).is_ok() && !line.contains('\n'), "{}: {line}", what.name);
        let tree = serde_json::from_slice(input).unwrap();
        assert_eq!(what.answer(Input::Tree(tree)), answer, "{} as a tree", what.name);
    }
}

/// Tests a file of the kernel with each parser of kernel files.
pub fn proc_files(input: &[u8]) {
    let text = &*String::from_utf8_lossy(input);
    stats::files(text);
    eviction::machine(text);
    node::machine(text);
    probes::process(input);
}

/// Tests the records of an earlier agent: a record's file, and each kind of record's value in JSON.
pub fn state_records(input: &[u8]) {
    use crate::state::{file, value};
    file::<Value>("pods", input);
    value::<BTreeMap<String, beelet_pods::records::PodRecord>>("pods", input);
    value::<beelet_images::ImageRecords>("images", input);
    value::<Vec<beelet_state::events::Event>>("events", input);
}

/// Returns a number below `end`, at least 0, from the front of the input; 0 if the input is empty.
pub(crate) fn below(from: &mut Unstructured<'_>, end: usize) -> usize {
    from.int_in_range(0..=end.saturating_sub(1)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{self, File};
    use std::io::Read as _;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::{Path, PathBuf};

    use flate2::read::GzDecoder;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
    }

    /// Returns the names of a folder's files without their extensions.
    fn names_in(folder: &Path) -> BTreeSet<String> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.map(|name| name.split('.').next().unwrap_or_default().to_owned()).collect()
    }

    /// Returns the committed inputs of a target, from its archive.
    fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
        let file = File::open(folder("corpus").join(format!("{target}.tar.gz"))).unwrap();
        let mut archive = tar::Archive::new(GzDecoder::new(file));
        let read = |entry: std::io::Result<tar::Entry<'_, _>>| {
            let mut entry = entry.unwrap();
            let mut input = Vec::new();
            entry.read_to_end(&mut input).unwrap();
            (entry.path().unwrap().display().to_string(), input)
        };
        archive.entries().unwrap().map(read).collect()
    }

    fn crashes(target: &str) -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(folder("crashes").join(target)).into_iter().flatten();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.map(|path| (path.display().to_string(), fs::read(&path).unwrap())).collect()
    }

    #[test]
    fn no_committed_input_breaks_a_promise() {
        let mut broken = Vec::new();
        for (target, run) in TARGETS {
            let kept = corpus(target);
            assert!(!kept.is_empty(), "{target} has no inputs");
            let empty = ("nothing".to_owned(), Vec::new());
            for (name, input) in kept.into_iter().chain(crashes(target)).chain([empty]) {
                if catch_unwind(AssertUnwindSafe(|| run(&input))).is_err() {
                    broken.push(format!("{target}: {name}"));
                }
            }
        }
        assert!(broken.is_empty(), "promises are broken by {broken:#?}");
    }

    #[test]
    fn every_target_has_a_program_and_inputs() {
        let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(names_in(&folder("src/bin")), targets);
        assert_eq!(names_in(&folder("corpus")), targets);
        assert!(names_in(&folder("crashes")).is_subset(&targets));
        assert!(names_in(&folder("dictionaries")).is_subset(&targets));
    }
}
