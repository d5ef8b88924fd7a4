//! Runtimes whose instances the helper holds, and whose agents we speak with.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_runtime::channel::{Guest, WeakGuest};
use atoll_runtime::{
    Error, Growing, Instance, InstanceEnd, InstanceSpec, Runtime, SaveKind, SaveSink, SaveSource, Saves,
};
use atoll_types::{InstanceId, Isolation, Resources, Usage};
use tokio::sync::watch;

use super::Helper;
use crate::words::{Answer, Ask, Beg, Gift, Restore, Spec, confused};

/// One tier of the helper's.
#[derive(Debug)]
pub(super) struct Remote {
    helper: Helper,
    isolation: Isolation,
    saves: Saves,
}

impl Remote {
    pub(super) fn new(helper: Helper, isolation: Isolation, saves: Saves) -> Self {
        Self {
            helper,
            isolation,
            saves,
        }
    }

    async fn ask(&self, ask: &Ask) -> Result<Answer, Error> {
        match self.helper.ask(ask, Vec::new()).await {
            Ok((Answer::Failed(failure), _)) => Err(failure.into()),
            Ok((answer, _)) => Ok(answer),
            Err(source) => Err(unheard(source)),
        }
    }

    /// What became of an instance that was started or taken over.
    fn instance(
        &self,
        id: &InstanceId,
        end: watch::Receiver<Option<InstanceEnd>>,
    ) -> Result<Instance, Error> {
        let guest = self.helper.guests.take(id).ok_or_else(|| unheard(confused()))?;
        Ok(Instance {
            id: id.clone(),
            isolation: self.isolation,
            guest,
            end,
        })
    }
}

fn unheard(source: io::Error) -> Error {
    Error::Io {
        what: "asking the helper".into(),
        source,
    }
}

#[async_trait]
impl Runtime for Remote {
    fn isolation(&self) -> Isolation {
        self.isolation
    }

    async fn start(&self, spec: InstanceSpec) -> Result<Instance, Error> {
        let guests = &self.helper.guests;
        let source = spec.restore.as_ref().map(|restore| {
            let number = self.helper.number();
            (number, guests.lend_source(number, Arc::clone(&restore.source)))
        });
        let id = spec.id.clone();
        let ask = Ask::Start {
            isolation: self.isolation,
            spec: Box::new(Spec {
                id: spec.id,
                image: spec.image,
                resources: spec.resources,
                hostname: spec.hostname,
                mounts: spec.mounts,
                network: spec.network.is_some(),
                restore: spec
                    .restore
                    .zip(source.as_ref())
                    .map(|(restore, (number, _))| Restore {
                        kind: restore.kind,
                        source: *number,
                        names: restore.source.names(),
                    }),
            }),
        };
        let (end, _forget) = guests.expect(&id);
        self.ask(&ask).await?;
        self.instance(&id, end)
    }

    async fn discover(&self) -> Result<Vec<InstanceId>, Error> {
        let isolation = self.isolation;
        match self.ask(&Ask::Discover { isolation }).await? {
            Answer::Ids(ids) => Ok(ids),
            _ => Err(unheard(confused())),
        }
    }

    async fn adopt(&self, id: &InstanceId) -> Result<Instance, Error> {
        let (end, _forget) = self.helper.guests.expect(id);
        let ask = Ask::Adopt {
            isolation: self.isolation,
            id: id.clone(),
        };
        self.ask(&ask).await?;
        self.instance(id, end)
    }

    async fn resize(&self, id: &InstanceId, resources: &Resources) -> Result<(), Error> {
        let ask = Ask::Resize {
            isolation: self.isolation,
            id: id.clone(),
            resources: *resources,
        };
        self.ask(&ask).await.map(drop)
    }

    async fn usage(&self, id: &InstanceId) -> Result<Usage, Error> {
        let ask = Ask::Usage {
            isolation: self.isolation,
            id: id.clone(),
        };
        match self.ask(&ask).await? {
            Answer::Usage(usage) => Ok(usage),
            _ => Err(unheard(confused())),
        }
    }

    fn saves(&self) -> Saves {
        self.saves.clone()
    }

