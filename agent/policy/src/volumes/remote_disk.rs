//! Disks on a network (`iscsi`, `fc`): the fields of their volumes, their names in a Node's status and in
//! paths, and the parsing of programs' output and kernel files that locate them. Follows `pkg/volume/iscsi`
//! and `pkg/volume/fc` of Kubernetes 1.36.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    FCVolumeSource, ISCSIPersistentVolumeSource, ISCSIVolumeSource, PersistentVolume, Volume,
};
use serde::{Deserialize, Serialize};

use crate::volumes::{VolumeError, claims::is_for_one_pod, file_system::FileSystem};

/// The default port of a portal.
const PORT: u16 = 3260;
/// Maximum length of a text that becomes a part of a path or an argument.
const LONGEST: usize = 223;
/// Maximum number of portals or names of one disk.
const MOST: usize = 16;
/// Keys of a Secret for CHAP, for discovery and for sessions.
const OF_DISCOVERY: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
const OF_SESSION: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];

/// A volume that is a disk on a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteVolume {
    /// The PersistentVolume's name, or the volume's in the pod.
    pub name: String,
    /// The disk.
    pub disk: RemoteDisk,
    /// The file system on it.
    pub file_system: FileSystem,
    /// True if no container writes to the disk.
    pub read_only: bool,
    /// Mount options.
    pub options: Vec<String>,
    /// True if containers use the disk as a device.
    pub is_block: bool,
    /// True if only one pod at a time may use the disk.
    pub for_one_pod: bool,
    /// Namespace and name of the Secret for CHAP.
    pub secret: Option<(String, String)>,
}

/// A disk on a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RemoteDisk {
    /// On Fibre Channel.
    Fc(FcDisk),
    /// On iSCSI.
    Iscsi(IscsiDisk),
}

/// A disk on Fibre Channel: a unit of targets, or a disk with names of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FcDisk {
    /// Names as given in the volume, in the kubelet's format.
    pub written: String,
    /// Targets of the disk, and its unit number there.
    pub unit: Option<(Vec<String>, i32)>,
    /// The disk's own names, without blanks.
    pub names: Vec<String>,
}

/// A disk on iSCSI.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IscsiDisk {
    /// The first portal as given in the volume.
    pub written: String,
    /// All portals, with ports; the first one comes first.
    pub portals: Vec<String>,
    /// The target.
    pub target: String,
    /// Unit number at the target.
    pub unit: i32,
    /// The existing interface.
    pub base_interface: String,
    /// The interface in use: the existing one, or a copy of it with an initiator's name.
    pub interface: String,
    /// Name of the node as an initiator.
    pub initiator: Option<String>,
    /// True if discovery requires CHAP.
    pub chap_discovery: bool,
    /// True if sessions require CHAP.
    pub chap_session: bool,
}

/// Returns a pod's own volume on a network disk.
///
/// # Errors
/// The values are invalid for a disk: they become parts of paths, and arguments of programs.
#[must_use]
pub fn of_pod(volume: &Volume, namespace: &str) -> Option<Result<RemoteVolume, VolumeError>> {
    let name = volume.name.clone();
    let plain = |disk, file_system, read_only: Option<bool>| RemoteVolume {
        name: name.clone(),
        disk,
        file_system,
        read_only: read_only == Some(true),
        options: Vec::new(),
        is_block: false,
        for_one_pod: false,
        secret: None,
    };
    if let Some(of) = &volume.fc {
        let found = both(fc(of), of.fs_type.as_deref());
        return Some(found.map(|(disk, kind)| plain(RemoteDisk::Fc(disk), kind, of.read_only)));
    }
    let of = volume.iscsi.as_ref()?;
    let secret = of.secret_ref.as_ref().map(|secret| (namespace.to_owned(), secret.name.clone()));
    let found = both(iscsi(&volume.name, &persistent(of)), of.fs_type.as_deref());
    Some(found.map(|(disk, kind)| RemoteVolume {
        secret: secret.filter(|(_, name)| needs_secret(&disk) && !name.is_empty()),
        ..plain(RemoteDisk::Iscsi(disk), kind, of.read_only)
    }))
}

