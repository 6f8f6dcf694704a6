//! Frames of the runtime's streaming server.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::stream_frames(input));
