//! Manifests, as YAML or JSON, up to complete pods.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| beelet_fuzz_targets::manifest(input));
libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    beelet_fuzz::mutate_json(data, size, max_size, seed)
});
