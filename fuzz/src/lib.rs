//! Shared code of the programs in `src/bin`. `fuzz/targets` has their targets and the promises that these
//! check; libFuzzer provides their `main`. `cargo xtask fuzz` builds and runs the programs.

use libfuzzer_sys::fuzzer_mutate;
use serde_json::{Map, Value};

/// Values at the limits of fields.
const ODD: &[&str] = &[
    "null",
    "true",
    "false",
    "0",
    "1",
    "-1",
    "0.5",
    "1e300",
    "2147483648",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "[]",
    "{}",
    "\"\"",
    "\"a\"",
    "\"9Ei\"",
    "\"-1\"",
    "\"1e-30\"",
    "\"100%\"",
    "\"2562047h\"",
    "\"$(A)\"",
    "\"../x\"",
    "\"9999-12-31T23:59:59Z\"",
    "\"-009999-01-01T00:00:00Z\"",
];

/// Mutates an input and returns the new length, like libFuzzer's own mutation. In three of four cases,
/// changes a few nodes of an input that is JSON, so that it stays JSON and most of it keeps its meaning;
/// otherwise changes its bytes.
pub fn mutate_json(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut chance = Chance(seed);
    if chance.below(4) > 0
        && let Ok(mut tree) = serde_json::from_slice::<Value>(&data[..size])
    {
        for _ in 0..=chance.below(3) {
            change(&mut tree, &mut chance);
        }
        let text = tree.to_string();
        if text.len() <= max_size.min(data.len()) {
            data[..text.len()].copy_from_slice(text.as_bytes());
            return text.len();
        }
    }
    fuzzer_mutate(data, size, max_size)
}

/// Changes one node of the tree.
fn change(tree: &mut Value, chance: &mut Chance) {
    let nodes = count(tree);
    let (at, from) = (chance.below(nodes), chance.below(nodes));
    let other = node(tree, from).clone();
    let place = node(tree, at);
    match (chance.below(8), place) {
        // A list or a mapping loses, doubles or gains a member.
        (0, Value::Array(items)) if !items.is_empty() => drop(items.remove(chance.below(items.len()))),
        (0, Value::Object(fields)) if !fields.is_empty() => drop(remove(fields, chance)),
        (1, Value::Array(items)) if !items.is_empty() => {
            let item = items[chance.below(items.len())].clone();
            items.insert(chance.below(items.len() + 1), item);
        }
        (2, Value::Array(items)) => items.push(other),
        (1 | 2, Value::Object(fields)) => {
            let (name, value) = remove(fields, chance).unwrap_or(("a".to_owned(), other));
            fields.insert(text_of(name.clone()), value.clone());
            if chance.below(2) == 0 {
                fields.insert(name, value);
            }
        }
        (3, place) => *place = other,
        (4, place) => *place = serde_json::from_str(ODD[chance.below(ODD.len())]).unwrap_or_default(),
        (_, Value::String(text)) => *text = text_of(std::mem::take(text)),
        (_, Value::Number(number)) => {
            let changed = serde_json::from_str::<Value>(&text_of(number.to_string()));
            if let Ok(Value::Number(changed)) = changed {
                *number = changed;
            }
        }
        (_, place) => *place = other,
    }
}

fn remove(fields: &mut Map<String, Value>, chance: &mut Chance) -> Option<(String, Value)> {
    let name = fields.keys().nth(chance.below(fields.len()))?.clone();
    fields.remove_entry(&name)
}

/// Returns a text that libFuzzer has changed, because libFuzzer knows the values that the program compares
/// with.
fn text_of(text: String) -> String {
    let mut bytes = text.into_bytes();
    let (size, room) = (bytes.len(), bytes.len() + 32);
    bytes.resize(room, 0);
    let size = fuzzer_mutate(&mut bytes, size, room);
    String::from_utf8_lossy(&bytes[..size]).into_owned()
}

fn count(tree: &Value) -> usize {
    1 + match tree {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Returns the node of this number, in the order of the text; the last node if the number is too large.
fn node(tree: &mut Value, at: usize) -> &mut Value {
    fn find<'t>(tree: &'t mut Value, at: &mut usize) -> Option<&'t mut Value> {
        if *at == 0 {
            return Some(tree);
        }
        *at -= 1;
        match tree {
            Value::Array(items) => items.iter_mut().find_map(|item| find(item, at)),
            Value::Object(fields) => fields.values_mut().find_map(|field| find(field, at)),
            _ => None,
        }
    }
    let mut left = at.min(count(tree) - 1);
    // The number is below the count, so the node exists.
    find(tree, &mut left).unwrap_or_else(|| unreachable!("the tree has the counted number of nodes"))
}

/// Pseudo-random numbers from libFuzzer's seed (xorshift), so that a run can be repeated.
struct Chance(u32);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        let mut state = self.0 | 1;
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        self.0 = state;
        (state >> 1) as usize % end.max(1)
    }
}
