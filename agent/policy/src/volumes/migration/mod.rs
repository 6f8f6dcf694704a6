//! Translation to CSI of volume kinds whose in-tree drivers storage plugins (CSI) have replaced. Follows
//! `csi-translation-lib` of Kubernetes 1.36, including its messages: the controller that attaches the volumes
//! uses the same names.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        core::v1::{
            AWSElasticBlockStoreVolumeSource, AzureDiskVolumeSource, CSIPersistentVolumeSource,
            GCEPersistentDiskVolumeSource, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume,
            PersistentVolumeSpec, SecretReference, Volume, VsphereVirtualDiskVolumeSource,
        },
        storage::v1::CSINode,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::VolumeError;

/// The annotation of a CSINode with the migrated kinds of volumes.
pub const ANNOTATION: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// Separator of the zones in a label.
const ZONES: &str = "__";
/// Placeholder for an unknown part of a disk's name in Google's cloud.
const UNSPECIFIED: &str = "UNSPECIFIED";
/// Labels of zones and regions, and their former names.
const ZONE: &str = "topology.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
const OLD_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
const OLD_REGION: &str = "failure-domain.beta.kubernetes.io/region";
/// Portworx' annotations of a PersistentVolume that name the Secret for all calls.
const PORTWORX_SECRET: [&str; 2] =
    ["openstorage.io/auth-secret-name", "openstorage.io/auth-secret-namespace"];

/// A kind of volume, and the driver that replaces its in-tree plugin.
struct Kind {
    /// The kubelet's name of the kind.
    plugin: &'static str,
    driver: &'static str,
    topology: Topology,
    of_pod: fn(&Volume, &str) -> Option<Result<Inline, String>>,
    of_claim: fn(&PersistentVolume) -> Option<Result<CSIPersistentVolumeSource, String>>,
}

