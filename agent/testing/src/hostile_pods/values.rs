//! Hostile values by kind of field.

use serde_json::{Value, json};

use super::{Group, Hostile};
use crate::schema::Kind;

/// Texts that parse as numbers, or nearly.
const AMOUNTS: &[&str] = &[
    "0",
    "-1",
    "1",
    "1n",
    "0.0000000001",
    "1e-30",
    "-0",
    "1000Ei",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "1e30",
    "-1e30",
    "9e999999999",
    "",
    " ",
    "1 ",
    "abc",
    "NaN",
    "inf",
    "0x10",
    "1Qi",
    "+5",
];

/// Texts with a meaning elsewhere: paths, options, formats, line breaks, reversed text, non-characters.
const TEXTS: &[&str] = &[
    "",
    " ",
    ".",
    "..",
    "/",
    "//",
    "../../../../etc/passwd",
    "/proc/self/root",
    "a/b",
    "a\0b",
    "a\nb: c",
    "a\r\nb",
    "\u{1b}[31m",
    "\u{202e}live",
    "\u{feff}",
    "\u{fffd}",
    "-rf",
    "--help",
    "%s%n%d",
    "$(HOME)",
    "$$(A)$(",
    "`id`",
    "'\"\\",
    "a:b",
    "a,b=c",
    "*",
    "{}",
    "[]",
    "null",
    "true",
    "日本語",
    "e\u{301}",
    "9223372036854775807",
    "-1",
    "1e309",
    "1970-01-01T00:00:00Z",
];

/// Valid and invalid times.
const TIMES: &[&str] = &[
    "0001-01-01T00:00:00Z",
    "1970-01-01T00:00:00Z",
    "1969-12-31T23:59:59Z",
    "9999-12-31T23:59:59Z",
    "9999-12-31T23:59:59+23:59",
    "-009999-01-01T00:00:00Z",
    "+10000-01-01T00:00:00Z",
    "2026-02-30T00:00:00Z",
    "2026-01-01T25:00:00Z",
    "",
    "now",
];

/// Returns the hostile values for a kind of field.
pub(super) fn worst_of(kind: Kind) -> Vec<(Group, Hostile)> {
    let number = |value: Value| (Group::Numbers, Hostile::Value(value));
    let text = |text: &&str| (Group::Texts, Hostile::Value((*text).into()));
    let own: Vec<(Group, Hostile)> = match kind {
        Kind::Bool => [true, false].map(|value| (Group::Types, Hostile::Value(value.into()))).into(),
        Kind::Int32 => int32().map(number).collect(),
        Kind::Int64 => int64().map(number).collect(),
        Kind::Quantity => AMOUNTS
            .iter()
            .map(|text| number((*text).into()))
            .chain([number(json!(1e308)), number(json!(-1)), (Group::Numbers, Hostile::Text("9", 10_000))])
            .collect(),
        Kind::IntOrString => int32()
            .chain(int64())
            .map(number)
            .chain(TEXTS.iter().map(text))
            .chain([(Group::Texts, Hostile::Text("a", 100_000))])
            .collect(),
        Kind::Time => TIMES.iter().map(|text| number((*text).into())).collect(),
        Kind::Text => TEXTS.iter().map(text).chain(long_texts()).collect(),
        Kind::List => {
            [0, 2, 1000].map(|count| (Group::Counts, Hostile::Elements(count))).into_iter().collect()
        }
        Kind::Map => keys(),
        Kind::Json | Kind::Object(_) => Vec::new(),
    };
    own.into_iter().chain(of_other_types(kind)).collect()
}

fn int32() -> impl Iterator<Item = Value> {
    [0, -1, 1, 65_535, 65_536, i32::MAX, i32::MIN].into_iter().map(Value::from)
}

/// Values include one second more than an `Instant` can hold, milliseconds given as seconds, and the limits.
fn int64() -> impl Iterator<Item = Value> {
    let all =
        [0, -1, 1, i64::from(i32::MAX), i64::from(u32::MAX), 1_000_000_000_000, i64::MAX / 1_000_000_000];
    let most = [i64::MAX / 1000, i64::MAX / 2 * 2, i64::MAX - 1, i64::MAX, i64::MIN, i64::MIN + 1];
    all.into_iter().chain(most).map(Value::from)
}

/// Texts at the limits of names and labels, one beyond them, and longer than any limit.
fn long_texts() -> impl Iterator<Item = (Group, Hostile)> {
    let lengths = [63, 64, 253, 254, 4096, 300_000];
    lengths.map(|length| (Group::Texts, Hostile::Text("a", length))).into_iter().chain([
        (Group::Texts, Hostile::Text("é", 127)),
        (Group::Texts, Hostile::Text("a/", 2000)),
        (Group::Texts, Hostile::Text("../", 2000)),
        (Group::Texts, Hostile::Text("$(A)", 20_000)),
        (Group::Texts, Hostile::Text("\n", 20_000)),
    ])
}

fn keys() -> Vec<(Group, Hostile)> {
    let mut all: Vec<(Group, Hostile)> =
        TEXTS.iter().map(|text| (Group::Texts, Hostile::Key(text, 1))).collect();
    all.push((Group::Texts, Hostile::Key("a", 100_000)));
    all.extend([0, 2, 1000].map(|count| (Group::Counts, Hostile::Entries(count))));
    all
}

/// Returns values of other JSON types than the field's.
fn of_other_types(kind: Kind) -> Vec<(Group, Hostile)> {
    let all = [
        json!(null),
        json!(true),
        json!(7),
        json!(-1.5),
        json!("x"),
        json!([]),
        json!([null]),
        json!({}),
        json!({"x": 1}),
    ];
    let fits = |value: &Value| match kind {
        Kind::Bool => value.is_boolean(),
        Kind::Int32 | Kind::Int64 => value.is_i64(),
        Kind::Text => value.is_string(),
        Kind::List => *value == json!([]),
        Kind::Map => *value == json!({}),
        Kind::Quantity | Kind::IntOrString | Kind::Time | Kind::Json | Kind::Object(_) => false,
    };
    let others = all.into_iter().filter(|value| !fits(value)).map(Hostile::Value);
    // A JSON parser gives up at 128 levels.
    others.chain([Hostile::Nested(60), Hostile::Nested(200)]).map(|hostile| (Group::Types, hostile)).collect()
}
