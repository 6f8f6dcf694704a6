//! Pods' networks: the configuration of CNI that the runtime uses, and whether its plugins are there.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Finding, Patient};

const CHECK: &str = "CNI plugins";
/// Where runtimes look that do not say where.
const CONFIGURATIONS: &str = "/etc/cni/net.d";
const PROGRAMS: &str = "/opt/cni/bin";
/// The plugin that every sandbox has besides.
const LOOPBACK: &str = "loopback";
/// Most bytes that are read of a configuration.
const MOST: u64 = 1 << 20;

/// Where the runtime looks.
#[derive(Debug, PartialEq, Eq)]
struct Places {
    configurations: PathBuf,
    programs: Vec<PathBuf>,
}

pub(super) fn plugins(patient: &Patient) -> Vec<Finding> {
    // That it does not answer is said already.
    let Some(answer) = patient.runtime.status() else { return Vec::new() };
    let places = places(answer.info.get("config").map(String::as_str).unwrap_or_default());
    let Some((file, text)) = first(&places.configurations) else {
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

/// What containerd says of itself; of others what is usual.
fn places(config: &str) -> Places {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    let cni = &config["cni"];
    let path = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(PathBuf::from);
    let mut programs: Vec<PathBuf> =
        cni["binDirs"].as_array().into_iter().flatten().filter_map(path).collect();
    if programs.is_empty() {
        programs.push(path(&cni["binDir"]).unwrap_or_else(|| PathBuf::from(PROGRAMS)));
    }
    Places {
        configurations: path(&cni["confDir"]).unwrap_or_else(|| PathBuf::from(CONFIGURATIONS)),
        programs,
    }
}

/// The configuration that counts: the first by its name.
fn first(folder: &Path) -> Option<(PathBuf, String)> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        path.extension().is_some_and(|end| end == "conflist" || end == "conf" || end == "json")
    });
    paths.sort();
    let path = paths.into_iter().next()?;
    let is_small = fs::metadata(&path).is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MOST);
    let text = if is_small { fs::read_to_string(&path).ok()? } else { String::new() };
    Some((path, text))
}

fn judge(file: &Path, text: &str, folders: &str, is_there: impl Fn(&str) -> bool) -> Vec<Finding> {
    let file = file.display();
    let Ok(config) = serde_json::from_str::<Value>(text) else {
        let detail = format!("{file} is not JSON");
        return vec![Finding::degraded(CHECK, detail, "no pod gets a network", "correct or remove it")];
    };
    let list = config["plugins"].as_array().cloned().unwrap_or_else(|| vec![config.clone()]);
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
    let maps_ports = list
        .iter()
        .any(|plugin| plugin["type"] == "portmap" && plugin["capabilities"]["portMappings"] == true);
    if !maps_ports {
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
    fn plugins_are_looked_for_where_the_runtime_does() {
        let containerd = r#"{"cni": {"binDir": "/opt/a", "confDir": "/etc/a"}}"#;
        let expected = Places { configurations: "/etc/a".into(), programs: vec!["/opt/a".into()] };
        assert_eq!(places(containerd), expected);
        let newer = r#"{"cni": {"binDir": "", "binDirs": ["/opt/a", "/opt/b"], "confDir": "/etc/a"}}"#;
        assert_eq!(places(newer).programs, [PathBuf::from("/opt/a"), PathBuf::from("/opt/b")]);
        assert_eq!(places("").configurations, Path::new(CONFIGURATIONS));
        assert_eq!(places("[]").programs, [PathBuf::from(PROGRAMS)]);
    }

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
