//! The targets for records of the ring buffer, and for the BTF of unusual kernels.

use arbitrary::Unstructured;

use crate::below;
use beelet_bpf::btf::Btf;
use beelet_bpf::edges::Edge;
use beelet_bpf::offsets::{self, Offsets};
use beelet_bpf::reader;

/// Tests a record: a decoded event has the time in the record's head; an error has the record's kind.
pub fn ring_records(input: &[u8]) {
    let word = |at: usize| input.get(at..at + 8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap()));
    let kind = input.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    match reader::decode(input) {
        Err(unknown) => assert_eq!(unknown, kind),
        Ok(
            Edge::ListenerOpened { at_ns, .. }
            | Edge::ListenerClosed { at_ns, .. }
            | Edge::ContainerExited { at_ns, .. }
            | Edge::OomKill { at_ns, .. }
            | Edge::Pressure { at_ns, .. },
        ) => assert_eq!(Some(at_ns), word(8)),
        Ok(edge) => panic!("a record cannot be {edge:?}"),
    }
}

/// Tests BTF: the input itself, and types generated from the input with the names that the agent needs.
pub fn btf(input: &[u8]) {
    questions(input.to_vec());
    questions(made_of(input));
}

fn questions(bytes: Vec<u8>) {
    let Ok(btf) = Btf::parse(bytes) else { return };
    for release in [(5, 15), (6, 12)] {
        let found = Offsets::resolve(&btf, release);
        let mut names: Vec<&str> = found.globals.iter().map(|(name, _)| *name).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "a global is set twice");
    }
    let _ = offsets::check_set_state(&btf);
}

/// Generates BTF with a valid header, valid sizes and string offsets, and types that refer to each other in
/// any way.
fn made_of(input: &[u8]) -> Vec<u8> {
    let mut strings = vec![0];
    let mut names = vec![0];
    for name in offsets::names() {
        names.push(u32::try_from(strings.len()).unwrap());
        strings.extend(name.as_bytes());
        strings.push(0);
    }
    let mut from = Unstructured::new(input);
    let from = &mut from;
    let mut types: Vec<u8> = Vec::new();
    let mut push = |words: &[u32]| words.iter().for_each(|word| types.extend(word.to_le_bytes()));
    while !from.is_empty() {
        let kind = below(from, 20) as u32;
        let name = names[below(from, names.len())];
        let flag = below(from, 2) as u32;
        let count = below(from, 6) as u32;
        push(&[name, flag << 31 | kind << 24 | count, reference(from)]);
        let mut rest = |words: usize| (0..words).for_each(|_| push(&[reference(from)]));
        match kind {
            1 | 14 | 17 => rest(1),
            3 => rest(3),
            4 | 5 => {
                for _ in 0..count {
                    let name = names[below(from, names.len())];
                    push(&[name, reference(from), reference(from)]);
                }
            }
            15 | 19 => rest(3 * count as usize),
            6 | 13 => rest(2 * count as usize),
            _ => {}
        }
    }
    let (types_len, strings_len) = (types.len() as u32, strings.len() as u32);
    let header = [0xeb9f | 1 << 16, 24, 0, types_len, types_len, strings_len];
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(types);
    bytes.extend(strings);
    bytes
}

/// Returns mostly a type's id or a small offset, and sometimes any number.
fn reference(from: &mut Unstructured<'_>) -> u32 {
    match from.arbitrary::<u8>().unwrap_or_default() {
        255 => from.arbitrary().unwrap_or_default(),
        small => u32::from(small),
    }
}
