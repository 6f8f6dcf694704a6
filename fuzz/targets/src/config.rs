//! The target for a configuration's text.

use std::path::Path;

use beelet_config::load;

/// Tests a configuration: the printed configuration reads back as the same, without a warning.
pub fn config(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut config = match load::parse(Path::new("/config.yaml"), text) {
        Ok((config, _)) => config,
        Err(faults) => {
            assert!(!faults.errors.is_empty());
            assert!(!faults.to_string().contains("please report it as a bug"), "{faults}");
            return;
        }
    };
    let printed = config.effective();
    // Fields without an effect are not printed: each would cause a warning.
    config.unread.clear();
    match load::parse(Path::new("/effective.yaml"), &printed) {
        Ok((again, mut warnings)) => {
            assert_eq!(again, config, "{printed}");
            // A gate without an effect stays in the document, as in a kubelet's, and causes its warning
            // again.
            warnings.retain(|warning| !warning.field.starts_with("featureGates."));
            assert!(warnings.is_empty(), "{warnings:?}\n{printed}");
        }
        Err(error) => panic!("the printed configuration is invalid: {error}\n{printed}"),
    }
}
