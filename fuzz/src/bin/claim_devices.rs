//! Answers of drivers about the devices of resource claims.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::claim_devices(input));