/// Returns a PersistentVolume on a network disk, for a pod of this namespace.
///
/// # Errors
/// As for a pod's own volume.
#[must_use]
pub fn of_claim(
    volume: &PersistentVolume,
    read_only: bool,
    namespace: &str,
) -> Option<Result<RemoteVolume, VolumeError>> {
    let spec = volume.spec.as_ref()?;
    let name = volume.metadata.name.clone().unwrap_or_default();
    let plain = |disk, file_system| RemoteVolume {
        name: name.clone(),
        disk,
        file_system,
        read_only,
        options: spec.mount_options.clone().unwrap_or_default(),
        is_block: spec.volume_mode.as_deref() == Some("Block"),
        for_one_pod: is_for_one_pod(volume),
        secret: None,
    };
    if let Some(of) = &spec.fc {
        let found = both(fc(of), of.fs_type.as_deref());
        return Some(found.map(|(disk, kind)| plain(RemoteDisk::Fc(disk), kind)));
    }
    let of = spec.iscsi.as_ref()?;
    let secret = of.secret_ref.as_ref().and_then(|secret| {
        let own = secret.namespace.clone().filter(|namespace| !namespace.is_empty());
        Some((own.unwrap_or_else(|| namespace.to_owned()), secret.name.clone()?))
    });
    let found = both(iscsi(&name, of), of.fs_type.as_deref());
    Some(found.map(|(disk, kind)| RemoteVolume {
        secret: secret.filter(|(_, name)| needs_secret(&disk) && !name.is_empty()),
        ..plain(RemoteDisk::Iscsi(disk), kind)
    }))
}

/// Combines a disk with its requested file system.
fn both<T>(disk: Result<T, String>, file_system: Option<&str>) -> Result<(T, FileSystem), VolumeError> {
    let kind = FileSystem::of(file_system.unwrap_or_default()).map_err(|why| why.to_string());
    disk.and_then(|disk| kind.map(|kind| (disk, kind))).map_err(VolumeError::Disk)
}

fn needs_secret(disk: &IscsiDisk) -> bool {
    disk.chap_discovery || disk.chap_session
}

fn persistent(of: &ISCSIVolumeSource) -> ISCSIPersistentVolumeSource {
    ISCSIPersistentVolumeSource {
        chap_auth_discovery: of.chap_auth_discovery,
        chap_auth_session: of.chap_auth_session,
        initiator_name: of.initiator_name.clone(),
        iqn: of.iqn.clone(),
        iscsi_interface: of.iscsi_interface.clone(),
        lun: of.lun,
        portals: of.portals.clone(),
        target_portal: of.target_portal.clone(),
        ..ISCSIPersistentVolumeSource::default()
    }
}

/// Checks a text that becomes a part of a path, and an argument: only these characters, and first a letter, a
/// digit or a bracket.
fn word(what: &str, text: &str, more: &[char]) -> Result<String, String> {
    let is_fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') || more.contains(&c);
    let begins = text.chars().next().is_some_and(|c| c.is_ascii_alphanumeric() || c == '[');
    if begins && text.len() <= LONGEST && text.chars().all(is_fine) {
        return Ok(text.to_owned());
    }
    let shown: String = text.chars().take(LONGEST).collect();
    Err(format!("{what} {shown:?} is invalid"))
}

fn fc(of: &FCVolumeSource) -> Result<FcDisk, String> {
    let words = |what: &str, all: &Option<Vec<String>>| {
        let all: Vec<String> = all.iter().flatten().map(|one| one.replace(' ', "_")).collect();
        if all.len() > MOST {
            return Err(format!("a disk has at most {MOST} names"));
        }
        all.iter().map(|one| word(what, one, &[])).collect::<Result<Vec<String>, String>>()
    };
    let targets = words("targetWWN", &of.target_wwns)?;
    let names = words("wwid", &of.wwids)?;
    match of.lun {
        Some(unit) if !targets.is_empty() => {
            if !(0..=255).contains(&unit) {
                return Err(format!("lun {unit} is not between 0 and 255"));
            }
            let written = format!("{}:{unit}", listed(&of.target_wwns));
            Ok(FcDisk { written, unit: Some((targets, unit)), names: Vec::new() })
        }
        _ if !names.is_empty() => Ok(FcDisk { written: listed(&of.wwids), unit: None, names }),
        _ => Err("fc: no fc disk information found. failed to make a new mounter".to_owned()),
    }
}

