//! The network configuration that the runtime passes to CNI. This module only reads it: the runtime creates
//! the networks.

use std::fs;
use std::path::{Path, PathBuf};

use beelet_base::blocking::blocking;
use beelet_base::own_file;
use beelet_proto::cri;
use serde_json::Value;

use super::Runtime;

/// The folder that runtimes use when their status names none.
const CONFIGURATIONS: &str = "/etc/cni/net.d";
const PROGRAMS: &str = "/opt/cni/bin";
/// The limit of bytes that are read of a configuration.
const MOST: u64 = 1 << 20;

/// The folders that the runtime uses.
#[derive(Debug, PartialEq, Eq)]
pub struct Places {
    /// The folder of configurations.
    pub configurations: PathBuf,
    /// The folders of plugins.
    pub programs: Vec<PathBuf>,
}

impl Places {
    /// Returns the folders that a verbose status names, as containerd's does; for other runtimes the usual
    /// ones.
    #[must_use]
    pub fn of(status: &cri::StatusResponse) -> Self {
        Self::read(status.info.get("config").map(String::as_str).unwrap_or_default())
    }

    fn read(config: &str) -> Self {
        let config: Value = serde_json::from_str(config).unwrap_or_default();
        let cni = &config["cni"];
        let path = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(PathBuf::from);
        let mut programs: Vec<PathBuf> =
            cni["binDirs"].as_array().into_iter().flatten().filter_map(path).collect();
        if programs.is_empty() {
            programs.push(path(&cni["binDir"]).unwrap_or_else(|| PathBuf::from(PROGRAMS)));
        }
        Self {
            configurations: path(&cni["confDir"]).unwrap_or_else(|| PathBuf::from(CONFIGURATIONS)),
            programs,
        }
    }

    /// Returns the configuration that takes effect, the first one by name, with its text. The text is empty
    /// if the file can't be read as text. Blocks.
    #[must_use]
    pub fn first(&self) -> Option<(PathBuf, String)> {
        let entries = fs::read_dir(&self.configurations).ok()?;
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| {
            path.extension().is_some_and(|end| end == "conflist" || end == "conf" || end == "json")
        });
        paths.sort();
        let path = paths.into_iter().next()?;
        // Pods of CNI plugins write to this folder.
        let read = own_file::read_through_links(&path).and_then(|file| own_file::read_at_most(&file, MOST));
        let text = read.ok().flatten().and_then(|bytes| String::from_utf8(bytes).ok());
        Some((path, text.unwrap_or_default()))
    }
}

/// Returns the plugins of a configuration, which may be a list or a single plugin.
#[must_use]
pub fn plugins(config: &Value) -> Vec<Value> {
    config["plugins"].as_array().cloned().unwrap_or_else(|| vec![config.clone()])
}

/// Returns true if one of the plugins maps ports of the machine to pods.
#[must_use]
pub fn maps_ports(plugins: &[Value]) -> bool {
    plugins.iter().any(|plugin| plugin["type"] == "portmap" && plugin["capabilities"]["portMappings"] == true)
}

/// Returns the reason why a hostPort leads nowhere with this configuration; None if it leads to its pod, or
/// if the text can't be read.
fn unmapped(file: &Path, text: &str) -> Option<String> {
    let config: Value = serde_json::from_str(text).ok()?;
    let file = file.display();
    let why = format!("a hostPort leads nowhere: {file} has no portmap plugin with portMappings");
    (!maps_ports(&plugins(&config))).then_some(why)
}

impl Runtime {
    /// Returns the reason why a pod's hostPort leads nowhere; None if it leads to the pod, or if that is
    /// unknown.
    pub async fn unmapped_host_ports(&self) -> Option<String> {
        let places = Places::of(&self.status(true).await.ok()?);
        let (file, text) = blocking("reading the network's configuration", move || places.first()).await?;
        unmapped(&file, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folders_of_plugins_come_from_the_runtimes_status() {
        let containerd = r#"{"cni": {"binDir": "/opt/a", "confDir": "/etc/a"}}"#;
        let expected = Places { configurations: "/etc/a".into(), programs: vec!["/opt/a".into()] };
        assert_eq!(Places::read(containerd), expected);
        let newer = r#"{"cni": {"binDir": "", "binDirs": ["/opt/a", "/opt/b"], "confDir": "/etc/a"}}"#;
        assert_eq!(Places::read(newer).programs, [PathBuf::from("/opt/a"), PathBuf::from("/opt/b")]);
        assert_eq!(Places::read("").configurations, Path::new(CONFIGURATIONS));
        assert_eq!(Places::read("[]").programs, [PathBuf::from(PROGRAMS)]);
    }

    #[test]
    fn a_host_port_needs_the_plugin_that_maps_it() {
        let check = |text: &str, leads_nowhere: bool| {
            assert_eq!(unmapped(Path::new("/n/10.conflist"), text).is_some(), leads_nowhere, "{text}");
        };
        check(r#"{"plugins": [{"type": "bridge"}]}"#, true);
        check(r#"{"type": "bridge"}"#, true);
        check(r#"{"plugins": [{"type": "bridge"}, {"type": "portmap"}]}"#, true);
        check(
            r#"{"plugins": [{"type": "bridge"}, {"type": "portmap", "capabilities": {"portMappings": true}}]}"#,
            false,
        );
        check("{", false);
    }
}
