//! A pod's `/etc/hosts`, in the kubelet's format: the pod's names, and the spec's `hostAliases`.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

use crate::{error::FileError, sandbox_files};
use beelet_base::own_file;
use beelet_model::disk::WritableFile;
use beelet_model::pod::NodeFacts;
use beelet_model::table::PodName;
use beelet_spec::cri_config::HostName;

/// Path of the file in a container.
const IN_CONTAINER: &str = "/etc/hosts";
/// Path of the node's file.
const ON_HOST: &str = "/etc/hosts";
/// Most bytes read from the node's file.
const HOST_MAX: u64 = 1 << 20;

const LOCAL: &str = "127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
fe00::0\tip6-mcastprefix
fe00::1\tip6-allnodes
fe00::2\tip6-allrouters
";

/// Returns the content of the file; `of_host` is the node's file, for pods on the host network.
fn content(pod: &core::Pod, pod_ips: &[String], of_host: &[u8], node: &NodeFacts) -> Vec<u8> {
    let default_spec = core::PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let mut text = if spec.host_network == Some(true) {
        [&b"# Kubernetes-managed hosts file (host network).\n"[..], of_host].concat()
    } else {
        let host = HostName::of(spec, &PodName::of(pod), node);
        let names = match host.qualified() {
            Some(qualified) => format!("{qualified}\t{}", host.name),
            None => host.name,
        };
        let own: String = pod_ips.iter().map(|ip| format!("{ip}\t{names}\n")).collect();
        format!("# Kubernetes-managed hosts file.\n{LOCAL}{own}").into_bytes()
    };
    let aliases = spec.host_aliases.as_deref().unwrap_or_default();
    if !aliases.is_empty() {
        text.extend_from_slice(b"\n# Entries added by HostAliases.\n");
    }
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
        text.extend_from_slice(format!("{}\t{names}\n", alias.ip).as_bytes());
    }
    text
}

/// Writes the file into the pod's folder. Writes in place, because containers have the file mounted. Blocks.
pub(super) fn write(
    folder: &Path,
    pod: &core::Pod,
    pod_ips: &[String],
    node: &NodeFacts,
) -> Result<PathBuf, FileError> {
    let on_host = pod.spec.as_ref().and_then(|s| s.host_network) == Some(true);
    let of_host = if on_host { read_host()? } else { Vec::new() };
    let wanted = content(pod, pod_ips, &of_host, node);
    let path = folder.join(WritableFile::Hosts.place(""));
    beelet_base::folder::make_folder(folder, beelet_base::folder::PRIVATE)?;
    let written = own_file::own(&path).and_then(|mut file| set_content(&mut file, &wanted));
    match written {
        Ok(()) => Ok(path),
        Err(cause) => Err(FileError::Write { path, cause }),
    }
}

fn set_content(file: &mut File, wanted: &[u8]) -> io::Result<()> {
    let mut current = Vec::new();
    file.take(wanted.len() as u64 + 1).read_to_end(&mut current)?;
    if current != wanted {
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(wanted)?;
        own_file::permit(file, 0o644)?;
    }
    Ok(())
}

/// Reads the node's file as bytes, because its comments may have any encoding.
fn read_host() -> Result<Vec<u8>, FileError> {
    let mut text = Vec::new();
    match own_file::read_through_links(Path::new(ON_HOST))
        .and_then(|file| file.take(HOST_MAX).read_to_end(&mut text))
    {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            Err(FileError::Read { path: PathBuf::from(ON_HOST), cause })
        }
        _ => Ok(text),
    }
}

/// Returns the mount of the file; None if the container mounts a volume at the path.
pub(super) fn mount(path: &Path, container: &core::Container) -> Option<cri::Mount> {
    sandbox_files::mount(WritableFile::Hosts, path, IN_CONTAINER, container)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn shown(spec: Value) -> String {
        let mut spec = spec;
        spec["containers"] = json!([]);
        let pod = json!({"metadata": {"name": "web-n1", "namespace": "shop", "uid": "u1"}, "spec": spec});
        let pod: core::Pod = serde_json::from_value(pod).unwrap();
        let ips = ["10.0.0.7".to_owned(), "fd00::7".to_owned()];
        let content = content(&pod, &ips, b"192.0.2.9 printer\n", &beelet_spec::fixtures::node());
        String::from_utf8(content).unwrap()
    }

    #[test]
    fn the_nodes_file_may_have_any_encoding() {
        let pod: core::Pod =
            serde_json::from_value(json!({"spec": {"hostNetwork": true, "containers": []}})).unwrap();
        let of_host = b"192.0.2.9 printer # \xfcber\n";
        let content = content(&pod, &[], of_host, &beelet_spec::fixtures::node());
        assert!(content.ends_with(of_host));
    }

    #[test]
    fn the_file_has_the_pods_names_and_aliases() {
        let text = shown(json!({"hostname": "www", "subdomain": "front",
            "hostAliases": [{"ip": "192.0.2.5", "hostnames": ["db", "db.test"]}]}));
        let expected = format!(
            "# Kubernetes-managed hosts file.\n{LOCAL}10.0.0.7\twww.front.shop.svc.cluster.test\twww\nfd00::7\t\
             www.front.shop.svc.cluster.test\twww\n\n# Entries added by HostAliases.\n192.0.2.5\tdb\tdb.test\n"
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn a_pod_without_a_domain_has_one_name() {
        assert!(shown(json!({})).ends_with("fe00::2\tip6-allrouters\n10.0.0.7\tweb-n1\nfd00::7\tweb-n1\n"));
    }

    #[test]
    fn a_pod_on_the_host_network_has_the_nodes_entries() {
        let text =
            shown(json!({"hostNetwork": true, "hostAliases": [{"ip": "192.0.2.5", "hostnames": ["db"]}]}));
        assert_eq!(
            text,
            "# Kubernetes-managed hosts file (host network).\n192.0.2.9 printer\n\n# Entries added by HostAliases.\n\
             192.0.2.5\tdb\n"
        );
    }

    #[test]
    fn a_containers_own_mount_replaces_the_file() {
        let container = |path: &str| -> core::Container {
            serde_json::from_value(json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": path}]}))
                .unwrap()
        };
        assert!(mount(Path::new("/p/etc-hosts"), &container("/etc")).is_some());
        assert!(mount(Path::new("/p/etc-hosts"), &container("/etc/hosts")).is_none());
        assert!(mount(Path::new("/p/etc-hosts"), &container("/etc/hosts/")).is_none());
    }

    #[test]
    fn the_file_is_read_only_if_the_containers_root_is() {
        for (context, readonly) in [
            (json!({}), false),
            (json!({"readOnlyRootFilesystem": false}), false),
            (json!({"readOnlyRootFilesystem": true}), true),
        ] {
            let container = json!({"name": "c", "securityContext": context});
            let made = mount(Path::new("/p/etc-hosts"), &serde_json::from_value(container).unwrap());
            assert_eq!(made.unwrap().readonly, readonly, "{context}");
        }
    }
}
