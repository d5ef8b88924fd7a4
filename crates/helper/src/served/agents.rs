//! What the front has, as the helper's runtimes want it: agents, and the files that saved state goes to and comes from.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_runtime::agent::{Agent, Greeted, Greeter};
use atoll_runtime::channel::{ChannelError, Connect, Fifos};
use atoll_runtime::{Cause, Growing, Kind, SaveSink, SaveSource, Told};
use atoll_types::InstanceId;

use crate::peer::{Message, Peer};
use crate::words::{Beg, Gift, confused};

fn read(message: Message) -> io::Result<(Gift, Vec<OwnedFd>)> {
    match message.read()? {
        Gift::Refused(why) => Err(why.into()),
        gift => Ok((gift, message.files)),
    }
}

async fn beg(peer: &Peer, beg: &Beg, files: Vec<OwnedFd>) -> io::Result<(Gift, Vec<OwnedFd>)> {
    read(peer.ask(Message::new(beg, files)?).await?)
}

fn beg_blocking(peer: &Peer, beg: &Beg, files: Vec<OwnedFd>) -> io::Result<(Gift, Vec<OwnedFd>)> {
    read(peer.ask_blocking(Message::new(beg, files)?)?)
}

fn file((gift, files): (Gift, Vec<OwnedFd>)) -> io::Result<Option<OwnedFd>> {
    match gift {
        Gift::File(true) => files.into_iter().next().map(Some).ok_or_else(confused),
        Gift::File(false) => Ok(None),
        _ => Err(confused()),
    }
}

/// The front, which speaks with agents.
#[derive(Debug)]
pub(super) struct Front {
    peer: Peer,
    /// What an instance is restored from.
    source: Option<u64>,
}

impl Front {
    pub(super) fn new(peer: Peer, source: Option<u64>) -> Self {
        Self { peer, source }
    }
}

#[async_trait]
impl Greeter for Front {
    async fn greet(&self, id: &InstanceId, fifos: &Fifos, how: Connect) -> Result<Greeted, ChannelError> {
        let failed = |error: io::Error| ChannelError::Io {
            what: "greeting the agent".into(),
            source: Arc::new(error),
        };
        let (to_guest, from_guest) = fifos.open_for_host().map_err(failed)?;
        let question = Beg::Greet {
            id: id.clone(),
            how: how.into(),
        };
        match beg(&self.peer, &question, vec![to_guest, from_guest])
            .await
            .map_err(failed)?
        {
            (Gift::Done, _) => Ok(Greeted::elsewhere(Arc::new(Distant {
                peer: self.peer.clone(),
                id: id.clone(),
            }))),
            (Gift::NotGreeted(why), _) => Err(why.into()),
            _ => Err(failed(confused())),
        }
    }

    async fn unpack(&self, greeted: &Greeted, _: &Arc<dyn SaveSource>) -> Result<(), Cause> {
        let (Some(source), Some(id)) = (self.source, greeted.agent.instance()) else {
            return Err(Cause::new(Kind::Saved, "there is nothing to unpack"));
        };
        let unpacked = beg(&self.peer, &Beg::Unpack { id, source }, Vec::new()).await;
        unpacked.map(drop).map_err(|error| Told::from(&error).into())
    }
}

/// An agent that the front speaks with.
#[derive(Debug)]
struct Distant {
    peer: Peer,
    id: InstanceId,
}

impl Distant {
    async fn says(&self, question: Beg) -> bool {
        matches!(
            beg(&self.peer, &question, Vec::new()).await,
            Ok((Gift::Yes(true), _))
        )
    }
}

#[async_trait]
impl Agent for Distant {
    fn is_open(&self) -> bool {
        true
    }

    fn instance(&self) -> Option<InstanceId> {
        Some(self.id.clone())
    }

    async fn hold(&self) {
        let id = self.id.clone();
        let _gone = beg(&self.peer, &Beg::Hold { id }, Vec::new()).await;
    }

