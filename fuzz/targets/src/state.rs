//! Records of an earlier agent, for the target `state_records`.

use serde::Serialize;
use serde::de::DeserializeOwned;

use beelet_state::{decode, encode, first_line, json_text};

/// Tests a record's file.
pub(crate) fn file<T: DeserializeOwned>(name: &str, file: &[u8]) {
    let _ = decode::<T>(name, file);
}

/// Tests a record's value in JSON, under a matching checksum, so that the agent accepts the file: the written
/// record reads back the same, and not under another record's name.
pub(crate) fn value<T>(name: &str, value: &[u8])
where
    T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug,
{
    let mut body = format!(r#"{{"record":"{name}","boot":"b","value":"#).into_bytes();
    body.extend_from_slice(value);
    body.push(b'}');
    let file = [first_line(&body).into_bytes(), body].concat();
    let Ok((read, boot)) = decode::<T>(name, &file) else { return };
    let written = encode(name, &boot, &json_text(&read).unwrap());
    assert_eq!(decode::<T>(name, &written), Ok((read, boot)));
    assert!(decode::<T>("other", &written).is_err());
}
