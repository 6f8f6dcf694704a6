//! Queries for the machine's logs (KEP-2258): a file of the log folder, or services' lines in the journal.
//! Every value that a client names becomes an argument of a program that runs as root: only values known to
//! be harmless pass.
//!
//! Source: `nodeLogQuery` in pkg/kubelet/kubelet_server_journal.go.

use jiff::Timestamp;

/// Maximum number of services in one query, and maximum bytes of a service's name and of a pattern.
const SERVICES: usize = 4;
const NAME: usize = 256;
const PATTERN: usize = 1024;
/// Maximum number of lines from the end.
const LINES: u32 = 100_000;
/// Output formats of journalctl that a query may select.
const FORMATS: [&str; 7] =
    ["short-precise", "json", "short", "short-unix", "short-iso", "short-iso-precise", "cat"];
/// Parameters that a file does not support.
const OPTIONS: [&str; 11] = [
    "sinceTime",
    "untilTime",
    "tailLines",
    "tail",
    "boot",
    "pattern",
    "grep",
    "case-sensitive",
    "since",
    "until",
    "output",
];

/// A query that may be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogQuery {
    /// Path of a file below the log folder. Only the file system knows whether it exists.
    File(String),
    /// Journal lines of services.
    Services {
        /// The services' names.
        names: Vec<String>,
        /// Options of journalctl that select among their lines, with their values; none names a service.
        settings: Vec<(&'static str, String)>,
    },
}

/// The reason for refusing a query, with the parameter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{parameter}: {why}")]
pub struct LogQueryError {
    /// The parameter.
    pub parameter: &'static str,
    /// The problem with the parameter.
    pub why: String,
}

/// Creates the error for a parameter.
fn wrong(parameter: &'static str, why: impl Into<String>) -> LogQueryError {
    LogQueryError { parameter, why: why.into() }
}

impl LogQuery {
    /// Reads a request's parameters. Returns `None` if the request contains no query.
    ///
    /// # Errors
    /// A parameter is invalid, or requests more than a client may read.
    pub fn parse(pairs: &[(String, String)]) -> Result<Option<Self>, LogQueryError> {
        let asked: Vec<&str> = of(pairs, "query").chain(of(pairs, "unit")).collect();
        if asked.is_empty() {
            return Ok(None);
        }
        let asked: Vec<&str> = asked.into_iter().filter(|name| !name.trim().is_empty()).collect();
        let is_file = |name: &&str| name.contains(['/', '\\']);
        let (files, services): (Vec<&str>, Vec<&str>) = asked.into_iter().partition(is_file);
        match (&files[..], &services[..]) {
            ([], []) => Err(wrong("query", "names no service or file")),
            ([file], []) => {
                if let Some(option) = OPTIONS.iter().find(|option| of(pairs, option).next().is_some()) {
                    return Err(wrong("query", format!("a file query does not support `{option}`")));
                }
                Ok(Some(Self::File((*file).to_owned())))
            }
            ([], names) => {
                if names.len() > SERVICES {
                    return Err(wrong("query", format!("more than {SERVICES} services")));
                }
                names.iter().try_for_each(|name| safe(name))?;
                let names = names.iter().map(|name| (*name).to_owned()).collect();
                Ok(Some(Self::Services { names, settings: settings(pairs)? }))
            }
            _ => Err(wrong("query", "must name either one file or services")),
        }
    }
}

fn of<'a>(pairs: &'a [(String, String)], name: &str) -> impl Iterator<Item = &'a str> {
    pairs.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
}

/// Checks that a service's name has no special character.
fn safe(name: &str) -> Result<(), LogQueryError> {
    let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_.:@".contains(c);
    if name.len() > NAME || name.starts_with('-') || !name.chars().all(is_safe) {
        let shown: String = name.chars().take(64).collect();
        return Err(wrong("query", format!("{shown:?} is not a service name")));
    }
    Ok(())
}

fn settings(pairs: &[(String, String)]) -> Result<Vec<(&'static str, String)>, LogQueryError> {
    let value = |name: &str| of(pairs, name).next().filter(|value| !value.is_empty());
    let mut all = Vec::new();
    let (since, until) = (time(value("sinceTime"), "sinceTime")?, time(value("untilTime"), "untilTime")?);
    if since.zip(until).is_some_and(|(since, until)| since > until) {
        return Err(wrong("untilTime", "must be after sinceTime"));
    }
    for (flag, at, relative) in [("--since", since, "since"), ("--until", until, "until")] {
        let relative_time = value(relative).map(|text| ago(text, relative)).transpose()?;
        match (at, relative_time) {
            (Some(_), Some(_)) => {
                return Err(wrong(relative, format!("cannot be combined with `{relative}Time`")));
            }
            (Some(at), None) => all.push((flag, format!("@{}", at.as_second()))),
            (None, Some(text)) => all.push((flag, text)),
            (None, None) => {}
        }
    }
    if let Some(text) = value("tailLines").or_else(|| value("tail")) {
        let lines: Option<u32> = text.parse().ok().filter(|lines| *lines <= LINES);
        let lines = lines.ok_or_else(|| wrong("tailLines", format!("must be from 0 to {LINES}")))?;
        all.push(("--lines", lines.to_string()));
    }
    if let Some(text) = value("boot") {
        let boot: Option<i32> = text.parse().ok().filter(|boot| *boot <= 0);
        let boot = boot.ok_or_else(|| wrong("boot", "must be a whole number less than 1"))?;
        all.push(("--boot", boot.to_string()));
    }
    if let Some(pattern) = value("pattern").or_else(|| value("grep")) {
        if pattern.len() > PATTERN || pattern.contains(char::is_control) {
            return Err(wrong("pattern", format!("must be a single line of at most {PATTERN} bytes")));
        }
        let sensitive = match value("case-sensitive") {
            None | Some("false" | "0" | "f") => false,
            Some("true" | "1" | "t") => true,
            Some(_) => return Err(wrong("case-sensitive", "must be true or false")),
        };
        all.extend([("--grep", pattern.to_owned()), ("--case-sensitive", sensitive.to_string())]);
    }
    let format = value("output").unwrap_or("short-precise");
    if !FORMATS.contains(&format) {
        return Err(wrong("output", format!("must be one of {}", FORMATS.join(", "))));
    }
    all.push(("--output", format.to_owned()));
    Ok(all)
}

