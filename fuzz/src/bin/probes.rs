//! Redirects in answers to probes, and probe settings in annotations.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::probes(input));
