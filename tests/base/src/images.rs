//! Container images made without a registry: OCI layouts in a tar, from the machine's static busybox and the
//! test app. `ctr images import` accepts them unchanged.

use crate::workdir;
use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Sandbox image: the test app, started with `pause`.
pub const PAUSE: &str = "localhost/beelet/pause:1";
/// Image of the pods: busybox with all its applets, and the test app as `/bin/testapp`.
pub const APP: &str = "localhost/beelet/app:1";

/// Image as a file for `ctr images import`.
#[derive(Debug, Clone)]
pub struct ImageTar {
    /// Full name of the image.
    pub name: String,
    /// Path of the OCI layout.
    pub path: PathBuf,
}

/// File of an image.
#[derive(Debug, Clone)]
pub enum Entry {
    /// Regular file with its mode.
    File(Vec<u8>, u32),
    /// Symbolic link to this target.
    Link(String),
    /// Folder with its mode.
    Folder(u32),
}

/// Returns the standard images, [`PAUSE`] and [`APP`], built once for each set of contents and cached under
/// the target folder.
pub fn standard() -> Result<Vec<ImageTar>> {
    let app = std::fs::read(testapp()?).context("cannot read the test app")?;
    Ok(vec![pause(PAUSE, &app)?, busybox_image(&app)?])
}

/// Returns a sandbox image of this name from the content of the test app.
pub fn pause(name: &str, app: &[u8]) -> Result<ImageTar> {
    let files = [("pause".to_owned(), Entry::File(app.to_vec(), 0o755))];
    cached(name, &files, &json!({ "Entrypoint": ["/pause", "pause"] }))
}

fn busybox_image(app: &[u8]) -> Result<ImageTar> {
    cached(APP, &busybox_files(app)?, &json!({ "Env": ["PATH=/bin"], "Cmd": ["/bin/sh"] }))
}

/// Returns another image with the layer of [`APP`], which differs only in its name and its configuration.
pub fn variant(name: &str) -> Result<ImageTar> {
    let app = std::fs::read(testapp()?).context("cannot read the test app")?;
    let variant = format!("VARIANT={name}");
    cached(name, &busybox_files(&app)?, &json!({ "Env": ["PATH=/bin", variant], "Cmd": ["/bin/sh"] }))
}

/// Returns Debian's redis under its name in Docker's registry, with an additional shell.
pub fn redis(name: &str) -> Result<ImageTar> {
    // One program is both the server and the checker of its files; its file name selects the role.
    let programs =
        [("redis-check-rdb", "usr/local/bin/redis-server"), ("redis-cli", "usr/local/bin/redis-cli")];
    let mut files = vec![
        ("data".to_owned(), Entry::Folder(0o777)),
        ("bin/sh".to_owned(), Entry::File(std::fs::read(busybox()?)?, 0o755)),
        ("bin/tar".to_owned(), Entry::Link("sh".to_owned())),
    ];
    let mut of_both = std::collections::BTreeMap::new();
    for (program, place) in programs {
        let path =
            crate::requires::find_program(program).with_context(|| format!("{program} is not installed"))?;
        of_both.extend(libraries(&path)?);
        files.push((place.to_owned(), Entry::File(std::fs::read(path)?, 0o755)));
    }
    files.extend(of_both);
    let config = json!({
        "Env": ["PATH=/usr/local/bin:/bin"],
        "WorkingDir": "/data",
        "Cmd": ["redis-server", "--protected-mode", "no"],
    });
    cached(name, &files, &config)
}

