//! Records of the kernel programs' ring buffer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::ring_records(input));
