//! `atoll demo`: with the running server, or with one inside this process.

use std::time::Instant;

use atoll_client::output::{Output, Result};

use super::Connection;
use crate::args::Global;
use crate::config::Config;

pub(crate) async fn run(global: &Global, output: Output) -> Result<()> {
    let began = Instant::now();
    let connection = Connection::open(global).await?;
    let templates = Config::embedded(global.data.as_deref())?.templates;
    let client = connection.client.clone();
    let outcome = Box::pin(atoll_demo::play(client, output, began, &templates)).await;
    connection.close().await;
    outcome
}