/// Formats a list as Go prints it.
fn listed(all: &Option<Vec<String>>) -> String {
    format!("[{}]", all.as_deref().unwrap_or_default().join(" "))
}

fn iscsi(name: &str, of: &ISCSIPersistentVolumeSource) -> Result<IscsiDisk, String> {
    let with_port = |portal: &String| {
        let portal = word("the portal", portal, &[':', '[', ']', '%'])?;
        let has_port = portal.rsplit_once(':').is_some_and(|(host, _)| !host.is_empty());
        Ok::<_, String>(if has_port { portal } else { format!("{portal}:{PORT}") })
    };
    let all: Vec<&String> = std::iter::once(&of.target_portal).chain(of.portals.iter().flatten()).collect();
    if all.len() > MOST {
        return Err(format!("a disk has at most {MOST} portals"));
    }
    let mut portals: Vec<String> = Vec::new();
    for portal in all {
        let portal = with_port(portal)?;
        if !portals.contains(&portal) {
            portals.push(portal);
        }
    }
    let target = word("the target", &of.iqn, &[':'])?;
    if !["iqn.", "eui.", "naa."].iter().any(|begin| target.starts_with(begin)) {
        return Err(format!("the target {target:?} is invalid"));
    }
    if !(0..=255).contains(&of.lun) {
        return Err(format!("lun {} is not between 0 and 255", of.lun));
    }
    let base = of.iscsi_interface.as_deref().filter(|name| !name.is_empty()).unwrap_or("default");
    let base_interface = word("the interface", base, &[':'])?;
    let initiator = of.initiator_name.as_ref().filter(|name| !name.is_empty());
    let initiator = initiator.map(|name| word("the initiator", name, &[':'])).transpose()?;
    let interface = match (&initiator, portals.first()) {
        (Some(_), Some(portal)) => word("the interface", &format!("{portal}:{name}"), &[':', '[', ']', '%'])?,
        _ => base_interface.clone(),
    };
    Ok(IscsiDisk {
        written: of.target_portal.clone(),
        portals,
        target,
        unit: of.lun,
        base_interface,
        interface,
        initiator,
        chap_discovery: of.chap_auth_discovery == Some(true),
        chap_session: of.chap_auth_session == Some(true),
    })
}

impl RemoteDisk {
    /// Returns the kubelet's name of the disk's kind.
    #[must_use]
    pub fn plugin(&self) -> &'static str {
        match self {
            Self::Fc(_) => "kubernetes.io/fc",
            Self::Iscsi(_) => "kubernetes.io/iscsi",
        }
    }

    /// Returns the disk's name in a Node's status.
    #[must_use]
    pub fn unique_name(&self) -> String {
        let plugin = self.plugin();
        match self {
            Self::Fc(disk) => format!("{plugin}/{}", disk.written),
            Self::Iscsi(disk) => format!("{plugin}/{}:{}:{}", disk.written, disk.target, disk.unit),
        }
    }

    /// Returns the place where the disk is mounted for all pods, in the folder of its kind: one or two parts
    /// of a path.
    #[must_use]
    pub fn folder(&self) -> String {
        match self {
            Self::Fc(FcDisk { unit: Some((targets, unit)), .. }) => {
                format!("{}-lun-{unit}", targets.join("-"))
            }
            Self::Fc(FcDisk { names, .. }) => names.join("-"),
            Self::Iscsi(disk) => {
                let portal = disk.portals.first().map_or("", String::as_str);
                format!("iface-{}/{portal}-{}-lun-{}", disk.interface, disk.target, disk.unit)
            }
        }
    }
}

