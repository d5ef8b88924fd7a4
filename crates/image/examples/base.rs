//! Builds the default template: `base STORE-DIR`.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use atoll_image::{DebianOptions, Templates, Update};
use atoll_types::Timestamp;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::args().nth(1).ok_or("usage: base STORE-DIR")?;
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_millis();
    let start = Instant::now();
    let progress = |update: Update<'_>| {
        if !update.message.is_empty() || update.done == update.total {
            eprintln!(
                "{} {}/{} {}",
                update.stage, update.done, update.total, update.message
            );
        }
    };
    let options = DebianOptions::base(Timestamp(i64::try_from(now)?));
    let manifest = Templates::open(dir)?
        .build_debian(options, Arc::new(progress))
        .await?;
    println!("{manifest:#?} in {:?}", start.elapsed());
    Ok(())
}
