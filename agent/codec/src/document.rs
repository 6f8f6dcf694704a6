//! Reader of text into a tree of values, with the place of each node: YAML (also several documents in one
//! text) or JSON.
//!
//! All files that people write for beelet pass this module: pod manifests, the configuration, the
//! scenarios of `beelet plan`. The tree is a plain [`serde_json::Value`]; in addition every node keeps its
//! line and column, so that a later error at a field path can be shown at its place.
//!
//! Scalars have the meaning of Kubernetes' own reader (YAML 1.1: `yes` is a boolean, `0644` is octal),
//! because a manifest must mean the same to every agent.
//!
//! This module must never read a file, panic on any text, or interpret the fields.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::{DuplicateKeyPolicy, Location, Spanned};

/// Deepest nesting of mappings and lists.
const MAX_DEPTH: usize = 100;

/// Stack of the reading thread, in bytes: a debug build needs tens of KiB per level. Only its used part costs
/// memory.
const STACK: usize = 32 << 20;

/// Longest cause shown to the user, in characters: a message that quotes a text from outside stays readable.
const MAX_MESSAGE: usize = 300;

/// Limit of values that aliases stand for.
const MAX_ALIASED: usize = 200_000;

/// Deepest nesting of aliases.
const MAX_ALIAS_DEPTH: usize = 16;

/// Limits of a text.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest text, in bytes.
    pub bytes: usize,
    /// Largest number of mappings, lists and scalars, with aliases expanded.
    pub nodes: usize,
}

impl Limits {
    /// Limits of a pod manifest or configuration file.
    pub const MANIFEST: Limits = Limits { bytes: 1 << 20, nodes: 200_000 };
    /// Limits of a scenario of `beelet plan`, with thousands of pods or images.
    pub const SCENARIO: Limits = Limits { bytes: 64 << 20, nodes: 8_000_000 };
}

/// A document of a text.
#[derive(Clone, Debug)]
pub struct Document {
    /// Value of the document.
    pub value: Value,
    /// Place of each node of `value`.
    pub lines: LineIndex,
}

impl Document {
    /// Finds line and column (both from 1) of the node at `path`, or of its nearest existing ancestor:
    /// `spec.containers[0].image` of a container without an image is the place of the container.
    ///
    /// `path` has the format of `serde_path_to_error`; keys with dots (annotations) may be plain
    /// (`limits.nvidia.com/gpu`) or quoted (`limits["nvidia.com/gpu"]`). `.` and the empty path
    /// are the document's start. None if not even the first field exists.
    #[must_use]
    pub fn locate(&self, path: &str) -> Option<(u64, u64)> {
        self.lines.locate(path)
    }

    /// Returns line and column (both from 1) of the document's first node.
    #[must_use]
    pub fn start(&self) -> (u64, u64) {
        self.lines.position(&self.lines.root)
    }

    /// Returns every repeated key of a mapping: its path, and the line and column (both from 1) of its last
    /// place. Only [`parse_repeating`] accepts a document with repeated keys.
    #[must_use]
    pub fn repeated(&self) -> Vec<(String, (u64, u64))> {
        let mut found = Vec::new();
        let mut pending = vec![(String::new(), &self.lines.root)];
        while let Some((path, place)) = pending.pop() {
            match &place.children {
                Children::None => {}
                Children::List(items) => {
                    pending.extend(items.iter().enumerate().map(|(i, item)| (format!("{path}[{i}]"), item)));
                }
                Children::Map(entries) => {
                    let mut last: BTreeMap<&str, (&NodePlace, usize)> = BTreeMap::new();
                    for (key, child) in entries {
                        let seen = last.get(&**key).map_or(0, |(_, seen)| *seen);
                        last.insert(key, (child, seen + 1));
                    }
                    let dot = if path.is_empty() { "" } else { "." };
                    for (key, (child, seen)) in last {
                        let path = format!("{path}{dot}{key}");
                        if seen > 1 {
                            found.push((path.clone(), self.lines.position(child)));
                        }
                        pending.push((path, child));
                    }
                }
            }
        }
        found.sort_by_key(|(_, place)| *place);
        found
    }

