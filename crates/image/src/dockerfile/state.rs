//! What a build has come to between two instructions.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_types::ImageCommand;
use sha2::{Digest, Sha256};

use super::parse::Command;
use crate::tree::Tree;

/// Grows with every change of what a step does, so that an older cache is not believed.
const CACHE_GENERATION: &str = "atoll-build-2";

/// The filesystem of a state. A tree is read from an image only when somebody wants to look or to edit.
#[derive(Clone)]
pub(super) enum Files {
    Image(String),
    Tree(Arc<Tree>),
}

#[derive(Clone)]
pub(super) struct State {
    pub(super) files: Files,
    /// Digest of everything that led here.
    pub(super) key: String,
    /// The reference of the image that it all began with.
    pub(super) base: String,
    pub(super) env: BTreeMap<String, String>,
    pub(super) args: BTreeMap<String, String>,
    pub(super) workdir: String,
    /// Who steps run as, and sandboxes too: what `USER` or the base image said.
    pub(super) user: Option<String>,
    /// Whom a base template's sandboxes run as. Steps on it run as root, or nothing could be installed.
    pub(super) template_user: Option<String>,
    pub(super) shell: Vec<String>,
    pub(super) entrypoint: Option<Vec<String>>,
    pub(super) cmd: Option<Vec<String>>,
    /// Whether `cmd` was said by this stage, and not by what it began with.
    pub(super) own_cmd: bool,
    pub(super) ports: Vec<u16>,
}

impl State {
    pub(super) fn command(&self) -> Option<ImageCommand> {
        let command = ImageCommand {
            entrypoint: self.entrypoint.clone().unwrap_or_default(),
            cmd: self.cmd.clone().unwrap_or_default(),
        };
        command.argv().is_some().then_some(command)
    }

    /// Without its group.
    pub(super) fn final_user(&self) -> String {
        let user = self.user.as_ref().or(self.template_user.as_ref());
        user.and_then(|user| user.split(':').next())
            .unwrap_or("root")
            .to_owned()
    }

    pub(super) fn lookup(&self, name: &str) -> Option<String> {
        self.env.get(name).or_else(|| self.args.get(name)).cloned()
    }

    pub(super) fn argv(&self, command: &Command) -> Vec<String> {
        match command {
            Command::Exec(argv) => argv.clone(),
            Command::Shell(text) => self.shell.iter().chain([text]).cloned().collect(),
        }
    }

    pub(super) fn advance(&mut self, parts: &[&str]) {
        let mut sha = Sha256::new();
        for part in [CACHE_GENERATION, &self.key].iter().chain(parts) {
            sha.update((part.len() as u64).to_le_bytes());
            sha.update(part);
        }
        self.key = hex::encode(sha.finalize());
    }
}
