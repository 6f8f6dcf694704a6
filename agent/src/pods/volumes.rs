//! A pod's volumes on disk: emptyDir (disk and memory) and hostPath. A pod's folder is
//! `<pods>/<uid>/volumes/<name>`; what is below it goes with the pod, and nothing outside it ever does.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
};

use beelet_policy::quantity::Quantity;
use beelet_proto::cri;
use k8s_openapi::api::core::v1 as core;
use rustix::mount::{MountFlags, UnmountFlags};

use super::launch::{make_folder, remove_folder};

/// A pod's volumes.
#[derive(Clone, Debug)]
pub(super) struct Volumes {
    /// `<pods>/<uid>`.
    folder: PathBuf,
    volumes: Vec<core::Volume>,
}

impl Volumes {
    /// The volumes of `pod`, with their folders below `pods_dir`.
    pub(super) fn of(pod: &core::Pod, pods_dir: &Path) -> Self {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let volumes = pod.spec.as_ref().and_then(|s| s.volumes.clone()).unwrap_or_default();
        Self { folder: pods_dir.join(uid), volumes }
    }

    fn path(&self, volume: &str) -> PathBuf {
        self.folder.join("volumes").join(volume)
    }

    /// Makes what must be there before the first container runs. Harmless to repeat.
    pub(super) fn set_up(&self) -> Result<(), String> {
        for volume in &self.volumes {
            if let Some(empty) = &volume.empty_dir {
                self.set_up_empty_dir(&volume.name, empty)?;
            } else if let Some(host) = &volume.host_path {
                check_host_path(&volume.name, host)?;
            }
        }
        Ok(())
    }

    fn set_up_empty_dir(&self, name: &str, empty: &core::EmptyDirVolumeSource) -> Result<(), String> {
        let path = self.path(name);
        make_folder(&path)?;
        let in_memory = empty.medium.as_deref() == Some("Memory");
        if in_memory && !mounts_below(&path)?.contains(&path) {
            let options = match &empty.size_limit {
                Some(limit) => {
                    let bytes =
                        Quantity::parse(&limit.0).map_err(|e| format!("volume {name}: sizeLimit: {e}"))?;
                    format!("size={},mode=0777", bytes.value())
                }
                None => "mode=0777".to_owned(),
            };
            let data = std::ffi::CString::new(options).map_err(|e| format!("volume {name}: {e}"))?;
            let flags = MountFlags::NOSUID | MountFlags::NODEV;
            rustix::mount::mount("tmpfs", &path, "tmpfs", flags, data.as_c_str())
                .map_err(|e| format!("volume {name}: cannot mount a tmpfs on {}: {e}", path.display()))?;
        }
        // Any user of the pod's containers may write to it, as under the kubelet.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777))
            .map_err(|e| format!("volume {name}: cannot set the mode of {}: {e}", path.display()))
    }

    /// The mounts of one container.
    pub(super) fn mounts(&self, container: &core::Container) -> Result<Vec<cri::Mount>, String> {
        container.volume_mounts.iter().flatten().map(|mount| self.mount(container, mount)).collect()
    }

    fn mount(&self, container: &core::Container, mount: &core::VolumeMount) -> Result<cri::Mount, String> {
        let volume = self.volumes.iter().find(|v| v.name == mount.name).ok_or_else(|| {
            format!("container {} mounts volume {}, which the pod does not have", container.name, mount.name)
        })?;
        let host_path = match &volume.host_path {
            Some(host) => PathBuf::from(&host.path),
            None => self.path(&volume.name),
        };
        let propagation = match mount.mount_propagation.as_deref() {
            Some("HostToContainer") => cri::MountPropagation::PropagationHostToContainer,
            Some("Bidirectional") => cri::MountPropagation::PropagationBidirectional,
            _ => cri::MountPropagation::PropagationPrivate,
        };
        Ok(cri::Mount {
            container_path: mount.mount_path.clone(),
            host_path: host_path.to_string_lossy().into_owned(),
            readonly: mount.read_only.unwrap_or(false),
            propagation: propagation.into(),
            ..Default::default()
        })
    }