/// A driver's names for zones and regions.
enum Topology {
    /// The driver has no topology.
    Nowhere,
    Zone(&'static str),
    ZoneAndRegion(&'static str, &'static str),
}

/// A pod's own volume, translated to CSI.
struct Inline {
    /// Name of the PersistentVolume that stands for it, unique among those of its driver.
    name: Name,
    mode: &'static str,
    source: CSIPersistentVolumeSource,
}

enum Name {
    Whole(String),
    /// Appended to the driver's name and a hyphen.
    OfDriver(String),
}

const KINDS: &[Kind] = &[
    Kind {
        plugin: "kubernetes.io/aws-ebs",
        driver: "ebs.csi.aws.com",
        topology: Topology::Zone("topology.ebs.csi.aws.com/zone"),
        of_pod: |volume, _| Some(aws(volume.aws_elastic_block_store.as_ref()?).map(one_writer)),
        of_claim: |volume| Some(aws(spec(volume)?.aws_elastic_block_store.as_ref()?)),
    },
    Kind {
        plugin: "kubernetes.io/azure-disk",
        driver: "disk.csi.azure.com",
        topology: Topology::Nowhere,
        of_pod: |volume, _| {
            let whole = |source: CSIPersistentVolumeSource| Inline {
                name: Name::Whole(source.volume_handle.clone()),
                ..one_writer(source)
            };
            Some(azure_disk(volume.azure_disk.as_ref()?, false).map(whole))
        },
        of_claim: |volume| Some(azure_disk(spec(volume)?.azure_disk.as_ref()?, true)),
    },
    Kind {
        plugin: "kubernetes.io/azure-file",
        driver: "file.csi.azure.com",
        topology: Topology::Nowhere,
        of_pod: azure_file_of_pod,
        of_claim: azure_file_of_claim,
    },
    Kind {
        plugin: "kubernetes.io/cinder",
        driver: "cinder.csi.openstack.org",
        topology: Topology::Zone("topology.cinder.csi.openstack.org/zone"),
        of_pod: |volume, _| {
            let of = volume.cinder.as_ref()?;
            Some(Ok(one_writer(plain(&of.volume_id, of.fs_type.as_ref(), of.read_only))))
        },
        of_claim: |volume| {
            let of = spec(volume)?.cinder.as_ref()?;
            Some(Ok(plain(&of.volume_id, of.fs_type.as_ref(), of.read_only)))
        },
    },
    Kind {
        plugin: "kubernetes.io/gce-pd",
        driver: "pd.csi.storage.gke.io",
        topology: Topology::Zone("topology.gke.io/zone"),
        of_pod: |volume, _| {
            let of = volume.gce_persistent_disk.as_ref()?;
            let place = format!("zones/{UNSPECIFIED}");
            let name = Name::OfDriver(of.pd_name.clone());
            Some(Ok(Inline { name, mode: mode_of(of.read_only), source: gce(of, &place) }))
        },
        of_claim: gce_of_claim,
    },
    Kind {
        plugin: "kubernetes.io/portworx-volume",
        driver: "pxd.portworx.com",
        topology: Topology::Nowhere,
        of_pod: |volume, _| {
            let of = volume.portworx_volume.as_ref()?;
            let inline = one_writer(plain(&of.volume_id, of.fs_type.as_ref(), None));
            Some(Ok(Inline { mode: mode_of(of.read_only), ..inline }))
        },
        of_claim: portworx_of_claim,
    },
    Kind {
        plugin: "kubernetes.io/vsphere-volume",
        driver: "csi.vsphere.vmware.com",
        topology: Topology::ZoneAndRegion("topology.csi.vmware.com/zone", "topology.csi.vmware.com/region"),
        of_pod: |volume, _| Some(Ok(one_writer(vsphere(volume.vsphere_volume.as_ref()?)))),
        of_claim: |volume| Some(Ok(vsphere(spec(volume)?.vsphere_volume.as_ref()?))),
    },
];

/// Returns true if a pod's own volume is of a migrated kind.
#[must_use]
pub fn is_migrated(volume: &Volume) -> bool {
    KINDS.iter().any(|kind| (kind.of_pod)(volume, "").is_some())
}

/// Returns true if a pod's own volume of a migrated kind is read-only.
#[must_use]
pub fn is_read_only(volume: &Volume) -> bool {
    let said = [
        volume.aws_elastic_block_store.as_ref().and_then(|of| of.read_only),
        volume.azure_disk.as_ref().and_then(|of| of.read_only),
        volume.azure_file.as_ref().and_then(|of| of.read_only),
        volume.cinder.as_ref().and_then(|of| of.read_only),
        volume.gce_persistent_disk.as_ref().and_then(|of| of.read_only),
        volume.portworx_volume.as_ref().and_then(|of| of.read_only),
    ];
    said.contains(&Some(true))
}

/// Translates a pod's own volume to a PersistentVolume for storage plugins; `None` if the kind is not
/// migrated.
///
/// # Errors
/// The volume cannot be translated to CSI.
#[must_use]
pub fn of_pod(volume: &Volume, namespace: &str) -> Option<Result<PersistentVolume, VolumeError>> {
    KINDS.iter().find_map(|kind| Some((kind, (kind.of_pod)(volume, namespace)?))).map(|(kind, found)| {
        let Inline { name, mode, source } = found.map_err(VolumeError::Translation)?;
        let name = match name {
            Name::Whole(name) => name,
            Name::OfDriver(name) => format!("{}-{name}", kind.driver),
        };
        let csi = CSIPersistentVolumeSource { driver: kind.driver.to_owned(), ..source };
        Ok(PersistentVolume {
            metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
            spec: Some(PersistentVolumeSpec {
                csi: Some(csi),
                access_modes: Some(vec![mode.to_owned()]),
                volume_mode: Some("Filesystem".to_owned()),
                ..PersistentVolumeSpec::default()
            }),
            status: None,
        })
    })
}

/// Translates a PersistentVolume to CSI; `None` if the kind is not migrated.
///
/// # Errors
/// The volume cannot be translated to CSI.
#[must_use]
pub fn of_claim(volume: &PersistentVolume) -> Option<Result<PersistentVolume, VolumeError>> {
    KINDS.iter().find_map(|kind| Some((kind, (kind.of_claim)(volume)?))).map(|(kind, found)| {
        let csi = CSIPersistentVolumeSource {
            driver: kind.driver.to_owned(),
            ..found.map_err(VolumeError::Translation)?
        };
        let mut volume = volume.clone();
        match kind.topology {
            Topology::Nowhere => {}
            Topology::Zone(key) => into_zone(&mut volume, key),
            Topology::ZoneAndRegion(zone, region) => into_zone_and_region(&mut volume, zone, region),
        }
        let spec = volume.spec.get_or_insert_default();
        if spec.gce_persistent_disk.is_some() {
            spec.access_modes = spec.access_modes.take().map(|modes| vec![gce_mode(&modes).to_owned()]);
        }
        spec.aws_elastic_block_store = None;
        spec.azure_disk = None;
        spec.azure_file = None;
        spec.cinder = None;
        spec.gce_persistent_disk = None;
        spec.portworx_volume = None;
        spec.vsphere_volume = None;
        spec.csi = Some(csi);
        Ok(volume)
    })
}

/// Returns the new value of a CSINode's [`ANNOTATION`]; `None` if unchanged.
#[must_use]
pub fn changed_annotation(found: &CSINode) -> Option<String> {
    let known = found.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION));
    let known: BTreeSet<&str> = known.iter().flat_map(|text| text.split(',')).collect();
    let wanted: BTreeSet<&str> = KINDS.iter().map(|kind| kind.plugin).collect();
    (known != wanted).then(|| wanted.into_iter().collect::<Vec<_>>().join(","))
}

