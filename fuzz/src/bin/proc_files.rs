//! Files of /proc and of cgroups.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::proc_files(input));
