//! What a template is: an immutable root filesystem plus how to run in it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{NetworkPolicy, Resources, TemplateId, Timestamp};

/// Where the root filesystem of a template came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum TemplateSource {
    Debian { suite: String, packages: Vec<String> },
    Image { reference: String, digest: String },
    Dockerfile { digest: String, base: String },
}

/// A process that a template starts when a sandbox is made from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartCommand {
    pub argv: Vec<String>,
    pub ready: Option<ReadyCheck>,
}

/// What an image was made to run: its `ENTRYPOINT` and `CMD`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageCommand {
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
}

impl ImageCommand {
    /// The whole command line; `None` if there is nothing to run.
    pub fn argv(&self) -> Option<Vec<String>> {
        let argv = [&self.entrypoint[..], &self.cmd[..]].concat();
        (!argv.is_empty()).then_some(argv)
    }
}

/// How Atoll knows that the start command is ready to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ReadyCheck {
    /// Something listens on this port.
    Port { port: u16, timeout_millis: u64 },
    /// This command exits with 0.
    Command { argv: Vec<String>, timeout_millis: u64 },
}

/// Everything about a template but its bytes. Lives beside the image file as `template.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateManifest {
    pub id: TemplateId,
    /// SHA-256 of the image file, in hex: the template's identity on disk. Where that is a layer on other files, it names them by
    /// theirs, so this stands for them too.
    pub digest: String,
    /// Of all files of the image together.
    pub size_bytes: u64,
    /// What it has for itself, where it shares the rest with what it was built on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_bytes: Option<u64>,
    pub created_at: Timestamp,
    pub source: TemplateSource,
    pub env: BTreeMap<String, String>,
    pub workdir: String,
    /// The user that commands run as unless the caller says otherwise: a name or a number.
    pub user: String,
    pub start: Option<StartCommand>,
    /// What its image was made to run. A sandbox is a computer: it is started only where `start` says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<ImageCommand>,
    pub exposed_ports: Vec<u16>,
    /// What sandboxes made from it may reach, unless they say so themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkPolicy>,
    /// What sandboxes made from it get, unless they say so themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
}
