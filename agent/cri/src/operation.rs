//! The calls of CRI (and of containerd's store of images) that the agent makes, with their names: metrics use
//! the kubelet's names, errors use plain words.

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// Returns the full name of a service from its name in the table.
macro_rules! service {
    (Runtime) => {
        "runtime.v1.RuntimeService/"
    };
    (Image) => {
        "runtime.v1.ImageService/"
    };
    (Transfer) => {
        "containerd.services.transfer.v1.Transfer/"
    };
}

macro_rules! operations {
    ($($name:ident, $metric:literal, $phrase:literal, $read:literal, $service:ident $method:ident;)*) => {
        /// A call of the container runtime interface.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Operation {
            $(#[doc = concat!("The call to ", $phrase, ".")] $name,)*
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &[Operation] = &[$(Operation::$name),*];

            /// Returns its name in metrics: the kubelet's `operation_type`.
            #[must_use]
            pub fn metric(self) -> &'static str {
                match self { $(Operation::$name => $metric,)* }
            }

            /// Returns its service and method, which name its spans.
            pub(crate) fn rpc(self) -> &'static str {
                match self { $(Operation::$name => concat!(service!($service), stringify!($method)),)* }
            }

            /// Returns the call in words that a subject can follow.
            pub(crate) fn phrase(self) -> &'static str {
                match self { $(Operation::$name => $phrase,)* }
            }

            /// Returns true if the call only reads, so repeating it is safe.
            pub(crate) fn is_read(self) -> bool {
                match self { $(Operation::$name => $read,)* }
            }
        }
    };
}

operations! {
    Version, "version", "ask the container runtime for its version", true, Runtime Version;
    Status, "status", "ask the container runtime for its status", true, Runtime Status;
    RuntimeConfig, "runtime_config", "ask the container runtime for its configuration", true,
        Runtime RuntimeConfig;
    UpdateRuntimeConfig, "update_runtime_config", "pass the addresses of pods to the container runtime", false,
        Runtime UpdateRuntimeConfig;
    ImageFsInfo, "image_fs_info", "ask for the file systems that hold the images", true, Image ImageFsInfo;
    ListSandboxes, "list_podsandbox", "list the pod sandboxes", true, Runtime ListPodSandbox;
    SandboxStatus, "podsandbox_status", "read the status of", true, Runtime PodSandboxStatus;
    RunSandbox, "run_podsandbox", "run the sandbox of", false, Runtime RunPodSandbox;
    StopSandbox, "stop_podsandbox", "stop", false, Runtime StopPodSandbox;
    RemoveSandbox, "remove_podsandbox", "remove", false, Runtime RemovePodSandbox;
    ListContainers, "list_containers", "list the containers", true, Runtime ListContainers;
    ContainerStatus, "container_status", "read the status of", true, Runtime ContainerStatus;
    CreateContainer, "create_container", "create", false, Runtime CreateContainer;
    StartContainer, "start_container", "start", false, Runtime StartContainer;
    StopContainer, "stop_container", "stop", false, Runtime StopContainer;
    RemoveContainer, "remove_container", "remove", false, Runtime RemoveContainer;
    ExecSync, "exec_sync", "run a command in", false, Runtime ExecSync;
    ContainerEvents, "container_events", "follow the container events", true, Runtime GetContainerEvents;
    ListContainerStats, "list_container_stats", "ask what the containers use", true,
        Runtime ListContainerStats;
    UpdateContainer, "update_container", "change the resources of", false, Runtime UpdateContainerResources;
    ReopenContainerLog, "reopen_container_log", "make the runtime reopen the log of", false,
        Runtime ReopenContainerLog;
    Exec, "exec", "run a command in", false, Runtime Exec;
    Attach, "attach", "attach to", false, Runtime Attach;
    PortForward, "port_forward", "forward ports of", false, Runtime PortForward;
    Checkpoint, "checkpoint_container", "checkpoint", false, Runtime CheckpointContainer;
    ListImages, "list_images", "list the images", true, Image ListImages;
    ImageStatus, "image_status", "look up", true, Image ImageStatus;
    PullImage, "pull_image", "pull", false, Image PullImage;
    RemoveImage, "remove_image", "remove", false, Image RemoveImage;
    ImportImage, "import_image", "import", false, Transfer Transfer;
    ExportImage, "export_image", "export", true, Transfer Transfer;
}

impl EncodeLabelValue for Operation {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.metric().encode(encoder)
    }
}