    async fn release(&self) {
        let id = self.id.clone();
        let _gone = beg(&self.peer, &Beg::Release { id }, Vec::new()).await;
    }

    async fn taken(&self, within: Duration) -> bool {
        let (id, millis) = (self.id.clone(), within.as_millis() as u64);
        self.says(Beg::Taken { id, millis }).await
    }

    async fn delivered(&self, within: Duration) -> bool {
        let (id, millis) = (self.id.clone(), within.as_millis() as u64);
        self.says(Beg::Delivered { id, millis }).await
    }

    async fn answers(&self, within: Duration) -> bool {
        let (id, millis) = (self.id.clone(), within.as_millis() as u64);
        self.says(Beg::Answers { id, millis }).await
    }

    /// The front is told of the end, and does it.
    fn finish(&self) {}
}

/// Saved state that the front gives back.
#[derive(Debug)]
pub(super) struct Source {
    peer: Peer,
    number: u64,
    names: Vec<String>,
}

impl Source {
    pub(super) fn new(peer: Peer, number: u64, names: Vec<String>) -> Self {
        Self { peer, number, names }
    }

    async fn get(&self, name: &str, at_least: bool) -> io::Result<File> {
        let question = Beg::Source {
            source: self.number,
            name: name.into(),
            at_least,
        };
        let given = file(beg(&self.peer, &question, Vec::new()).await?)?;
        given.map(File::from).ok_or_else(confused)
    }
}

#[async_trait]
impl SaveSource for Source {
    async fn file(&self, name: &str) -> io::Result<File> {
        self.get(name, false).await
    }

    async fn at_least(&self, name: &str) -> io::Result<File> {
        self.get(name, true).await
    }

    fn names(&self) -> Vec<String> {
        self.names.clone()
    }
}

/// Where the front wants saved state.
#[derive(Debug, Clone)]
pub(super) struct Sink {
    peer: Peer,
    number: u64,
}

impl Sink {
    pub(super) fn new(peer: Peer, number: u64) -> Self {
        Self { peer, number }
    }

    fn file(&self, question: &Beg) -> io::Result<OwnedFd> {
        file(beg_blocking(&self.peer, question, Vec::new())?)?.ok_or_else(confused)
    }
}

impl SaveSink for Sink {
    fn stream(&self, name: &str) -> io::Result<OwnedFd> {
        self.file(&Beg::Stream {
            sink: self.number,
            name: name.into(),
        })
    }

    fn scratch(&self) -> io::Result<File> {
        self.file(&Beg::Scratch { sink: self.number }).map(File::from)
    }

    fn part(&self, name: &str, whole: File) -> io::Result<()> {
        let question = Beg::Part {
            sink: self.number,
            name: name.into(),
        };
        beg_blocking(&self.peer, &question, vec![whole.into()]).map(drop)
    }

    fn growing(&self, name: &str) -> io::Result<Option<(File, Box<dyn Growing>)>> {
        let question = Beg::Growing {
            sink: self.number,
            name: name.into(),
        };
        let given = file(beg_blocking(&self.peer, &question, Vec::new())?)?;
        Ok(given.map(|file| {
            let growing = Grows {
                sink: self.clone(),
                name: name.into(),
            };
            (File::from(file), Box::new(growing) as Box<dyn Growing>)
        }))
    }
}

#[derive(Debug)]
struct Grows {
    sink: Sink,
    name: String,
}

impl Growing for Grows {
    fn whole(&self) {
        let question = Beg::Whole {
            sink: self.sink.number,
            name: self.name.clone(),
        };
        let _gone = beg_blocking(&self.sink.peer, &question, Vec::new());
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        let question = Beg::Finish {
            sink: self.sink.number,
            name: self.name.clone(),
        };
        beg_blocking(&self.sink.peer, &question, Vec::new()).map(drop)
    }
}
