//! `atoll scripted-provider`: serves it, and says where and how to register it.

use atoll_client::output::{Doing, Output, Result};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::args::ScriptedArgs;

pub(crate) async fn run(output: Output, args: &ScriptedArgs) -> Result<()> {
    let listener = TcpListener::bind(args.listen)
        .await
        .doing(format_args!("cannot listen on {}", args.listen))?;
    let address = listener.local_addr().doing("cannot listen")?;
    output.line(format_args!("scripted provider on http://{address}"));
    output.note(format_args!(
        "register it: atoll provider set scripted --kind openai --base-url http://{address}/v1 --no-key --serves 'scripted-*'"
    ));
    output.json(&json!({"url": format!("http://{address}")}));
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        let _gone = tokio::signal::ctrl_c().await;
        stopping.cancel();
    });
    atoll_scripted::serve(listener, stop).await;
    Ok(())
}
