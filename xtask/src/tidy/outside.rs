//! Rules about input from outside: connections, and values that another program wrote.

use super::{Violation, code_of};

/// Code that `agent/` must not contain outside tests, the places that may contain it, and the message.
const RULES: [(&str, &[&str], &str); 5] = [
    (
        "TcpListener::bind",
        &["agent/cli/"],
        "use base::room for a TCP server: it limits the connections of unknown and of known clients",
    ),
    (
        "TcpSocket::new_",
        &["agent/base/src/room.rs"],
        "use base::room for a TCP server: it limits the connections of unknown and of known clients",
    ),
    (
        "UnixListener::bind",
        &["agent/serve/src/socket.rs", "agent/exec/src/server.rs"],
        "use the crate serve for a server on a unix socket: it limits the connections",
    ),
    (
        "\"].take()",
        &[],
        "a mutable index panics if the value is not an object: use get_mut(..).map(Value::take)",
    ),
    (
        "auth_layer()",
        &["agent/cluster/src/kubeconfig.rs"],
        "the library runs a kubeconfig's plugins without a timeout: cluster::kubeconfig removes them first",
    ),
];

/// Finds the lines of an agent's file that break a rule.
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
    fn each_rule_finds_its_violations_only() {
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
