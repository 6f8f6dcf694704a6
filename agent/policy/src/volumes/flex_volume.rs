//! The protocol between a node and the drivers of `flexVolume`: programs in a folder that receive a command
//! and answer in JSON. Follows `pkg/volume/flexvolume` of Kubernetes 1.36.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::{PersistentVolume, Pod, Volume};
use serde_json::{Map, Value, json};

use crate::volumes::{VolumeError, claims::is_for_one_pod};

/// Maximum length of a file's name.
const NAME: usize = 255;
/// Maximum characters of a driver's message that are passed on.
const WORDS: usize = 1024;
/// Kinds of volumes that the agent creates itself: a driver must not have such a name or one below it.
const OWN: [&str; 5] = ["csi", "fc", "iscsi", "local-volume", "nfs"];

/// A volume of a flexVolume driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlexVolume {
    /// The driver, `vendor/driver`.
    pub driver: String,
    /// The PersistentVolume's name, or the volume's in the pod.
    pub name: String,
    /// The requested file system.
    pub file_system: String,
    /// True if no container writes to the volume.
    pub read_only: bool,
    /// Further options for the driver.
    pub options: BTreeMap<String, String>,
    /// Namespace and name of the Secret for the driver.
    pub secret: Option<(String, String)>,
    /// True if only one pod at a time may use the volume.
    pub for_one_pod: bool,
}

/// Returns a pod's own volume of a driver.
#[must_use]
pub fn of_pod(volume: &Volume, namespace: &str) -> Option<FlexVolume> {
    let of = volume.flex_volume.as_ref()?;
    let secret = of.secret_ref.as_ref().map(|secret| secret.name.clone()).filter(|name| !name.is_empty());
    Some(FlexVolume {
        driver: of.driver.clone(),
        name: volume.name.clone(),
        file_system: of.fs_type.clone().unwrap_or_default(),
        read_only: of.read_only == Some(true),
        options: of.options.clone().unwrap_or_default(),
        secret: secret.map(|name| (namespace.to_owned(), name)),
        for_one_pod: false,
    })
}

/// Returns a PersistentVolume of a driver, for a pod of this namespace.
///
/// # Errors
/// The volume requests a feature that flexVolume drivers lack.
#[must_use]
pub fn of_claim(
    volume: &PersistentVolume,
    read_only: bool,
    namespace: &str,
) -> Option<Result<FlexVolume, VolumeError>> {
    let spec = volume.spec.as_ref()?;
    let of = spec.flex_volume.as_ref()?;
    if spec.volume_mode.as_deref() == Some("Block") {
        return Some(Err(VolumeError::FlexBlock));
    }
    if spec.mount_options.as_ref().is_some_and(|options| !options.is_empty()) {
        return Some(Err(VolumeError::FlexOptions));
    }
    let secret = of.secret_ref.as_ref().and_then(|secret| {
        let own = secret.namespace.clone().filter(|namespace| !namespace.is_empty());
        let name = secret.name.clone().filter(|name| !name.is_empty())?;
        Some((own.unwrap_or_else(|| namespace.to_owned()), name))
    });
    Some(Ok(FlexVolume {
        driver: of.driver.clone(),
        name: volume.metadata.name.clone().unwrap_or_default(),
        file_system: of.fs_type.clone().unwrap_or_default(),
        read_only,
        options: of.options.clone().unwrap_or_default(),
        secret,
        for_one_pod: is_for_one_pod(volume),
    }))
}

/// Returns the name of a driver's folder, in the folder of all drivers and in a pod's. `None` for a name that
/// cannot be a driver's.
#[must_use]
pub fn folder_of(driver: &str) -> Option<String> {
    let is_part = |part: &str| !matches!(part, "" | "." | "..");
    let own = driver.strip_prefix("kubernetes.io/").and_then(|name| name.split('/').next());
    let is_own = own.is_some_and(|name| OWN.contains(&name));
    let is_driver = driver.len() <= NAME
        && !driver.starts_with('.')
        && !driver.contains(['~', '\0'])
        && driver.split('/').all(is_part);
    (is_driver && !is_own).then(|| driver.replace('/', "~"))
}

/// Returns the name of the program in a driver's folder.
#[must_use]
pub fn program_of(folder: &str) -> &str {
    folder.rsplit('~').next().unwrap_or(folder)
}

