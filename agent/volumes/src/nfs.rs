//! NFS volumes: the system's helper (mount.nfs) mounts them at `volumes/kubernetes.io~nfs/<volume>` in the
//! pod's folder, as in Kubernetes' `pkg/volume/nfs`. An unreachable server delays only its own pods.

use std::{
    fs,
    path::{Path, PathBuf},
};

use beelet_base::{
    folder::{PRIVATE, make_folder},
    program::Program,
};
use beelet_policy::volumes::{
    content::Allowance,
    file_system::{export, mount_options},
};
use k8s_openapi::api::core::v1::{NFSVolumeSource, Volume};

use crate::{
    VOLUMES, disk,
    error::Error,
    mounts,
    persistent_volume::{one_name, options_of},
    plugin::{Attachment, Location, Spec, Target, Use, VolumePlugin},
};

/// The kubelet's name of this kind of volumes in paths.
const PLUGIN: &str = "kubernetes.io~nfs";
/// Paths where mount(8) looks for the helper.
const HELPERS: [&str; 2] = ["/sbin/mount.nfs", "/usr/sbin/mount.nfs"];

/// Plugin of NFS volumes.
#[derive(Debug)]
pub(crate) struct NfsVolumes;

/// Returns the kubelet's name of the plugin of NFS volumes.
pub(crate) fn plugin_name(spec: &Spec<'_>) -> Option<&'static str> {
    let is_ours = spec.is_kind(|claimed| claimed.nfs.is_some(), |volume| volume.nfs.is_some());
    is_ours.then_some("kubernetes.io/nfs")
}

impl VolumePlugin for NfsVolumes {
    fn name(&self, spec: &Spec<'_>) -> Option<&'static str> {
        plugin_name(spec)
    }

    fn location(&self, _volume: &Volume) -> Location {
        Location::Linked
    }

    fn is_read_only(&self, volume: &Volume) -> bool {
        volume.nfs.as_ref().is_some_and(|source| source.read_only == Some(true))
    }

    fn is_due(&self, spec: &Spec<'_>, used: Use, _attachment: Option<&Attachment>) -> bool {
        spec.is_claimed_or_mounted(used)
    }

    fn set_up(
        &self,
        spec: &Spec<'_>,
        target: &Target<'_>,
        _left: &mut Allowance,
    ) -> Result<Option<PathBuf>, Error> {
        if let Some(claimed) = spec.claimed {
            let Some(source) = spec.persistent().and_then(|spec| spec.nfs.as_ref()) else { return Ok(None) };
            let read_only = claimed.read_only || source.read_only == Some(true);
            return mount(target.folder, claimed.name(), source, read_only, &options_of(claimed)).map(Some);
        }
        let Some(source) = &spec.volume.nfs else { return Ok(None) };
        mount(target.folder, &spec.volume.name, source, source.read_only == Some(true), &[]).map(Some)
    }

    fn name_of_place(&self, _folder: &Path, place: &Path) -> Option<&'static str> {
        let is_ours = place.components().any(|part| part.as_os_str() == PLUGIN);
        is_ours.then_some("kubernetes.io/nfs")
    }

    fn must_be_mounted(&self, folder: &Path, place: &Path) -> bool {
        place.starts_with(folder.join(VOLUMES).join(PLUGIN))
    }

    fn may_relabel(&self, folder: &Path, place: &Path) -> bool {
        !self.must_be_mounted(folder, place)
    }
}

/// Mounts an export for the pod with this folder, unless it is mounted already. Returns the volume's path.
fn mount(
    folder: &Path,
    name: &str,
    source: &NFSVolumeSource,
    read_only: bool,
    options: &[String],
) -> Result<PathBuf, Error> {
    let target = folder.join(VOLUMES).join(PLUGIN).join(one_name(name)?);
    if mounts::is_mount_point(&target)? {
        return Ok(target);
    }
    let mount = program(source, &target, read_only, options)?;
    check_helper(&HELPERS)?;
    make_folder(&target, PRIVATE)?;
    let mounted = disk::succeed(&mount, disk::SHORT);
    if mounted.is_err() {
        // The next attempt makes the folder again.
        let _ = fs::remove_dir(&target);
    }
    mounted.map(|()| target)
}

/// Checks that the helper is installed: mount(8)'s error without it names no package.
fn check_helper(places: &[&str]) -> Result<(), Error> {
    if places.iter().any(|place| Path::new(place).exists()) {
        return Ok(());
    }
    Err(Error::unmet(
        "`mount.nfs` is missing on this node: install nfs-common (Debian, Ubuntu) or nfs-utils (other systems)",
    ))
}

/// Returns the call of mount(8) with its helper for NFS; no field of the volume can choose another helper.
fn program(
    source: &NFSVolumeSource,
    target: &Path,
    read_only: bool,
    options: &[String],
) -> Result<Program, Error> {
    let from = export(&source.server, &source.path).map_err(Error::unmet_of)?;
    let read_only = read_only.then_some("ro");
    let options = mount_options(options.iter().map(String::as_str).chain(read_only));
    let options = options.map_err(Error::unmet_of)?;
    let mount = Program::tool("mount").setting("-t", "nfs");
    let mount = if options.is_empty() { mount } else { mount.setting("-o", options) };
    Ok(mount.end_of_options().operand(from).operand(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_mounted_with_the_volumes_options() {
        let check = |server: &str, read_only: bool, options: &[&str], expected: &[&str]| {
            let source =
                NFSVolumeSource { server: server.to_owned(), path: "/x".to_owned(), read_only: None };
            let options: Vec<String> = options.iter().map(|&one| one.to_owned()).collect();
            let mount = program(&source, Path::new("/t"), read_only, &options).unwrap();
            let found: Vec<_> = mount.arguments().iter().map(|one| one.to_str().unwrap()).collect();
            assert_eq!(found, expected);
        };
        check("files", false, &[], &["-t", "nfs", "--", "files:/x", "/t"]);
        check("files", true, &[], &["-t", "nfs", "-o", "ro", "--", "files:/x", "/t"]);
        let options = ["nfsvers=4.1", "hard"];
        let expected = ["-t", "nfs", "-o", "nfsvers=4.1,hard,ro", "--", "[fd00::1]:/x", "/t"];
        check("fd00::1", true, &options, &expected);
    }

    #[test]
    fn a_missing_helper_names_the_package() {
        assert!(check_helper(&["/proc/self"]).is_ok());
        let error = check_helper(&["/nowhere/mount.nfs"]).unwrap_err().to_string();
        assert!(error.contains("nfs-common"), "{error}");
    }
}
