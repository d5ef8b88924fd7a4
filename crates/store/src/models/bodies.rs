//! What was asked and answered, where the operator wants it kept.

use std::fmt;

use async_trait::async_trait;
use atoll_types::{ModelCallId, ProjectId, Timestamp};

use crate::Error;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelBodies {
    pub request: String,
    pub answer: String,
    pub shortened: bool,
}

#[async_trait]
pub trait ModelBodyStore: fmt::Debug + Send + Sync + 'static {
    async fn put_model_bodies(
        &self,
        call: ModelCallId,
        project: ProjectId,
        at: Timestamp,
        bodies: ModelBodies,
    ) -> Result<(), Error>;

    async fn model_bodies(
        &self,
        project: &ProjectId,
        call: &ModelCallId,
    ) -> Result<Option<ModelBodies>, Error>;

    /// Forgets what is older than `before`, and of the rest all but `most`: the newest of each project, so that nobody's calls
    /// make another project lose what it has while that is little.
    async fn trim_model_bodies(&self, before: Timestamp, most: usize) -> Result<usize, Error>;
}
