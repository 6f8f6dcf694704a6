//! Tests of `beelet plan`: input, output and exit codes.

#![cfg(test)]

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

fn plan(what: &str, input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_beelet"))
        .args(["plan", what, "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input.as_bytes()));
        child.wait_with_output().unwrap()
    })
}

/// Returns the names of the answered scenarios, the errors about the others, and the exit code.
fn outcome(output: &Output) -> (Vec<String>, String, i32) {
    let name = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["name"].as_str().unwrap().to_owned()
    };
    let names = String::from_utf8_lossy(&output.stdout).lines().map(name).collect();
    (names, String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code().unwrap())
}

fn check(input: &str, names: &[&str], errors: &str, code: i32) {
    let (got, printed, exit) = outcome(&plan("cgroups", input));
    assert_eq!(
        (got.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), printed.as_str(), exit),
        (names, errors, code),
        "{input}"
    );
}

const A: &str = r#"{"name": "a", "cgroupVersion": "v2", "node": {"cpus": 2, "memory": "4Gi"}, "pods": []}"#;
const B: &str = r#"{"name":"b","cgroupVersion":"v1","node":{"cpus":"2","memory":4294967296},"pods":[]}"#;
const YAML: &str = "name: c\ncgroupVersion: v2\nnode: {cpus: 2, memory: 4Gi}\npods: []\n";

#[test]
fn every_form_of_input_is_read_in_order() {
    check(A, &["a"], "", 0);
    check(&format!("{A}\n{B}\n"), &["a", "b"], "", 0);
    check(&format!("[{A},\n{B}]"), &["a", "b"], "", 0);
    check(&A.replace(',', ",\n"), &["a"], "", 0);
    check(YAML, &["c"], "", 0);
    check(&format!("# two\n---\n{YAML}---\n{A}\n"), &["c", "a"], "", 0);
    check(
        "- &c {name: c, cgroupVersion: v2, node: {cpus: 2, memory: 4Gi}, pods: []}\n- {<<: *c, name: d}\n",
        &["c", "d"],
        "",
        0,
    );
    check("{name: c, cgroupVersion: v2, node: {cpus: 2, memory: 4Gi}, pods: []}", &["c"], "", 0);
    check("", &[], "", 0);
    check("[]", &[], "", 0);
}

#[test]
fn an_invalid_scenario_is_named_and_the_rest_is_answered() {
    let typo = A.replace("cgroupVersion", "cgroupVersoin");
    let (names, errors, code) = outcome(&plan("cgroups", &format!("{B}\n{typo}\n{B}\n")));
    assert_eq!((names, code), (vec!["b".to_owned(), "b".to_owned()], 2));
    assert!(
        errors.starts_with("error: standard input:2:32: scenario 2 (\"a\"): cgroupVersoin: unknown field `cgroupVersoin`, expected one of `name`"),
        "{errors}"
    );
}

#[test]
fn a_wrong_value_is_shown_with_its_field_and_place() {
    let pod = r#"{"name":"x","cgroupVersion":"v2","node":{"cpus":2,"memory":"4Gi"},"pods":[{"metadata":{"name":"p","uid":"u"},"spec":{"containers":[{"name":"c","resources":{"requests":{"cpu":"1"}}},{"name":"d","resources":{"requests":{"cpu":"abc"}}}]}}]}"#;
    check(
        pod,
        &[],
        "error: standard input:1:225: scenario 1 (\"x\"): pods[0].spec.containers[1].resources.requests.cpu: \"abc\" is not a quantity (use e.g. 250m, 1.5 or 512Mi)\n",
        2,
    );
    let yaml = format!(
        "{}---\n{YAML}",
        YAML.replace(
            "pods: []",
            "pods:\n- metadata: {name: p, uid: u}\n  spec:\n    overhead:\n      memory: 1Q"
        )
    );
    check(
        &yaml,
        &["c"],
        "error: standard input:8:15: scenario 1 (\"c\"): pods[0].spec.overhead.memory: \"1Q\" is not a quantity (use e.g. 250m, 1.5 or 512Mi)\n",
        2,
    );
    check(
        &A.replace("4Gi", "lots"),
        &[],
        "error: standard input:1:68: scenario 1 (\"a\"): node.memory: \"lots\" is not a quantity (use e.g. 250m, 1.5 or 512Mi)\n",
        2,
    );
    check(
        &YAML.replace("name: c", "name: ''"),
        &[],
        "error: standard input:1:7: scenario 1: name: is empty; every scenario needs a name\n",
        2,
    );
}

