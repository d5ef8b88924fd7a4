//! Files on their way: into the tree by COPY and ADD, and back from a sandbox after RUN. All of it blocks.

use std::path::Path;
use std::sync::Arc;

use super::copy::{self, Change, Plan};
use crate::content::Content;
use crate::error::Result;
use crate::layer::{self, Whiteouts};
use crate::progress::Job;
use crate::store::{Scratch, Templates};
use crate::tree::{Kind, LastLink, Tree};

/// What a sandbox mounts; its contents are never part of a template.
const MOUNTS: [&str; 4] = ["/proc", "/sys", "/dev", "/.atoll"];

/// What the sandbox itself writes about its network. As elsewhere, it is not the step's to change.
const NETWORK_FILE: [&[u8]; 2] = [b"/etc/", b"resolv.conf"];

/// One COPY or ADD with everything known.
pub(super) struct Request {
    pub(super) from: Arc<Tree>,
    pub(super) paths: Vec<String>,
    pub(super) inline: Vec<(String, String)>,
    pub(super) destination: String,
    pub(super) change: Change,
    pub(super) unpack: bool,
    pub(super) first_archive: usize,
}

impl Request {
    pub(super) fn plan(&self, into: &Tree, scratch: &Scratch, job: &Job) -> Result<Plan> {
        let mut planned = Plan::default();
        let mut plain = Vec::new();
        for (number, path) in self.paths.iter().enumerate() {
            match self.archive(path, scratch, self.first_archive + number, job)? {
                Some(tree) => {
                    let owner_stays = Change {
                        owner: None,
                        ..self.change
                    };
                    copy::plan_all(&tree, &self.destination, owner_stays, &mut planned)?;
                }
                None => plain.push(path.clone()),
            }
        }
        if !plain.is_empty() {
            copy::plan(
                &self.from,
                &plain,
                &self.destination,
                into,
                self.change,
                &mut planned,
            )?;
        }
        for (name, text) in &self.inline {
            let to_directory = self.destination.ends_with('/') || self.inline.len() + self.paths.len() > 1;
            let path = match to_directory {
                true => format!("{}/{name}", self.destination.trim_end_matches('/')),
                false => self.destination.clone(),
            };
            planned.push(copy::plan_file(path, text.clone(), self.change));
        }
        Ok(planned)
    }

    fn archive(&self, path: &str, scratch: &Scratch, number: usize, job: &Job) -> Result<Option<Tree>> {
        if !self.unpack {
            return Ok(None);
        }
        match self.from.lookup(path.as_bytes(), LastLink::Follow)? {
            Some(id) => match &self.from.node(id).kind {
                Kind::File(content) => copy::read_archive(content, scratch, number, job),
                Kind::Directory(_) | Kind::Symlink(_) | Kind::Fifo => Ok(None),
            },
            None => Ok(None),
        }
    }
}

/// Puts what a sandbox changed into the tree that it began with.
pub(super) fn import(
    store: &Templates,
    image: &str,
    archive: &Path,
    whiteouts: Whiteouts,
    job: &Job,
) -> Result<Tree> {
    let content = Content::whole_file(archive)?;
    let total = content.len();
    let parent = store.blob_tree(image)?;
    let mut tree = parent.clone();
    layer::apply(&mut tree, content, whiteouts, |done| {
        job.report("reading files", done, total, "")
    })?;
    for mount in MOUNTS {
        tree.remove(mount.as_bytes())?;
        // The mount point itself looks as it did before the step.
        if let Some(id) = parent.lookup(mount.as_bytes(), LastLink::Keep)?
            && parent.entries(id).is_some()
        {
            tree.make_dirs(mount.as_bytes(), &parent.node(id).meta)?;
        }
    }
    let [dir, name] = NETWORK_FILE;
    if let Some(dir) = tree.lookup(dir, LastLink::Follow)?
        && tree.entries(dir).is_some()
    {
        tree.remove(&NETWORK_FILE.concat())?;
        if let Some(id) = parent.lookup(&NETWORK_FILE.concat(), LastLink::Keep)? {
            let before = parent.node(id);
            tree.put_in(dir, name, before.meta.clone(), before.kind.clone())?;
        }
    }
    Ok(tree)
}

/// Here-documents keep their quotes; only variables are put in.
pub(super) fn expand_text(text: &str, word: &dyn Fn(&str) -> Result<String>) -> Result<String> {
    let protected: String = text
        .chars()
        .flat_map(|c| match c {
            '"' | '\'' => vec!['\\', c],
            c => vec![c],
        })
        .collect();
    word(&protected)
}
