//! The kubelet's digest of a container (`HashContainer` in `pkg/kubelet/container/helpers.go`): a kubelet
//! restarts a running container whose annotation has another digest than the pod's spec.
//!
//! Since Kubernetes 1.31 the digest covers the name and the image only; before, it covered the whole
//! container in the field order of that version.

use std::fmt::Write as _;

/// Returns the digest of a container with this name and image, as kubelets since 1.31 compute it: FNV-1a over
/// the printed form of the bytes of a JSON object.
#[must_use]
pub fn container_hash(name: &str, image: &str) -> u32 {
    let json = format!(r#"{{"image":{},"name":{}}}"#, quoted(image), quoted(name));
    let mut hash = fnv(OFFSET, b"([]uint8)[");
    for (index, byte) in json.bytes().enumerate() {
        let separator: &[u8] = if index == 0 { b"" } else { b" " };
        hash = fnv(fnv(hash, separator), byte.to_string().as_bytes());
    }
    fnv(hash, b"]")
}

/// Returns the digest as the annotation `io.kubernetes.container.hash` has it.
#[must_use]
pub fn container_hash_of(name: &str, image: &str) -> String {
    format!("{:x}", container_hash(name, image))
}

/// FNV-1a, 32 bits: the offset basis.
const OFFSET: u32 = 0x811c_9dc5;

fn fnv(hash: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Returns the JSON form of a text as Go writes it, which escapes some characters for HTML.
fn quoted(text: &str) -> String {
    let mut json = String::with_capacity(text.len().saturating_add(2));
    json.push('"');
    for character in text.chars() {
        match character {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            '\r' => json.push_str("\\r"),
            '\t' => json.push_str("\\t"),
            '\u{8}' => json.push_str("\\b"),
            '\u{c}' => json.push_str("\\f"),
            '\u{0}'..='\u{1f}' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                // Writing to a String can't fail.
                let _ = write!(json, "\\u{:04x}", u32::from(character));
            }
            other => json.push(other),
        }
    }
    json.push('"');
    json
}
