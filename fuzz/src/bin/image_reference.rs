//! Names of images.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::image_reference(input));
