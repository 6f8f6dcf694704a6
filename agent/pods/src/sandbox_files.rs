//! A sandbox's `/etc/hostname` and `/etc/resolv.conf`, with the same content as the runtime's own files.
//! Containers may write to the runtime's files, which no disk usage statistic includes (an issue similar to
//! CVE-2020-8557). The agent therefore mounts its own files, which count as usage of the pod.
//!
//! Like the runtime's files, the agent's are created with a sandbox and shared by its containers: a change by
//! one container (such as an init container that sets name servers) is visible to the others until the
//! sandbox is replaced. Containers of a sandbox that another agent created without these files have the
//! runtime's.

use std::{
    ffi::OsStr,
    fs::symlink_metadata,
    io::{self, Read as _},
    path::{Component, Path, PathBuf},
};

use beelet_base::{
    folder::{PRIVATE, make_folder},
    own_file,
    shared_folder::Folder,
};
use beelet_model::disk::WritableFile;
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;

use crate::error::FileError;

/// The files, with their paths in a container.
const ALL: [(WritableFile, &str); 2] =
    [(WritableFile::Hostname, "/etc/hostname"), (WritableFile::Resolver, "/etc/resolv.conf")];
/// File with the node's hostname and a newline.
const OF_MACHINE: &str = "/proc/sys/kernel/hostname";
/// Most bytes read from the file; a hostname is shorter.
const HOSTNAME_MAX: u64 = 256;

/// Creates the files of a new sandbox with this `config` in the pod's folder, and removes those of the pod's
/// other sandboxes. Blocks.
pub(super) fn write(folder: &Path, config: &cri::PodSandboxConfig) -> Result<(), FileError> {
    make_folder(folder, PRIVATE)?;
    let attempt = config.metadata.as_ref().map_or(0, |metadata| metadata.attempt).to_string();
    for (kind, _) in ALL {
        let text = match kind {
            WritableFile::Hostname => hostname(&config.hostname)?,
            _ => config.dns_config.as_ref().map(resolver).unwrap_or_default(),
        };
        let (name, files) = (kind.place(""), folder.join(kind.place("")));
        let of_error = |cause| FileError::Write { path: files.clone(), cause };
        // Access is by descriptor: a container with a hostPath may have replaced the folder by a link.
        Folder::open(folder).and_then(|pod| pod.remove(name.as_os_str())).map_err(of_error)?;
        make_folder(&files, PRIVATE)?;
        let made =
            Folder::open(&files).and_then(|files| files.create(OsStr::new(&attempt), text.as_bytes(), 0o644));
        made.map_err(of_error)?;
    }
    Ok(())
}

/// Returns the mounts of the files in a container of the sandbox with this attempt number, except at paths
/// where the container mounts a volume. Blocks.
pub(super) fn mounts(folder: &Path, attempt: u32, container: &core::Container) -> Vec<cri::Mount> {
    let of_kind = |(kind, at): (WritableFile, &str)| {
        let files = folder.join(kind.place(""));
        let path = files.join(attempt.to_string());
        // Files of any other type are not the agent's.
        let is_made = symlink_metadata(&files).is_ok_and(|found| found.is_dir())
            && symlink_metadata(&path).is_ok_and(|found| found.is_file());
        if is_made { mount(kind, &path, at, container) } else { None }
    };
    ALL.into_iter().filter_map(of_kind).collect()
}

/// Returns the mount of a file, read-only if the container's root is read-only; None if the container mounts
/// a volume at the path.
pub(super) fn mount(
    kind: WritableFile,
    path: &Path,
    at: &str,
    container: &core::Container,
) -> Option<cri::Mount> {
    let context = container.security_context.as_ref();
    let readonly = context.and_then(|context| context.read_only_root_filesystem) == Some(true);
    (!has_own(container, at)).then(|| kind.mount(path, at, readonly))
}

/// Returns true if the container mounts a volume at exactly this path, in any notation: runtimes normalize
/// paths too, and would mount both.
pub(super) fn has_own(container: &core::Container, at: &str) -> bool {
    container.volume_mounts.iter().flatten().any(|mount| cleaned(&mount.mount_path) == cleaned(at))
}

/// Normalizes an absolute path lexically, like Go's `filepath.Clean`.
fn cleaned(path: &str) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for component in Path::new(path).components() {
        match component {
            Component::ParentDir => {
                clean.pop();
            }
            Component::Normal(name) => clean.push(name),
            _ => {}
        }
    }
    clean
}

/// Returns the content of `/etc/hostname`, the same as containerd's: the sandbox's hostname, or the node's if
/// the sandbox has none.
fn hostname(of_sandbox: &str) -> Result<String, FileError> {
    if !of_sandbox.is_empty() {
        return Ok(format!("{of_sandbox}\n"));
    }
    let mut name = String::new();
    let read = own_file::read(Path::new(OF_MACHINE))
        .and_then(|file| file.take(HOSTNAME_MAX).read_to_string(&mut name));
    let of_error = |cause: io::Error| FileError::Read { path: PathBuf::from(OF_MACHINE), cause };
    read.map_err(of_error)?;
    Ok(format!("{}\n", name.trim_end()))
}

