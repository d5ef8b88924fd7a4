//! How the server confines itself before it does anything else. What is taken away is told in `atoll_confine::server`.

use atoll_confine::server::{self, Layer};

use crate::config::{Config, Confine};
use crate::output::{Error, Result};

/// Takes away what no part of the server needs. Before there are threads.
pub(crate) fn shrink(config: &Config) -> Result<Vec<Layer>> {
    match config.confine {
        Confine::Off => Ok(Vec::new()),
        Confine::On => Ok(server::shrink()),
        Confine::Required => insist(server::shrink()),
    }
}

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
