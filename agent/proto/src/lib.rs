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
