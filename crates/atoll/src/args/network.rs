//! What sandboxes may reach, and the secrets that are put into their requests on the way.

use std::path::PathBuf;

use atoll_types::{PortRange, parse_bytes};
use clap::{Args, Subcommand};

use super::parse::{SecretGiven, Target, parse_duration, parse_secret_use, parse_target};

/// A list rather than a type of its own, so that shells complete it. A test holds it complete.
const PRESETS: [&str; 3] = ["none", "package-registries", "all-public"];

/// What a new sandbox, or those of a template, may reach; what is not given is as the template says, else as the operator
/// does.
#[derive(Debug, Args, Clone, Default)]
pub(crate) struct ReachArgs {
    /// What it may reach: none, package-registries or all-public
    #[arg(long, value_parser = PRESETS, value_name = "PRESET", hide_possible_values = true, help_heading = "Network")]
    pub(crate) net: Option<String>,
    /// Also let it reach HOST[:PORTS]: a name, *.name, an address or a range of them; may be repeated
    #[arg(long, value_parser = parse_target, value_name = "HOST[:PORTS]", help_heading = "Network")]
    pub(crate) allow: Vec<Target>,
    /// Never let it reach HOST[:PORTS], whatever else is allowed; may be repeated
    #[arg(long, value_parser = parse_target, value_name = "HOST[:PORTS]", help_heading = "Network")]
    pub(crate) deny: Vec<Target>,
    /// A whole policy, as JSON, instead of the other options but secrets
    #[arg(long, value_name = "FILE", conflicts_with_all = ["net", "allow", "deny", "TrafficArgs"],
        help_heading = "Network")]
    pub(crate) net_policy: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) traffic: TrafficArgs,
}

/// How much may go through, where other options say to whom.
#[derive(Debug, Args, Clone, Copy, Default)]
pub(crate) struct TrafficArgs {
    /// Connections at once
    #[arg(long, value_name = "COUNT", help_heading = "Network")]
    pub(crate) max_connections: Option<u32>,
    /// Bytes per second in both directions together, e.g. 10M
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", help_heading = "Network")]
    pub(crate) max_bandwidth: Option<u64>,
    /// Bytes in its whole life, in both directions together, e.g. 1G
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE", help_heading = "Network")]
    pub(crate) max_traffic: Option<u64>,
}

/// What the RUN steps of a build may reach.
#[derive(Debug, Args, Clone, Default)]
pub(crate) struct BuildReachArgs {
    /// What RUN steps may reach while it is built: none, package-registries or all-public [default: none]
    #[arg(long, value_parser = PRESETS, value_name = "PRESET", hide_possible_values = true, requires = "dockerfile",
        help_heading = "Network")]
    pub(crate) build_net: Option<String>,
    /// Also let RUN steps reach HOST[:PORTS]; may be repeated
    #[arg(long, value_parser = parse_target, value_name = "HOST[:PORTS]", requires = "dockerfile",
        help_heading = "Network")]
    pub(crate) build_allow: Vec<Target>,
    /// A whole policy for RUN steps, as JSON, instead of the two above
    #[arg(long, value_name = "FILE", requires = "dockerfile", conflicts_with_all = ["build_net", "build_allow"],
        help_heading = "Network")]
    pub(crate) build_net_policy: Option<PathBuf>,
}

/// Show and change what a sandbox may reach, and what became of its attempts
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll net show sbx_k3…
  atoll net set sbx_k3… --preset package-registries --allow api.example.com
  atoll net log sbx_k3… --denied
  atoll net explain sbx_k3… https://pypi.org/simple/")]
pub(crate) enum NetCommand {
    /// Show what a sandbox may reach, and how much has gone through
    Show {
        /// Name or id of the sandbox, or a beginning of its id that is unique
        sandbox: String,
    },
    Set(NetSetArgs),
    Log(NetLogArgs),
    Explain(NetExplainArgs),
}

/// Set what a sandbox may reach from now on, instead of what it was before
///
/// It holds at once, and connections that are not allowed any more are cut. Nothing is allowed but what is said here.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll net set sbx_k3… --preset none                          # nothing at all
  atoll net set sbx_k3… --preset package-registries --deny crates.io
  atoll net set sbx_k3… --allow api.example.com --allow 10.1.0.0/16:5432 --secret example=API_KEY
  atoll net set sbx_k3… --preset all-public --max-connections 64 --max-bandwidth 10M --max-traffic 1G
  atoll net set sbx_k3… --file policy.json

A policy in a file can say more, such as methods and paths:
  {\"preset\": \"package-registries\",
   \"rules\": [{\"action\": \"allow\", \"to\": \"api.example.com\", \"methods\": [\"GET\"], \"paths\": [\"/v1/**\"]}],
   \"limits\": {\"connections\": 64, \"bytes_per_second\": 1000000, \"total_bytes\": 1000000000}}")]
pub(crate) struct NetSetArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    /// What it may reach: none, package-registries or all-public
    #[arg(long, value_parser = PRESETS, value_name = "PRESET", hide_possible_values = true,
        required_unless_present_any = ["allow", "deny", "file"])]
    pub(crate) preset: Option<String>,
    /// Also let it reach HOST[:PORTS]: a name, *.name, an address or a range of them; may be repeated
    #[arg(long, value_parser = parse_target, value_name = "HOST[:PORTS]")]
    pub(crate) allow: Vec<Target>,
    /// Never let it reach HOST[:PORTS], whatever else is allowed; may be repeated
    #[arg(long, value_parser = parse_target, value_name = "HOST[:PORTS]")]
    pub(crate) deny: Vec<Target>,
    /// A whole policy, as JSON, instead of the other options but secrets; `-` for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["preset", "allow", "deny", "TrafficArgs"])]
    pub(crate) file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) traffic: TrafficArgs,
    /// Let it use these secrets, instead of those before; may be repeated [default: as before]
    #[arg(long, value_parser = parse_secret_use, value_name = "NAME[=VARIABLE]")]
    pub(crate) secret: Vec<SecretGiven>,
    /// Let it use no secret any more
    #[arg(long, conflicts_with = "secret")]
    pub(crate) no_secrets: bool,
}

