//! The mounts of the machine, as volumes and pods look for them.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::mount_table(input));
