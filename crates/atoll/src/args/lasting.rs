//! What outlives a sandbox: templates, artifacts, keys.

use std::path::PathBuf;

use atoll_types::Isolation;
use clap::{Args, Subcommand};

use super::network::{BuildReachArgs, ReachArgs};
use super::parse::{parse_duration, parse_pair};
use super::sandboxes::LimitArgs;

/// Build and manage what sandboxes start from
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    Build(Box<TemplateBuildArgs>),
    /// List templates
    List,
    /// Show everything about a template
    Inspect {
        template: String,
    },
    /// Delete a template
    Delete {
        template: String,
    },
    KeepRunning(KeepRunningArgs),
    /// Let every project use a template; takes an operator
    ///
    /// It stays its project's as well: what is built under its name later is shared when that is shared too.
    Share {
        template: String,
        /// The project that it belongs to [default: that of the key]
        #[arg(long, value_name = "NAME")]
        project: Option<String>,
    },
    /// Take a shared template back from other projects; takes an operator
    ///
    /// What they have made of it goes on. It belongs to the key's project then.
    Unshare {
        template: String,
    },
    /// Remove what no template and no sandbox uses, and what builds have cached
    Prune,
}

/// Build a template
///
/// From Debian packages (the default; `base` without further options is the template that `run` uses), from an OCI image,
/// or from a Dockerfile.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll template build base --shared
  atoll template build data --package python3-numpy --package python3-pandas
  atoll template build alpine --image docker.io/library/alpine:3.22
  atoll template build app --dockerfile ./app --start 'python3 -m http.server 8000' --ready-port 8000
  atoll template build app --dockerfile ./app --build-net package-registries --allow api.example.com
  atoll template build app --dockerfile ./app --cpu 2 --memory 2G
  atoll template build web --image registry.example/team/web:1 --start-from-image \\
      --registry-user me --registry-password-file token.txt

What the limits, --net, --allow and --deny say holds for sandboxes made from the template, unless they say so themselves. RUN
steps reach nothing but what --build-net and --build-allow say.

A template belongs to the project of the key that it is built with, and no other project sees it, unless it is --shared. Without
a server this command sets up the machine, and what it builds is shared.")]
pub(crate) struct TemplateBuildArgs {
    /// Name of the template
    pub(crate) name: String,
    /// For every project, instead of for one; takes an operator
    #[arg(long)]
    pub(crate) shared: bool,
    /// An image: a registry reference, oci:DIR or docker-archive:FILE
    #[arg(long, value_name = "REFERENCE", conflicts_with_all = ["dockerfile", "package", "suite"])]
    pub(crate) image: Option<String>,
    /// A directory with a Dockerfile, or the Dockerfile itself
    #[arg(long, value_name = "PATH", conflicts_with_all = ["package", "suite"])]
    pub(crate) dockerfile: Option<PathBuf>,
    /// The directory that COPY and ADD read [default: that of the Dockerfile]
    #[arg(long, value_name = "DIR", requires = "dockerfile")]
    pub(crate) context: Option<PathBuf>,
    /// A value for an ARG of the Dockerfile; may be repeated
    #[arg(long, value_parser = parse_pair, value_name = "NAME=VALUE", requires = "dockerfile")]
    pub(crate) build_arg: Vec<(String, String)>,
    /// The stage of the Dockerfile to build [default: the last]
    #[arg(long, value_name = "STAGE", requires = "dockerfile")]
    pub(crate) target: Option<String>,
    /// Run every step of the Dockerfile again
    #[arg(long, requires = "dockerfile")]
    pub(crate) no_cache: bool,
    /// Who to be for the registry of the image, or of the Dockerfile's base images
    #[arg(long, value_name = "NAME", requires = "registry_password_file")]
    pub(crate) registry_user: Option<String>,
    /// Which registry that is for, e.g. ghcr.io [default: that of --image]
    #[arg(long, value_name = "HOST", requires = "registry_user")]
    pub(crate) registry: Option<String>,
    /// A file with the password or token for it; - reads standard input
    #[arg(long, value_name = "FILE", requires = "registry_user")]
    pub(crate) registry_password_file: Option<PathBuf>,
    /// A Debian package, on top of a minimal system and in place of those of `base`; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) package: Vec<String>,
    /// Debian suite
    #[arg(long, value_name = "NAME")]
    pub(crate) suite: Option<String>,
    /// A command that every sandbox of this template starts with
    #[arg(long, value_name = "COMMAND")]
    pub(crate) start: Option<String>,
    /// Start what the image was made to run, its ENTRYPOINT and CMD; otherwise they are only noted
    #[arg(long, conflicts_with_all = ["start", "package", "suite"])]
    pub(crate) start_from_image: bool,
    /// The start command is ready when something listens on this port
    #[arg(long, value_name = "PORT", requires = "start")]
    pub(crate) ready_port: Option<u16>,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) reach: ReachArgs,
    #[command(flatten)]
    pub(crate) build_reach: BuildReachArgs,
}