/// Returns the libraries that the dynamic loader would load for a program, including the loader; none for a
/// static program.
pub fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    Ok(library_paths(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns the paths in ldd's output: `name => path (address)`, and the loader's `path (address)`.
fn library_paths(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let line = line.split_once(" => ").map_or(line, |(_, path)| path);
        let path = line.trim().split(" (").next().unwrap_or_default().to_owned();
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    text.lines().filter_map(path).collect()
}

/// Returns the [`shared_libraries`] of a program as files of an image.
pub fn libraries(program: &Path) -> Result<Vec<(String, Entry)>> {
    let file = |path: PathBuf| {
        let content = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok((place_of(&path), Entry::File(content, 0o755)))
    };
    shared_libraries(program)?.into_iter().map(file).collect()
}

/// Returns the name in an image of a file at the same place on the machine.
pub fn place_of(path: &Path) -> String {
    path.to_string_lossy().trim_start_matches('/').to_owned()
}

fn busybox_files(app: &[u8]) -> Result<Vec<(String, Entry)>> {
    let busybox = busybox()?;
    let program = std::fs::read(&busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    let listed = Command::new(&busybox).arg("--list").output().context("cannot list busybox's applets")?;
    let mut files = vec![
        ("bin".to_owned(), Entry::Folder(0o755)),
        ("etc".to_owned(), Entry::Folder(0o755)),
        ("tmp".to_owned(), Entry::Folder(0o1777)),
        ("www".to_owned(), Entry::Folder(0o755)),
        ("bin/busybox".to_owned(), Entry::File(program, 0o755)),
        ("bin/testapp".to_owned(), Entry::File(app.to_vec(), 0o755)),
        ("etc/passwd".to_owned(), Entry::File(b"root:x:0:0:root:/:/bin/sh\n".to_vec(), 0o644)),
        ("etc/group".to_owned(), Entry::File(b"root:x:0:\n".to_vec(), 0o644)),
        ("www/index.html".to_owned(), Entry::File(b"hello from beelet\n".to_vec(), 0o644)),
    ];
    for applet in String::from_utf8_lossy(&listed.stdout).lines().filter(|applet| *applet != "busybox") {
        files.push((format!("bin/{applet}"), Entry::Link("busybox".to_owned())));
    }
    Ok(files)
}

/// Returns an image of these files for this machine, from the cache if it was built before.
pub fn cached(name: &str, files: &[(String, Entry)], config: &Value) -> Result<ImageTar> {
    let own = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    cached_for(own, name, files, config)
}

/// Returns an image of these files for this architecture (in the images' spelling: `amd64`, `arm64`), from
/// the cache if it was built before.
pub fn cached_for(
    architecture: &str,
    name: &str,
    files: &[(String, Entry)],
    config: &Value,
) -> Result<ImageTar> {
    let layer = layer(files)?;
    let config = json!({ "architecture": architecture, "os": "linux", "config": config });
    let digest = hex(&Sha256::new().chain_update(&layer).chain_update(config.to_string()).chain_update(name));
    let short = name.rsplit('/').next().unwrap_or(name).replace(':', "-");
    let path = workdir::target_dir().join("images").join(format!("{short}-{}.tar", &digest[..16]));
    if !path.exists() {
        let layout = layout(name, &layer, &config)?;
        // Another test may build the same image now: the rename makes the file appear complete.
        let temporary = path.with_extension(workdir::unique("part"));
        workdir::write(&temporary, layout)?;
        std::fs::rename(&temporary, &path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    Ok(ImageTar { name: name.to_owned(), path })
}

/// Returns the files as an uncompressed layer. Equal files result in equal bytes.
fn layer(files: &[(String, Entry)]) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, entry) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mtime(0);
        match entry {
            Entry::File(content, mode) => {
                header.set_mode(*mode);
                header.set_size(content.len() as u64);
                archive.append_data(&mut header, path, content.as_slice())?;
            }
            Entry::Link(target) => {
                header.set_mode(0o777);
                header.set_size(0);
                header.set_entry_type(tar::EntryType::Symlink);
                archive.append_link(&mut header, path, target)?;
            }
            Entry::Folder(mode) => {
                header.set_mode(*mode);
                header.set_size(0);
                header.set_entry_type(tar::EntryType::Directory);
                archive.append_data(&mut header, path, std::io::empty())?;
            }
        }
    }
    archive.into_inner().context("cannot finish the image's layer")
}

/// Returns an image of one layer as an OCI layout, by the OCI image specification's "Image Layout". `config`
/// is its configuration without the layer.
fn layout(name: &str, layer: &[u8], config: &Value) -> Result<Vec<u8>> {
    let layer_digest = format!("sha256:{}", hex(&Sha256::new().chain_update(layer)));
    let mut config = config.clone();
    config["rootfs"] = json!({ "type": "layers", "diff_ids": [layer_digest] });
    let config = config.to_string();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes()),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
    })
    .to_string();
    let mut named = descriptor("application/vnd.oci.image.manifest.v1+json", manifest.as_bytes());
    named["annotations"] = json!({
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rsplit(':').next(),
    });
    let index = json!({ "schemaVersion": 2, "manifests": [named] }).to_string();
    let mut archive = tar::Builder::new(Vec::new());
    let mut add = |path: String, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_mtime(0);
        header.set_size(content.len() as u64);
        archive.append_data(&mut header, path, content)
    };
    add("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add("index.json".to_owned(), index.as_bytes())?;
    for blob in [layer, config.as_bytes(), manifest.as_bytes()] {
        add(format!("blobs/sha256/{}", hex(&Sha256::new().chain_update(blob))), blob)?;
    }
    archive.into_inner().context("cannot finish the image's layout")
}

fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    let digest = format!("sha256:{}", hex(&Sha256::new().chain_update(blob)));
    json!({ "mediaType": media_type, "digest": digest, "size": blob.len() })
}

