//! Reader of an API server's JSON that skips `managedFields`: no part of a node needs them, and they can be
//! most of an object.

use serde_json::Value;

use crate::reader::Reading;

/// Parses an API server's JSON, without the `managedFields` of any `metadata`.
///
/// `managedFields` are skipped, not parsed: they may have any depth (an API server stores the pod author's
/// content). A text replaces values beyond 100 levels. Otherwise a pod with these would hide all others of
/// its list.
///
/// # Errors
/// The text is not JSON.
pub fn answer(text: &[u8]) -> Result<Value, serde_json::Error> {
    Reading::ANSWER.read(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reader::{LEVELS, TOO_DEEP};

    #[test]
    fn an_answer_is_read_without_its_managed_fields() {
        let check =
            |text: &str, expected: &Value| assert_eq!(answer(text.as_bytes()).unwrap(), *expected, "{text}");
        let pod = r#"{"metadata":{"name":"a","managedFields":[{"manager":"x"}],"labels":{"managedFields":"kept"}}}"#;
        let read = json!({ "metadata": { "name": "a", "labels": { "managedFields": "kept" } } });
        check(pod, &read);
        check(
            &format!(r#"{{"kind":"PodList","items":[{pod}]}}"#),
            &json!({ "kind": "PodList", "items": [read] }),
        );
        check(&format!(r#"{{"type":"ADDED","object":{pod}}}"#), &json!({ "type": "ADDED", "object": read }));
        for plain in
            ["null", "true", "-7", "18446744073709551615", "1.5", r#""text""#, r#"["a",{"b":{"c":[]}}]"#]
        {
            check(plain, &serde_json::from_str(plain).unwrap());
        }
    }

    #[test]
    fn managed_fields_of_any_depth_hide_nothing() {
        let deep = format!("{}1{}", r#"{"f:a":"#.repeat(10_000), "}".repeat(10_000));
        let list = format!(
            r#"{{"items":[{{"metadata":{{"name":"a","managedFields":[{{"fieldsV1":{deep}}}]}}}},{{"metadata":{{"name":"b"}}}}]}}"#
        );
        let names: Vec<Value> =
            [json!({ "metadata": { "name": "a" } }), json!({ "metadata": { "name": "b" } })].into();
        assert_eq!(answer(list.as_bytes()).unwrap(), json!({ "items": names }));
        // Elsewhere the field is read up to the bound.
        let mut read = &answer(deep.as_bytes()).unwrap();
        let mut levels = 0;
        while let Some(inner) = read.get("f:a") {
            (read, levels) = (inner, levels + 1);
        }
        assert_eq!((read.as_str(), levels), (Some(TOO_DEEP), usize::from(LEVELS) + 1));
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        for text in ["", "{", "nothing", r#"{"metadata":{"managedFields":[}}"#, "{} {}", "[1,]"] {
            assert!(answer(text.as_bytes()).is_err(), "{text}");
        }
    }
}
