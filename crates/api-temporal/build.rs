//! Generates the server side of the gRPC services out of the descriptors that the message crate was compiled from, so that
//! messages and services cannot disagree and no `.proto` file lies here.

use prost::Message as _;
use prost_types::FileDescriptorSet;

/// The services that are served, and the path under which their messages are compiled already.
const SERVICES: [&str; 3] = [
    "temporal/api/workflowservice/v1/service.proto",
    "temporal/api/operatorservice/v1/service.proto",
    "health/v1/health.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    let path = std::env::var("DEP_TEMPORALIO_PROTOS_DESCRIPTOR_PATH")?;
    let mut descriptors = FileDescriptorSet::decode(std::fs::read(path)?.as_slice())?;
    descriptors
        .file
        .retain(|file| SERVICES.iter().any(|service| file.name().ends_with(service)));
    for file in &mut descriptors.file {
        if file.package().starts_with("temporal.api.") {
            file.message_type.clear();
            file.enum_type.clear();
        }
    }
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(true)
        .generate_default_stubs(true)
        .extern_path(".temporal.api", "::temporalio_protos::temporal::api")
        .compile_fds(descriptors)?;
    Ok(())
}
