//! Tests that the units and the DaemonSet in packaging/ match the command line and each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use clap::Parser as _;
use serde_json::Value;

use super::{Cli, Command};
use beelet_codec::document::{self, Limits};

const UNITS: [&str; 2] = ["beelet.service", "beelet-observe.service"];

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging")
}

fn unit(name: &str) -> String {
    std::fs::read_to_string(packaging().join(name)).unwrap()
}

/// Returns the value of a unit's setting.
fn setting<'a>(unit: &'a str, name: &str) -> &'a str {
    let value = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("no {name}="))
}

fn daemon_set() -> (String, Value) {
    let text = std::fs::read_to_string(packaging().join("kubernetes/observe.yaml")).unwrap();
    let documents = document::parse_within(&text, Limits::SCENARIO).unwrap();
    let set = documents.into_iter().map(|document| document.value).find(|value| value["kind"] == "DaemonSet");
    (text, set.unwrap())
}

/// Returns the DaemonSet's container.
fn container(set: &Value) -> &Value {
    let containers = set["spec"]["template"]["spec"]["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1);
    &containers[0]
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect()
}

fn parsed(arguments: &[String]) -> Command {
    let whole = std::iter::once("beelet".to_owned()).chain(arguments.iter().cloned());
    Cli::try_parse_from(whole).unwrap_or_else(|error| panic!("{arguments:?}: {error}")).command
}

#[test]
fn the_units_start_commands_that_there_are() {
    for (name, is_right) in [
        (UNITS[0], (|command| matches!(command, Command::Run(_))) as fn(&Command) -> bool),
        (UNITS[1], |command| matches!(command, Command::Observe(_))),
    ] {
        let text = unit(name);
        let words: Vec<String> = setting(&text, "ExecStart").split(' ').map(str::to_owned).collect();
        assert_eq!(words[0], "/usr/bin/beelet");
        assert!(is_right(&parsed(&words[1..])), "{words:?}");
        // `node::systemd` notifies systemd.
        assert_eq!(setting(&text, "Type"), "notify");
        assert!(!setting(&text, "WatchdogSec").is_empty());
        // The unit restarts after any number of failures, and stops no other unit.
        assert_eq!((setting(&text, "Restart"), setting(&text, "StartLimitIntervalSec")), ("always", "0"));
        assert!(!text.contains("\nConflicts="));
    }
}

#[test]
fn the_daemon_sets_arguments_are_the_command_lines() {
    let (_, set) = daemon_set();
    let container = container(&set);
    let names: BTreeSet<&str> =
        container["env"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    let args: Vec<String> = strings(&container["args"])
        .into_iter()
        .map(|arg| {
            assert!(!arg.contains("$(") || names.contains("POD_IP"), "{arg}");
            arg.replace("$(POD_IP)", "10.0.0.1")
        })
        .collect();
    assert!(!args.iter().any(|arg| arg.contains("$(")), "{args:?}");
    assert!(matches!(parsed(&args), Command::Observe(_)));
    // Scrapes and health checks use the served port.
    let port = container["ports"][0]["containerPort"].to_string();
    assert!(args.contains(&format!("--listen=10.0.0.1:{port}")), "{args:?}");
    let annotations = &set["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations["prometheus.io/port"], port.as_str());
}

#[test]
fn the_daemon_set_has_the_units_capabilities_and_says_how_many() {
    let (text, set) = daemon_set();
    let capabilities = &container(&set)["securityContext"]["capabilities"];
    assert_eq!(strings(&capabilities["drop"]), ["ALL"]);
    let added: BTreeSet<String> =
        strings(&capabilities["add"]).iter().map(|name| format!("CAP_{name}")).collect();
    let unit = unit(UNITS[1]);
    let bounding: BTreeSet<String> =
        setting(&unit, "CapabilityBoundingSet").split(' ').map(str::to_owned).collect();
    assert_eq!(added, bounding);
    let number = ["no", "one", "two", "three", "four", "five", "six"][added.len()];
    assert!(text.contains(&format!("{number} capabilities")), "the comment at the top must say {number}");
}

#[test]
fn systemd_knows_every_setting_of_the_units() {
    let dir = tempfile::tempdir().unwrap();
    for name in UNITS {
        // systemd-analyze requires the program to exist.
        let text = unit(name).replace("/usr/bin/beelet ", "/bin/true ");
        std::fs::write(dir.path().join(name), text).unwrap();
        let mut verify = Process::new("systemd-analyze");
        let output = verify.args(["verify", "--man=no"]).arg(dir.path().join(name)).output();
        let Ok(output) = output else {
            eprintln!("cannot run systemd-analyze; skipping the units");
            return;
        };
        let said = String::from_utf8_lossy(&output.stderr);
        // systemd-analyze also reports this machine's own units.
        let of_ours: Vec<&str> = said.lines().filter(|line| line.contains(name)).collect();
        assert!(output.status.success() && of_ours.is_empty(), "{of_ours:#?}");
    }
}

/// Returns the package's configuration with its commented defaults uncommented.
fn uncommented(text: &str) -> String {
    let is_default =
        |rest: &str| rest.split_once(": ").is_some_and(|(field, _)| field.chars().all(char::is_alphanumeric));
    let line = |line: &str| match line.strip_prefix("# ") {
        Some(rest) if is_default(rest) => rest.to_owned(),
        _ => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_packages_configuration_is_good_and_its_comments_show_the_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let load = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let (config, warnings) = beelet_config::Config::load(&path).unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        config
    };
    let text = unit("beelet.yaml");
    let config = load("as-it-is.yaml", &text);
    assert_eq!(config.static_pod_path.as_deref(), Some(Path::new("/etc/beelet/manifests")));
    let filled = uncommented(&text);
    assert!(filled.lines().filter(|line| !line.starts_with('#')).count() > 15, "{filled}");
    assert_eq!(load("filled-in.yaml", &filled), config);
    // The commented examples are valid, too.
    let optional =
        text.replace("\n#cgroup", "\ncgroup").replace("\n#system", "\nsystem").replace("\n#shut", "\nshut");
    assert_ne!(load("with-options.yaml", &optional), config);
}