    /// Unmounts and removes the pod's folder. Symbolic links in it are removed, not followed.
    pub(super) fn tear_down(&self) -> Result<(), String> {
        let mut mounts = mounts_below(&self.folder)?;
        mounts.sort_unstable_by(|a, b| b.cmp(a));
        for path in mounts {
            rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW)
                .map_err(|e| format!("cannot unmount {}: {e}; something still uses it", path.display()))?;
        }
        remove_folder(&self.folder)
    }
}

/// The mount points at and below `folder`.
fn mounts_below(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let table = fs::read_to_string("/proc/self/mountinfo")
        .map_err(|e| format!("cannot read the mount table: {e}"))?;
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(|p| PathBuf::from(unescape(p)));
    Ok(points.filter(|p| p.starts_with(folder)).collect())
}

/// Undoes the octal escapes of mountinfo (proc_pid_mountinfo(5)): space, tab, newline, backslash.
fn unescape(field: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(field.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

/// Checks a host path against its type, and makes what the `…OrCreate` types ask for.
fn check_host_path(name: &str, host: &core::HostPathVolumeSource) -> Result<(), String> {
    let path = Path::new(&host.path);
    let kind = host.type_.as_deref().unwrap_or("");
    if kind == "DirectoryOrCreate" && !path.exists() {
        make_folder(path)?;
    }
    if kind == "FileOrCreate" && !path.exists() {
        fs::File::create(path)
            .map_err(|e| format!("volume {name}: cannot create the file {}: {e}", path.display()))?;
    }
    if kind.is_empty() {
        return Ok(());
    }
    let found = fs::metadata(path)
        .map_err(|e| format!("volume {name}: hostPath {} of type {kind}: {e}", path.display()))?
        .file_type();
    let fits = match kind {
        "Directory" | "DirectoryOrCreate" => found.is_dir(),
        "File" | "FileOrCreate" => found.is_file(),
        "Socket" => found.is_socket(),
        "CharDevice" => found.is_char_device(),
        "BlockDevice" => found.is_block_device(),
        _ => return Err(format!("volume {name}: hostPath type {kind:?} is not known")),
    };
    if fits { Ok(()) } else { Err(format!("volume {name}: hostPath {} is not a {kind}", path.display())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(path: &Path, kind: &str) -> core::HostPathVolumeSource {
        core::HostPathVolumeSource { path: path.to_string_lossy().into_owned(), type_: Some(kind.to_owned()) }
    }

    #[test]
    fn host_paths_are_checked_against_their_type() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "").unwrap();
        let check = |path: &Path, kind: &str, fits: bool| {
            assert_eq!(check_host_path("v", &host(path, kind)).is_ok(), fits, "{} {kind}", path.display());
        };
        check(dir.path(), "Directory", true);
        check(&file, "Directory", false);
        check(&file, "File", true);
        check(Path::new("/dev/null"), "CharDevice", true);
        check(Path::new("/dev/null"), "Socket", false);
        check(&dir.path().join("missing"), "", true);
        check(&dir.path().join("missing"), "File", false);
        check(&dir.path().join("made"), "DirectoryOrCreate", true);
        check(&dir.path().join("made-file"), "FileOrCreate", true);
        check(dir.path(), "Folder", false);
    }

    #[test]
    fn tearing_down_does_not_follow_symbolic_links() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        let pod: core::Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"uid": "u1"},
            "spec": {"containers": [], "volumes": [{"name": "scratch", "emptyDir": {}}]}
        }))
        .unwrap();
        let volumes = Volumes::of(&pod, &dir.path().join("pods"));
        volumes.set_up().unwrap();
        std::os::unix::fs::symlink(&outside, volumes.path("scratch").join("link")).unwrap();
        volumes.tear_down().unwrap();
        assert!(outside.join("kept").exists());
        assert!(!dir.path().join("pods/u1").exists());
    }

    #[test]
    fn mount_points_with_spaces_are_read_right() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
    }
}
