//! The HTTP/2 frames of a client.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::http2_authority(input));
