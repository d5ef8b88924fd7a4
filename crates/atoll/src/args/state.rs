//! State that survives: rest and return, copies, snapshots, volumes, garbage.

use std::path::PathBuf;

use atoll_types::parse_bytes;
use clap::{Args, Subcommand};

use super::parse::{parse_duration, parse_pair};

/// How much is kept, where a command leaves that open.
#[derive(Debug, Args, Clone, Copy, Default)]
pub(crate) struct KindArgs {
    /// Keep memory and files, so that processes go on; refused where the isolation cannot
    #[arg(long, conflicts_with = "filesystem")]
    pub(crate) memory: bool,
    /// Keep files only; processes start anew
    #[arg(long)]
    pub(crate) filesystem: bool,
}

impl KindArgs {
    /// As the API names it. `None`: as much as can be kept.
    pub(crate) fn name(self) -> Option<&'static str> {
        match (self.memory, self.filesystem) {
            (true, _) => Some("memory"),
            (_, true) => Some("filesystem"),
            _ => None,
        }
    }
}

/// Put a sandbox to rest, to go on later where it was
///
/// Processes, open files, listening servers and interpreters are kept as they are, where the isolation can (gvisor);
/// else its files are. It then holds no memory and no CPU, and stays until it is resumed or killed.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll pause sbx_k3…
  atoll pause sbx_k3… --memory        # or not at all
  atoll resume sbx_k3…")]
pub(crate) struct PauseArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    #[command(flatten)]
    pub(crate) kind: KindArgs,
}

/// Let a paused sandbox go on
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll resume sbx_k3…
  atoll resume sbx_k3… --timeout 1h")]
pub(crate) struct ResumeArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    /// Its new lifetime, from now [default: what was left when it went to rest]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub(crate) timeout: Option<u64>,
}

/// End the processes of a sandbox and keep its files
#[derive(Debug, Args)]
#[command(after_help = "Example: atoll stop sbx_k3…")]
pub(crate) struct StopArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
}

/// Start a stopped sandbox on its files
#[derive(Debug, Args)]
#[command(after_help = "Example: atoll start sbx_k3… --timeout 1h")]
pub(crate) struct StartArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    /// Its new lifetime, from now [default: what was left when it went to rest]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub(crate) timeout: Option<u64>,
}

/// Make running copies of a running sandbox and print their ids
///
/// Each copy goes on from this very moment, under an identity of its own; the original goes on too. All are made, or
/// none.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll fork sbx_k3…
  atoll fork sbx_k3… -n 8 --timeout 10m --label try=7
  atoll fork sbx_k3… --filesystem     # copies of the files; processes start anew")]
pub(crate) struct ForkArgs {
    /// Name or id of the sandbox, or a beginning of its id that is unique
    pub(crate) sandbox: String,
    /// How many
    #[arg(short = 'n', long, default_value_t = 1, value_name = "COUNT",
        value_parser = clap::value_parser!(u64).range(1..=64))]
    pub(crate) count: u64,
    /// Copy the files only; processes start anew
    #[arg(long)]
    pub(crate) filesystem: bool,
    /// Lifetime of the copies, from now [default: as the original was created with]
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub(crate) timeout: Option<u64>,
    /// A label for the copies, next to those of the original; may be repeated
    #[arg(short, long, value_parser = parse_pair, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,
}

/// Take, list and move snapshots of sandboxes
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll snapshot create sbx_k3… --name trained
  atoll create --template trained          # goes on from there, as often as you like
  atoll snapshot export trained trained.atoll")]
pub(crate) enum SnapshotCommand {
    /// Take a snapshot of a sandbox, which goes on, and print its id
    Create {
        /// Name or id of the sandbox, or a beginning of its id that is unique
        sandbox: String,
        /// A name to find it by
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        kind: KindArgs,
    },
    /// List snapshots
    List,
    /// Show everything about a snapshot
    Inspect {
        /// Name or id
        snapshot: String,
    },
    /// Delete a snapshot; sandboxes made of it go on
    Delete {
        /// Name or id
        snapshot: String,
    },
    /// Write a snapshot to one file
    Export {
        /// Name or id
        snapshot: String,
        /// Where to write it; `-` for standard output
        file: PathBuf,
    },
    /// Take in a file that an export wrote, here or elsewhere
    Import {
        /// The file; `-` for standard input
        file: PathBuf,
        /// Instead of the name that is in the file
        #[arg(long)]
        name: Option<String>,
    },
}

/// Create, fill and attach storage that outlives sandboxes
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll volume create data --size 1G
  atoll volume create inputs --from ./inputs --read-only
  atoll run --volume data:/data --volume inputs:/inputs:ro -- ls /inputs
  atoll volume export data data.tar")]
pub(crate) enum VolumeCommand {
    /// Create a volume
    #[command(after_help = "\
Examples:
  atoll volume create data --size 1G                       # empty
  atoll volume create data --size 1G --from ./seed         # filled
  atoll volume create inputs --from ./inputs --read-only   # sealed: sandboxes can only read it")]
    Create {
        /// A name to attach it by
        name: String,
        /// The most it may hold, e.g. 1G
        #[arg(long, value_parser = parse_bytes, value_name = "SIZE", required_unless_present = "read_only",
            conflicts_with = "read_only")]
        size: Option<u64>,
        /// Fill it with a directory, or with a tar file
        #[arg(long, value_name = "PATH")]
        from: Option<PathBuf>,
        /// Seal it: its content never changes, and any number of sandboxes may read it
        #[arg(long, requires = "from")]
        read_only: bool,
    },
    /// List volumes
    List,
    /// Show everything about a volume
    Inspect {
        /// Name or id
        volume: String,
    },
    /// Delete a volume with all it holds
    Delete {
        /// Name or id
        volume: String,
    },
    /// Copy everything out: into a directory, or into a tar file
    Export {
        /// Name or id
        volume: String,
        /// A directory that exists or ends in /, else a tar file; `-` for standard output
        to: PathBuf,
    },
    /// Copy a directory, or what is in a tar file, into a volume
    Import {
        /// Name or id
        volume: String,
        /// A directory or a tar file; `-` for a tar stream from standard input
        from: PathBuf,
    },
}

/// Free disk space that nothing refers to any more
///
/// The server does so by itself soon after something is deleted. This asks for it now, and says what there was.
#[derive(Debug, Args)]
#[command(after_help = "Example: atoll gc --dry-run")]
pub(crate) struct GcArgs {
    /// Only say what would go
    #[arg(long)]
    pub(crate) dry_run: bool,
}
