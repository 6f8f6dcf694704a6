use proptest::prelude::*;
use serde_json::json;

use super::*;

fn one(text: &str) -> Document {
    let mut documents = parse(text).unwrap();
    assert_eq!(documents.len(), 1, "{text}");
    documents.remove(0)
}

fn check_value(text: &str, expected: &Value) {
    assert_eq!(&one(text).value, expected, "{text}");
}

#[test]
fn scalars_mean_what_they_mean_to_kubernetes() {
    check_value("a: yes", &json!({"a": true}));
    check_value("a: off", &json!({"a": false}));
    check_value("a: 0644", &json!({"a": 420}));
    check_value("a: 0o644", &json!({"a": 420}));
    check_value("a: 0x1f", &json!({"a": 31}));
    check_value("a: -3", &json!({"a": -3}));
    check_value("a: 0.5", &json!({"a": 0.5}));
    check_value("a: 1e3", &json!({"a": 1000}));
    check_value("a: '0644'", &json!({"a": "0644"}));
    check_value("a: 250m", &json!({"a": "250m"}));
    check_value("a: 1.2.3", &json!({"a": "1.2.3"}));
    check_value("a: 2026-11-21", &json!({"a": "2026-11-21"}));
    check_value("a: ~", &json!({"a": null}));
    check_value("a:", &json!({"a": null}));
    check_value("a: ''", &json!({"a": ""}));
    check_value("1: b", &json!({"1": "b"}));
    check_value("on: b", &json!({"on": "b"}));
    check_value("a: |\n  x\n  y\n", &json!({"a": "x\ny\n"}));
    check_value("a: 18446744073709551615", &json!({"a": u64::MAX}));
}

#[test]
fn aliases_and_merge_keys_are_expanded() {
    check_value("a: &x {b: 1}\nc: *x\n", &json!({"a": {"b": 1}, "c": {"b": 1}}));
    check_value("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\n", &json!({"a": {"b": 1}, "c": {"b": 1, "d": 2}}));
}

#[test]
fn json_is_read_as_it_is() {
    let text =
        "{\n\t\"a\": [1, 2.5, \"x\\u00e9\\/\\ud83c\\udfb5\", null, true],\n\t\"b\": {\"c\":\"yes\"}\n}\n";
    check_value(text, &serde_json::from_str(text).unwrap());
    assert_eq!(one(text).locate("b.c"), Some((3, 12)));
}

#[test]
fn documents_are_told_apart_and_empty_ones_left_out() {
    let documents = parse("# nothing\n---\na: 1\n---\n---\nb: 2\n...\n").unwrap();
    let values: Vec<_> = documents.iter().map(|d| &d.value).collect();
    assert_eq!(values, [&json!({"a": 1}), &json!({"b": 2})]);
    assert_eq!(documents[1].start(), (6, 1));
    assert_eq!(parse("").unwrap().len(), 0);
    assert_eq!(parse("# a comment\n").unwrap().len(), 0);
    check_value("\u{feff}a: 1", &json!({"a": 1}));
}

const POD: &str = "\
metadata:
  annotations:
    example.com/a.b: x
    example.com/a: {b: y}
spec:
  containers:
  - name: web
    resources: {requests: {cpu: abc}}
  - name: side
";

fn check_place(path: &str, expected: Option<(u64, u64)>) {
    assert_eq!(one(POD).locate(path), expected, "{path}");
}

#[test]
fn a_field_path_is_found_in_the_text() {
    check_place("", Some((1, 1)));
    check_place(".", Some((1, 1)));
    check_place("metadata", Some((1, 1)));
    check_place("spec.containers", Some((6, 3)));
    check_place("spec.containers[0]", Some((7, 5)));
    check_place("spec.containers[0].name", Some((7, 11)));
    check_place("spec.containers[0].resources.requests.cpu", Some((8, 33)));
    check_place("spec.containers[1].name", Some((9, 11)));
    check_place("metadata.annotations.example.com/a.b", Some((3, 22)));
    check_place("metadata.annotations.example.com/a", Some((4, 5)));
    check_place("metadata.annotations[\"example.com/a.b\"]", Some((3, 22)));
    check_place("metadata.annotations[\"example.com/a\"].b", Some((4, 24)));
}

#[test]
fn a_path_that_does_not_exist_is_found_at_its_nearest_ancestor() {
    check_place("spec.containers[1].image", Some((9, 5)));
    check_place("spec.containers[7].image", Some((6, 3)));
    check_place("spec.containers[x].image", Some((6, 3)));
    check_place("spec.containers[0].name.further", Some((7, 11)));
    check_place("status.phase", None);
}

