//! Noticing that an instance is over, and why. The same for every tier.
//!
//! What must hold: an instance that exceeds its memory ends as a whole and is said to have ended for that. Which of its
//! processes the kernel shoots is chance (in gVisor: the sentry, or one that runs some guest process), and what would be
//! left is a sandbox with a hole in it. cgroup v2 kills the group by itself; on v1 this module does.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::InstanceEnd;
use crate::agent::Agent;
use crate::cgroup::Group;
use crate::process::Handle;

/// Reports the end of `process`, which is the end of the instance, and closes its channel. `explain` says what is
/// known when it was not for want of memory.
///
/// The task lives until then, or until nobody holds the receiver any more.
pub(crate) fn watch(
    process: Handle,
    group: Group,
    agent: Arc<dyn Agent>,
    explain: impl FnOnce() -> String + Send + 'static,
) -> watch::Receiver<Option<InstanceEnd>> {
    let (sender, receiver) = watch::channel(None);
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = process.ended() => ended,
            () = sender.closed() => return,
            never = kill_when_out_of_memory(&group) => match never {},
        };
        let end = match (ended, group.oom_kills()) {
            (_, Ok(1..)) => InstanceEnd::OutOfMemory,
            (Ok(()), _) => InstanceEnd::Died(explain()),
            (Err(error), _) => InstanceEnd::Died(format!("it can no longer be watched: {error}")),
        };
        agent.finish();
        sender.send_replace(Some(end));
    });
    receiver
}

/// Kills the group once the kernel has killed one of its processes for want of memory.
async fn kill_when_out_of_memory(group: &Group) -> std::convert::Infallible {
    match group
        .oom_event()
        .and_then(|event| event.map(register).transpose())
    {
        Ok(Some(event)) => {
            // One that was taken over may have lost a process while nobody watched.
            if group.oom_kills().is_ok_and(|kills| kills > 0)
                && let Err(error) = group.kill_all().await
            {
                tracing::warn!(%error, "an instance that is out of memory cannot be killed");
            }
            while let Ok(mut ready) = event.readable().await {
                ready.clear_ready();
                // The event comes when memory is short, the kill a moment later, or never if some could be freed.
                for _ in 0..100 {
                    match group.oom_kills() {
                        Ok(0) => tokio::time::sleep(Duration::from_millis(10)).await,
                        Ok(_) => {
                            if let Err(error) = group.kill_all().await {
                                tracing::warn!(%error, "an instance that is out of memory cannot be killed");
                            }
                            break;
                        }
                        Err(_) => break, // the group is gone
                    }
                }
                let _ = rustix::io::read(event.get_ref(), &mut [0; 8]);
            }
        }
        Ok(None) => {}
        Err(error) => tracing::warn!(%error, "cannot be told when an instance is out of memory"),
    }
    std::future::pending().await
}

#[expect(unsafe_code, reason = "registering for one direction only is unsafe in tokio")]
fn register(event: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: `OwnedFd` gives the same open descriptor until it is dropped, which `AsyncFd` does after deregistering.
    unsafe { AsyncFd::register_with_interest(event, Interest::READABLE) }.map_err(Into::into)
}
