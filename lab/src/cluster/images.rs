//! Images of a cluster without a registry: Kubernetes' own programs under the names that kubeadm expects, and
//! the tests' app.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use beelet_tests::images::{self, Entry, ImageTar};
use beelet_tests::requires::find_program;
use beelet_tests::workdir;
use serde_json::{Value, json};

use super::machine::Machine;
use super::programs::Programs;

/// Images of the machines.
#[derive(Debug)]
pub(super) struct Images {
    /// Images of the control plane only.
    pub(super) control_plane: Vec<ImageTar>,
    /// Images of every machine.
    pub(super) every: Vec<ImageTar>,
    /// Name of the sandbox image.
    pub(super) pause: String,
}

/// Builds the images; those of an earlier call come from the cache.
pub(super) fn build(programs: &Programs, version: &str) -> Result<Images> {
    let (mut control_plane, mut every) = (Vec::new(), Vec::new());
    let mut pause = String::new();
    for name in programs.image_names(version)? {
        let base = name.rsplit('/').next().and_then(|last| last.split(':').next()).unwrap_or_default();
        let of_plane = match base {
            "kube-apiserver" => Some(&programs.apiserver),
            "kube-controller-manager" => Some(&programs.controller_manager),
            "kube-scheduler" => Some(&programs.scheduler),
            "etcd" => Some(&programs.etcd),
            _ => None,
        };
        if let Some(program) = of_plane {
            control_plane.push(kept(&name, program, || program_image(&name, program, base, &[]))?);
        }
        match (base, &programs.coredns) {
            ("kube-proxy", _) => every.push(kept(&name, &programs.proxy, || proxy(&name, programs))?),
            ("coredns", Some(coredns)) => {
                every.push(kept(&name, coredns, || program_image(&name, coredns, base, &[]))?);
            }
            // kubeadm's checks pull this image even if the addon is skipped; then no pod runs it.
            ("pause" | "coredns", _) => {
                every.push(images::pause(&name, &read(&images::testapp()?)?)?);
                if base == "pause" {
                    pause.clone_from(&name);
                }
            }
            _ => {}
        }
    }
    every.extend(images::standard()?.into_iter().filter(|image| image.name == images::APP));
    Ok(Images { control_plane, every, pause })
}

/// Imports images on a machine.
pub(super) fn import(machine: &Machine, images: &[ImageTar]) -> Result<()> {
    images.iter().try_for_each(|image| import_archive(machine, &image.path))
}

/// Imports an archive of images on a machine.
pub(super) fn import_archive(machine: &Machine, archive: &Path) -> Result<()> {
    let archive = archive.display().to_string();
    machine.run(&["ctr", "--namespace", "k8s.io", "images", "import", &archive]).map(drop)
}

/// Returns the image that an earlier call made from this program, by its size and time; otherwise `make`s it:
/// reading and hashing a hundred megabytes takes a while.
fn kept(name: &str, program: &Path, make: impl FnOnce() -> Result<ImageTar>) -> Result<ImageTar> {
    let found = program.metadata().with_context(|| format!("cannot find {}", program.display()))?;
    let short = name.rsplit('/').next().unwrap_or(name).replace(':', "-");
    let file = format!("lab-{short}-{}-{}.tar", found.len(), found.mtime());
    let path = workdir::target_dir().join("images").join(file);
    if !path.exists() {
        let image = make()?;
        std::fs::hard_link(&image.path, &path)
            .with_context(|| format!("cannot create {}", path.display()))?;
    }
    Ok(ImageTar { name: name.to_owned(), path })
}

/// Returns the image of kube-proxy, which runs iptables and conntrack.
fn proxy(name: &str, programs: &Programs) -> Result<ImageTar> {
    let mut more = Vec::new();
    let mut needed: Vec<PathBuf> = Vec::new();
    let tables =
        find_program("xtables-nft-multi").context("xtables-nft-multi is not installed (Debian: iptables)")?;
    needed.push(tables);
    needed.extend(["conntrack", "nft"].into_iter().filter_map(find_program));
    for program in &needed {
        let file = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        more.push((format!("usr/sbin/{file}"), Entry::File(read(program)?, 0o755)));
        more.extend(images::libraries(program)?);
    }
    for link in
        ["iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"]
    {
        more.push((format!("usr/sbin/{link}"), Entry::Link("xtables-nft-multi".to_owned())));
    }
    let extensions = Path::new("/usr/lib/x86_64-linux-gnu/xtables");
    if let Ok(folder) = std::fs::read_dir(extensions) {
        for entry in folder {
            let path = entry?.path();
            more.extend(images::libraries(&path)?);
            more.push((images::place_of(&path), Entry::File(read(&path)?, 0o755)));
        }
    }
    more.sort_by(|a, b| a.0.cmp(&b.0));
    more.dedup_by(|a, b| a.0 == b.0);
    program_image(name, &programs.proxy, "kube-proxy", &more)
}

/// Returns an image of one program at /usr/local/bin, with its libraries and these files.
fn program_image(name: &str, program: &Path, file: &str, more: &[(String, Entry)]) -> Result<ImageTar> {
    let place = format!("usr/local/bin/{file}");
    let mut files: Vec<(String, Entry)> =
        FOLDERS.iter().map(|(path, mode)| ((*path).to_owned(), Entry::Folder(*mode))).collect();
    files.push(("etc/passwd".to_owned(), Entry::File(b"root:x:0:0:root:/:/bin/false\n".to_vec(), 0o644)));
    files.extend(images::libraries(program)?);
    files.extend_from_slice(more);
    files.push((place.clone(), Entry::File(read(program)?, 0o755)));
    let config: Value = json!({
        "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        "Entrypoint": [format!("/{place}")],
    });
    images::cached(name, &files, &config)
}

/// Folders of every image of a program.
const FOLDERS: [(&str, u32); 4] = [("etc", 0o755), ("run", 0o755), ("tmp", 0o1777), ("var", 0o755)];

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
