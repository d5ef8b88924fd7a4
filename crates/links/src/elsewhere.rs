//! Links that another process makes: the server that speaks with the world has no power over networks, and asks the one that
//! has.

use std::fmt::Debug;
use std::io;
use std::net::{SocketAddr, UdpSocket};

use async_trait::async_trait;
use atoll_types::InstanceId;

use crate::{Result, Slot};

/// The process that makes them. As the calls of [`Links`](crate::Links) with the same names.
#[async_trait]
pub trait Elsewhere: Debug + Send + Sync {
    async fn lease(&self, instance: &InstanceId) -> Result<Slot>;
    async fn discover(&self) -> Result<Vec<InstanceId>>;
    async fn release(&self, instance: &InstanceId) -> Result<()>;
    async fn close(&self) -> Result<bool>;
    fn answer_from(&self, asked: SocketAddr) -> io::Result<UdpSocket>;
}
