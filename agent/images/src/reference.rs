//! The grammar of image names (github.com/distribution/reference): `[host[:port]/]path[:tag][@digest]`.

/// Maximum length of a name without tag and digest.
const NAME_MAX: usize = 255;
/// Maximum length of a tag.
const TAG_MAX: usize = 128;

/// Parts of an image's name as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference<'a> {
    /// Host and port, if the name begins with them.
    pub host: Option<&'a str>,
    /// The repository in the registry.
    pub path: &'a str,
}

/// Fault of an image name. The text completes a sentence that begins with the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAReference {
    /// The text after `@`.
    #[error("has an invalid digest, expected e.g. sha256:<64 hexadecimal digits>")]
    Digest,
    /// The text after the last colon.
    #[error("has an invalid tag, expected up to {TAG_MAX} of letters, digits, '_', '.' and '-'")]
    Tag,
    /// The text before the first slash.
    #[error("has an invalid registry, expected a host name with an optional port")]
    Registry,
    /// The repository.
    #[error(
        "has an invalid path, expected up to {NAME_MAX} of a-z, 0-9, '.', '_', '-' and '/', no capital letters, each part \
         beginning and ending with a letter or digit"
    )]
    Path,
}

/// Parses an image's name.
///
/// # Errors
/// The name is invalid.
pub fn parse(image: &str) -> Result<Reference<'_>, NotAReference> {
    let (rest, digest) = match image.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (image, None),
    };
    if digest.is_some_and(|digest| !is_digest(digest)) {
        return Err(NotAReference::Digest);
    }
    // A colon before the last slash belongs to the registry's port.
    let at = rest.rfind('/').map_or(0, |slash| slash + 1);
    let (name, tag) = match rest[at..].split_once(':') {
        Some((last, tag)) => (&rest[..at + last.len()], Some(tag)),
        None => (rest, None),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return Err(NotAReference::Tag);
    }
    let (host, path) = match name.split_once('/') {
        Some((first, path)) if first.contains(['.', ':']) || first == "localhost" => (Some(first), path),
        _ => (None, name),
    };
    if host.is_some_and(|host| !is_host(host)) {
        return Err(NotAReference::Registry);
    }
    if name.len() > NAME_MAX || !path.split('/').all(is_component) {
        return Err(NotAReference::Path);
    }
    Ok(Reference { host, path })
}

/// Returns an image's name as written, without tag and digest.
#[must_use]
pub fn repository(image: &str) -> &str {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    let at = name.rfind('/').map_or(0, |slash| slash + 1);
    let tag = name[at..].find(':').map_or(name.len(), |colon| at + colon);
    &name[..tag]
}

/// Returns an image's name with its registry, without tag and digest: `busybox` is
/// `docker.io/library/busybox`.
#[must_use]
pub fn normalized(image: &str) -> String {
    let repository = repository(image);
    match repository.split_once('/') {
        Some(("index.docker.io", path)) => format!("docker.io/{path}"),
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => repository.to_owned(),
        Some(_) => format!("docker.io/{repository}"),
        None => format!("docker.io/library/{repository}"),
    }
}

