//! Pods' networks: the configuration of CNI that the runtime uses, and whether its plugins are there.

use std::path::Path;

use beelet_cri::cni::{self, Places};
use serde_json::Value;

use super::{Finding, Patient};

const CHECK: &str = "CNI plugins";
/// The plugin that every sandbox has besides.
const LOOPBACK: &str = "loopback";
pub(super) fn plugins(patient: &Patient) -> Vec<Finding> {
    // That it does not answer is said already.
    let Some(answer) = patient.runtime.status() else { return Vec::new() };
    let places = Places::of(answer);
    let Some((file, text)) = places.first() else {
        return vec![Finding::degraded(
            CHECK,
            format!("there is no network configuration in {}", places.configurations.display()),
            "only pods with hostNetwork can be started",
            "install the CNI plugins and put a configuration there",
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
        return vec![Finding::degraded(CHECK, detail, "no pod gets a network", "correct or remove it")];
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
            format!("{file} names {}, which is not in {folders}", missing.join(", ")),
            "pods' sandboxes cannot be made",
            "install the CNI plugins there, or name others",
        ));
    }
    if !cni::maps_ports(&list) {
        findings.push(Finding::degraded(
            "host ports",
            format!("{file} has no portmap plugin with portMappings"),
            "a hostPort of a pod leads nowhere",
            "add {\"type\": \"portmap\", \"capabilities\": {\"portMappings\": true}} to its plugins",
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
        let no_portmap = (State::Degraded, "/n/10.conflist has no portmap plugin with portMappings");
        let portmap = r#"{"type": "portmap", "capabilities": {"portMappings": true}}"#;
        let bridge = r#"{"type": "bridge", "ipam": {"type": "host-local"}}"#;
        check(
            &format!(r#"{{"plugins": [{bridge}, {portmap}]}}"#),
            &[(State::Ok, "bridge, portmap by /n/10.conflist")],
        );
        check(
            r#"{"type": "bridge", "ipam": {"type": "none"}}"#,
            &[(State::Degraded, "/n/10.conflist names none, which is not in /opt"), no_portmap],
        );
        check("{", &[(State::Degraded, "/n/10.conflist is not JSON")]);
    }
}
