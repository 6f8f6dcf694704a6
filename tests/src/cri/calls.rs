//! Calls to a runtime, by name and with their contents.

use beelet_proto::cri;
use tonic::Code;

macro_rules! calls {
    ($($op:ident($request:ident)),* $(,)?) => {
        /// Call of CRI, by name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Op {
            $(#[doc = concat!("`", stringify!($op), "`")] $op,)*
        }

        /// Call with its request.
        #[allow(clippy::large_enum_variant)] // a few hundred at most, and tests match on them directly
        #[derive(Clone, Debug, PartialEq)]
        pub enum Asked {
            $(#[doc = concat!("`", stringify!($op), "`")] $op(cri::$request),)*
        }

        impl Op {
            /// All calls.
            pub const ALL: &[Op] = &[$(Op::$op,)*];
        }

        impl Asked {
            /// Returns the name of the call.
            #[must_use]
            pub fn op(&self) -> Op {
                match self { $(Asked::$op(_) => Op::$op,)* }
            }
        }

        $(impl From<Wrapped<{ Op::$op as u8 }, cri::$request>> for Asked {
            fn from(wrapped: Wrapped<{ Op::$op as u8 }, cri::$request>) -> Self {
                Asked::$op(wrapped.0)
            }
        })*
    };
}

/// Request with its call: some calls share a request type.
pub(super) struct Wrapped<const OP: u8, Q>(pub(super) Q);

calls! {
    Version(VersionRequest),
    Status(StatusRequest),
    RuntimeConfig(RuntimeConfigRequest),
    UpdateRuntimeConfig(UpdateRuntimeConfigRequest),
    RunPodSandbox(RunPodSandboxRequest),
    StopPodSandbox(StopPodSandboxRequest),
    RemovePodSandbox(RemovePodSandboxRequest),
    PodSandboxStatus(PodSandboxStatusRequest),
    ListPodSandbox(ListPodSandboxRequest),
    CreateContainer(CreateContainerRequest),
    StartContainer(StartContainerRequest),
    StopContainer(StopContainerRequest),
    RemoveContainer(RemoveContainerRequest),
    ListContainers(ListContainersRequest),
    ContainerStatus(ContainerStatusRequest),
    UpdateContainerResources(UpdateContainerResourcesRequest),
    ReopenContainerLog(ReopenContainerLogRequest),
    ExecSync(ExecSyncRequest),
    Exec(ExecRequest),
    Attach(AttachRequest),
    PortForward(PortForwardRequest),
    ContainerStats(ContainerStatsRequest),
    ListContainerStats(ListContainerStatsRequest),
    PodSandboxStats(PodSandboxStatsRequest),
    ListPodSandboxStats(ListPodSandboxStatsRequest),
    CheckpointContainer(CheckpointContainerRequest),
    GetContainerEvents(GetEventsRequest),
    ListMetricDescriptors(ListMetricDescriptorsRequest),
    ListPodSandboxMetrics(ListPodSandboxMetricsRequest),
    ListImages(ListImagesRequest),
    ImageStatus(ImageStatusRequest),
    PullImage(PullImageRequest),
    RemoveImage(RemoveImageRequest),
    ImageFsInfo(ImageFsInfoRequest),
}

/// Result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The call is in progress.
    Pending,
    /// The call was answered, successfully or with an error.
    Answered(Code),
    /// The caller gave up, or the connection broke, before the answer.
    Dropped,
}

/// Received call.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Position among all calls, from 0.
    pub number: usize,
    /// Request of the call.
    pub asked: Asked,
    /// Deadline of the call (`grpc-timeout`), as written.
    pub timeout: Option<String>,
    /// Span of the call (`traceparent`), as written.
    pub parent: Option<String>,
    /// Result of the call.
    pub outcome: Outcome,
}

impl Call {
    /// Returns the name of the call.
    #[must_use]
    pub fn op(&self) -> Op {
        self.asked.op()
    }

    /// Returns true if the call was answered without an error.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.outcome == Outcome::Answered(Code::Ok)
    }
}

/// Calls that change state.
pub const CHANGES: [Op; 7] = [
    Op::RunPodSandbox,
    Op::StopPodSandbox,
    Op::RemovePodSandbox,
    Op::CreateContainer,
    Op::StartContainer,
    Op::StopContainer,
    Op::RemoveContainer,
];