    /// Returns the items of the list in the field `name`, each as a document with its places in this one;
    /// None if the field is not a list.
    #[must_use]
    pub fn items(&self, name: &str) -> Option<Vec<Document>> {
        let values = self.value.get(name)?.as_array()?;
        let (list, _) = step(&self.lines.root, name)?;
        let Children::List(places) = &list.children else { return None };
        let item = |(value, place): (&Value, &NodePlace)| Document {
            value: value.clone(),
            lines: LineIndex { root: place.clone(), above: self.lines.above },
        };
        Some(values.iter().zip(places).map(item).collect())
    }
}

/// Places of the nodes of a document.
#[derive(Clone, Debug)]
pub struct LineIndex {
    root: NodePlace,
    /// Number of lines of the file above the text.
    above: u64,
}

/// Place of a node and of its children.
#[derive(Clone, Debug)]
struct NodePlace {
    line: u32,
    column: u32,
    children: Children,
}

#[derive(Clone, Debug)]
enum Children {
    None,
    List(Vec<NodePlace>),
    Map(Vec<(Box<str>, NodePlace)>),
}

impl LineIndex {
    /// Finds a place like [`Document::locate`], without the value.
    #[must_use]
    pub fn locate(&self, path: &str) -> Option<(u64, u64)> {
        let path = path.trim_start_matches('.');
        if path.is_empty() {
            return Some(self.position(&self.root));
        }
        let (mut place, mut rest) = step(&self.root, path)?;
        while !rest.is_empty() {
            match step(place, rest) {
                Some((next, tail)) => (place, rest) = (next, tail),
                None => break,
            }
        }
        Some(self.position(place))
    }

    fn position(&self, place: &NodePlace) -> (u64, u64) {
        (self.above + u64::from(place.line), place.column.into())
    }
}

/// Takes a step along a path: returns the child at the beginning of `path`, and the remaining path.
fn step<'p, 't>(place: &'p NodePlace, path: &'t str) -> Option<(&'p NodePlace, &'t str)> {
    match &place.children {
        Children::None => None,
        Children::List(items) => {
            let (index, rest) = path.strip_prefix('[')?.split_once(']')?;
            Some((items.get(index.parse::<usize>().ok()?)?, rest.trim_start_matches('.')))
        }
        Children::Map(entries) if path.starts_with("[\"") => entries.iter().find_map(|(key, child)| {
            let rest = path.strip_prefix(&format!("[{key:?}]"))?;
            Some((child, rest.trim_start_matches('.')))
        }),
        // The longest key wins: `a.b` may be the key `a.b` as well as `b` inside `a`.
        Children::Map(entries) => entries
            .iter()
            .filter_map(|(key, child)| {
                let rest = path.strip_prefix(&**key)?;
                let ends = rest.is_empty() || rest.starts_with('.') || rest.starts_with('[');
                ends.then(|| (key.len(), child, rest.trim_start_matches('.')))
            })
            .max_by_key(|(length, ..)| *length)
            .map(|(_, child, rest)| (child, rest)),
    }
}

/// Error of an unreadable text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct DocumentError {
    /// Line, from 1.
    pub line: u64,
    /// Column in characters, from 1.
    pub column: u64,
    /// Cause, on one line.
    pub message: String,
}

/// Reads all documents of `text`, without empty ones.
///
/// # Errors
/// Fails if the text is neither YAML nor JSON, a mapping repeats a key, or the text exceeds
/// [`Limits::SCENARIO`].
pub fn parse(text: &str) -> Result<Vec<Document>, DocumentError> {
    parse_within(text, Limits::SCENARIO)
}

/// Reads all documents of `text` within `limits`.
///
/// # Errors
/// As for [`parse`].
pub fn parse_within(text: &str, limits: Limits) -> Result<Vec<Document>, DocumentError> {
    parse_below(0, text, limits)
}

