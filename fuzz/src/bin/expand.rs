//! $(VAR) references.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet::fuzzing::expand(input));