fn spec(volume: &PersistentVolume) -> Option<&PersistentVolumeSpec> {
    volume.spec.as_ref()
}

fn one_writer(source: CSIPersistentVolumeSource) -> Inline {
    Inline { name: Name::OfDriver(source.volume_handle.clone()), mode: "ReadWriteOnce", source }
}

fn mode_of(read_only: Option<bool>) -> &'static str {
    if read_only == Some(true) { "ReadOnlyMany" } else { "ReadWriteOnce" }
}

/// Returns the source with the fields common to all drivers.
fn plain(handle: &str, file_system: Option<&String>, read_only: Option<bool>) -> CSIPersistentVolumeSource {
    CSIPersistentVolumeSource {
        volume_handle: handle.to_owned(),
        fs_type: file_system.cloned(),
        read_only: read_only.filter(|is| *is),
        volume_attributes: Some(BTreeMap::new()),
        ..CSIPersistentVolumeSource::default()
    }
}

fn attributes<const N: usize>(all: [(&str, String); N]) -> Option<BTreeMap<String, String>> {
    Some(all.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

fn aws(of: &AWSElasticBlockStoreVolumeSource) -> Result<CSIPersistentVolumeSource, String> {
    let id = aws_id(&of.volume_id)
        .map_err(|why| format!("failed to translate Kubernetes ID to EBS Volume ID {why}"))?;
    let partition = of.partition.unwrap_or_default().to_string();
    let plain = plain(id, of.fs_type.as_ref(), of.read_only);
    Ok(CSIPersistentVolumeSource { volume_attributes: attributes([("partition", partition)]), ..plain })
}

/// Returns the volume's name at Amazon from a text that may have the form `aws://ZONE/NAME`.
fn aws_id(written: &str) -> Result<&str, String> {
    let Some(rest) = written.strip_prefix("aws://") else { return Ok(written) };
    let path = rest.find('/').map_or("", |slash| &rest[slash..]);
    let id = path.split(['?', '#']).next().unwrap_or_default().trim_matches('/');
    if id.starts_with("vol-") && !id.contains('/') {
        return Ok(id);
    }
    Err(format!("Invalid format for AWS volume ({written})"))
}

fn azure_disk(of: &AzureDiskVolumeSource, of_claim: bool) -> Result<CSIPersistentVolumeSource, String> {
    if let Some(kind) = of.kind.as_ref().filter(|kind| !kind.eq_ignore_ascii_case("Managed")) {
        return Err(format!("kind({kind}) is not supported in csi migration"));
    }
    let mut said = BTreeMap::from([("kind".to_owned(), "Managed".to_owned())]);
    if let Some(mode) = of.caching_mode.as_ref().filter(|mode| of_claim || !mode.is_empty()) {
        said.insert("cachingmode".to_owned(), mode.clone());
    }
    if let Some(file_system) = &of.fs_type {
        said.insert("fstype".to_owned(), file_system.clone());
    }
    let plain = plain(&of.disk_uri, of.fs_type.as_ref(), of.read_only);
    Ok(CSIPersistentVolumeSource { volume_attributes: Some(said), ..plain })
}

/// Returns the storage account contained in a Secret's name, or else the name.
fn azure_account(secret: &str) -> &str {
    let account = secret.find("azure-storage-account-").and_then(|at| {
        let rest = &secret[at + "azure-storage-account-".len()..];
        rest.rfind("-secret").map(|end| &rest[..end])
    });
    account.filter(|account| !account.is_empty()).unwrap_or(secret)
}

/// Returns the source for a share: its name, its Secret's name and namespace, and its unique parts.
fn azure_file(share: &str, secret: &str, namespace: &str, of: [&str; 2]) -> CSIPersistentVolumeSource {
    let [group, name] = of;
    let account = azure_account(secret);
    CSIPersistentVolumeSource {
        volume_handle: format!("{group}#{account}#{share}#{name}#{namespace}"),
        volume_attributes: attributes([("sharename", share.to_owned())]),
        node_stage_secret_ref: Some(SecretReference {
            name: Some(secret.to_owned()),
            namespace: Some(namespace.to_owned()),
        }),
        ..CSIPersistentVolumeSource::default()
    }
}

fn azure_file_of_pod(volume: &Volume, namespace: &str) -> Option<Result<Inline, String>> {
    let of = volume.azure_file.as_ref()?;
    let namespace = if namespace.is_empty() { "default" } else { namespace };
    let source = CSIPersistentVolumeSource {
        read_only: of.read_only.filter(|is| *is),
        ..azure_file(&of.share_name, &of.secret_name, namespace, ["", &volume.name])
    };
    Some(Ok(Inline { name: Name::Whole(source.volume_handle.clone()), mode: "ReadWriteMany", source }))
}

fn azure_file_of_claim(volume: &PersistentVolume) -> Option<Result<CSIPersistentVolumeSource, String>> {
    let of = spec(volume)?.azure_file.as_ref()?;
    let annotations = volume.metadata.annotations.as_ref();
    let group = annotations.and_then(|all| all.get("kubernetes.io/azure-file-resource-group"));
    let claimed = spec(volume)?.claim_ref.as_ref().and_then(|claim| claim.namespace.as_ref());
    let namespace = of.secret_namespace.as_ref().or(claimed).filter(|namespace| !namespace.is_empty());
    let Some(namespace) = namespace else {
        let why = "could not find a secret namespace in PersistentVolumeSource or ClaimRef";
        return Some(Err(why.to_owned()));
    };
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let named = [group.map_or("", String::as_str), name];
    Some(Ok(CSIPersistentVolumeSource {
        read_only: of.read_only.filter(|is| *is),
        ..azure_file(&of.share_name, &of.secret_name, namespace, named)
    }))
}

fn gce(of: &GCEPersistentDiskVolumeSource, place: &str) -> CSIPersistentVolumeSource {
    let handle = format!("projects/{UNSPECIFIED}/{place}/disks/{}", of.pd_name);
    let partition = of.partition.filter(|number| *number != 0);
    let partition = partition.map(|number| number.to_string()).unwrap_or_default();
    let plain = plain(&handle, of.fs_type.as_ref(), of.read_only);
    CSIPersistentVolumeSource { volume_attributes: attributes([("partition", partition)]), ..plain }
}

fn gce_of_claim(volume: &PersistentVolume) -> Option<Result<CSIPersistentVolumeSource, String>> {
    let of = spec(volume)?.gce_persistent_disk.as_ref()?;
    let label = |key: &str| volume.metadata.labels.as_ref().and_then(|all| all.get(key)).cloned();
    let zones = label(OLD_ZONE).filter(|zones| !zones.is_empty()).or_else(|| label(ZONE)).unwrap_or_default();
    let zones: Vec<&str> = zones.split(ZONES).collect();
    let place = match zones.as_slice() {
        [] | [""] => Ok(format!("zones/{UNSPECIFIED}")),
        [zone] => Ok(format!("zones/{zone}")),
        zones => gce_region(zones).map(|region| format!("regions/{region}")),
    };
    Some(place.map(|place| gce(of, &place)).map_err(|why| format!("failed to get region from zones: {why}")))
}

/// Returns the region of zones: `europe-west1` of `europe-west1-b` and `europe-west1-c`.
fn gce_region(zones: &[&str]) -> Result<String, String> {
    let mut regions = BTreeSet::new();
    for zone in zones {
        let parts: Vec<&str> = zone.split('-').collect();
        let [locale, region, _] = parts.as_slice() else {
            return Err(format!(
                "zone in unexpected format, expected: {{locale}}-{{region}}-{{zone}}, got: {zone}"
            ));
        };
        regions.insert(format!("{locale}-{region}"));
    }
    match (regions.len(), regions.pop_first()) {
        (1, Some(region)) => Ok(region),
        _ => Err(format!("multiple or no regions gotten from zones, got: {zones:?}")),
    }
}

/// Returns the single access mode that the driver supports: the in-tree plugin accepted all modes and reduced
/// them to this one.
fn gce_mode(modes: &[String]) -> &'static str {
    let has = |mode: &str| modes.iter().any(|one| one == mode);
    if has("ReadOnlyMany") && !has("ReadWriteOnce") && !has("ReadWriteMany") {
        "ReadOnlyMany"
    } else {
        "ReadWriteOnce"
    }
}

fn portworx_of_claim(volume: &PersistentVolume) -> Option<Result<CSIPersistentVolumeSource, String>> {
    let of = spec(volume)?.portworx_volume.as_ref()?;
    let annotation = |key: &str| volume.metadata.annotations.as_ref()?.get(key).cloned();
    let [name, namespace] = PORTWORX_SECRET.map(annotation);
    let secret = name
        .zip(namespace)
        .map(|(name, namespace)| SecretReference { name: Some(name), namespace: Some(namespace) });
    Some(Ok(CSIPersistentVolumeSource {
        controller_publish_secret_ref: secret.clone(),
        node_stage_secret_ref: secret.clone(),
        node_publish_secret_ref: secret.clone(),
        controller_expand_secret_ref: secret.clone(),
        node_expand_secret_ref: secret,
        ..plain(&of.volume_id, of.fs_type.as_ref(), None)
    }))
}

fn vsphere(of: &VsphereVirtualDiskVolumeSource) -> CSIPersistentVolumeSource {
    let policy = of.storage_policy_name.as_ref().filter(|policy| !policy.is_empty());
    let said = policy.map(|policy| ("storagepolicyname".to_owned(), policy.clone()));
    let plain = plain(&of.volume_path, of.fs_type.as_ref(), None);
    CSIPersistentVolumeSource { volume_attributes: Some(said.into_iter().collect()), ..plain }
}

/// Returns the terms of a volume's node affinity.
fn terms(volume: &mut PersistentVolume) -> Option<&mut Vec<NodeSelectorTerm>> {
    let affinity = volume.spec.as_mut()?.node_affinity.as_mut()?;
    Some(&mut affinity.required.as_mut()?.node_selector_terms)
}

/// Returns the requirements of a volume's node affinity.
fn asked(volume: &PersistentVolume) -> impl Iterator<Item = &NodeSelectorRequirement> {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required.as_ref());
    let terms = required.into_iter().flat_map(|required| &required.node_selector_terms);
    terms.flat_map(|term| term.match_expressions.iter().flatten())
}