impl FlexVolume {
    /// Returns the volume's name in a Node's status.
    #[must_use]
    pub fn unique_name(&self) -> String {
        format!("{}/{}", self.driver, self.name)
    }

    /// Returns the volume's options for the driver, with `more`, in JSON. Kubernetes' own values override the
    /// volume's options.
    #[must_use]
    pub fn options(&self, more: BTreeMap<String, String>) -> String {
        let mut all = self.options.clone();
        all.extend(more);
        let mode = if self.read_only { "ro" } else { "rw" };
        for (key, value) in
            [("fsType", &*self.file_system), ("readwrite", mode), ("pvOrVolumeName", &*self.name)]
        {
            all.insert(format!("kubernetes.io/{key}"), value.to_owned());
        }
        json!(all).to_string()
    }
}

/// Returns the mount options about the pod: its identity, its group, and the content of the Secret, which the
/// driver receives in Base64.
#[must_use]
pub fn of_mount(
    pod: &Pod,
    group: Option<u32>,
    secret: &BTreeMap<String, Vec<u8>>,
) -> BTreeMap<String, String> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
    let mut all: BTreeMap<String, String> = [
        ("pod.name", text(&pod.metadata.name)),
        ("pod.namespace", text(&pod.metadata.namespace)),
        ("pod.uid", text(&pod.metadata.uid)),
        ("serviceAccount.name", account.unwrap_or_default()),
    ]
    .into_iter()
    .map(|(key, value)| (format!("kubernetes.io/{key}"), value))
    .collect();
    if let Some(group) = group {
        all.insert("kubernetes.io/mounterArgs.FsGroup".to_owned(), group.to_string());
    }
    all.extend(
        secret.iter().map(|(key, value)| (format!("kubernetes.io/secret/{key}"), STANDARD.encode(value))),
    );
    all
}

/// Returns the texts that must not appear in an error because of the Secret's content: the whole `options`,
/// and each value, also in plain text, since a driver decodes it. Empty without a Secret.
#[must_use]
pub fn secrets(options: &str, secret: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    let plain = |value: &Vec<u8>| String::from_utf8_lossy(value).trim().to_owned();
    let values = secret.values().flat_map(|value| [STANDARD.encode(value), plain(value)]);
    let mut all: Vec<String> = values.filter(|text| !text.is_empty()).collect();
    if !all.is_empty() {
        all.push(options.to_owned());
    }
    // The longest text comes first: replacing a substring of another text first would leave the rest of that
    // text.
    all.sort_by_key(|text| std::cmp::Reverse(text.len()));
    all
}

/// A driver's capabilities from its `init` command, with these defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Volumes are attached to a node, and mounted there once for all pods.
    pub attach: bool,
    /// Volumes may get the SELinux label of containers.
    pub relabel: bool,
    /// Ownership of volumes may change to the pod's group.
    pub group: bool,
    /// The file system can report its free space.
    pub metrics: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { attach: true, relabel: true, group: true, metrics: false }
    }
}

/// A driver's answer to a successful command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The device of the volume.
    pub device: String,
    /// The driver's capabilities.
    pub capabilities: Capabilities,
}

/// A reason why a driver has not executed a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The driver lacks the command.
    NotSupported,
    /// The command failed; with the message.
    Failed(String),
}

/// Parses a driver's output; the driver received these `secrets`: see [`secrets`].
///
/// # Errors
/// The driver has not executed the command, or its output cannot be parsed. The error contains no secret: it
/// omits unparsable output if there are secrets, which may appear there in any form.
pub fn read_answer(command: &str, said: &[u8], secrets: &[String]) -> Result<Answer, Refusal> {
    // Secrets are replaced before the text is shortened: half a secret would not match any more.
    let shortened = |text: &str| {
        let hidden = secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "***"));
        hidden.chars().take(WORDS).collect::<String>()
    };
    let unreadable = |why: &str| {
        if !secrets.is_empty() {
            return Refusal::Failed(format!(
                "the driver's answer to {command} cannot be read ({why}); it is hidden, as the driver received secrets"
            ));
        }
        let said = shortened(String::from_utf8_lossy(said).trim());
        Refusal::Failed(format!("the driver's answer to {command} cannot be read ({why}): {said:?}"))
    };
    let read: Value = serde_json::from_slice(said).map_err(|why| unreadable(&why.to_string()))?;
    let Value::Object(read) = read else { return Err(unreadable("not a JSON object")) };
    let text = |key: &str| field(&read, key).and_then(Value::as_str).unwrap_or_default().to_owned();
    match &*text("status") {
        "Success" => {}
        "Not supported" => return Err(Refusal::NotSupported),
        status => {
            let (status, reason) = (shortened(status), shortened(&text("message")));
            return Err(Refusal::Failed(format!(
                "{command} command failed, status: {status}, reason: {reason}"
            )));
        }
    }
    let mut capabilities = Capabilities::default();
    if let Some(Value::Object(of)) = field(&read, "capabilities") {
        let is = |key: &str, otherwise: bool| field(of, key).and_then(Value::as_bool).unwrap_or(otherwise);
        capabilities = Capabilities {
            attach: is("attach", capabilities.attach),
            relabel: is("selinuxRelabel", capabilities.relabel),
            group: is("fsGroup", capabilities.group),
            metrics: is("supportsMetrics", capabilities.metrics),
        };
    }
    Ok(Answer { device: text("device"), capabilities })
}

