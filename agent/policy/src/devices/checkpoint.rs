//! The kubelet's own checkpoint of device allocations, `kubelet_internal_checkpoint`: a node can switch from
//! the kubelet to this agent and back without a pod losing its devices.
//!
//! Format: `pkg/kubelet/cm/devicemanager/checkpoint` (since 1.20, device ids by NUMA node). The checksum is
//! FNV-1a (32 bit) over what go-spew prints for the data with `%#v`, sorted keys and no methods
//! (`pkg/util/hash`, `checkpointmanager/checksum`). Must never panic on any content of the file.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{HeldDevices, Ids};

/// A reason why a checkpoint cannot be used. The agent then sets the file aside and rebuilds the allocations.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file is not JSON of the expected form.
    #[error("cannot read the device checkpoint: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The file was changed or truncated after the write.
    #[error("the device checkpoint is corrupt: stored checksum {stored}, computed {computed}")]
    Checksum {
        /// Checksum in the file.
        stored: u64,
        /// Checksum of the content.
        computed: u64,
    },
}

/// Devices of one resource that one container holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The pod's uid.
    #[serde(rename = "PodUID", default)]
    pub pod_uid: String,
    /// The container's name.
    #[serde(rename = "ContainerName", default)]
    pub container_name: String,
    /// The resource's name.
    #[serde(rename = "ResourceName", default)]
    pub resource_name: String,
    /// Device ids by NUMA node, -1 for those without one. `None` is Go's nil map, whose checksum differs from
    /// an empty map's.
    #[serde(rename = "DeviceIDs", default)]
    pub device_ids: Option<BTreeMap<i64, Option<Vec<String>>>>,
    /// The plugin's answer: an encoded `v1beta1.ContainerAllocateResponse`.
    #[serde(rename = "AllocResp", default, serialize_with = "to_base64", deserialize_with = "from_base64")]
    pub alloc_resp: Option<Vec<u8>>,
}

/// Identity of a container's devices of one resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HolderKey {
    /// The pod's uid.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// The resource's name.
    pub resource: String,
}

/// The state that must survive a restart. Large parts are shared with the ledger.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// The devices held, by container and resource.
    pub(super) held: BTreeMap<HolderKey, Arc<HeldDevices>>,
    /// The healthy devices of every registered resource.
    pub(super) registered: BTreeMap<String, Arc<Ids>>,
}

impl Snapshot {
    /// Returns the file's content, checksum included.
    ///
    /// # Errors
    /// Never for the snapshot of a ledger; serialization is fallible in general.
    pub fn write(self) -> Result<Vec<u8>, CheckpointError> {
        Text::default().write(self)
    }
}

/// A writer of successive checkpoints that encodes only the changes again: plugins' answers (four bytes of
/// checksum input per byte) and the lists of all devices make up most of a checkpoint.
#[derive(Debug, Default)]
pub struct Text {
    /// Entries in the order of their arrival, which differs after a restart; no reader depends on it.
    lines: Vec<Line>,
    lists: Lists,
}

/// An entry in encoded form.
#[derive(Debug)]
struct Line {
    place: HolderKey,
    held: Arc<HeldDevices>,
    json: String,
    /// Checksum of everything before this line and of the line itself.
    checksum: Fnv1a,
}

/// The lists of healthy devices in encoded form.
#[derive(Debug, Default)]
struct Lists {
    registered: BTreeMap<String, Arc<Ids>>,
    json: String,
    checksum: Suffix,
}

