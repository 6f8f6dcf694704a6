//! Fuzzing: records that an earlier agent left.

use serde::Serialize;
use serde::de::DeserializeOwned;

use beelet_state::{decode, encode, first_line, json_text};

/// A record's file.
pub(crate) fn file<T: DeserializeOwned>(name: &str, file: &[u8]) {
    let _ = decode::<T>(name, file);
}

/// A record's value in JSON, under a checksum that fits, so that it is believed: what is read is written so
/// that it reads back the same, and as no other record.
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
