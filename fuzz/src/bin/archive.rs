//! Tar archives, as images and copies of files come in.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::archive(input));