impl Text {
    /// Returns the file's content, checksum included.
    ///
    /// # Errors
    /// Never for the snapshot of a ledger; serialization is fallible in general.
    pub fn write(&mut self, snapshot: Snapshot) -> Result<Vec<u8>, CheckpointError> {
        let Snapshot { held, registered } = snapshot;
        self.update(&held)?;
        self.lists.update(registered)?;
        let mut checksum = self.lines.last().map_or_else(beginning, |line| line.checksum);
        checksum.write(if self.lines.is_empty() { NIL } else { "]" });
        let Fnv1a(checksum) = self.lists.checksum(checksum);
        let length = self.lines.iter().map(|line| line.json.len() + 1).sum::<usize>();
        let mut file = String::with_capacity(length + self.lists.json.len() + 100);
        file.push_str(r#"{"Data":{"PodDeviceEntries":"#);
        for (i, line) in self.lines.iter().enumerate() {
            file.push(if i == 0 { '[' } else { ',' });
            file.push_str(&line.json);
        }
        file.push_str(if self.lines.is_empty() { "null" } else { "]" });
        file.push_str(r#","RegisteredDevices":"#);
        file.push_str(&self.lists.json);
        file.push_str(&format!(r#"}},"Checksum":{checksum}}}"#));
        Ok(file.into_bytes())
    }

    /// Keeps the order of unchanged lines, and the checksums of those before the first removed line.
    fn update(&mut self, held: &BTreeMap<HolderKey, Arc<HeldDevices>>) -> Result<(), CheckpointError> {
        let stays = |line: &Line| held.get(&line.place).is_some_and(|held| Arc::ptr_eq(held, &line.held));
        let known: BTreeSet<&HolderKey> =
            self.lines.iter().filter(|line| stays(line)).map(|line| &line.place).collect();
        let new = held.iter().filter(|(place, _)| !known.contains(place));
        let new = new.map(|(place, held)| Line::new(place, held)).collect::<Result<Vec<_>, _>>()?;
        let unchanged = self.lines.iter().position(|line| !stays(line)).unwrap_or(self.lines.len());
        self.lines.retain(stays);
        self.lines.extend(new);
        let (before, changed) = self.lines.split_at_mut(unchanged);
        let mut before = before.last().map(|line| line.checksum);
        for line in changed {
            let mut checksum = before.unwrap_or_else(beginning);
            checksum.write(if before.is_some() { " " } else { "[" });
            Entry::new(&line.place, &line.held).dump(&mut checksum);
            line.checksum = checksum;
            before = Some(checksum);
        }
        Ok(())
    }
}

impl Line {
    fn new(place: &HolderKey, held: &Arc<HeldDevices>) -> Result<Self, CheckpointError> {
        let json = serde_json::to_string(&Entry::new(place, held))?;
        let checksum = Fnv1a::default(); // computed once the line's position in the file is known
        Ok(Self { place: place.clone(), held: Arc::clone(held), json, checksum })
    }
}

impl Lists {
    fn update(&mut self, registered: BTreeMap<String, Arc<Ids>>) -> Result<(), CheckpointError> {
        // Comparing lists shared with the ledger is cheap (pointer equality).
        if self.json.is_empty() || self.registered != registered {
            let lists: BTreeMap<&str, &Ids> =
                registered.iter().map(|(resource, ids)| (resource.as_str(), &**ids)).collect();
            *self = Self { json: serde_json::to_string(&lists)?, checksum: Suffix::default(), registered };
        }
        Ok(())
    }

    /// Extends `before` by the lists.
    fn checksum(&mut self, before: Fnv1a) -> Fnv1a {
        let registered = &self.registered;
        self.checksum.after(before, |sum| {
            let lists = registered.iter().map(|(resource, ids)| (resource, Some(ids.iter())));
            dump_registered(sum, Some(lists));
        })
    }
}

/// Returns the checksum of the text before the entries.
fn beginning() -> Fnv1a {
    let mut checksum = Fnv1a::default();
    checksum.write(BEGINNING);
    checksum
}

/// The data that the checksum covers, in decoded form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Data {
    /// The allocations; `None` is Go's nil slice, which the kubelet writes for an empty list.
    #[serde(rename = "PodDeviceEntries", default)]
    pub pod_device_entries: Option<Vec<Entry>>,
    /// The healthy devices of every registered resource; only the resources' names matter to a reader.
    #[serde(rename = "RegisteredDevices", default)]
    pub registered_devices: Option<BTreeMap<String, Option<Vec<String>>>>,
}

#[derive(Deserialize)]
struct File {
    #[serde(rename = "Data")]
    data: Data,
    #[serde(rename = "Checksum")]
    checksum: u64,
}

impl Data {
    /// Reads a checkpoint file and checks its checksum.
    ///
    /// # Errors
    /// If the file is not a checkpoint, or was changed after the write.
    pub fn read(file: &[u8]) -> Result<Self, CheckpointError> {
        let File { data, checksum: stored } = serde_json::from_slice::<File>(file)?;
        let computed = u64::from(data.checksum());
        if stored == computed { Ok(data) } else { Err(CheckpointError::Checksum { stored, computed }) }
    }

    /// Returns the checksum that the kubelet computes for this data.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        let mut hash = Fnv1a::default();
        self.dump(&mut hash);
        hash.0
    }

    /// Prints the data as go-spew does. A field's type precedes its value; an element has no type.
    fn dump(&self, to: &mut impl Sink) {
        to.write(BEGINNING);
        list(to, self.pod_device_entries.as_ref(), Entry::dump);
        let registered = self.registered_devices.as_ref();
        dump_registered(to, registered.map(by_key));
    }
}

/// The text before the entries.
const BEGINNING: &str = "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)";

/// Prints the text after the entries.
fn dump_registered<'a, S: Sink, I: IntoIterator<Item = &'a String>>(
    to: &mut S,
    lists: Option<impl Iterator<Item = (&'a String, Option<I>)>>,
) {
    to.write(" RegisteredDevices:(map[string][]string)");
    map(to, lists, |resource, to| to.write(resource));
    to.write("}");
}

impl Entry {
    /// Creates the entry for a container's devices of a resource.
    #[must_use]
    pub fn new(place: &HolderKey, held: &HeldDevices) -> Self {
        let HolderKey { pod_uid, container, resource } = place.clone();
        Self {
            pod_uid,
            container_name: container,
            resource_name: resource,
            device_ids: Some(held.by_node.iter().map(|(node, ids)| (*node, Some(ids.clone()))).collect()),
            alloc_resp: Some(held.response.clone()),
        }
    }

    /// Splits the entry into key and devices, the inverse of [`Self::new`].
    #[must_use]
    pub fn into_held(self) -> (HolderKey, HeldDevices) {
        let by_node = self.device_ids.unwrap_or_default();
        let by_node = by_node.into_iter().map(|(node, ids)| (node, ids.unwrap_or_default())).collect();
        let place =
            HolderKey { pod_uid: self.pod_uid, container: self.container_name, resource: self.resource_name };
        (place, HeldDevices { by_node, response: self.alloc_resp.unwrap_or_default() })
    }

    fn dump(&self, to: &mut impl Sink) {
        to.write("{PodUID:(string)");
        to.write(&self.pod_uid);
        to.write(" ContainerName:(string)");
        to.write(&self.container_name);
        to.write(" ResourceName:(string)");
        to.write(&self.resource_name);
        to.write(" DeviceIDs:(checkpoint.DevicesPerNUMA)");
        map(to, self.device_ids.as_ref().map(by_key), |node, to| to.write(&node.to_string()));
        to.write(" AllocResp:([]uint8)");
        list(to, self.alloc_resp.as_ref(), |byte, to| decimal(*byte, to));
        to.write("}");
    }
}

/// A consumer of text in parts. The text for a thousand devices is a hundred kilobytes, most of it plugins'
/// answers byte by byte; no sink keeps it.
trait Sink {
    /// Consumes text in UTF-8.
    fn write_bytes(&mut self, text: &[u8]);

    fn write(&mut self, text: &str) {
        self.write_bytes(text.as_bytes());
    }
}

/// Fowler-Noll-Vo 1a, 32 bit (Go's `fnv.New32a`).
#[derive(Debug, Clone, Copy)]
struct Fnv1a(u32);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(0x811c_9dc5)
    }
}

/// The checksum of a text, as the kubelet's checkpoints have it.
pub(crate) fn fnv1a(text: &str) -> u32 {
    let mut sum = Fnv1a::default();
    sum.write(text);
    sum.0
}

const FNV_PRIME: u32 = 0x0100_0193;

impl Sink for Fnv1a {
    fn write_bytes(&mut self, text: &[u8]) {
        let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(FNV_PRIME);
        self.0 = text.iter().fold(self.0, step);
    }
}

/// The effect of one fixed text on any checksum before it, without reading the text each time.
///
/// A step xors a byte into the lowest byte of the sum and multiplies: the lowest byte alone determines the
/// change by the xor, and also the next lowest byte. Over n bytes a sum s thus becomes s * prime^n + c modulo
/// 2^32, with 256 values of c, one per lowest byte of s. Reading the text once yields each of them.
#[derive(Debug, Default)]
struct Suffix {
    /// prime^n
    factor: u32,
    /// c by the lowest byte
    summand: BTreeMap<u8, u32>,
}

impl Suffix {
    /// Returns the checksum of `before` extended by the text that `write` writes.
    fn after(&mut self, before: Fnv1a, write: impl FnOnce(&mut Counted)) -> Fnv1a {
        let [lowest, ..] = before.0.to_le_bytes();
        let factor = &mut self.factor;
        let summand = *self.summand.entry(lowest).or_insert_with(|| {
            let start = u32::from(lowest);
            let mut text = Counted { sum: Fnv1a(start), factor: 1 };
            write(&mut text);
            *factor = text.factor;
            text.sum.0.wrapping_sub(start.wrapping_mul(*factor))
        });
        Fnv1a(before.0.wrapping_mul(*factor).wrapping_add(summand))
    }
}

/// A checksum, and the product of the factors of its steps so far.
struct Counted {
    sum: Fnv1a,
    factor: u32,
}

impl Sink for Counted {
    fn write_bytes(&mut self, text: &[u8]) {
        self.sum.write_bytes(text);
        for _ in text {
            self.factor = self.factor.wrapping_mul(FNV_PRIME);
        }
    }
}

const NIL: &str = "<nil>";

fn list<T, S: Sink>(to: &mut S, items: Option<impl IntoIterator<Item = T>>, dump: impl Fn(T, &mut S)) {
    let Some(items) = items else { return to.write(NIL) };
    to.write("[");
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            to.write(" ");
        }
        dump(item, to);
    }
    to.write("]");
}