/// Keep a template's start command running, for sandboxes of one size
///
/// Boots the template once, in the size given here or else the template's own, waits until its start command is ready, and
/// keeps the memory. Sandboxes of this size come up with their servers already answering. They must be of that size, without
/// environment and volumes of their own; others start as always.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  atoll template build app --dockerfile ./app --start 'python3 -m http.server 8000' --ready-port 8000
  atoll template keep-running app
  atoll create --template app")]
pub(crate) struct KeepRunningArgs {
    /// Name or id of a template with a start command
    pub(crate) template: String,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    /// The weakest isolation that will do
    #[arg(long, value_name = "TIER")]
    pub(crate) isolation: Option<Isolation>,
}

/// Save, list and fetch files that outlive their sandbox
#[derive(Debug, Subcommand)]
pub(crate) enum ArtifactCommand {
    /// Save a file or directory of a sandbox under a name
    Save {
        /// SANDBOX:PATH
        from: String,
        /// Name to save it under
        name: String,
        /// Keep it this long, e.g. 7d
        #[arg(long, value_parser = parse_duration, value_name = "TIME")]
        keep: Option<u64>,
    },
    /// List artifacts
    List {
        /// Only those of this name
        name: Option<String>,
    },
    /// Fetch an artifact: a file as it is, a directory unpacked where nothing is yet
    Get {
        /// Name (the newest of it) or id
        artifact: String,
        /// Where to put it; `-` for standard output [default: its name, here]
        to: Option<PathBuf>,
    },
    /// Delete an artifact
    Delete { artifact: String },
}

/// Create, list and revoke API keys
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create a key and print its secret, once
    Create {
        /// What it is for
        name: String,
        /// What it may do: operator, member, viewer or approver [default: member]
        #[arg(long)]
        role: Option<String>,
        /// What it is restricted to: sandboxes, sandbox:ID, templates, secrets:use, secrets:manage, models,
        /// models:manage, workflows, approvals, ledger; may be repeated [default: not restricted]
        #[arg(long)]
        scope: Vec<String>,
        /// It stops working after this long, e.g. 30d
        #[arg(long, value_parser = parse_duration, value_name = "TIME")]
        expires: Option<u64>,
        #[command(flatten)]
        whose: WhoseArgs,
    },
    /// List keys
    List {
        #[command(flatten)]
        whose: WhoseArgs,
    },
    /// Revoke a key; requests that use it are refused from now on
    Revoke {
        /// Its id, as `list` shows it
        #[arg(value_name = "KEY")]
        id: String,
        #[command(flatten)]
        whose: WhoseArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct WhoseArgs {
    /// Of this project, by name or id [default: the project of your key]. Keys of `default` name any
    #[arg(long)]
    pub(crate) project: Option<String>,
}

/// Create and list projects: each sees its own sandboxes, artifacts, secrets, budgets and workflows
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  atoll project create team-b
  atoll key create --project team-b laptop")]
pub(crate) enum ProjectCommand {
    /// Create a project, with a key of `default`
    Create {
        /// Lowercase letters, digits and `-`
        name: String,
    },
    /// List those that you can see
    List,
}
