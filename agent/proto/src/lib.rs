//! The wire types of all protocols that beelet uses, generated from the files under `proto/`. Only the module
//! tree is written by hand.

/// The container runtime interface, CRI v1.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// The parts of the Container Storage Interface v1 that a node needs.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the specification
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// beelet's own API.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod beelet {
    tonic::include_proto!("beelet.v1");
}

/// containerd's API for content, images and leases, from the files of containerd 2.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod containerd {
    /// Types shared by the services.
    pub mod types {
        tonic::include_proto!("containerd.types");
    }

    /// The services.
    pub mod services {
        /// Blobs by digest.
        pub mod content {
            /// Version 1.
            pub mod v1 {
                tonic::include_proto!("containerd.services.content.v1");
            }
        }

        /// Image names.
        pub mod images {
            /// Version 1.
            pub mod v1 {
                tonic::include_proto!("containerd.services.images.v1");
            }
        }

        /// Leases, which protect content from garbage collection.
        pub mod leases {
            /// Version 1.
            pub mod v1 {
                tonic::include_proto!("containerd.services.leases.v1");
            }
        }
    }
}

/// The device plugin API v1beta1.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod deviceplugin {
    tonic::include_proto!("v1beta1");
}

/// The DRA plugin API by version.
pub mod dra {
    /// Health of devices, v1alpha1.
    #[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
    pub mod health {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra_health.v1alpha1");
    }

    /// DRA v1.
    #[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
    pub mod v1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }

    /// DRA v1beta1.
    #[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
    pub mod v1beta1 {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
    }
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

/// The pods API v1alpha1; the protobuf package has the same name.
pub use self::podresources_v1alpha1 as pods;

/// gRPC's health checking protocol.
#[allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all, unused_qualifications)] // generated, documented in the .proto file
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}
