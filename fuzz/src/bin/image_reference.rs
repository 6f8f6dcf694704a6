//! Names of images.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet::fuzzing::image_reference(input));
