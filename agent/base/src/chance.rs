//! Numbers by chance, for pauses that are not to end at the same moment. Nothing secret may follow from them.

use std::hash::{BuildHasher, RandomState};

/// Any of 2^64 numbers.
#[must_use]
pub fn word() -> u64 {
    // Each state has keys of its own.
    RandomState::new().hash_one(0_u8)
}

/// Any of 256 numbers.
#[must_use]
pub fn chance() -> u8 {
    word().to_le_bytes()[0]
}

/// A number from 0 to 1 by chance.
#[must_use]
pub fn random() -> f64 {
    f64::from(chance()) / f64::from(u8::MAX)
}