/// Reads like [`parse_within`], but accepts repeated keys, of which the last value counts, as in the
/// lenient decoding of `KubeletConfiguration` (`DecodeKubeletConfigurationIntoInternal` of the kubelet):
/// [`Document::repeated`] lists them.
///
/// # Errors
/// Fails if the text is neither YAML nor JSON, or exceeds `limits`.
pub fn parse_repeating(text: &str, limits: Limits) -> Result<Vec<Document>, DocumentError> {
    let below = |node: Node| Document { value: node.value, lines: LineIndex { root: node.place, above: 0 } };
    read(text, limits, DuplicateKeyPolicy::PassThrough).map(|nodes| nodes.into_iter().map(below).collect())
}

/// Reads a text that is part of a file, after `above` lines: places are those of the file.
///
/// # Errors
/// As for [`parse`].
pub fn parse_below(above: u64, text: &str, limits: Limits) -> Result<Vec<Document>, DocumentError> {
    let documents = read(text, limits, DuplicateKeyPolicy::Error)
        .map_err(|error| DocumentError { line: above + error.line, ..error })?;
    let below = |node: Node| Document { value: node.value, lines: LineIndex { root: node.place, above } };
    Ok(documents.into_iter().map(below).collect())
}

fn read(text: &str, limits: Limits, duplicates: DuplicateKeyPolicy) -> Result<Vec<Node>, DocumentError> {
    if text.len() > limits.bytes {
        let message = format!("the text has {} bytes; the limit is {}", text.len(), limits.bytes);
        return Err(DocumentError { line: 1, column: 1, message });
    }
    // Some editors add a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    on_a_deep_stack(|| {
        serde_saphyr::from_multiple_with_options::<Node>(text, options(limits, duplicates))
            .map_err(|error| describe(&error, limits))
    })
}

/// Runs `read` on a thread of its own: serde recurses once per level, and the callers' threads (2 MiB in
/// an async runtime) are too small for [`MAX_DEPTH`] levels in a debug build.
fn on_a_deep_stack<T: Send>(
    read: impl FnOnce() -> Result<T, DocumentError> + Send,
) -> Result<T, DocumentError> {
    let failed = |message| Err(DocumentError { line: 1, column: 1, message });
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("document".to_owned()).stack_size(STACK);
        match thread.spawn_scoped(scope, read).map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => failed("the YAML reader failed on this text; please report it as a bug".to_owned()),
            Err(cause) => failed(format!("cannot start a thread to read the text: {cause}")),
        }
    })
}

fn options(limits: Limits, duplicates: DuplicateKeyPolicy) -> serde_saphyr::Options {
    serde_saphyr::options! {
        duplicate_keys: duplicates,
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_nodes: limits.nodes,
            max_events: limits.nodes * 3,
            max_aliases: 10_000,
            max_anchors: 10_000,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: limits.nodes.min(MAX_ALIASED),
            max_replay_stack_depth: MAX_ALIAS_DEPTH,
        },
        emit_comments: false,
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

/// Converts the library's error into one short line, without the place in the text.
fn describe(error: &serde_saphyr::Error, limits: Limits) -> DocumentError {
    let at = error.location();
    let (line, column) = at.map_or((1, 1), |at| (at.line().max(1), at.column().max(1)));
    let mut cause = error.without_snippet();
    // An error in an alias's target is reported at the alias.
    while let serde_saphyr::Error::AliasError { error, .. } = cause {
        cause = error;
    }
    let mut message = match cause {
        serde_saphyr::Error::Budget { .. } => {
            format!("too large or too deep: at most {MAX_DEPTH} levels and {} values are read", limits.nodes)
        }
        serde_saphyr::Error::AliasReplayLimitExceeded { .. }
        | serde_saphyr::Error::AliasReplayCounterOverflow { .. }
        | serde_saphyr::Error::AliasExpansionLimitExceeded { .. }
        | serde_saphyr::Error::AliasReplayStackDepthExceeded { .. } => format!(
            "the aliases (*name) stand for more than {} values, or for each other over more than {MAX_ALIAS_DEPTH} levels; \
             write out what they stand for",
            limits.nodes.min(MAX_ALIASED)
        ),
        serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("duplicate key {key:?}")
        }
        serde_saphyr::Error::NonFiniteFloat { value, .. } => format!("{value:?} is not a finite number"),
        other => other.to_string(),
    };
    for suffix in [format!(" at line {line}, column {column}"), format!(" line {line} column {column}")] {
        message = message.replace(&suffix, "");
    }
    DocumentError { line, column, message: one_line(&message) }
}