fn hex(hasher: &Sha256) -> String {
    hasher.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the machine's static busybox.
pub fn busybox() -> Result<PathBuf> {
    for path in ["/bin/busybox", "/usr/bin/busybox", "/bin/busybox.static", "/usr/bin/busybox.static"] {
        if is_static(Path::new(path)).unwrap_or(false) {
            return Ok(PathBuf::from(path));
        }
    }
    bail!(
        "no static busybox is installed; `cargo xtask setup --for demo` installs it (Debian: busybox-static)"
    )
}

/// Returns true if the program at `path` needs no dynamic loader, so that it runs in an image without other
/// files. Reads the program headers of a 64-bit little-endian ELF file and checks for PT_INTERP (elf(5)).
pub fn is_static(path: &Path) -> Result<bool> {
    const PT_INTERP: u32 = 3;
    let mut head = Vec::new();
    std::fs::File::open(path)?.take(64 * 1024).read_to_end(&mut head)?;
    let number = |at: usize, size: usize| -> Result<u64> {
        let bytes = head.get(at..at + size).context("the file is too short for a program")?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    if !head.starts_with(b"\x7fELF\x02\x01") {
        bail!("{} is not a 64-bit little-endian ELF file", path.display());
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let at = usize::try_from(table + index * size).context("a program header is outside the file")?;
        if number(at, 4)? == u64::from(PT_INTERP) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the static test app: the one that `BEELET_TESTAPP` names, or else a new build.
pub fn testapp() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("BEELET_TESTAPP") {
        return Ok(PathBuf::from(path));
    }
    build_testapp()
}

/// Builds the test app, static and optimised, and returns its path. Calls cargo once per process.
pub fn build_testapp() -> Result<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(built) = BUILT.get() {
        return Ok(built.clone());
    }
    let built = build_testapp_now()?;
    Ok(BUILT.get_or_init(|| built).clone())
}

fn build_testapp_now() -> Result<PathBuf> {
    // A separate folder: the flag would otherwise make cargo rebuild the shared dependencies each time.
    let target = workdir::target_dir().join("static");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(workdir::repository())
        .args(["rustc", "--quiet", "--release", "--package", "beelet-testapp", "--target-dir"])
        .arg(&target)
        .args(["--", "-Ctarget-feature=+crt-static", "-Clto=off"])
        .output()
        .context("cannot start cargo to build the test app")?;
    if !output.status.success() {
        bail!("cannot build the test app:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let program = target.join("release/beelet-testapp");
    if !is_static(&program)? {
        bail!(
            "{} is dynamically linked; check that libc's static archive (libc6-dev) is installed",
            program.display()
        );
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_a_path() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibelf.so.1 => /lib/libelf.so.1 (0x00007f1)\n\
                    \tlibgone.so => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f2)\n";
        let expected = ["/lib/libelf.so.1", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(library_paths(text), expected);
        assert_eq!(library_paths("\tnot a dynamic executable\n"), Vec::<PathBuf>::new());
    }

    #[test]
    fn the_same_files_make_the_same_image() {
        let files =
            [("bin".to_owned(), Entry::Folder(0o755)), ("bin/x".to_owned(), Entry::File(vec![7], 0o755))];
        let config = json!({});
        let first = layout("localhost/x:1", &layer(&files).unwrap(), &config).unwrap();
        let second = layout("localhost/x:1", &layer(&files).unwrap(), &config).unwrap();
        assert_eq!(first, second);
    }

    #[test]
    fn a_layout_names_its_image_and_its_blobs_by_their_digest() {
        let layer = layer(&[("a".to_owned(), Entry::Link("b".to_owned()))]).unwrap();
        let layout = layout("localhost/x:1", &layer, &json!({ "Cmd": ["/a"] })).unwrap();
        let mut files = std::collections::BTreeMap::new();
        for entry in tar::Archive::new(layout.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(entry.path().unwrap().display().to_string(), content);
        }
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "localhost/x:1");
        for (path, content) in &files {
            if let Some(digest) = path.strip_prefix("blobs/sha256/") {
                assert_eq!(digest, hex(&Sha256::new().chain_update(content)), "{path}");
            }
        }
        assert_eq!(files.len(), 5, "{:?}", files.keys());
    }

    #[test]
    fn our_own_program_is_dynamic_or_static_as_its_headers_say() {
        let exe = std::env::current_exe().unwrap();
        let bytes = std::fs::read(&exe).unwrap();
        let has_loader = bytes.windows(9).any(|window| window == b"ld-linux-") && cfg!(target_env = "gnu");
        assert_eq!(is_static(&exe).unwrap(), !has_loader);
    }

    #[test]
    fn a_text_file_is_not_a_program() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "#!/bin/sh\n").unwrap();
        assert!(is_static(file.path()).is_err());
    }
}