fn by_key<K>(lists: &BTreeMap<K, Option<Vec<String>>>) -> impl Iterator<Item = (&K, Option<&Vec<String>>)> {
    lists.iter().map(|(key, ids)| (key, ids.as_ref()))
}

/// Prints a map of lists of ids, with keys of any type.
fn map<'a, K, S: Sink, I: IntoIterator<Item = &'a String>>(
    to: &mut S,
    lists: Option<impl Iterator<Item = (K, Option<I>)>>,
    key: impl Fn(K, &mut S),
) {
    let Some(lists) = lists else { return to.write(NIL) };
    to.write("map[");
    for (i, (k, ids)) in lists.enumerate() {
        if i > 0 {
            to.write(" ");
        }
        key(k, to);
        to.write(":");
        list(to, ids, |id, to| to.write(id));
    }
    to.write("]");
}

fn decimal(byte: u8, to: &mut impl Sink) {
    /// The three digits of each byte.
    static DIGITS: [[u8; 3]; 256] = {
        let mut digits = [[b'0'; 3]; 256];
        let mut byte = 0;
        while byte < digits.len() {
            let n = byte as u8;
            digits[byte] = [b'0' + n / 100, b'0' + n / 10 % 10, b'0' + n % 10];
            byte += 1;
        }
        digits
    };
    let zeros = usize::from(byte < 100) + usize::from(byte < 10);
    to.write_bytes(&DIGITS[usize::from(byte)][zeros..]);
}

