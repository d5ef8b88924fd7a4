//! Generates the server side of the gRPC services out of the descriptors that the message crate was compiled from, so that
//! messages and services cannot disagree and no `.proto` file lies here; and the table by which requests are weighed.

#[path = "build/shapes.rs"]
mod shapes;

use prost::Message as _;
use prost_types::FileDescriptorSet;

/// The services that are served, and the path under which their messages are compiled already.
const SERVICES: [&str; 2] = [
    "temporal/api/workflowservice/v1/service.proto",
    "temporal/api/operatorservice/v1/service.proto",
];
const HEALTH: &str = "health/v1/health.proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    let path = std::env::var("DEP_TEMPORALIO_PROTOS_DESCRIPTOR_PATH")?;
    let descriptors = FileDescriptorSet::decode(std::fs::read(path)?.as_slice())?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("shapes.rs"), shapes::table(&descriptors, &SERVICES)?)?;

    let only = |names: &[&str]| {
        let mut some = descriptors.clone();
        some.file
            .retain(|file| names.iter().any(|name| file.name().ends_with(name)));
        some
    };
    let mut services = only(&SERVICES);
    for file in &mut services.file {
        file.message_type.clear();
        file.enum_type.clear();
    }
    let configure = || {
        tonic_prost_build::configure()
            .build_client(false)
            .build_server(true)
            .generate_default_stubs(true)
    };
    configure()
        .extern_path(".temporal.api", "::temporalio_protos::temporal::api")
        .codec_path("crate::weighed::Codec")
        .compile_fds(services)?;
    configure().compile_fds(only(&[HEALTH]))?;
    Ok(())
}