/// Returns the labels that a volume uses for zone and region (`getTopologyLabel`).
fn labels_of(volume: &PersistentVolume) -> [&'static str; 2] {
    let asks = |key: &str| asked(volume).any(|one| one.key == key);
    let has = |key: &str| volume.metadata.labels.as_ref().is_some_and(|all| all.contains_key(key));
    let is_old = !asks(ZONE) && (asks(OLD_ZONE) || (!has(ZONE) && has(OLD_ZONE)));
    if is_old { [OLD_ZONE, OLD_REGION] } else { [ZONE, REGION] }
}

/// Returns true if the affinity names any value of a label.
fn has_values(volume: &PersistentVolume, key: &str) -> bool {
    asked(volume).any(|one| one.key == key && one.values.iter().flatten().next().is_some())
}

fn rename(volume: &mut PersistentVolume, from: &str, to: &str) {
    for term in terms(volume).into_iter().flatten() {
        for one in term.match_expressions.iter_mut().flatten().filter(|one| one.key == from) {
            to.clone_into(&mut one.key);
        }
    }
}

/// Adds a label to all terms (`addTopology`).
fn add(volume: &mut PersistentVolume, key: &str, values: &[&str]) {
    let values: BTreeSet<&str> = values.iter().map(|one| one.trim()).filter(|one| !one.is_empty()).collect();
    if values.is_empty() {
        return;
    }
    let spec = volume.spec.get_or_insert_default();
    let required = spec.node_affinity.get_or_insert_default().required.get_or_insert_default();
    if required.node_selector_terms.is_empty() {
        required.node_selector_terms.push(NodeSelectorTerm::default());
    }
    for term in &mut required.node_selector_terms {
        term.match_expressions.get_or_insert_default().push(NodeSelectorRequirement {
            key: key.to_owned(),
            operator: "In".to_owned(),
            values: Some(values.iter().map(|&one| one.to_owned()).collect()),
        });
    }
}

fn label(volume: &PersistentVolume, key: &str) -> Option<String> {
    volume.metadata.labels.as_ref()?.get(key).cloned()
}

/// Renames the zones for the driver; takes them from labels if the affinity names none.
fn into_zone(volume: &mut PersistentVolume, key: &str) {
    let [zone, region] = labels_of(volume);
    if has_values(volume, zone) {
        rename(volume, zone, key);
    } else if let Some(zones) = label(volume, zone) {
        add(volume, key, &zones.split(ZONES).collect::<Vec<_>>());
    }
    if region == OLD_REGION && has_values(volume, region) {
        rename(volume, region, REGION);
    }
}

/// Does the same for a driver that has its own name for regions, too.
fn into_zone_and_region(volume: &mut PersistentVolume, zone_key: &str, region_key: &str) {
    let [zone, region] = labels_of(volume);
    for (from, to) in [(zone, zone_key), (region, region_key)] {
        if has_values(volume, from) {
            rename(volume, from, to);
        } else if let Some(one) = label(volume, from) {
            add(volume, to, &[&one]);
        }
    }
}

#[cfg(test)]
mod tests;