/// Returns a field of an object, case-insensitively, as the kubelet's parser does.
fn field<'v>(of: &'v Map<String, Value>, name: &str) -> Option<&'v Value> {
    of.get(name).or_else(|| of.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drivers_folder_is_a_single_path_component_of_its_own() {
        let check = |driver: &str, expected: Option<&str>| {
            assert_eq!(folder_of(driver).as_deref(), expected, "{driver:?}");
        };
        check("vendor/driver", Some("vendor~driver"));
        check("driver", Some("driver"));
        check("kubernetes.io/lvm", Some("kubernetes.io~lvm"));
        for wrong in ["", "/", "a/", "/a", "a//b", "..", "a/..", "a/../b", ".hidden/a", "a~b", "a\0b"] {
            check(wrong, None);
        }
        check("kubernetes.io/csi", None);
        check("kubernetes.io/nfs", None);
        check("kubernetes.io/csi/driver", None);
        check("kubernetes.io/nfsd/driver", Some("kubernetes.io~nfsd~driver"));
        check(&"a".repeat(256), None);
        let programs = ["vendor~driver", "driver", "a~b~c"].map(program_of);
        assert_eq!(programs, ["driver", "driver", "c"]);
    }

    #[test]
    fn a_volumes_options_cannot_override_those_of_kubernetes() {
        let volume = json!({"name": "data", "flexVolume": {
            "driver": "v/d", "fsType": "xfs", "readOnly": true, "secretRef": {"name": "key"},
            "options": {"size": "1m", "kubernetes.io/readwrite": "rw", "kubernetes.io/pod.name": "other"},
        }});
        let volume = of_pod(&serde_json::from_value(volume).unwrap(), "shop").unwrap();
        assert_eq!(volume.unique_name(), "v/d/data");
        assert_eq!(volume.secret, Some(("shop".to_owned(), "key".to_owned())));
        let pod = json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u1"},
            "spec": {"containers": [], "serviceAccountName": "robot"}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let secret = BTreeMap::from([("password".to_owned(), b"hush".to_vec())]);
        let said: Value = serde_json::from_str(&volume.options(of_mount(&pod, Some(2000), &secret))).unwrap();
        let expected = json!({
            "size": "1m", "kubernetes.io/fsType": "xfs", "kubernetes.io/readwrite": "ro",
            "kubernetes.io/pvOrVolumeName": "data", "kubernetes.io/pod.name": "web",
            "kubernetes.io/pod.namespace": "shop", "kubernetes.io/pod.uid": "u1",
            "kubernetes.io/serviceAccount.name": "robot", "kubernetes.io/mounterArgs.FsGroup": "2000",
            "kubernetes.io/secret/password": "aHVzaA==",
        });
        assert_eq!(said, expected);
    }

    #[test]
    fn a_claims_volume_defaults_to_the_pods_namespace() {
        let check = |spec: Value, expected: Result<Option<(&str, &str)>, &str>| {
            let found = json!({"metadata": {"name": "pv-1"}, "spec": spec});
            let found = of_claim(&serde_json::from_value(found).unwrap(), true, "shop").unwrap();
            match (found, expected) {
                (Ok(found), Ok(expected)) => {
                    let secret = found.secret.as_ref().map(|(namespace, name)| (&**namespace, &**name));
                    assert_eq!((found.name.as_str(), found.read_only, secret), ("pv-1", true, expected));
                }
                (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
                (found, expected) => panic!("{found:?}, not {expected:?}"),
            }
        };
        let of = |secret: Value| json!({"flexVolume": {"driver": "v/d", "secretRef": secret}});
        check(json!({"flexVolume": {"driver": "v/d"}}), Ok(None));
        check(of(json!({"name": "key"})), Ok(Some(("shop", "key"))));
        check(of(json!({"name": "key", "namespace": "vault"})), Ok(Some(("vault", "key"))));
        check(json!({"flexVolume": {"driver": "v/d"}, "volumeMode": "Block"}), Err("block device"));
        check(json!({"flexVolume": {"driver": "v/d"}, "mountOptions": ["ro"]}), Err("Mount options"));
        assert_eq!(of_claim(&PersistentVolume::default(), true, "shop"), None);
    }

    #[test]
    fn an_answer_is_read_case_insensitively_or_refused_with_a_reason() {
        let check = |said: &str, expected: Result<(&str, [bool; 4]), &str>| {
            let found = read_answer("init", said.as_bytes(), &[]);
            match (&found, expected) {
                (Ok(Answer { device, capabilities: c }), Ok(expected)) => {
                    assert_eq!((&**device, [c.attach, c.relabel, c.group, c.metrics]), expected, "{said}");
                }
                (Err(Refusal::NotSupported), Err("not supported")) => {}
                (Err(Refusal::Failed(why)), Err(expected)) => assert!(why.contains(expected), "{why}"),
                _ => panic!("{said}: {found:?}"),
            }
        };
        let default = [true, true, true, false];
        check(r#"{"status": "Success"}"#, Ok(("", default)));
        check(" {\"status\": \"Success\", \"device\": \"/dev/sdx\"}\n", Ok(("/dev/sdx", default)));
        check(
            r#"{"status": "Success", "capabilities": {"attach": false, "selinuxRelabel": false}}"#,
            Ok(("", [false, false, true, false])),
        );
        check(
            r#"{"Status": "Success", "Capabilities": {"FSGROUP": false, "supportsMetrics": true}}"#,
            Ok(("", [true, true, false, true])),
        );
        check(r#"{"status": "Not supported"}"#, Err("not supported"));
        let failed = "init command failed, status: Failure, reason: no such disk";
        check(r#"{"status": "Failure", "message": "no such disk"}"#, Err(failed));
        check(r#"{"status": 7}"#, Err("init command failed, status: , reason: "));
        check("", Err("cannot be read"));
        check("[]", Err("not a JSON object"));
        check("mount: failed", Err("\"mount: failed\""));
        check(&format!(r#"{{"status": "{}"}}"#, "x".repeat(5000)), Err("xxx"));
        let Err(Refusal::Failed(why)) = read_answer("init", &[b'x'; 100_000], &[]) else { panic!() };
        assert!(why.len() < 2000, "{}", why.len());
    }

    #[test]
    fn no_secret_of_a_driver_is_in_an_error() {
        let secret = [("a", "hush"), ("b", "hush-hush\n"), ("empty", "")];
        let secret = secret.map(|(key, value)| (key.to_owned(), value.as_bytes().to_vec())).into();
        let known = secrets(r#"{"a":"aHVzaA=="}"#, &secret);
        let fails = |said: &str| match read_answer("mount", said.as_bytes(), &known) {
            Err(Refusal::Failed(why)) => why,
            read => panic!("{said}: {read:?}"),
        };
        let reason = |message: &str| {
            let why = fails(&json!({"status": "Failure", "message": message}).to_string());
            why.split_once("reason: ").unwrap().1.to_owned()
        };
        assert_eq!(reason("no disk"), "no disk");
        assert_eq!(reason("-o pass=hush-hush, hush or aHVzaA=="), "-o pass=***, *** or ***");
        assert_eq!(reason(r#"told {"a":"aHVzaA=="}"#), "told ***");
        // A secret at the edge of the maximum length is replaced before the cut.
        let edge = "x".repeat(WORDS - 2);
        assert_eq!(reason(&format!("{edge}hush")), format!("{edge}**"));
        let why = fails("+ mount 'aHVz'");
        assert!(why.contains("cannot be read (expected value") && !why.contains("aHVz"), "{why}");
        assert!(!fails("[\"hush\"]").contains("hush"));
        assert!(secrets("{}", &BTreeMap::new()).is_empty());
    }
}
