//! The mount table, as the layout of cgroups reads it.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::mountinfo(input));