/// Returns true for the unique name of a disk on a network.
#[must_use]
pub fn is_unique_name(name: &str) -> bool {
    name.starts_with("kubernetes.io/fc/") || name.starts_with("kubernetes.io/iscsi/")
}

/// Returns true for a link in `/dev/disk/by-path` that leads to a unit of a target on Fibre Channel.
#[must_use]
pub fn is_fc_path(name: &str, target: &str, unit: i32) -> bool {
    let end = format!("fc-0x{target}-lun-{unit}");
    name == end || (name.starts_with("pci-") && name.ends_with(&format!("-{end}")))
}

/// Returns the link in `/dev/disk/by-id` that leads to a disk with a name of its own.
#[must_use]
pub fn fc_id(name: &str) -> String {
    format!("scsi-{name}")
}

/// Returns true if a link in `/dev/disk/by-path` leads to a disk through this portal.
#[must_use]
pub fn is_iscsi_path(name: &str, disk: &IscsiDisk, portal: &str, transport: &str) -> bool {
    let address = portal.replace(['[', ']'], "");
    let end = format!("ip-{address}-iscsi-{}-lun-{}", disk.target, disk.unit);
    match transport {
        "tcp" => name == end,
        _ => name.starts_with("pci-") && name.ends_with(&format!("-{end}")),
    }
}

/// Returns the transport of an interface from the output of `iscsiadm`.
#[must_use]
pub fn transport(shown: &str) -> Option<String> {
    let value = shown.lines().find_map(|line| line.strip_prefix("iface.transport_name = "))?.trim();
    Some(if value == "<empty>" { "tcp".to_owned() } else { value.to_owned() })
}

/// Returns the settings of an interface that equals the one in the output of `iscsiadm`, except for the
/// initiator.
///
/// # Errors
/// The output cannot be parsed.
pub fn interface_like(shown: &str, initiator: &str) -> Result<BTreeMap<String, String>, VolumeError> {
    let mut all = BTreeMap::new();
    let lines = shown.lines().filter(|line| line.starts_with("iface.") && !line.contains("<empty>"));
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [key, "=", value] = words.as_slice() else {
            return Err(VolumeError::Interface(line.to_owned()));
        };
        // The name is set at creation only.
        if *key != "iface.iscsi_ifacename" {
            all.insert((*key).to_owned(), (*value).to_owned());
        }
    }
    all.insert("iface.initiatorname".to_owned(), initiator.to_owned());
    Ok(all)
}

/// Returns the settings of a discovery, or of a session, from a Secret, in their order.
#[must_use]
pub fn chap(of_session: bool, secret: &BTreeMap<String, String>) -> Vec<(&'static str, &str)> {
    let keys = if of_session { OF_SESSION } else { OF_DISCOVERY };
    let value = |key: &'static str| Some((key, secret.get(key)?.as_str()));
    keys.into_iter().filter_map(value).filter(|(_, value)| !value.is_empty()).collect()
}

