//! Messages of device plugins, and the ledger after them.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::device_plugin(input));