/// Removes control characters from `text` and cuts it to the length of a message.
fn one_line(text: &str) -> String {
    let mut line: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_MESSAGE).collect();
    if text.chars().nth(MAX_MESSAGE).is_some() {
        line.push('…');
    }
    line
}

/// A node during reading: its value and its place.
struct Node {
    value: Value,
    place: NodePlace,
}

/// Content of a [`Spanned`]: the value, and the places of its children.
struct Content {
    value: Value,
    children: Children,
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Content>::deserialize(deserializer)?;
        let (line, column) = coordinates(&spanned.referenced);
        let Content { value, children } = spanned.value;
        Ok(Node { value, place: NodePlace { line, column, children } })
    }
}

fn coordinates(at: &Location) -> (u32, u32) {
    let clamp = |n: u64| u32::try_from(n.max(1)).unwrap_or(u32::MAX);
    (clamp(at.line()), clamp(at.column()))
}

impl Content {
    fn scalar(value: impl Into<Value>) -> Self {
        Content { value: value.into(), children: Children::None }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

/// Converts a whole `value` into an `i64` if it fits: Kubernetes' readers turn YAML into JSON first, where
/// Go's encoder writes `1e+06` and `8080.0` without exponent and point (`encoding/json`, `floatEncoder`).
fn whole(value: f64) -> Option<i64> {
    // Below 2^63 in both directions; Go's decoder also refuses larger numbers.
    let in_range = (-(i64::MAX as f64)..i64::MAX as f64).contains(&value);
    (value.fract() == 0.0 && in_range).then_some(value as i64)
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping, a list, a string, a number, true, false or null")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Content, E> {
        Ok(Content::scalar(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Content, E> {
        Ok(Content::scalar(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Content, E> {
        Ok(Content::scalar(value))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Content, E> {
        if let Some(whole) = whole(value) {
            return Ok(Content::scalar(whole));
        }
        match Number::from_f64(value) {
            Some(number) => Ok(Content::scalar(Value::Number(number))),
            None => Err(E::custom("a number must be finite")),
        }
    }

    fn visit_str<E>(self, value: &str) -> Result<Content, E> {
        Ok(Content::scalar(value))
    }

    fn visit_string<E>(self, value: String) -> Result<Content, E> {
        Ok(Content::scalar(value))
    }

    fn visit_unit<E>(self) -> Result<Content, E> {
        Ok(Content::scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Content, E> {
        Ok(Content::scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Content, D::Error> {
        Content::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Content, A::Error> {
        let (mut values, mut places) = (Vec::new(), Vec::new());
        while let Some(Node { value, place }) = items.next_element()? {
            values.push(value);
            places.push(place);
        }
        Ok(Content { value: Value::Array(values), children: Children::List(places) })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Content, A::Error> {
        let (mut values, mut places) = (Map::new(), Vec::new());
        while let Some(key) = entries.next_key::<Spanned<String>>()? {
            let Node { value, mut place } = entries.next_value()?;
            // The place of a block that starts below its key is the key's; that of a scalar its own.
            let (line, column) = coordinates(&key.referenced);
            if !matches!(place.children, Children::None) || value.is_null() {
                (place.line, place.column) = (line, column);
            }
            places.push((key.value.as_str().into(), place));
            values.insert(key.value, value);
        }
        Ok(Content { value: Value::Object(values), children: Children::Map(places) })
    }
}

#[cfg(test)]
mod tests;