fn to_base64<S: Serializer>(bytes: &Option<Vec<u8>>, serializer: S) -> Result<S::Ok, S::Error> {
    bytes.as_ref().map(|bytes| BASE64.encode(bytes)).serialize(serializer)
}

fn from_base64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u8>>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| BASE64.decode(text).map_err(D::Error::custom)).transpose()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::devices::Devices;
    use proptest::prelude::*;

    /// Checkpoints of real kubelets (published in users' notes): reading and writing them must reproduce each
    /// byte.
    const REAL: [&str; 2] = [
        r#"{"Data":{"PodDeviceEntries":[{"PodUID":"bf52b2cd-b611-4e79-86b1-280b283185c3","ContainerName":"check","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["tegra"]},"AllocResp":"Ch8KFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSBXRlZ3Jh"}],"RegisteredDevices":{"nvidia.com/gpu":["tegra"]}},"Checksum":3660592824}"#,
        r#"{"Data":{"PodDeviceEntries":[{"PodUID":"9a15d2b5-c152-46b9-96e0-d57032629e1f","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"1":["GPU-9b341c59-f96b-ba85-c137-78c3652fea65","GPU-c1e9f249-b37b-81c2-a8d9-ba5ca0294841"]},"AllocResp":"CmsKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSUUdQVS1jMWU5ZjI0OS1iMzdiLTgxYzItYThkOS1iYTVjYTAyOTQ4NDEsR1BVLTliMzQxYzU5LWY5NmItYmE4NS1jMTM3LTc4YzM2NTJmZWE2NRokCg4vZGV2L252aWRpYWN0bBIOL2Rldi9udmlkaWFjdGwaAnJ3GiYKDy9kZXYvbnZpZGlhLXV2bRIPL2Rldi9udmlkaWEtdXZtGgJydxoyChUvZGV2L252aWRpYS11dm0tdG9vbHMSFS9kZXYvbnZpZGlhLXV2bS10b29scxoCcncaLgoTL2Rldi9udmlkaWEtbW9kZXNldBITL2Rldi9udmlkaWEtbW9kZXNldBoCcncaIAoML2Rldi9udmlkaWExEgwvZGV2L252aWRpYTEaAnJ3GiAKDC9kZXYvbnZpZGlhMhIML2Rldi9udmlkaWEyGgJydw=="}],"RegisteredDevices":{"nvidia.com/gpu":["GPU-77a702db-e37f-3a74-d46d-c5713f66058c","GPU-9b341c59-f96b-ba85-c137-78c3652fea65","GPU-c1e9f249-b37b-81c2-a8d9-ba5ca0294841"]}},"Checksum":2530956716}"#,
    ];

    #[test]
    fn kubelet_checkpoints_are_read_and_written_back_unchanged() {
        for file in REAL {
            let data = Data::read(file.as_bytes()).unwrap();
            let devices = Devices::restored(data, Duration::ZERO);
            assert_eq!(String::from_utf8(devices.checkpoint().write().unwrap()).unwrap(), file);
        }
    }

    #[test]
    fn a_changed_file_is_corrupt() {
        let changed = REAL[0].replace("tegra", "tegrb");
        assert!(matches!(
            Data::read(changed.as_bytes()),
            Err(CheckpointError::Checksum { stored: 3_660_592_824, .. })
        ));
        assert!(matches!(Data::read(&REAL[0].as_bytes()[..100]), Err(CheckpointError::Malformed(_))));
    }

    impl Sink for String {
        fn write_bytes(&mut self, text: &[u8]) {
            self.push_str(std::str::from_utf8(text).unwrap());
        }
    }

    #[test]
    fn bytes_are_printed_as_numbers() {
        let mut text = String::new();
        (0..=u8::MAX).for_each(|byte| decimal(byte, &mut text));
        assert_eq!(text, (0..=u8::MAX).map(|byte| byte.to_string()).collect::<String>());
    }

    #[test]
    fn nothing_and_nil_print_differently_as_in_go() {
        let dump = |json: &str| {
            let mut text = String::new();
            serde_json::from_str::<Data>(json).unwrap().dump(&mut text);
            text
        };
        let empty = r#"{"PodDeviceEntries":[],"RegisteredDevices":{"a":[],"b":null}}"#;
        assert_eq!(
            dump(empty),
            "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)[] RegisteredDevices:(map[string][]string)map[a:[] b:<nil>]}"
        );
        let nil = r#"{"PodDeviceEntries":null}"#;
        assert_eq!(
            dump(nil),
            "(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)<nil> RegisteredDevices:(map[string][]string)<nil>}"
        );
    }

    proptest! {
        #[test]
        fn a_known_suffix_does_to_a_checksum_what_its_bytes_do(text: Vec<u8>, before: Vec<u32>) {
            let mut suffix = Suffix::default();
            for sum in before {
                let mut expected = Fnv1a(sum);
                expected.write_bytes(&text);
                prop_assert_eq!(suffix.after(Fnv1a(sum), |sum| sum.write_bytes(&text)).0, expected.0);
            }
        }

        #[test]
        fn any_bytes_are_a_checkpoint_or_refused(bytes: Vec<u8>) {
            let _ = Data::read(&bytes);
        }

        #[test]
        fn a_damaged_checkpoint_is_read_or_refused(at in 0..400_usize, byte: u8, which in 0..2_usize) {
            let mut file = REAL[which].as_bytes().to_vec();
            let at = at % file.len();
            file[at] = byte;
            let _ = Data::read(&file);
        }
    }
}