/// Returns the content of `/etc/resolv.conf`, the same as containerd's (`parseDNSOptions`).
fn resolver(dns: &cri::DnsConfig) -> String {
    let searches = [dns.searches.join(" ")].into_iter().filter(|line| !line.is_empty());
    let options = [dns.options.join(" ")].into_iter().filter(|line| !line.is_empty());
    let lines = searches.map(|line| format!("search {line}\n"));
    let lines = lines.chain(dns.servers.iter().map(|server| format!("nameserver {server}\n")));
    lines.chain(options.map(|line| format!("options {line}\n"))).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use serde_json::{Value, json};

    use super::*;

    fn config(attempt: u32, hostname: &str) -> cri::PodSandboxConfig {
        let list = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata { attempt, ..Default::default() }),
            hostname: hostname.to_owned(),
            dns_config: Some(cri::DnsConfig {
                servers: list(&["10.96.0.10", "192.0.2.53"]),
                searches: list(&["shop.svc.cluster.test", "cluster.test"]),
                options: list(&["ndots:5", "rotate"]),
            }),
            ..Default::default()
        }
    }

    fn container(more: Value) -> core::Container {
        let mut container = json!({"name": "c"});
        container.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(container).unwrap()
    }

    fn places(mounts: &[cri::Mount]) -> Vec<&str> {
        mounts.iter().map(|mount| mount.container_path.as_str()).collect()
    }

    #[test]
    fn the_files_have_the_content_of_the_runtimes_own() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("pod");
        write(&pod, &config(0, "web-n1")).unwrap();
        let mounts = mounts(&pod, 0, &container(json!({})));
        assert_eq!(places(&mounts), ["/etc/hostname", "/etc/resolv.conf"]);
        let texts = mounts.iter().map(|mount| fs::read_to_string(&mount.host_path).unwrap());
        let resolver = "search shop.svc.cluster.test cluster.test\nnameserver 10.96.0.10\nnameserver 192.0.2.53\n\
                        options ndots:5 rotate\n";
        assert_eq!(texts.collect::<Vec<_>>(), ["web-n1\n", resolver]);
        for mount in &mounts {
            assert!(mount.selinux_relabel && !mount.readonly, "{mount:?}");
            assert_eq!(fs::metadata(&mount.host_path).unwrap().permissions().mode() & 0o7777, 0o644);
        }
        write(&pod, &config(0, "")).unwrap();
        let of_machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(fs::read_to_string(&mounts[0].host_path).unwrap(), of_machine);
        assert_eq!(super::resolver(&cri::DnsConfig::default()), "");
    }

    #[test]
    fn a_containers_changes_stay_until_the_sandbox_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (pod, plain) = (dir.path().join("pod"), container(json!({})));
        write(&pod, &config(0, "web-n1")).unwrap();
        let first = mounts(&pod, 0, &plain);
        fs::write(&first[1].host_path, "nameserver 192.0.2.1\n").unwrap();
        let again = mounts(&pod, 0, &plain);
        assert_eq!(first, again);
        assert_eq!(fs::read_to_string(&again[1].host_path).unwrap(), "nameserver 192.0.2.1\n");
        write(&pod, &config(1, "web-n1")).unwrap();
        let next = mounts(&pod, 1, &plain);
        assert!(fs::read_to_string(&next[1].host_path).unwrap().starts_with("search shop.svc"));
        assert!(!Path::new(&first[1].host_path).exists(), "the old file still uses disk space");
        // A sandbox that another agent created has the runtime's files.
        assert!(mounts(&pod, 2, &plain).is_empty());
        // A link that a container with a hostPath created is not mounted.
        fs::remove_file(&next[0].host_path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &next[0].host_path).unwrap();
        assert_eq!(places(&mounts(&pod, 1, &plain)), ["/etc/resolv.conf"]);
        // A link in place of the folder is not followed.
        let (elsewhere, hostnames) = (dir.path().join("elsewhere"), pod.join("etc-hostname"));
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join("1"), "hush").unwrap();
        fs::rename(&hostnames, dir.path().join("old")).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &hostnames).unwrap();
        assert_eq!(places(&mounts(&pod, 1, &plain)), ["/etc/resolv.conf"]);
        write(&pod, &config(1, "web-n1")).unwrap();
        assert_eq!(fs::read_to_string(&next[0].host_path).unwrap(), "web-n1\n");
        assert_eq!(fs::read_to_string(elsewhere.join("1")).unwrap(), "hush");
    }

    #[test]
    fn a_containers_own_mounts_win_and_a_read_only_root_makes_the_files_read_only() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &config(0, "web-n1")).unwrap();
        for (path, expected) in [
            ("/etc", &["/etc/hostname", "/etc/resolv.conf"][..]),
            ("/etc/hostname", &["/etc/resolv.conf"]),
            ("/etc//resolv.conf/", &["/etc/hostname"]),
            ("/etc/other/../resolv.conf", &["/etc/hostname"]),
        ] {
            let own = container(json!({"volumeMounts": [{"name": "v", "mountPath": path}]}));
            assert_eq!(places(&mounts(dir.path(), 0, &own)), expected, "{path}");
        }
        for readonly in [false, true] {
            let context = container(json!({"securityContext": {"readOnlyRootFilesystem": readonly}}));
            assert!(mounts(dir.path(), 0, &context).iter().all(|mount| mount.readonly == readonly));
        }
    }
}