/// Formats a portal from address and port.
#[must_use]
pub fn portal(address: &str, port: &str) -> String {
    if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod_volume(source: Value) -> Result<RemoteVolume, VolumeError> {
        let mut volume = source;
        volume["name"] = json!("data");
        of_pod(&serde_json::from_value(volume).unwrap(), "shop").unwrap()
    }

    #[test]
    fn a_disk_on_fibre_channel_is_named_by_its_targets_or_its_own_names() {
        let check = |source: Value, expected: Result<(&str, &str), &str>| match (
            pod_volume(json!({ "fc": source })),
            expected,
        ) {
            (Ok(found), Ok((unique, folder))) => {
                assert_eq!((&*found.disk.unique_name(), &*found.disk.folder()), (unique, folder));
            }
            (Err(why), Err(expected)) => assert!(why.to_string().contains(expected), "{why}"),
            (found, _) => panic!("{source}: {found:?}"),
        };
        let one = "50060e801049cfd1";
        check(
            json!({"targetWWNs": [one, "b"], "lun": 0}),
            Ok(("kubernetes.io/fc/[50060e801049cfd1 b]:0", "50060e801049cfd1-b-lun-0")),
        );
        check(json!({"wwids": ["V I 1"]}), Ok(("kubernetes.io/fc/[V I 1]", "V_I_1")));
        check(json!({"targetWWNs": [one]}), Err("no fc disk information"));
        check(json!({}), Err("no fc disk information"));
        check(json!({"targetWWNs": [one], "lun": 256}), Err("between 0 and 255"));
        for wrong in ["", "..", "../x", "a/b", "-f", "a\nb", &"a".repeat(300)] {
            check(json!({"wwids": [wrong]}), Err("is invalid"));
        }
        check(json!({"wwids": vec!["a"; 17]}), Err("at most 16"));
    }

    #[test]
    fn a_disk_on_iscsi_is_named_by_its_first_portal_and_its_target() {
        let disk = |more: Value| {
            let mut source =
                json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:a", "lun": 3});
            source.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            pod_volume(json!({ "iscsi": source }))
        };
        let of = |found: &RemoteVolume| match &found.disk {
            RemoteDisk::Iscsi(disk) => disk.clone(),
            RemoteDisk::Fc(_) => panic!("{found:?}"),
        };
        let plain = disk(json!({})).unwrap();
        assert_eq!(plain.disk.unique_name(), "kubernetes.io/iscsi/10.0.0.1:iqn.2001-04.com.example:a:3");
        assert_eq!(plain.disk.folder(), "iface-default/10.0.0.1:3260-iqn.2001-04.com.example:a-lun-3");
        let more = json!({"portals": ["10.0.0.2:3261", "[fd00::1]:3260", "10.0.0.1:3260"],
            "initiatorName": "iqn.2001-04.com.example:node", "iscsiInterface": "bond0",
            "chapAuthSession": true, "secretRef": {"name": "chap"}});
        let full = disk(more).unwrap();
        assert_eq!(of(&full).portals, ["10.0.0.1:3260", "10.0.0.2:3261", "[fd00::1]:3260"]);
        assert_eq!(of(&full).interface, "10.0.0.1:3260:data");
        assert_eq!(full.secret, Some(("shop".to_owned(), "chap".to_owned())));
        assert_eq!(disk(json!({"secretRef": {"name": "chap"}})).unwrap().secret, None, "CHAP is off");
        let refused = |more: Value, words: &str| {
            let why = disk(more).unwrap_err();
            assert!(why.to_string().contains(words), "{why}");
        };
        refused(json!({"iqn": "iqn.2001-04.com.example:../../x"}), "is invalid");
        refused(json!({"iqn": "--login"}), "is invalid");
        refused(json!({"iqn": "disk"}), "is invalid");
        refused(json!({"targetPortal": "-p"}), "the portal");
        refused(json!({"portals": ["a b"]}), "the portal");
        refused(json!({"iscsiInterface": "a/b"}), "the interface");
        refused(json!({"initiatorName": "a\nb"}), "the initiator");
        refused(json!({"lun": -1}), "between 0 and 255");
    }

    #[test]
    fn a_claims_disk_has_the_claims_options() {
        let found = json!({"metadata": {"name": "pv-1"}, "spec": {
            "iscsi": {"targetPortal": "h", "iqn": "iqn.x", "lun": 0, "fsType": "xfs",
                "chapAuthDiscovery": true, "secretRef": {"name": "chap", "namespace": "vault"}},
            "mountOptions": ["noatime"], "volumeMode": "Block", "accessModes": ["ReadWriteOncePod"],
        }});
        let found = of_claim(&serde_json::from_value(found).unwrap(), true, "shop").unwrap().unwrap();
        assert_eq!(
            (&*found.name, found.read_only, found.is_block, found.for_one_pod),
            ("pv-1", true, true, true)
        );
        assert_eq!((found.file_system.name(), found.options), ("xfs", vec!["noatime".to_owned()]));
        assert_eq!(found.secret, Some(("vault".to_owned(), "chap".to_owned())));
        assert!(of_claim(&PersistentVolume::default(), true, "shop").is_none());
    }

    #[test]
    fn a_disk_with_a_file_system_that_needs_a_helper_is_refused() {
        for kind in ["fuse.sh", "nfs", "ext4,fuse.sh", "-o", "a/b", "auto"] {
            let refused = |of: Value, is_claim: bool| {
                let why = if is_claim {
                    let found = json!({"metadata": {"name": "pv-1"}, "spec": of});
                    of_claim(&serde_json::from_value(found).unwrap(), false, "shop").unwrap().unwrap_err()
                } else {
                    pod_volume(of).unwrap_err()
                };
                assert!(why.to_string().contains("is refused") && why.to_string().contains(kind), "{why}");
            };
            for is_claim in [false, true] {
                refused(json!({"fc": {"wwids": ["w1"], "fsType": kind}}), is_claim);
                let iscsi = json!({"targetPortal": "h", "iqn": "iqn.x", "lun": 0, "fsType": kind});
                refused(json!({ "iscsi": iscsi }), is_claim);
            }
        }
        let plain = pod_volume(json!({"fc": {"wwids": ["w1"]}})).unwrap();
        assert_eq!(plain.file_system.name(), "ext4");
    }

    #[test]
    fn links_lead_to_the_disk_and_to_no_other() {
        let check = |name: &str, expected: bool| assert_eq!(is_fc_path(name, "5006", 1), expected, "{name}");
        check("fc-0x5006-lun-1", true);
        check("pci-0000:41:00.0-fc-0x5006-lun-1", true);
        check("fc-0x5006-lun-10", false);
        check("fc-0x15006-lun-1", false);
        check("usb-fc-0x5006-lun-1", false);
        let Ok(RemoteVolume { disk: RemoteDisk::Iscsi(disk), .. }) =
            pod_volume(json!({"iscsi": {"targetPortal": "[fd00::1]:3260", "iqn": "iqn.x", "lun": 1}}))
        else {
            panic!()
        };
        let check = |name: &str, transport: &str, expected: bool| {
            assert_eq!(is_iscsi_path(name, &disk, "[fd00::1]:3260", transport), expected, "{name}");
        };
        check("ip-fd00::1:3260-iscsi-iqn.x-lun-1", "tcp", true);
        check("ip-fd00::1:3260-iscsi-iqn.x-lun-1-part1", "tcp", false);
        check("pci-0000-ip-fd00::1:3260-iscsi-iqn.x-lun-1", "tcp", false);
        check("pci-0000-ip-fd00::1:3260-iscsi-iqn.x-lun-1", "be2iscsi", true);
        assert_eq!(portal("fd00::1", "3260"), "[fd00::1]:3260");
        assert_eq!(portal("10.0.0.1", "3260"), "10.0.0.1:3260");
    }

    #[test]
    fn an_interface_is_parsed_from_iscsiadm() {
        let shown = "# BEGIN RECORD 2.0\niface.iscsi_ifacename = bond0\niface.net_ifacename = <empty>\n\
                     iface.transport_name = tcp\niface.initiatorname = <empty>\n# END RECORD\n";
        assert_eq!(transport(shown).as_deref(), Some("tcp"));
        assert_eq!(transport("iface.transport_name = <empty>\n").as_deref(), Some("tcp"));
        assert_eq!(transport("nothing"), None);
        let like = interface_like(shown, "iqn.node").unwrap();
        let expected = [("iface.initiatorname", "iqn.node"), ("iface.transport_name", "tcp")];
        assert_eq!(like.iter().map(|(k, v)| (&**k, &**v)).collect::<Vec<_>>(), expected);
        assert!(interface_like("iface.mtu = 1 2\n", "iqn.node").is_err());
        let secret = BTreeMap::from([
            ("node.session.auth.password".to_owned(), "p".to_owned()),
            ("node.session.auth.username".to_owned(), "u".to_owned()),
            ("node.session.auth.username_in".to_owned(), String::new()),
            ("other".to_owned(), "x".to_owned()),
        ]);
        assert_eq!(
            chap(true, &secret),
            [("node.session.auth.username", "u"), ("node.session.auth.password", "p")]
        );
        assert_eq!(chap(false, &secret), []);
    }
}
