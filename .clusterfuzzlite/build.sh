#!/bin/bash -eu
# Builds every program of fuzz/src/bin into $OUT, with its inputs and its words. The flags for coverage are those of
# `cargo xtask fuzz` (xtask/src/fuzz.rs); $RUSTFLAGS of the image has those of the sanitizer.
cd "$SRC/beelet"
RUSTUP_TOOLCHAIN=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
export RUSTUP_TOOLCHAIN
# The stable compiler contains the sanitizer's runtime, but `-Z sanitizer` is a nightly option.
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="${RUSTFLAGS:-} -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
# With an explicit target, the flags do not apply to build scripts and macros.
target=x86_64-unknown-linux-gnu
cargo build --locked --package beelet-fuzz --features libfuzzer --profile fuzz --target "$target" --bins

for source in fuzz/src/bin/*.rs; do
  name=$(basename "$source" .rs)
  cp "target/$target/fuzz/$name" "$OUT/"
  printf '[libfuzzer]\ntimeout = 10\nrss_limit_mb = 2560\n' >"$OUT/$name.options"
  if [ -e "fuzz/dictionaries/$name.dict" ]; then cp "fuzz/dictionaries/$name.dict" "$OUT/"; fi
  # Inputs that reach new code, and inputs that once found a fault.
  inputs=$(mktemp -d)
  if [ -e "fuzz/corpus/$name.tar.gz" ]; then tar -xzf "fuzz/corpus/$name.tar.gz" -C "$inputs"; fi
  if [ -d "fuzz/crashes/$name" ]; then cp "fuzz/crashes/$name"/* "$inputs/"; fi
  (cd "$inputs" && zip -q -r "$OUT/${name}_seed_corpus.zip" .)
  rm -rf "$inputs"
done
