//! One test, every tier.

use crate::server::{Options, Server};

/// A wall that this machine may offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Gvisor,
    Jail,
}

impl Tier {
    pub fn name(self) -> &'static str {
        match self {
            Self::Gvisor => "gvisor",
            Self::Jail => "jail",
        }
    }

    /// Whether hostile tenants may share a machine behind it.
    pub fn is_tenant_boundary(self) -> bool {
        self == Self::Gvisor
    }
}

/// Runs a test on a tier: starts a server whose sandboxes get that wall, runs the test, and asserts that nothing is left.
/// A machine without the tier skips it, and says so; unless `ATOLL_REQUIRE_TIERS` names it (`./test` names those that doctor
/// finds working), for then it is the tier that is broken.
pub async fn on(tier: Tier, options: Options, test: impl AsyncFnOnce(&mut Server)) {
    let mut server = Server::start(tier, options).await;
    if let Some(why) = server.missing_tier().await {
        let required = std::env::var("ATOLL_REQUIRE_TIERS").unwrap_or_default();
        skip(tier, &required, &why);
        return;
    }
    server.assert_has_base().await;
    test(&mut server).await;
    server.finish().await;
}

fn skip(tier: Tier, required: &str, why: &str) {
    let name = tier.name();
    assert!(
        !is_named(tier, required),
        "{name} must work here (ATOLL_REQUIRE_TIERS) and does not: {why}"
    );
    eprintln!("SKIPPED: this machine does not offer {name}: {why}");
}

/// Whether a list of tiers, with spaces or commas between them, has this one.
fn is_named(tier: Tier, list: &str) -> bool {
    list.split([' ', ',']).any(|name| name == tier.name())
}

/// Makes one test per tier of each function `async fn name(server: &Server)` that is named; `&mut` for those that restart
/// it.
///
/// ```ignore
/// on_every_tier!(a_file_is_replaced_as_a_whole);
/// on_every_tier!(with Options::default().config("…"); deadlines_hold);
/// ```
#[macro_export]
macro_rules! on_every_tier {
    (with $options:expr; $($name:ident),+ $(,)?) => {
        mod gvisor {
            $($crate::on_every_tier!(@one $name, Gvisor, $options);)+
        }
        mod jail {
            $($crate::on_every_tier!(@one $name, Jail, $options);)+
        }
    };
    (@one $name:ident, $tier:ident, $options:expr) => {
        #[tokio::test]
        async fn $name() {
            $crate::on($crate::Tier::$tier, $options, async |server: &mut $crate::Server| {
                super::$name(server).await;
            })
            .await;
        }
    };
    ($($name:ident),+ $(,)?) => {
        $crate::on_every_tier!(with $crate::Options::default(); $($name),+);
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_named_in_a_list() {
        assert!(is_named(Tier::Jail, "gvisor jail") && is_named(Tier::Gvisor, "gvisor,jail"));
        assert!(!is_named(Tier::Jail, "gvisor") && !is_named(Tier::Gvisor, ""));
    }

    #[test]
    #[should_panic(expected = "gvisor must work here")]
    fn a_tier_that_must_work_is_not_skipped() {
        skip(Tier::Gvisor, "gvisor", "it is broken");
    }
}