/// Show what became of a sandbox's attempts to reach something, and which rule decided
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll net log sbx_k3…
  atoll net log sbx_k3… --denied --follow")]
pub(crate) struct NetLogArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    /// Only what was refused
    #[arg(long)]
    pub(crate) denied: bool,
    /// Go on until interrupted
    #[arg(short, long)]
    pub(crate) follow: bool,
}

/// Say whether a sandbox may reach something, and why; nothing is sent
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll net explain sbx_k3… https://pypi.org/simple/
  atoll net explain sbx_k3… https://api.example.com/v1/users --method POST
  atoll net explain sbx_k3… db.example.com:5432
  atoll net explain sbx_k3… udp://192.0.2.1:123")]
pub(crate) struct NetExplainArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    /// A URL, a name or an address, with or without a port
    #[arg(value_name = "URL")]
    pub(crate) target: String,
    /// Method of the request [default: GET]
    #[arg(long)]
    pub(crate) method: Option<String>,
}

/// Keep secrets that sandboxes use without holding them
///
/// The server puts the value into requests to the hosts that it is bound to, where the sandbox may reach them. In the
/// sandbox there is nothing, or a placeholder. A value is read from standard input or a file, never from the command line,
/// and never shown again.
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll secret set github --host api.github.com --bearer < token
  atoll run --allow api.github.com --secret github -- curl -s https://api.github.com/user
  atoll secret rotate github --file new-token
  atoll secret list")]
pub(crate) enum SecretCommand {
    Set(SecretSetArgs),
    /// List secrets
    List,
    /// Show where a secret goes; its value is never shown
    #[command(alias = "show")]
    Inspect {
        /// Its name
        secret: String,
    },
    Rotate(SecretRotateArgs),
    /// Delete a secret; sandboxes that use it go on without it
    Delete {
        /// Its name
        secret: String,
    },
}

/// Keep a secret, or replace one of the same name
///
/// On a terminal it asks for the value without showing it. From a pipe or a file the line break at the end is dropped.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll secret set github --host api.github.com --bearer < token
  atoll secret set search --host '*.search.example' --header x-api-key --method GET --path '/v1/**'
  atoll secret set registry --host git.example.com --basic ci --file token --expires 1h
  atoll secret set model --host api.model.example --placeholder      # wherever the program puts it")]
pub(crate) struct SecretSetArgs {
    /// A name to use it by
    pub(crate) name: String,
    /// A host that it goes to, a name or *.name; may be repeated. It goes nowhere else
    #[arg(long, required = true, value_name = "HOST")]
    pub(crate) host: Vec<String>,
    /// Only on this port or range of ports; may be repeated [default: 443]
    #[arg(long, value_name = "PORTS")]
    pub(crate) port: Vec<PortRange>,
    /// Only in requests with this method; may be repeated
    #[arg(long, value_name = "METHOD")]
    pub(crate) method: Vec<String>,
    /// Only in requests to such a path: * is a part of a segment, ** any number of segments; may be repeated
    #[arg(long, value_name = "PATTERN")]
    pub(crate) path: Vec<String>,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
    /// Also over plain HTTP, where everybody on the way can read it
    #[arg(long)]
    pub(crate) plain_http: bool,
    /// Blot out echoes of it in the bodies of answers, too
    #[arg(long)]
    pub(crate) redact: bool,
    #[command(flatten)]
    pub(crate) value: ValueArgs,
}

const SHAPE: &str = "How it is put into a request, one of";

/// The shape in which it is put into a request.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ShapeArgs {
    /// As this header
    #[arg(long, value_name = "NAME", help_heading = SHAPE)]
    pub(crate) header: Option<String>,
    /// As `Authorization: Bearer`
    #[arg(long, help_heading = SHAPE)]
    pub(crate) bearer: bool,
    /// As the password of this user, in `Authorization: Basic`
    #[arg(long, value_name = "USER", help_heading = SHAPE)]
    pub(crate) basic: Option<String>,
    /// As this parameter of the query
    #[arg(long, value_name = "NAME", help_heading = SHAPE)]
    pub(crate) query: Option<String>,
    /// Wherever the program in the sandbox put the placeholder
    #[arg(long, help_heading = SHAPE)]
    pub(crate) placeholder: bool,
}

/// Replace the value of a secret; sandboxes that run use the new one from their next request on, and requests that are open
/// with the old one are cut
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll secret rotate github < token
  atoll secret rotate github --file token --expires 1h")]
pub(crate) struct SecretRotateArgs {
    /// Its name
    #[arg(value_name = "SECRET")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) value: ValueArgs,
}

/// Where the value of a secret comes from, and how long it is good.
#[derive(Debug, Args)]
pub(crate) struct ValueArgs {
    /// Read the value from this file [default: standard input]
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// It is not used any more after this long, e.g. 1h [default: no end]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub(crate) expires: Option<u64>,
}

#[cfg(test)]
mod tests {
    use atoll_types::Preset;

    use super::*;

    #[test]
    fn every_preset_can_be_named() {
        assert_eq!(PRESETS, Preset::ALL.map(Preset::name));
    }
}
