//! Seals bytes with a key of the configuration: AES-256-GCM, the key by HKDF-SHA256 from the file's content
//! and the node's name, a new random nonce for each seal.

use std::{fs::File, io::Read, path::Path};

use base64::{Engine, engine::general_purpose::STANDARD};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hkdf::{HKDF_SHA256, Salt},
    rand::{SecureRandom, SystemRandom},
};
use serde::{Deserialize, Serialize};

/// Minimum size of a key file, in bytes.
const LEAST: usize = 32;
/// Maximum size of a key file, in bytes.
const MOST: u64 = 4096;
/// Purpose of the key, with the number of the format.
const PURPOSE: &[u8] = b"beelet autonomy 1";

/// Key derived from a key file.
pub(crate) struct Key(LessSafeKey);

/// Stored form of sealed bytes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Sealed {
    nonce: String,
    content: String,
}

impl Key {
    /// Reads a key file. Blocking.
    pub(crate) fn read(path: &Path, node: &str) -> Result<Self, String> {
        let mut content = Vec::new();
        let read = File::open(path).and_then(|file| file.take(MOST + 1).read_to_end(&mut content));
        read.map_err(|error| error.to_string())?;
        if content.len() as u64 > MOST {
            return Err(format!("the key file has more than {MOST} bytes"));
        }
        Self::of(&content, node)
    }

    fn of(content: &[u8], node: &str) -> Result<Self, String> {
        if content.len() < LEAST {
            let length = content.len();
            return Err(format!(
                "the key file has {length} bytes; a key needs at least {LEAST} random bytes"
            ));
        }
        let broken = |_| "cannot derive a key from the file".to_owned();
        let derived = Salt::new(HKDF_SHA256, PURPOSE).extract(content);
        let info = [node.as_bytes()];
        let key: UnboundKey = derived.expand(&info, &AES_256_GCM).map_err(broken)?.into();
        Ok(Self(LessSafeKey::new(key)))
    }

    /// Seals bytes.
    pub(crate) fn seal(&self, mut content: Vec<u8>) -> Result<Sealed, String> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| "cannot get random bytes".to_owned())?;
        let sealed = self.0.seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(PURPOSE),
            &mut content,
        );
        sealed.map_err(|_| "the content is too long".to_owned())?;
        Ok(Sealed { nonce: STANDARD.encode(nonce), content: STANDARD.encode(content) })
    }

    /// Opens bytes that this key has sealed.
    pub(crate) fn open(&self, sealed: &Sealed) -> Result<Vec<u8>, String> {
        let nonce = STANDARD.decode(&sealed.nonce).map_err(|error| error.to_string())?;
        let nonce =
            Nonce::try_assume_unique_for_key(&nonce).map_err(|_| "the record has no nonce".to_owned())?;
        let mut content = STANDARD.decode(&sealed.content).map_err(|error| error.to_string())?;
        let opened = self.0.open_in_place(nonce, Aad::from(PURPOSE), &mut content);
        let length = opened.map_err(|_| "the record was not sealed with this key".to_owned())?.len();
        content.truncate(length);
        Ok(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_key_seals_only_that_key_opens() {
        let key = Key::of(&[7; 32], "n1").unwrap();
        let sealed = key.seal(b"secret".to_vec()).unwrap();
        assert_eq!(key.open(&sealed).unwrap(), b"secret");
        assert!(!STANDARD.decode(&sealed.content).unwrap().windows(6).any(|part| part == b"secret"));
        assert_ne!(key.seal(b"secret".to_vec()).unwrap().content, sealed.content);
        for other in [Key::of(&[8; 32], "n1"), Key::of(&[7; 32], "n2")] {
            assert!(other.unwrap().open(&sealed).is_err());
        }
        let mut changed = STANDARD.decode(&sealed.content).unwrap();
        changed[0] ^= 1;
        let changed = Sealed { nonce: sealed.nonce, content: STANDARD.encode(changed) };
        assert!(key.open(&changed).is_err());
        let empty = Sealed { nonce: String::new(), content: String::new() };
        assert!(key.open(&empty).is_err());
    }

    #[test]
    fn a_key_has_a_length() {
        assert!(Key::of(&[7; 31], "n").is_err());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, [1; 5000]).unwrap();
        assert!(Key::read(&path, "n").is_err_and(|cause| cause.contains("4096")));
        assert!(Key::read(&dir.path().join("none"), "n").is_err());
    }
}
