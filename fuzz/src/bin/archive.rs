//! Tar archives, the format of images and of copied files.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::archive(input));
