//! The calls of CRI (and of containerd's store of images) that the agent makes, by name: in metrics as the
//! kubelet names them, in errors as a person would.

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

macro_rules! operations {
    ($($name:ident, $metric:literal, $phrase:literal, $read:literal;)*) => {
        /// A call of the container runtime interface.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Operation {
            $(#[doc = concat!("To ", $phrase, ".")] $name,)*
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &[Operation] = &[$(Operation::$name),*];

            /// Its name in metrics: the kubelet's `operation_type`.
            #[must_use]
            pub fn metric(self) -> &'static str {
                match self { $(Operation::$name => $metric,)* }
            }

            /// The call in words that a subject can follow.
            pub(crate) fn phrase(self) -> &'static str {
                match self { $(Operation::$name => $phrase,)* }
            }

            /// Returns true if it only looks, so that asking twice is as good as once.
            pub(crate) fn is_read(self) -> bool {
                match self { $(Operation::$name => $read,)* }
            }
        }
    };
}

operations! {
    Version, "version", "ask the container runtime for its version", true;
    Status, "status", "ask the container runtime for its status", true;
    RuntimeConfig, "runtime_config", "ask the container runtime for its configuration", true;
    ImageFsInfo, "image_fs_info", "ask for the file systems that hold the images", true;
    ListSandboxes, "list_podsandbox", "list the pod sandboxes", true;
    SandboxStatus, "podsandbox_status", "read the status of", true;
    RunSandbox, "run_podsandbox", "run the sandbox of", false;
    StopSandbox, "stop_podsandbox", "stop", false;
    RemoveSandbox, "remove_podsandbox", "remove", false;
    ListContainers, "list_containers", "list the containers", true;
    ContainerStatus, "container_status", "read the status of", true;
    CreateContainer, "create_container", "create", false;
    StartContainer, "start_container", "start", false;
    StopContainer, "stop_container", "stop", false;
    RemoveContainer, "remove_container", "remove", false;
    ExecSync, "exec_sync", "run a command in", false;
    ContainerEvents, "container_events", "follow the container events", true;
    ListContainerStats, "list_container_stats", "ask what the containers use", true;
    UpdateContainer, "update_container", "change the resources of", false;
    ReopenContainerLog, "reopen_container_log", "make the runtime reopen the log of", false;
    Exec, "exec", "run a command in", false;
    Attach, "attach", "attach to", false;
    PortForward, "port_forward", "forward ports of", false;
    Checkpoint, "checkpoint_container", "checkpoint", false;
    ListImages, "list_images", "list the images", true;
    ImageStatus, "image_status", "look up", true;
    PullImage, "pull_image", "pull", false;
    RemoveImage, "remove_image", "remove", false;
    ImportImage, "import_image", "import", false;
    ExportImage, "export_image", "export", true;
}

impl EncodeLabelValue for Operation {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.metric().encode(encoder)
    }
}
