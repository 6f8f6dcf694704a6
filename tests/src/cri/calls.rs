//! The calls that a runtime gets, by name and with all they carry.

use beelet_proto::cri;
use tonic::Code;

macro_rules! calls {
    ($($op:ident($request:ident)),* $(,)?) => {
        /// A call of CRI, by name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Op {
            $(#[doc = concat!("`", stringify!($op), "`")] $op,)*
        }

        /// A call with what it asks for.
        #[allow(clippy::large_enum_variant)] // a few hundred at most, and tests match on them directly
        #[derive(Clone, Debug, PartialEq)]
        pub enum Asked {
            $(#[doc = concat!("`", stringify!($op), "`")] $op(cri::$request),)*
        }

        impl Op {
            /// All calls that there are.
            pub const ALL: &[Op] = &[$(Op::$op,)*];
        }

        impl Asked {
            /// The call's name.
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

/// A request with the call it belongs to: some calls share a request type.
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

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is still being worked on.
    Pending,
    /// It was answered, well or with an error.
    Answered(Code),
    /// The caller gave up, or the connection broke, before there was an answer.
    Dropped,
}

/// A call that came.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Its place among all calls, from 0.
    pub number: usize,
    /// What it asked for.
    pub asked: Asked,
    /// The deadline it came with (`grpc-timeout`), as written.
    pub timeout: Option<String>,
    /// The span that it belongs to (`traceparent`), as written.
    pub parent: Option<String>,
    /// How it ended.
    pub outcome: Outcome,
}

impl Call {
    /// The call's name.
    #[must_use]
    pub fn op(&self) -> Op {
        self.asked.op()
    }

    /// Returns true if it was answered without an error.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.outcome == Outcome::Answered(Code::Ok)
    }
}

/// The calls that change something.
pub const CHANGES: [Op; 7] = [
    Op::RunPodSandbox,
    Op::StopPodSandbox,
    Op::RemovePodSandbox,
    Op::CreateContainer,
    Op::StartContainer,
    Op::StopContainer,
    Op::RemoveContainer,
];
