//! Rules about what comes from outside: connections, and values that another program wrote.

use super::{Violation, code_of};

/// What is found in the code of `agent/` outside tests, where it may be, and what to do instead.
const RULES: [(&str, &[&str], &str); 5] = [
    (
        "TcpListener::bind",
        &["agent/cli/"],
        "a TCP server is made by base::room, with limits for strangers and for those who are known",
    ),
    (
        "TcpSocket::new_",
        &["agent/base/src/room.rs"],
        "a TCP server is made by base::room, with limits for strangers and for those who are known",
    ),
    (
        "UnixListener::bind",
        &["agent/serve/src/socket.rs"],
        "a server on a unix socket is made by the crate serve, which limits its connections",
    ),
    (
        "\"].take()",
        &[],
        "an index that is changed panics where the value is no object: get_mut(..).map(Value::take)",
    ),
    (
        "auth_layer()",
        &["agent/cluster/src/kubeconfig.rs"],
        "the library runs a kubeconfig's plugins without an end: cluster::kubeconfig takes them out first",
    ),
];

/// Each line of a file of the agent's that breaks one of them.
pub(super) fn check(file: &str, text: &str) -> Vec<Violation> {
    let is_concerned = file.starts_with("agent/") && file.ends_with(".rs");
    if !is_concerned || file.contains("/tests/") || file.ends_with("tests.rs") {
        return Vec::new();
    }
    let code = text.lines().enumerate().take_while(|(_, line)| line.trim() != "#[cfg(test)]");
    let broken = code.flat_map(|(index, line)| {
        let rules = RULES.iter().filter(move |(form, places, _)| {
            code_of(line).contains(form) && !places.iter().any(|place| file.starts_with(place))
        });
        rules.map(move |(.., message)| Violation {
            file: file.to_owned(),
            line: index + 1,
            message: (*message).to_owned(),
        })
    });
    broken.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_find_what_they_are_for_and_nothing_else() {
        let check = |file: &str, text: &str, expected: &[usize]| {
            let lines: Vec<usize> = check(file, text).into_iter().map(|violation| violation.line).collect();
            assert_eq!(lines, expected, "{file}: {text}");
        };
        check("agent/api/src/http.rs", "\nlet l = TcpListener::bind(a).await?;\n", &[2]);
        check("agent/base/src/room.rs", "let l = TcpListener::bind(a).await?;\n", &[1]);
        check("agent/base/src/room.rs", "let l = TcpSocket::new_v4()?.listen(1)?;\n", &[]);
        check("agent/api/src/http.rs", "let l = TcpSocket::new_v4()?.listen(1)?;\n", &[1]);
        check("agent/api/src/http.rs", "#[cfg(test)]\nlet l = TcpListener::bind(a).await?;\n", &[]);
        check("agent/api/src/http/tests.rs", "let l = TcpListener::bind(a).await?;\n", &[]);
        check("tests/src/x.rs", "let l = TcpListener::bind(a).await?;\n", &[]);
        check("agent/api/src/x.rs", "let l = UnixListener::bind(a)?;\n", &[1]);
        check("agent/cluster/src/x.rs", "let o = value[\"object\"].take();\n", &[1]);
        check("agent/cluster/src/x.rs", "// value[\"object\"].take()\n", &[]);
    }
}
