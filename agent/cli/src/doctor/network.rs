//! Checks the CNI configuration of the runtime and the presence of its plugins.

use std::path::Path;

use beelet_cri::cni::{self, Places};
use serde_json::Value;

use super::{Finding, Patient};

const CHECK: &str = "CNI plugins";
/// The plugin that every sandbox needs in addition to those in the configuration.
const LOOPBACK: &str = "loopback";
pub(super) fn plugins(patient: &Patient) -> Vec<Finding> {
    // The runtime check reports a missing answer.
    let Some(answer) = patient.runtime.status() else { return Vec::new() };
    let places = Places::of(answer);
    let Some((file, text)) = places.first() else {
        return vec![Finding::degraded(
            CHECK,
            format!("no network configuration in {}", places.configurations.display()),
            "only pods with `hostNetwork` can start",
            "install the CNI plugins and add a configuration",
        )];
    };
    let is_there = |plugin: &str| places.programs.iter().any(|folder| folder.join(plugin).is_file());
    let folders: Vec<String> = places.programs.iter().map(|path| path.display().to_string()).collect();
    judge(&file, &text, &folders.join(", "), is_there)
}

fn judge(file: &Path, text: &str, folders: &str, is_there: impl Fn(&str) -> bool) -> Vec<Finding> {
    let file = file.display();
    let Ok(config) = serde_json::from_str::<Value>(text) else {
        let detail = format!("{file} is not JSON");
        return vec![Finding::degraded(
            CHECK,
            detail,
            "pods do not get a network",
            "correct or remove the file",
        )];
    };
    let list = cni::plugins(&config);
    let kinds: Vec<&str> = list.iter().filter_map(|plugin| plugin["type"].as_str()).collect();
    let ipam = list.iter().filter_map(|plugin| plugin["ipam"]["type"].as_str());
    let wanted = kinds.iter().copied().chain(ipam).chain([LOOPBACK]);
    let missing: Vec<&str> = wanted.filter(|plugin| !is_there(plugin)).collect();
    let mut findings = Vec::new();
    if missing.is_empty() {
        findings.push(Finding::ok(CHECK, format!("{} by {file}", kinds.join(", "))));
    } else {
        findings.push(Finding::degraded(
            CHECK,
            format!("{file} names {}, not found in {folders}", missing.join(", ")),
            "the runtime cannot create sandboxes",
            "install the CNI plugins there, or configure others",
        ));
    }
    if !cni::maps_ports(&list) {
        findings.push(Finding::degraded(
            "host ports",
            format!("{file} has no portmap plugin with `portMappings`"),
            "host ports of pods do not work",
            "add {\"type\": \"portmap\", \"capabilities\": {\"portMappings\": true}} to its `plugins`",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn a_plugin_that_is_not_there_is_told_and_portmap_is_missed() {
        let check = |text: &str, expected: &[(State, &str)]| {
            let findings = judge(Path::new("/n/10.conflist"), text, "/opt", |plugin| plugin != "none");
            let told: Vec<_> = findings.iter().map(|one| (one.state, one.detail.as_str())).collect();
            assert_eq!(told, expected, "{text}");
        };
        let no_portmap = (State::Degraded, "/n/10.conflist has no portmap plugin with `portMappings`");
        let portmap = r#"{"type": "portmap", "capabilities": {"portMappings": true}}"#;
        let bridge = r#"{"type": "bridge", "ipam": {"type": "host-local"}}"#;
        check(
            &format!(r#"{{"plugins": [{bridge}, {portmap}]}}"#),
            &[(State::Ok, "bridge, portmap by /n/10.conflist")],
        );
        check(
            r#"{"type": "bridge", "ipam": {"type": "none"}}"#,
            &[(State::Degraded, "/n/10.conflist names none, not found in /opt"), no_portmap],
        );
        check("{", &[(State::Degraded, "/n/10.conflist is not JSON")]);
    }
}
