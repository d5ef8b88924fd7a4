//! What is said of the server's confinement. How it comes about is told in [`crate::parting`].

use atoll_confine::server::Layer;

use crate::output::{Error, Result};

/// All of them, or none of the server.
pub(crate) fn insist(layers: Vec<Layer>) -> Result<Vec<Layer>> {
    match layers.iter().find_map(|layer| Some((layer.what, layer.stands.as_ref().err()?))) {
        None => Ok(layers),
        Some((what, why)) => Err(Error::new(format!(
            "the server cannot be confined as `confine = \"required\"` asks ({what}): {why}"
        ))
        .hint("set `confine = \"on\"` to go on with what this machine can, or see `atoll doctor`")),
    }
}

/// Says what is confined and what is not.
pub(crate) fn tell(layers: &[Layer]) {
    if layers.is_empty() {
        tracing::warn!("this server is not confined, as its configuration says");
    }
    for Layer { what, stands } in layers {
        match stands {
            Ok(how) => tracing::info!(layer = what, %how, "confined"),
            Err(why) => tracing::warn!(layer = what, %why, "not confined"),
        }
    }
}
