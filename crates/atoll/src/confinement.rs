//! What is said of the server's confinement. How it comes about is told in [`crate::parting`].

use atoll_client::output::{Error, Result};
use atoll_confine::server::Layer;

/// All of them, or none of the server.
pub(crate) fn insist(layers: Vec<Layer>) -> Result<Vec<Layer>> {
    match layers
        .iter()
        .find_map(|layer| Some((layer.what, layer.stands.as_ref().err()?)))
    {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_insists_does_not_start_without_a_wall() {
        let stands = |stands| Layer {
            what: "Landlock",
            stands,
        };
        let whole = vec![stands(Ok("sees little".into()))];
        assert_eq!(insist(whole.clone()).unwrap(), whole);
        let refused = insist(vec![stands(Err("this kernel has no Landlock".into()))]).unwrap_err();
        assert!(
            refused.to_string().contains("this kernel has no Landlock"),
            "{refused}"
        );
        assert!(refused.hint.is_some());
    }
}
