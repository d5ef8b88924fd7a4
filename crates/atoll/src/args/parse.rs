//! Values as people write them on a command line.

use atoll_types::PortRange;

/// Cores to thousandths of a core.
pub(crate) fn parse_cpu(text: &str) -> Result<u32, String> {
    let cores: f64 = text
        .trim()
        .parse()
        .map_err(|_| format!("`{text}` is not a number of cores; write for example 0.5 or 2"))?;
    if !(0.001..=1024.0).contains(&cores) {
        return Err(format!("`{text}` is not a sensible number of cores"));
    }
    Ok((cores * 1000.0).round() as u32)
}

/// `90s`, `10m`, `1h30m`, `500ms`, `7d` to milliseconds. A bare number is seconds.
pub(crate) fn parse_duration(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is not a time; write for example 90s, 10m, 1h30m or 7d");
    let mut rest = text.trim();
    if let Ok(seconds) = rest.parse::<u64>() {
        return seconds.checked_mul(1000).ok_or_else(bad);
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let scale = match &rest[..letters] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        rest = &rest[letters..];
        total = number
            .checked_mul(scale)
            .and_then(|part| total.checked_add(part))
            .ok_or_else(bad)?;
    }
    if text.trim().is_empty() {
        Err(bad())
    } else {
        Ok(total)
    }
}

pub(crate) fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not of the form NAME=VALUE")),
    }
}

/// A volume and where a sandbox sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) volume: String,
    pub(crate) path: String,
    pub(crate) read_only: bool,
}

/// `NAME:/path`, or `NAME:/path:ro`.
pub(crate) fn parse_mount(text: &str) -> Result<Mount, String> {
    let bad = || format!("`{text}` is not of the form NAME:/path or NAME:/path:ro");
    let (volume, rest) = text.split_once(':').ok_or_else(bad)?;
    let (path, read_only) = match rest.rsplit_once(':') {
        Some((path, "ro")) => (path, true),
        Some((path, "rw")) => (path, false),
        _ => (rest, false),
    };
    if volume.contains('/') {
        return Err(format!(
            "`{volume}` is no name of a volume; make one of a directory with `atoll volume create NAME --from {volume} --read-only`"
        ));
    }
    if volume.is_empty() || !path.starts_with('/') {
        return Err(bad());
    }
    Ok(Mount {
        volume: volume.to_owned(),
        path: path.to_owned(),
        read_only,
    })
}

/// What a sandbox may or may not reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) to: String,
    /// None: what the server takes for granted.
    pub(crate) ports: Vec<PortRange>,
}

/// `HOST` or `HOST:PORTS`, ports such as `443` or `443,8000-8100`. An IPv6 address with ports stands in brackets.
pub(crate) fn parse_target(text: &str) -> Result<Target, String> {
    let bad = || {
        format!(
            "`{text}` is not of the form HOST or HOST:PORTS; write for example pypi.org, 10.0.0.0/8:5432 or [2001:db8::/32]:443"
        )
    };
    let (to, ports) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']').ok_or_else(bad)? {
            (to, "") => (to, None),
            (to, ports) => (to, Some(ports.strip_prefix(':').ok_or_else(bad)?)),
        },
        // More than one colon: an IPv6 address.
        None if text.matches(':').count() > 1 => (text, None),
        None => text
            .split_once(':')
            .map_or((text, None), |(to, ports)| (to, Some(ports))),
    };
    if to.is_empty() || to.contains(['[', ']']) {
        return Err(bad());
    }
    Ok(Target {
        to: to.to_owned(),
        ports: ports
            .map(|ports| ports.split(',').map(str::parse).collect())
            .transpose()?
            .unwrap_or_default(),
    })
}

/// A secret that a sandbox may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SecretGiven {
    pub(crate) name: String,
    /// The variable for its placeholder.
    pub(crate) variable: Option<String>,
}

/// `NAME` or `NAME=VARIABLE`.
pub(crate) fn parse_secret_use(text: &str) -> Result<SecretGiven, String> {
    let (name, variable) = text
        .split_once('=')
        .map_or((text, None), |(name, variable)| (name, Some(variable)));
    if name.is_empty() || variable == Some("") {
        return Err("not of the form NAME or NAME=VARIABLE, where NAME is that of a secret".into());
    }
    Ok(SecretGiven {
        name: name.to_owned(),
        variable: variable.map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, millis) in [
            ("90s", 90_000),
            ("10m", 600_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("7d", 604_800_000),
            ("5", 5000),
        ] {
            assert_eq!(parse_duration(text), Ok(millis), "{text}");
        }
        for text in ["", "m", "1x", "-5s", "1h30", "99999999999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cores_are_read() {
        assert_eq!(parse_cpu("0.5"), Ok(500));
        assert_eq!(parse_cpu("2"), Ok(2000));
        assert!(parse_cpu("0").is_err());
        assert!(parse_cpu("NaN").is_err());
    }

    #[test]
    fn targets_are_read() {
        let target = |to: &str, ports: &[&str]| Target {
            to: to.into(),
            ports: ports.iter().map(|ports| ports.parse().unwrap()).collect(),
        };
        for (text, expected) in [
            ("pypi.org", target("pypi.org", &[])),
            ("*.pypi.org:443", target("*.pypi.org", &["443"])),
            (
                "a.example:443,8000-8100",
                target("a.example", &["443", "8000-8100"]),
            ),
            ("10.0.0.0/8:5432", target("10.0.0.0/8", &["5432"])),
            ("2001:db8::/32", target("2001:db8::/32", &[])),
            ("[2001:db8::/32]", target("2001:db8::/32", &[])),
            ("[2001:db8::1]:443", target("2001:db8::1", &["443"])),
        ] {
            assert_eq!(parse_target(text), Ok(expected), "{text}");
        }
        for text in [
            "",
            ":443",
            "a.example:",
            "a.example:https",
            "a.example:0",
            "[::1",
            "[::1]443",
            "[]:1",
        ] {
            assert!(parse_target(text).is_err(), "{text}");
        }
    }

    #[test]
    fn uses_of_secrets_are_read() {
        let given = |name: &str, variable: Option<&str>| SecretGiven {
            name: name.into(),
            variable: variable.map(str::to_owned),
        };
        assert_eq!(parse_secret_use("github"), Ok(given("github", None)));
        assert_eq!(
            parse_secret_use("github=TOKEN"),
            Ok(given("github", Some("TOKEN")))
        );
        for text in ["", "=TOKEN", "github="] {
            assert!(parse_secret_use(text).is_err(), "{text}");
        }
    }

    #[test]
    fn mounts_are_read() {
        let mount = |path: &str, read_only| Mount {
            volume: "data".into(),
            path: path.into(),
            read_only,
        };
        assert_eq!(parse_mount("data:/work"), Ok(mount("/work", false)));
        assert_eq!(parse_mount("data:/work:rw"), Ok(mount("/work", false)));
        assert_eq!(parse_mount("data:/work:ro"), Ok(mount("/work", true)));
        assert_eq!(parse_mount("data:/a:b"), Ok(mount("/a:b", false)));
        for text in ["data", "data:work", ":/work", "data:", "./host:/work"] {
            assert!(parse_mount(text).is_err(), "{text}");
        }
    }
}
