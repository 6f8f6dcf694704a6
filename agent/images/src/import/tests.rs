use std::collections::HashMap;

use serde_json::{Value, json};

use super::*;

/// Store in memory. Digests are not computed: a blob has the digest from the archive, or its number.
#[derive(Default)]
struct Memory {
    blobs: HashMap<String, Vec<u8>>,
    references: HashMap<String, Vec<String>>,
    names: BTreeMap<String, String>,
}

impl Blobs for Memory {
    fn write(
        &mut self,
        digest: Option<&str>,
        size: u64,
        content: &mut dyn Read,
    ) -> Result<String, ImportError> {
        let mut blob = Vec::new();
        content.read_to_end(&mut blob)?;
        assert_eq!(blob.len() as u64, size);
        let digest = digest.map_or_else(|| sha(&self.blobs.len().to_string()), str::to_owned);
        self.blobs.insert(digest.clone(), blob);
        Ok(digest)
    }

    fn has(&mut self, digest: &str) -> Result<bool, ImportError> {
        Ok(self.blobs.contains_key(digest))
    }

    fn read(&mut self, digest: &str) -> Result<Vec<u8>, ImportError> {
        Ok(self.blobs[digest].clone())
    }

    fn refer(&mut self, digest: &str, children: &[(String, String)]) -> Result<(), ImportError> {
        let children = children.iter().map(|(what, child)| format!("{what} {}", &child[7..9])).collect();
        self.references.insert(digest.to_owned(), children);
        Ok(())
    }

    fn name(&mut self, name: &str, target: &Descriptor) -> Result<bool, ImportError> {
        let before = self.names.insert(name.to_owned(), target.digest.clone());
        Ok(before.as_ref() != Some(&target.digest))
    }
}

/// Returns a digest that begins with `begin`.
fn sha(begin: &str) -> String {
    format!("sha256:{begin:0<64}")
}

fn own() -> Platform {
    Platform { os: "linux".to_owned(), architecture: "amd64".to_owned() }
}

/// Returns an archive of these files; a content that begins with `->` makes a link.
fn archive(files: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        match content.strip_prefix("->") {
            Some(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                builder.append_link(&mut header, name, target).unwrap();
            }
            None => {
                header.set_size(content.len() as u64);
                builder.append_data(&mut header, name, content.as_bytes()).unwrap();
            }
        }
    }
    builder.into_inner().unwrap()
}

fn blob(begin: &str) -> String {
    format!("blobs/sha256/{begin:0<64}")
}

fn descriptor(begin: &str, name: Option<(&str, &str)>) -> Value {
    let mut descriptor = json!({"mediaType": OCI_MANIFEST, "digest": sha(begin), "size": 1});
    if let Some((key, name)) = name {
        descriptor["annotations"] = json!({ key: name });
    }
    descriptor
}

fn manifest(config: &str, layer: &str) -> String {
    let layers = [descriptor(layer, None)];
    json!({"schemaVersion": 2, "config": descriptor(config, None), "layers": layers}).to_string()
}

const CONFIG: &str = r#"{"os":"linux","architecture":"amd64"}"#;

/// Imports an archive and compares the names, or the error.
fn check(files: &[(&str, &str)], name: Option<&str>, expected: Result<&[&str], &str>) -> Memory {
    let mut memory = Memory::default();
    let imported = read(archive(files).as_slice(), name, &own(), &mut memory);
    match (imported, expected) {
        (Ok(imported), Ok(expected)) => {
            let names: Vec<&str> = imported.iter().map(|one| one.name.as_str()).collect();
            assert_eq!(names, expected);
        }
        (Err(error), Err(expected)) => {
            assert!(error.to_string().contains(expected), "{error}");
            assert!(memory.names.is_empty(), "named although: {error}");
        }
        (imported, expected) => panic!("{imported:?}, not {expected:?}"),
    }
    memory
}

