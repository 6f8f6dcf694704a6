//! The mount table, as volumes and pods read it.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::mount_table(input));