#[test]
fn an_alias_is_found_where_it_is_used() {
    let document = one("a: &x 5\nb: *x\n");
    assert_eq!(document.locate("b"), Some((2, 4)));
}

fn check_error(text: &str, line: u64, part: &str) {
    let error = parse(text).unwrap_err();
    assert_eq!(error.line, line, "{error}");
    assert!(error.message.contains(part), "{error}");
    assert!(!error.message.contains('\n') && !error.message.contains(" column "), "{error}");
}

#[test]
fn a_broken_text_is_reported_at_its_line() {
    check_error("a: 1\nb: [1, 2\n", 2, "unclosed bracket '['");
    check_error("a: 1\n\tb: 2\n", 1, "found a tab");
    check_error("a: 1\na: 2\n", 2, "duplicate key \"a\"");
    check_error("a: 1\nb: {c: 1, c: 2}\n", 2, "duplicate key \"c\"");
    check_error("a: *nowhere\n", 1, "unknown anchor");
    check_error("a: .inf\n", 1, "\".inf\" is not a finite number");
    check_error("a: 1e999\n", 1, "\"1e999\" is not a finite number");
    check_error("{\"a\": 1,\n \"b\" 2}\n", 2, "invalid trailing content");
    check_error("a: 1\n---\nb: }\n", 3, "misplaced bracket");
}

#[test]
fn the_last_value_of_a_repeated_key_counts_where_that_is_asked_for() {
    let text = "a: 1\nb:\n- {c: 1, c: {d: 2}}\na: 3\n";
    let document = parse_repeating(text, Limits::MANIFEST).unwrap().remove(0);
    assert_eq!(document.value, json!({"a": 3, "b": [{"c": {"d": 2}}]}));
    assert_eq!(document.repeated(), [("b[0].c".to_owned(), (3, 10)), ("a".to_owned(), (4, 4))]);
    assert_eq!(document.locate("a"), Some((4, 4)));
    assert_eq!(one("a: 1\nb: [{c: 1}]\n").repeated(), []);
}

#[test]
fn what_is_too_large_is_refused() {
    let limits = Limits { bytes: 100, nodes: 10 };
    assert!(parse_within(&"#".repeat(101), limits).unwrap_err().message.contains("the limit is 100"));
    let many = parse_within("[1,2,3,4,5,6,7,8,9,10,11]", limits).unwrap_err();
    assert!(many.message.contains("too large or too deep"), "{many}");
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(parse(&nested(MAX_DEPTH - 1)).is_ok());
    assert!(parse(&nested(MAX_DEPTH + 1)).is_err());
    assert!(parse(&nested(100_000)).is_err());
    let block: String = (0..5000).map(|i| format!("{}a:\n", " ".repeat(i.min(900)))).collect();
    assert!(parse(&block).is_err());
}

#[test]
fn alias_bombs_are_refused() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for i in 1..12 {
        let refs = vec![format!("*a{}", i - 1); 9].join(", ");
        text += &format!("a{i}: &a{i} [{refs}]\n");
    }
    let message = parse(&text).unwrap_err().message;
    assert!(message.starts_with("the aliases (*name) stand for more than 200000 values"), "{message}");
}

#[test]
fn a_document_of_ten_thousand_lines_is_read() {
    let text: String = (0..10_000).map(|i| format!("key{i}: value\n")).collect();
    let document = &parse_within(&text, Limits::MANIFEST).unwrap()[0];
    assert_eq!(document.locate("key9999"), Some((10_000, 10)));
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let _ = parse_within(&String::from_utf8_lossy(&bytes), Limits::MANIFEST);
    }

    #[test]
    fn no_text_of_yaml_characters_makes_it_panic(text in "[-:{}\\[\\],&*!|>'\"%@`#? \n\ta-c0-9.~<]{0,400}") {
        let _ = parse_within(&text, Limits::MANIFEST);
    }

    #[test]
    fn every_json_value_survives(value in any_json()) {
        let text = serde_json::to_string_pretty(&value).unwrap();
        let documents = parse(&text).unwrap();
        match value {
            Value::Null => prop_assert!(documents.is_empty()),
            value => prop_assert_eq!(&documents[0].value, &value),
        }
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "\\PC{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::btree_map("[a-zA-Z./_-]{1,12}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}
