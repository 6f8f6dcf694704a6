//! Random numbers for jitter of pauses. Must never be used for secrets.

use std::hash::{BuildHasher, RandomState};

/// Returns a random 64-bit number.
#[must_use]
pub fn word() -> u64 {
    // Each state has random keys of its own.
    RandomState::new().hash_one(0_u8)
}

/// Returns a random byte.
#[must_use]
pub fn chance() -> u8 {
    word().to_le_bytes()[0]
}

/// Returns a random number from 0 to 1.
#[must_use]
pub fn random() -> f64 {
    f64::from(chance()) / f64::from(u8::MAX)
}
