//! Tier 2: bpftool shows every key and value of the pinned maps with the names of their fields.
#![allow(clippy::unwrap_used, clippy::panic)] // tests: clippy takes only functions marked #[test] for such

use crate::place::Place;
use beelet_tests::requires::find_program;
use beelet_tests::{require, requires};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the formatted entries that `bpftool --json map dump pinned PATH` prints.
fn dump(bpftool: &Path, pin: &Path) -> Vec<Value> {
    let output = Command::new(bpftool).args(["--json", "map", "dump", "pinned"]).arg(pin).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    printed.as_array().unwrap().iter().map(|entry| entry["formatted"].clone()).collect()
}

/// Returns the names of an object's fields, in order.
fn names(value: &Value) -> Vec<&str> {
    value.as_object().map(|fields| fields.keys().map(String::as_str).collect()).unwrap_or_default()
}

#[test]
fn every_map_shows_its_fields_by_name() {
    require!(bpf);
    let Some(bpftool) = bpftool() else { return };
    let place = Place::new("bk-bpftool");
    let _kernel = place.start();
    let mut process = place.process();
    let socket = process.socket("listen 127.0.0.1:80");
    let of = |map: &str| dump(&bpftool, &place.pins().join(map));

    let listeners = of("LISTENERS");
    let ours = listeners.iter().find(|entry| entry["key"]["cookie"] == socket.cookie).unwrap();
    let value = &ours["value"];
    assert_eq!(names(value), ["address", "cgroup_id", "since_ns", "counted", "seen_by"]);
    let fields = ["netns_cookie", "address", "port", "family", "dual_stack"];
    assert_eq!(names(&value["address"]), fields);
    assert_eq!(value["address"]["port"], 80);
    assert_eq!(value["address"]["netns_cookie"], place.handle.cookie());
    assert_eq!(value["cgroup_id"], place.cgroup_id());

    let addresses = of("ADDRESSES");
    let ours = addresses.iter().find(|entry| entry["key"]["netns_cookie"] == place.handle.cookie()).unwrap();
    assert_eq!(names(&ours["key"]), fields);
    assert_eq!(names(&ours["value"]), ["listeners", "last_cookie", "changed_ns"]);
    assert_eq!(ours["value"]["listeners"], 1);

    let meta = of("META");
    assert_eq!(
        names(&meta[0]["value"]),
        ["magic", "abi_version", "complete", "tracepoint", "instance", "digest"]
    );
    assert_eq!(meta[0]["value"]["abi_version"], beelet_ebpf_abi::ABI_VERSION);
    assert_eq!(meta[0]["value"]["complete"], 1);
}

#[test]
fn the_manual_shows_every_map() {
    require!(bpf);
    let manual = include_str!("../../../docs/bpftool.md");
    let place = Place::new("bk-manual");
    let pins = format!("/sys/fs/bpf/beelet/v{}", beelet_ebpf_abi::ABI_VERSION);
    for map in place.start().memory() {
        let commands =
            ["dump", "show", "lookup"].map(|verb| format!("# bpftool map {verb} pinned {pins}/{}", map.map));
        let shown = manual.lines().any(|line| {
            let rest = commands.iter().find_map(|command| line.trim_start().strip_prefix(command.as_str()));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
        });
        assert!(shown, "docs/bpftool.md shows nothing of {}", map.map);
    }
}

#[test]
fn our_own_dump_has_bpftools_names() {
    require!(bpf);
    let Some(bpftool) = bpftool() else { return };
    let place = Place::new("bk-dump");
    let kernel = place.start();
    place.container("pod1/one", &[]).load(None).run("udp 1 1").unwrap();
    let mut compared = 0;
    for map in kernel.memory() {
        let Ok(ours) = beelet_bpf::dump(place.bpffs.path(), "beelet", map.map) else {
            assert!(matches!(map.map, "EVENTS" | "TASK_STORAGE"), "{}", map.map);
            continue;
        };
        let theirs = dump(&bpftool, &place.pins().join(map.map));
        let (Some(ours), Some(theirs)) = (ours.first(), theirs.first()) else { continue };
        let value = |entry: &Value, cpu: &str| {
            let of_cpu = entry["values"].get(0).map(|first| if cpu.is_empty() { first } else { &first[cpu] });
            of_cpu.unwrap_or(&entry["value"]).clone()
        };
        assert_eq!(names(&ours["key"]), names(&theirs["key"]), "{}", map.map);
        assert_eq!(names(&value(ours, "")), names(&value(theirs, "value")), "{}", map.map);
        compared += 1;
    }
    assert!(compared >= 6, "{compared}");
}

fn bpftool() -> Option<PathBuf> {
    let found = find_program("bpftool");
    if found.is_none() {
        requires::skip(&requires::Missing {
            what: "bpftool is not installed".to_owned(),
            remedy: "apt-get install bpftool".to_owned(),
        });
    }
    found
}