fn time(text: Option<&str>, name: &'static str) -> Result<Option<Timestamp>, LogQueryError> {
    text.map(|text| text.parse().map_err(|_| wrong(name, "must be an RFC 3339 time"))).transpose()
}

/// Reads a number of seconds, minutes, hours or days; a leading minus means before now.
fn ago(text: &str, name: &'static str) -> Result<String, LogQueryError> {
    let digits = text.trim_start_matches(['+', '-']);
    let count = digits.trim_end_matches(['s', 'm', 'h', 'd']);
    let whole = (1..=9).contains(&count.len()) && count.bytes().all(|byte| byte.is_ascii_digit());
    if !whole || digits.len() != count.len() + 1 || text.len() > digits.len() + 1 {
        return Err(wrong(name, "must be like -5m"));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<Option<LogQuery>, LogQueryError> {
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap();
            (key.to_owned(), value.to_owned())
        };
        LogQuery::parse(&query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect::<Vec<_>>())
    }

    #[test]
    fn services_and_their_options_become_settings() {
        let check = |query: &str, names: &[&str], expected: &str| {
            let Ok(Some(LogQuery::Services { names: found, settings })) = parse(query) else {
                panic!("{query}: {:?}", parse(query));
            };
            assert_eq!(found, names, "{query}");
            let settings = settings.iter().map(|(name, value)| format!("{name}={value}"));
            assert_eq!(settings.collect::<Vec<_>>().join(" "), expected, "{query}");
        };
        check("query=kubelet", &["kubelet"], "--output=short-precise");
        check("query=kubelet&query=sshd@1", &["kubelet", "sshd@1"], "--output=short-precise");
        check("unit=kubelet&output=cat&tail=5", &["kubelet"], "--lines=5 --output=cat");
        check(
            "query=a&sinceTime=2026-01-01T00:00:00Z&untilTime=2026-01-01T01:00:00Z",
            &["a"],
            "--since=@1767225600 --until=@1767229200 --output=short-precise",
        );
        check("query=a&since=-5m&boot=-1", &["a"], "--since=-5m --boot=-1 --output=short-precise");
        check(
            "query=a&pattern=x.*y&case-sensitive=true",
            &["a"],
            "--grep=x.*y --case-sensitive=true --output=short-precise",
        );
    }

    #[test]
    fn a_query_names_a_single_file_without_options() {
        assert_eq!(parse("query=/syslog"), Ok(Some(LogQuery::File("/syslog".to_owned()))));
        assert_eq!(parse("query=/../etc/shadow"), Ok(Some(LogQuery::File("/../etc/shadow".to_owned()))));
        for wrong in ["query=/a&query=/b", "query=/a&query=b", "query=/a&tailLines=5", "query=/a&pattern=x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse(""), Ok(None));
        assert_eq!(parse("tailLines=x"), Ok(None));
    }

    #[test]
    fn values_that_a_program_could_interpret_are_refused() {
        let long = format!("query={}", "a".repeat(NAME + 1));
        let pattern = format!("query=a&pattern={}", "x".repeat(PATTERN + 1));
        for wrong in [
            "query=",
            "query=  ",
            "query=-all",
            "query=--file",
            "query=a b",
            "query=a;reboot",
            "query=$(reboot)",
            "query=a\nb",
            "query=a\0",
            "query=ä",
            "query=a*",
            "query=a&query=b&query=c&query=d&query=e",
            "query=a&tailLines=-1",
            "query=a&tailLines=100001",
            "query=a&tailLines=many",
            "query=a&boot=1",
            "query=a&sinceTime=yesterday",
            "query=a&since=yesterday",
            "query=a&since=--5m",
            "query=a&since=5mm",
            "query=a&since=m",
            "query=a&since=-5m&sinceTime=2026-01-01T00:00:00Z",
            "query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z",
            "query=a&output=export",
            "query=a&pattern=x\ny",
            "query=a&pattern=x&case-sensitive=perhaps",
            &long,
            &pattern,
        ] {
            assert!(parse(wrong).is_err(), "{wrong}: {:?}", parse(wrong));
        }
    }
}
