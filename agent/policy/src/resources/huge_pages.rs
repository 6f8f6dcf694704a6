//! Huge pages: the names of their sizes, and the page size of a volume (`v1helper`, `getPageSizeMountOption`
//! of the kubelet).

use k8s_openapi::api::core::v1::Pod;

use beelet_units::quantity::Quantity;

/// Prefix of their resources' names.
pub const PREFIX: &str = "hugepages-";
/// The medium of an emptyDir with pages of the size that the pod requests.
const MEDIUM: &str = "HugePages";

/// Returns the page size in bytes from a resource's name (`hugepages-2Mi`).
#[must_use]
pub fn size_of_resource(name: &str) -> Option<i64> {
    size(name.strip_prefix(PREFIX)?)
}

fn size(text: &str) -> Option<i64> {
    Quantity::parse(text).ok().map(Quantity::value).filter(|bytes| *bytes > 0)
}

/// Formats a size as in the kernel's files and CRI: `2MB`, `1GB`.
#[must_use]
pub fn unit_name(bytes: i64) -> String {
    let units = [(1_i64 << 40, "TB"), (1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")];
    match units.iter().find(|(unit, _)| bytes % unit == 0) {
        Some((unit, name)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

/// The huge pages of an emptyDir's medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// Pages of the size that the pod requests.
    OfPod,
    /// Pages of this many bytes.
    Of(i64),
}

impl Medium {
    /// Parses a medium; `None` if it does not stand for huge pages.
    #[must_use]
    pub fn parse(medium: &str) -> Option<Self> {
        match medium.strip_prefix(MEDIUM)? {
            "" => Some(Self::OfPod),
            rest => size(rest.strip_prefix('-')?).map(Self::Of),
        }
    }
}

/// A reason why a volume of huge pages cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageSizeError {
    /// The pod requests several sizes, and the medium names none.
    #[error(
        "medium `HugePages` is ambiguous, as containers request several sizes of huge pages: name the size"
    )]
    Several,
    /// No container requests pages of this size.
    #[error("the volume needs huge pages, but no container requests any of that size")]
    None,
}

/// Returns the size of a volume's pages, in bytes: that of the pod's requests.
///
/// # Errors
/// No container requests huge pages, or they request several sizes and the medium names none.
pub fn page_size(medium: Medium, pod: &Pod) -> Result<i64, PageSizeError> {
    let spec = pod.spec.as_ref();
    let containers =
        spec.into_iter().flat_map(|s| s.containers.iter().chain(s.init_containers.iter().flatten()));
    let of_pod = spec.and_then(|spec| spec.resources.as_ref());
    // Limits and requests are equal, and a request may be given as a limit alone.
    let lists = of_pod.into_iter().chain(containers.filter_map(|container| container.resources.as_ref()));
    let names = lists.flat_map(|list| list.requests.iter().chain(&list.limits)).flat_map(|list| list.keys());
    let mut found = None;
    for bytes in names.filter_map(|name| size_of_resource(name)) {
        match medium {
            Medium::Of(wanted) if bytes != wanted => {}
            Medium::OfPod if found.is_some_and(|other| other != bytes) => return Err(PageSizeError::Several),
            _ => found = Some(bytes),
        }
    }
    found.ok_or(PageSizeError::None)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sizes_have_the_kernels_names() {
        let check = |bytes: i64, expected: &str| assert_eq!(unit_name(bytes), expected);
        check(2 << 20, "2MB");
        check(1 << 30, "1GB");
        check(64 << 10, "64KB");
        check(512 << 20, "512MB");
        assert_eq!(size_of_resource("hugepages-2Mi"), Some(2 << 20));
        assert_eq!(size_of_resource("memory"), None);
        assert_eq!(size_of_resource("hugepages-much"), None);
    }

    #[test]
    fn a_volumes_pages_are_those_that_the_pod_asks_for() {
        let check = |medium: &str, lists: &[&str], expected: Result<i64, PageSizeError>| {
            let container = |name: &&str| json!({"name": "c", "resources": {"requests": {(*name): "1Gi"}}});
            let containers: Vec<_> = lists.iter().map(container).collect();
            let pod: Pod = serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap();
            assert_eq!(page_size(Medium::parse(medium).unwrap(), &pod), expected, "{medium} {lists:?}");
        };
        check("HugePages", &["hugepages-2Mi"], Ok(2 << 20));
        check("HugePages", &["memory", "hugepages-1Gi", "hugepages-1Gi"], Ok(1 << 30));
        check("HugePages", &["hugepages-2Mi", "hugepages-1Gi"], Err(PageSizeError::Several));
        check("HugePages-2Mi", &["hugepages-1Gi", "hugepages-2Mi"], Ok(2 << 20));
        check("HugePages-2Mi", &["hugepages-1Gi"], Err(PageSizeError::None));
        check("HugePages", &["memory"], Err(PageSizeError::None));
        for other in ["", "Memory", "HugePages-", "HugePages-x", "HugePagesX"] {
            assert_eq!(Medium::parse(other), None, "{other}");
        }
    }
}