/// Returns an image's full name, as runtimes store it: with docker's registry if the name has none, and with
/// a tag.
///
/// # Errors
/// The name is invalid.
pub fn whole(image: &str) -> Result<String, NotAReference> {
    let parsed = parse(image)?;
    let rest = image.strip_prefix(parsed.host.unwrap_or_default()).unwrap_or(image).trim_start_matches('/');
    let host = parsed.host.unwrap_or("docker.io");
    let library = if host == "docker.io" && !parsed.path.contains('/') { "library/" } else { "" };
    let has_tag = rest.len() > parsed.path.len();
    let tag = if has_tag { "" } else { ":latest" };
    Ok(format!("{host}/{library}{rest}{tag}"))
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`
fn is_component(part: &str) -> bool {
    let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = part.as_bytes();
    let ends = bytes.first().is_some_and(&alphanumeric) && bytes.last().is_some_and(alphanumeric);
    let separators = part.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    ends && separators
        .filter(|separator| !separator.is_empty())
        .all(|separator| matches!(separator, "." | "_" | "__") || separator.bytes().all(|b| b == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= TAG_MAX
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}

fn is_digest(digest: &str) -> bool {
    let Some((algorithm, hex)) = digest.split_once(':') else { return false };
    let known = match algorithm {
        "sha256" => hex.len() == 64,
        "sha384" => hex.len() == 96,
        "sha512" => hex.len() == 128,
        _ => hex.len() >= 32 && !algorithm.is_empty(),
    };
    known && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn is_host(host: &str) -> bool {
    if let Some(v6) = host.strip_prefix('[') {
        let Some((address, port)) = v6.split_once(']') else { return false };
        let port = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        return port && address.parse::<std::net::Ipv6Addr>().is_ok();
    }
    let (name, port) = match host.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (host, None),
    };
    let label = |label: &str| {
        let inner = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.split('.').all(label) && port.is_none_or(is_port)
}

fn is_port(port: &str) -> bool {
    !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_name_has_a_registry_and_a_tag() {
        let digest = format!("sha256:{}", "0".repeat(64));
        let check = |name: &str, expected: &str| assert_eq!(whole(name).unwrap(), expected, "{name}");
        check("nginx", "docker.io/library/nginx:latest");
        check("nginx:1.27", "docker.io/library/nginx:1.27");
        check("user/app", "docker.io/user/app:latest");
        check("docker.io/nginx:1", "docker.io/library/nginx:1");
        check("localhost/app:1", "localhost/app:1");
        check("localhost:5000/a/b", "localhost:5000/a/b:latest");
        check(&format!("redis@{digest}"), &format!("docker.io/library/redis@{digest}"));
        assert!(whole("Nginx").is_err() && whole("").is_err());
    }

    #[test]
    fn names_as_people_write_them() {
        let digest = format!("sha256:{}", "0".repeat(64));
        let check = |image: &str, host: Option<&str>, path: &str| {
            assert_eq!(parse(image), Ok(Reference { host, path }), "{image}");
        };
        check("busybox", None, "busybox");
        check("busybox:1.36", None, "busybox");
        check("me/app:V1_x-2", None, "me/app");
        check("localhost/beelet/app:1", Some("localhost"), "beelet/app");
        check("registry.k8s.io/pause:3.9", Some("registry.k8s.io"), "pause");
        check("localhost:5000/app", Some("localhost:5000"), "app");
        check("[::1]:5000/app", Some("[::1]:5000"), "app");
        check(&format!("a.b/c__d/e--f@{digest}"), Some("a.b"), "c__d/e--f");
        check(&format!("app:1@{digest}"), None, "app");
    }

    #[test]
    fn repositories_are_names_without_tag_and_digest() {
        let check = |image: &str, expected: &str, with_registry: &str| {
            assert_eq!((repository(image), normalized(image).as_str()), (expected, with_registry), "{image}");
        };
        check("busybox", "busybox", "docker.io/library/busybox");
        check("busybox:1@sha256:12", "busybox", "docker.io/library/busybox");
        check("me/app:1", "me/app", "docker.io/me/app");
        check("localhost:5000/app", "localhost:5000/app", "localhost:5000/app");
        check("registry.test:5000/a/b:1", "registry.test:5000/a/b", "registry.test:5000/a/b");
        check("index.docker.io/me/app", "index.docker.io/me/app", "docker.io/me/app");
    }

    #[test]
    fn invalid_names_are_refused() {
        let check = |image: &str, part: &str| {
            let error = parse(image).unwrap_err().to_string();
            assert!(error.contains(part), "{image}: {error}");
        };
        check("Busybox", "no capital letters");
        check("", "has an invalid path");
        check("a//b", "has an invalid path");
        check("/app", "has an invalid path");
        check("app/", "has an invalid path");
        check("a___b", "has an invalid path");
        check("a._b", "has an invalid path");
        check("app:", "has an invalid tag");
        check("app:.x", "has an invalid tag");
        check(&format!("app:{}", "x".repeat(129)), "has an invalid tag");
        check("app@sha256:12", "has an invalid digest");
        check("app@", "has an invalid digest");
        check("a..b.c/app", "has an invalid registry");
        check("host:port/app", "has an invalid registry");
        check(&format!("a/{}", "b".repeat(254)), "has an invalid path");
    }
}