    async fn save(&self, id: &InstanceId, kind: SaveKind, sink: Arc<dyn SaveSink>) -> Result<(), Error> {
        let number = self.helper.number();
        let _lent = self.helper.guests.lend_sink(number, sink);
        let ask = Ask::Save {
            isolation: self.isolation,
            id: id.clone(),
            kind,
            sink: number,
        };
        self.ask(&ask).await.map(drop)
    }

    async fn thaw(&self, id: &InstanceId) -> Result<(), Error> {
        let ask = Ask::Thaw {
            isolation: self.isolation,
            id: id.clone(),
        };
        self.ask(&ask).await.map(drop)
    }

    async fn destroy(&self, id: &InstanceId) -> Result<(), Error> {
        let ask = Ask::Destroy {
            isolation: self.isolation,
            id: id.clone(),
        };
        self.ask(&ask).await.map(drop)
    }
}

/// What we have that the helper asks for: agents, and files of saved state.
#[derive(Debug, Default)]
pub(super) struct Guests {
    agents: Mutex<HashMap<InstanceId, Agent>>,
    ends: Mutex<HashMap<InstanceId, watch::Sender<Option<InstanceEnd>>>>,
    sources: Mutex<HashMap<u64, Arc<dyn SaveSource>>>,
    sinks: Mutex<HashMap<u64, Arc<dyn SaveSink>>>,
    growing: Mutex<HashMap<(u64, String), Box<dyn Growing>>>,
}

#[derive(Debug)]
struct Agent {
    /// Until whoever started the instance has it.
    guest: Option<Guest>,
    weak: WeakGuest,
}

/// Forgets what was lent when whoever lent it does not wait any more.
pub(super) struct Lent<'a> {
    guests: &'a Guests,
    number: u64,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.guests.sources.lock().remove(&self.number);
        self.guests.sinks.lock().remove(&self.number);
        self.guests
            .growing
            .lock()
            .retain(|(number, _), _| *number != self.number);
    }
}

/// Forgets the channel of an instance that nobody took.
pub(super) struct Expected<'a> {
    guests: &'a Guests,
    id: InstanceId,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        let mut agents = self.guests.agents.lock();
        if agents.get(&self.id).is_none_or(|agent| agent.guest.is_some()) {
            agents.remove(&self.id);
            self.guests.ends.lock().remove(&self.id);
        }
    }
}

impl Guests {
    /// An instance is about to be. Its end is heard of from now on.
    fn expect(&self, id: &InstanceId) -> (watch::Receiver<Option<InstanceEnd>>, Expected<'_>) {
        let (sender, receiver) = watch::channel(None);
        self.ends.lock().insert(id.clone(), sender);
        let expected = Expected {
            guests: self,
            id: id.clone(),
        };
        (receiver, expected)
    }

    fn take(&self, id: &InstanceId) -> Option<Guest> {
        self.agents.lock().get_mut(id)?.guest.take()
    }