#[test]
fn text_that_is_neither_yaml_nor_json_is_reported_with_its_place() {
    let (names, errors, code) = outcome(&plan("cgroups", &format!("{A}\n{{\"name\": \"b\",,}}\n{B}")));
    assert_eq!((names, code), (vec!["a".to_owned(), "b".to_owned()], 2));
    assert!(errors.starts_with("error: standard input:2:14: scenario 2: key must be a string"), "{errors}");
    let (names, errors, code) = outcome(&plan("cgroups", &format!("[{A}, {{\"name\"")));
    assert_eq!((names, code), (vec!["a".to_owned()], 2));
    assert!(errors.starts_with("error: standard input:1:"), "{errors}");
    let (names, errors, code) = outcome(&plan("cgroups", "a: [\n"));
    assert_eq!((names.len(), code), (0, 2));
    assert!(errors.starts_with("error: standard input:"), "{errors}");
    let (_, errors, code) = outcome(&plan("cgroups", "\u{0}\u{1}"));
    assert_eq!(code, 2, "{errors}");
}

#[test]
fn an_input_that_is_wrong_everywhere_is_not_repeated_forever() {
    let (names, errors, code) = outcome(&plan("cgroups", &"{}\n".repeat(1000)));
    assert_eq!((names.len(), code, errors.lines().count()), (0, 2, 21));
    assert!(errors.ends_with("980 more errors\n"), "{errors}");
}

#[test]
fn a_missing_file_and_an_unknown_decision_are_usage_errors() {
    let run = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_beelet"))
            .arg("plan")
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let missing = run(&["cgroups", "-f", "/does/not/exist.yaml"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&missing.stderr).starts_with("error: cannot read /does/not/exist.yaml: ")
    );
    let unknown = run(&["nonsense"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("cgroups"));
}

/// Returns every example of docs/plan.md: `beelet plan WHAT <<'EOF'`, the scenarios, `EOF`.
fn examples(text: &str) -> Vec<(String, String)> {
    let mut examples = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(what) = line.strip_prefix("beelet plan ").and_then(|rest| rest.strip_suffix(" <<'EOF'"))
        else {
            continue;
        };
        let body = lines.by_ref().take_while(|line| *line != "EOF").map(|line| format!("{line}\n")).collect();
        examples.push((what.to_owned(), body));
    }
    examples
}

/// Returns the pieces of answers that the page shows: whole answers, files of cgroups, and inline code that
/// begins with a quotation mark.
fn shown(text: &str) -> Vec<String> {
    let answers = text.lines().filter(|line| line.starts_with("{\"name\":") || line.starts_with("\"/"));
    let prose = text.split("```").step_by(2).flat_map(str::lines);
    let inline =
        prose.flat_map(|line| line.split('`').skip(1).step_by(2)).filter(|code| code.starts_with('"'));
    answers.chain(inline).map(|code| code.replace(' ', "")).collect()
}

#[test]
fn the_examples_of_the_manual_have_the_documented_answers() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/plan.md")).unwrap();
    let mut answers = String::new();
    let examples = examples(&text);
    assert!(examples.len() >= 3);
    for (what, scenarios) in examples {
        let output = plan(&what, &scenarios);
        assert_eq!(
            (String::from_utf8_lossy(&output.stderr).as_ref(), output.status.code()),
            ("", Some(0)),
            "{scenarios}"
        );
        answers += &String::from_utf8_lossy(&output.stdout).replace(' ', "");
    }
    for piece in shown(&text) {
        assert!(
            answers.contains(&piece),
            "docs/plan.md shows {piece}, but no example answers so:\n{answers}"
        );
    }
}
