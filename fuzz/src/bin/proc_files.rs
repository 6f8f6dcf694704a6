//! Files of /proc and of cgroups.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet::fuzzing::proc_files(input));
