//! hostPath volumes: a file or folder of the machine, checked against its type.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1 as core;

use beelet_base::folder::make_folder;
use beelet_model::storage::Claimed;
use beelet_policy::volumes::content;

use crate::{
    error::Error,
    persistent_volume::options_of,
    plugin::{Attachment, Location, Spec, Target, Use, VolumePlugin},
};

/// Plugin of hostPath volumes and hostPath PersistentVolumes.
#[derive(Debug)]
pub(crate) struct HostPathVolumes;

/// Returns the kubelet's name of the plugin of `hostPath` volumes.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    let is_ours = spec.is_kind(|claimed| claimed.host_path.is_some(), |volume| volume.host_path.is_some());
    is_ours.then_some("kubernetes.io/host-path")
}

impl VolumePlugin for HostPathVolumes {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, volume: &core::Volume) -> Location {
        match &volume.host_path {
            Some(host) => Location::Machine(PathBuf::from(&host.path)),
            None => Location::Linked,
        }
    }

    fn is_due(&self, _spec: &Spec<'_>, used: Use, _attachment: Option<&Attachment>) -> bool {
        used.is_any()
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        _target: &Target<'_>,
        _left: &mut content::Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        if let (Some(claimed), Some(source)) =
            (spec.claimed, spec.persistent().and_then(|spec| spec.host_path.as_ref()))
        {
            return persistent(claimed, source).map(Some);
        }
        spec.volume.host_path.as_ref().map_or(Ok(()), check)?;
        Ok(None)
    }
}

/// Checks a host path against its type, after making a missing folder (0755) or file (0644) for the
/// `…OrCreate` types.
fn check(host: &core::HostPathVolumeSource) -> Result<(), Error> {
    content::check_path(&host.path)?;
    let path = Path::new(&host.path);
    let kind = host.type_.as_deref().unwrap_or("");
    match kind {
        // No check; the runtime makes a folder at a missing path.
        "" => return Ok(()),
        "DirectoryOrCreate" if !path.exists() => {
            make_folder(path, 0o755)?;
        }
        "FileOrCreate" if !path.exists() => {
            make_file(path).map_err(Error::io("make the file", path))?;
        }
        _ => {}
    }
    let wrong = |why: String| Error::HostPath { path: path.to_owned(), why };
    let found = fs::metadata(path).map_err(|e| wrong(format!("of type {kind}: {e}")))?.file_type();
    let fits = match kind {
        "Directory" | "DirectoryOrCreate" => found.is_dir(),
        "File" | "FileOrCreate" => found.is_file(),
        "Socket" => found.is_socket(),
        "CharDevice" => found.is_char_device(),
        "BlockDevice" => found.is_block_device(),
        _ => return Err(Error::unmet(format!("unknown hostPath type {kind:?}"))),
    };
    if fits { Ok(()) } else { Err(wrong(format!("is not a {kind}"))) }
}

/// Checks a PersistentVolume of the type `hostPath`. Returns its path.
pub(crate) fn persistent(claimed: &Claimed, source: &core::HostPathVolumeSource) -> Result<PathBuf, Error> {
    if !options_of(claimed).is_empty() {
        return Err(Error::unmet("mount options are not supported for volumes of type hostPath"));
    }
    check(source)?;
    Ok(PathBuf::from(&source.path))
}

/// Makes an empty file, unless another program made it first.
fn make_file(path: &Path) -> std::io::Result<()> {
    match fs::OpenOptions::new().create_new(true).write(true).open(path) {
        Ok(file) => file.set_permissions(fs::Permissions::from_mode(0o644)),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use beelet_policy::volumes::content::TooMuch;

    use super::*;

    #[test]
    fn made_paths_have_the_kubelets_modes() {
        let strict = ["sh", "-c", "umask 077; exec \"$0\" \"$@\""];
        let name = "made_paths_have_the_kubelets_modes";
        if !beelet_testing::again::in_child(module_path!(), name, &strict) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        for (name, kind, mode) in [("d/e", "DirectoryOrCreate", 0o755), ("f", "FileOrCreate", 0o644)] {
            let path = dir.path().join(name);
            let host = core::HostPathVolumeSource {
                path: path.to_string_lossy().into_owned(),
                type_: Some(kind.to_owned()),
            };
            check(&host).unwrap();
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, mode, "{kind}");
        }
    }

    #[test]
    fn too_long_paths_are_refused_without_access() {
        for kind in ["", "DirectoryOrCreate", "FileOrCreate", "Directory", "Socket"] {
            let host = |path: String| core::HostPathVolumeSource { path, type_: Some(kind.to_owned()) };
            // Resolving each folder of a path of one megabyte would read a million megabytes.
            let refused = check(&host("/a".repeat(1 << 20))).unwrap_err();
            assert!(matches!(refused, Error::TooMuch(TooMuch::Path { .. })), "{kind}: {refused}");
        }
    }

    #[test]
    fn host_paths_are_checked_against_their_type() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "kept").unwrap();
        let socket = dir.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let check = |path: &Path, kind: &str, fits: bool| {
            let host = core::HostPathVolumeSource {
                path: path.to_string_lossy().into_owned(),
                type_: Some(kind.to_owned()),
            };
            let checked = check(&host);
            assert_eq!(checked.is_ok(), fits, "{} {kind}: {checked:?}", path.display());
        };
        check(dir.path(), "Directory", true);
        check(&file, "Directory", false);
        check(&file, "File", true);
        check(&file, "DirectoryOrCreate", false);
        check(dir.path(), "FileOrCreate", false);
        check(Path::new("/dev/null"), "CharDevice", true);
        check(Path::new("/dev/null"), "BlockDevice", false);
        check(Path::new("/dev/null"), "Socket", false);
        check(&socket, "Socket", true);
        check(&dir.path().join("missing"), "", true);
        check(&dir.path().join("missing"), "File", false);
        check(&dir.path().join("made/deep"), "DirectoryOrCreate", true);
        check(&dir.path().join("made-file"), "FileOrCreate", true);
        check(&dir.path().join("none/made-file"), "FileOrCreate", false);
        check(dir.path(), "Folder", false);
        assert!(dir.path().join("made/deep").is_dir() && dir.path().join("made-file").is_file());
        check(&file, "FileOrCreate", true);
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    }
}
