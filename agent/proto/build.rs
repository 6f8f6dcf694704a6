//! Compiles the vendored .proto files with protox, so that builds need no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "cri/api.proto",
        "csi/csi.proto",
        "beelet/beelet.proto",
        "beelet/containers.proto",
        "beelet/devices.proto",
        "beelet/events.proto",
        "beelet/garbage.proto",
        "beelet/images.proto",
        "beelet/manifests.proto",
        "beelet/signals.proto",
        "beelet/tuner.proto",
        "deviceplugin/api.proto",
        "dra/health/v1alpha1.proto",
        "dra/v1/api.proto",
        "dra/v1beta1/api.proto",
        "github.com/containerd/containerd/api/services/content/v1/content.proto",
        "github.com/containerd/containerd/api/services/images/v1/images.proto",
        "github.com/containerd/containerd/api/services/leases/v1/leases.proto",
        "pluginregistration/api.proto",
        "podresources/api.proto",
        "podresources/v1alpha1/api.proto",
        "pods/api.proto",
        "beelet/probes.proto",
        "grpc/health/v1/health.proto",
    ];
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    // The pods API sends the same bytes to many clients.
    let mut builder = tonic_prost_build::configure().bytes(".v1alpha1");
    for message in SHOWN {
        builder = builder.type_attribute(message, "#[derive(serde::Serialize)]");
    }
    builder.compile_fds(descriptors)?;
    Ok(())
}

/// Types that `beelet top -o json` prints unchanged.
const SHOWN: [&str; 10] = [
    "beelet.v1.SignalSnapshot",
    "beelet.v1.SignalMachine",
    "beelet.v1.SignalPod",
    "beelet.v1.SignalContainer",
    "beelet.v1.SignalUsage",
    "beelet.v1.SignalRates",
    "beelet.v1.SignalWaitedFor",
    "beelet.v1.SignalHolder",
    "beelet.v1.SignalPinned",
    "beelet.v1.SignalDisturber",
];
