//! Logs of containers, whole and their last lines.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::log_lines(input));
