//! Compiles the vendored .proto files with protox: no protoc on the user's machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "cri/api.proto",
        "beelet/beelet.proto",
        "beelet/devices.proto",
        "beelet/events.proto",
        "beelet/garbage.proto",
        "deviceplugin/api.proto",
        "pluginregistration/api.proto",
        "podresources/api.proto",
    ];
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