    fn lend_source(&self, number: u64, source: Arc<dyn SaveSource>) -> Lent<'_> {
        self.sources.lock().insert(number, source);
        Lent { guests: self, number }
    }

    fn lend_sink(&self, number: u64, sink: Arc<dyn SaveSink>) -> Lent<'_> {
        self.sinks.lock().insert(number, sink);
        Lent { guests: self, number }
    }

    /// The helper saw the end of an instance.
    pub(super) fn ended(&self, id: &InstanceId, end: InstanceEnd) {
        let agent = self.agents.lock().remove(id);
        if let Some(guest) = agent.and_then(|agent| agent.guest.or_else(|| agent.weak.upgrade())) {
            guest.finish();
        }
        if let Some(sender) = self.ends.lock().remove(id) {
            sender.send_replace(Some(end));
        }
    }

    fn guest(&self, id: &InstanceId) -> Option<Guest> {
        let agents = self.agents.lock();
        let agent = agents.get(id)?;
        agent.guest.clone().or_else(|| agent.weak.upgrade())
    }

    fn source(&self, number: u64) -> io::Result<Arc<dyn SaveSource>> {
        self.sources.lock().get(&number).cloned().ok_or_else(unknown)
    }

    fn sink(&self, number: u64) -> io::Result<Arc<dyn SaveSink>> {
        self.sinks.lock().get(&number).cloned().ok_or_else(unknown)
    }

    /// Gives the helper what it asks for.
    pub(super) async fn give(&self, beg: Beg, files: Vec<OwnedFd>) -> (Gift, Vec<OwnedFd>) {
        match self.given(beg, files).await {
            Ok(given) => given,
            Err(error) => (Gift::Refused((&error).into()), Vec::new()),
        }
    }

    async fn given(&self, beg: Beg, files: Vec<OwnedFd>) -> io::Result<(Gift, Vec<OwnedFd>)> {
        let within = Duration::from_millis;
        let gift = match beg {
            Beg::Greet { id, how } => {
                let [to_guest, from_guest] = <[OwnedFd; 2]>::try_from(files).map_err(|_| confused())?;
                match Guest::over(to_guest, from_guest, how.into()).await {
                    Ok(guest) => {
                        let weak = guest.downgrade();
                        let guest = Some(guest);
                        self.agents.lock().insert(id, Agent { guest, weak });
                        Gift::Done
                    }
                    Err(error) => Gift::NotGreeted(error.into()),
                }
            }
            Beg::Unpack { id, source } => {
                let (guest, source) = (self.guest(&id).ok_or_else(unknown)?, self.source(source)?);
                let unpacked = atoll_runtime::gvisor::unpack_layer(&guest, &source).await;
                unpacked?;
                Gift::Done
            }
            Beg::Hold { id } => {
                self.guest(&id).ok_or_else(unknown)?.hold();
                Gift::Done
            }
            Beg::Release { id } => {
                self.guest(&id).ok_or_else(unknown)?.release();
                Gift::Done
            }
            Beg::Taken { id, millis } => {
                let guest = self.guest(&id).ok_or_else(unknown)?;
                Gift::Yes(guest.taken(within(millis)).await)
            }
            Beg::Delivered { id, millis } => {
                let guest = self.guest(&id).ok_or_else(unknown)?;
                Gift::Yes(guest.delivered(within(millis)).await)
            }
            Beg::Answers { id, millis } => {
                let guest = self.guest(&id).ok_or_else(unknown)?;
                Gift::Yes(guest.answers(within(millis)).await)
            }
            Beg::Source {
                source,
                name,
                at_least,
            } => {
                let source = self.source(source)?;
                let file = match at_least {
                    true => source.at_least(&name).await?,
                    false => source.file(&name).await?,
                };
                return Ok((Gift::File(true), vec![file.into()]));
            }
            Beg::Stream { sink, name } => {
                let sink = self.sink(sink)?;
                let stream = blocking(move || sink.stream(&name)).await?;
                return Ok((Gift::File(true), vec![stream]));
            }
            Beg::Scratch { sink } => {
                let sink = self.sink(sink)?;
                let file = blocking(move || sink.scratch()).await?;
                return Ok((Gift::File(true), vec![file.into()]));
            }
            Beg::Part { sink, name } => {
                let sink = self.sink(sink)?;
                let whole = files.into_iter().next().map(File::from).ok_or_else(confused)?;
                blocking(move || sink.part(&name, whole)).await?;
                Gift::Done
            }
            Beg::Growing { sink: number, name } => {
                let sink = self.sink(number)?;
                let wanted = name.clone();
                let Some((file, growing)) = blocking(move || sink.growing(&wanted)).await? else {
                    return Ok((Gift::File(false), Vec::new()));
                };
                self.growing.lock().insert((number, name), growing);
                return Ok((Gift::File(true), vec![file.into()]));
            }
            Beg::Whole { sink, name } => {
                if let Some(growing) = self.growing.lock().get(&(sink, name)) {
                    growing.whole();
                }
                Gift::Done
            }
            Beg::Finish { sink, name } => {
                let growing = self.growing.lock().remove(&(sink, name)).ok_or_else(unknown)?;
                blocking(move || growing.finish()).await?;
                Gift::Done
            }
        };
        Ok((gift, Vec::new()))
    }
}

fn unknown() -> io::Error {
    io::Error::other("nobody waits for that any more")
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}