#[test]
fn a_layout_is_imported_under_the_names_of_its_index() {
    let index = |name| json!({"manifests": [descriptor("aa", name)]}).to_string();
    let layout = |index: &str, expected, name| {
        let manifest = manifest("cc", "11");
        let files = [
            ("./oci-layout", "{}"),
            (&*blob("aa"), &*manifest),
            (&*blob("cc"), CONFIG),
            (&*blob("11"), "layer"),
            ("index.json", index),
        ];
        check(&files, name, expected)
    };
    let named = index(Some((layout::IMAGE_NAME, "docker.io/library/web:2")));
    let memory = layout(&named, Ok(&["docker.io/library/web:2"]), None);
    assert_eq!(memory.references[&sha("aa")], ["config cc", "l.0 11"]);
    layout(&index(Some((layout::REFERENCE_NAME, "web:2"))), Ok(&["docker.io/library/web:2"]), None);
    layout(&index(Some((layout::REFERENCE_NAME, "2"))), Err("import --name"), None);
    layout(&index(None), Ok(&["localhost/mine:1"]), Some("localhost/mine:1"));
    layout(&index(None), Err("no capital letters"), Some("Mine"));
    layout(r#"{"manifests": []}"#, Err("contains no image"), None);
    layout("{", Err("cannot parse index.json in the archive"), None);
}

#[test]
fn of_an_index_for_many_machines_what_is_there_is_enough() {
    let named = Some((layout::IMAGE_NAME, "localhost/web:2"));
    let mut list = descriptor("ee", named);
    list["mediaType"] = json!(layout::OCI_INDEX);
    let top = json!({"manifests": [list]}).to_string();
    let both = json!({"manifests": [descriptor("ff", None), descriptor("aa", None)]}).to_string();
    let manifest = manifest("cc", "11");
    let (ee, aa, cc, layer) = (blob("ee"), blob("aa"), blob("cc"), blob("11"));
    let files =
        [("index.json", &*top), (&*ee, &*both), (&*aa, &*manifest), (&*cc, CONFIG), (&*layer, "layer")];
    let memory = check(&files, None, Ok(&["localhost/web:2"]));
    assert_eq!(memory.references[&sha("ee")], ["m.1 aa"]);
    let other = [files[0], files[1], files[2], (&*cc, r#"{"os":"linux","architecture":"arm64"}"#), files[4]];
    // Without a match, the first reason is reported.
    check(&other, None, Err("is for linux/arm64, this machine is linux/amd64"));
    check(&files[..4], None, Err(&format!("lacks {}", sha("11"))));
}

#[test]
fn what_docker_saves_is_imported_through_its_links() {
    let list = r#"[{"Config":"c.json","RepoTags":["web:1","localhost/web:2"],"Layers":["a/layer.tar","b/layer.tar"]}]"#;
    let files = [
        ("c.json", CONFIG),
        ("a/VERSION", "1.0"),
        ("a/layer.tar", "\u{1f}?not gzip"),
        ("b/layer.tar", "->../a/layer.tar"),
        ("manifest.json", list),
    ];
    let memory = check(&files, None, Ok(&["docker.io/library/web:1", "localhost/web:2"]));
    let made: Manifest = serde_json::from_slice(&memory.blobs[&memory.names["localhost/web:2"]]).unwrap();
    assert_eq!(made.layers[0], made.layers[1]);
    assert_eq!(made.layers[0].media_type, "application/vnd.oci.image.layer.v1.tar");
    check(&files[1..], None, Err("lacks c.json"));
    check(&[("b/layer.tar", "->layer.tar"), files[0], files[2], files[4]], None, Err("lacks b/layer.tar"));
    check(&[("README", "x")], None, Err("contains no image"));
}

#[test]
fn a_hostile_archive_is_refused() {
    let named = Some((layout::IMAGE_NAME, "localhost/web:2"));
    let mut circle = descriptor("ee", named);
    circle["mediaType"] = json!(layout::OCI_INDEX);
    let index = json!({"manifests": [circle]}).to_string();
    // An index that lists itself must not loop.
    let mut memory = Memory::default();
    let files = [("index.json", &*index), (&*blob("ee"), &*index)];
    let imported = read(archive(&files).as_slice(), None, &own(), &mut memory);
    assert!(imported.is_err(), "{imported:?}");
    let huge = "x".repeat(MOST_JSON + 1);
    check(&[("index.json", &huge)], None, Err("larger than"));
    let other = json!({"manifests": [{"digest": "../../etc/passwd", "size": 1, "annotations": {layout::IMAGE_NAME: "localhost/a"}}]});
    check(&[("index.json", &other.to_string())], None, Err("lacks ../../etc/passwd"));
    let cut = archive(&[("index.json", &index)]);
    assert!(read(&cut[..700], None, &own(), &mut Memory::default()).is_err());
}

#[test]
fn links_lead_to_names_in_the_archive_alone() {
    for (folder, target, expected) in
        [("a/b", "../c/./d", "a/c/d"), ("", "x", "x"), ("a", "/etc/x", "etc/x"), ("a", "../../../x", "x")]
    {
        assert_eq!(resolve(folder, target), expected, "{folder} {target}");
    }
}
