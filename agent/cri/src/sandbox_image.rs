//! The image that sandboxes are made of.

use beelet_proto::cri;

/// Returns the image that sandboxes are made of, from the runtime's own configuration: the verbose status of
/// containerd and CRI-O contains it. Newer runtimes also pin it.
#[must_use]
pub fn sandbox_image(status: &cri::StatusResponse) -> Option<String> {
    let config: serde_json::Value = serde_json::from_str(status.info.get("config")?).ok()?;
    let places = ["/sandboxImage", "/pinnedImages/sandbox", "/sandbox_image"];
    let image = places.iter().find_map(|place| config.pointer(place)?.as_str())?;
    Some(image.to_owned()).filter(|image| !image.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandbox_image_is_read_from_containerds_status() {
        let check = |config: &str, expect: Option<&str>| {
            let info = [("config".to_owned(), config.to_owned())].into();
            let status = cri::StatusResponse { info, ..Default::default() };
            assert_eq!(sandbox_image(&status).as_deref(), expect, "{config}");
        };
        check(r#"{"sandboxImage": "registry.k8s.io/pause:3.6"}"#, Some("registry.k8s.io/pause:3.6"));
        check(r#"{"pinnedImages": {"sandbox": "pause:3.10"}}"#, Some("pause:3.10"));
        check("{}", None);
        check("not json", None);
    }
}
