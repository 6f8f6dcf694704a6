//! The wire types of every protocol beelet speaks, generated from the files under `proto/`.
//! Nothing here is written by hand but the module tree.

/// The container runtime interface, CRI v1.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// beelet's own API.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod beelet {
    tonic::include_proto!("beelet.v1");
}

/// The device plugin API v1beta1.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");
}

/// The plugin registration API v1.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod pluginregistration {
    tonic::include_proto!("pluginregistration");
}

/// The pod resources API v1.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod podresources {
    tonic::include_proto!("v1");
}

/// The pod resources API v1alpha1.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod podresources_v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

/// The pods API v1alpha1. Its package has the same name.
pub use self::podresources_v1alpha1 as pods;

/// gRPC's health checking protocol.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}
