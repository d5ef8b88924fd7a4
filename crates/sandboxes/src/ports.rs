//! Ports of a sandbox: what listens, and byte streams to it. Every stream goes through the guest agent to a loopback
//! port inside; the host's own network is not involved.

use std::sync::Arc;

use atoll_guest_protocol::{ListeningPort, Message, Request};
use atoll_node::{Incoming, StreamReceiver, StreamSender};
use atoll_types::{Code, Fault, SandboxId};
use bytes::Bytes;

use crate::cell::{Cell, InUse};
use crate::faults::{ANSWER_WITHIN, from_channel, unexpected, unreachable_guest};
use crate::{Caller, Sandboxes};

impl Sandboxes {
    pub async fn ports(&self, caller: &Caller, id: &SandboxId) -> Result<Vec<ListeningPort>, Fault> {
        let (cell, guest, _in_use) = self.enter(caller, id).await?;
        match guest.call(&Request::ListPorts).await {
            Ok(Some(Message::Ports(ports))) => Ok(ports),
            Ok(_) => Err(unexpected()),
            Err(error) => Err(from_channel(&cell, error).await),
        }
    }

    /// A byte stream to a loopback port inside.
    pub async fn connect(&self, caller: &Caller, id: &SandboxId, port: u16) -> Result<PortStream, Fault> {
        if port == 0 {
            return Err(Fault::new(Code::PortInvalid, "0 is not a port; use 1 to 65535"));
        }
        let (cell, guest, in_use) = self.enter(caller, id).await?;
        let (sender, mut receiver) = match guest.open(&Request::Connect { port }).await {
            Ok(stream) => stream.split(),
            Err(error) => return Err(from_channel(&cell, error).await),
        };
        let answer = tokio::time::timeout(ANSWER_WITHIN, receiver.next());
        match answer.await.map_err(|_| unreachable_guest())? {
            Some(Ok(Incoming::Message(Message::Connected))) => Ok(PortStream {
                reader: PortReader {
                    cell: Arc::clone(&cell),
                    receiver,
                    _in_use: in_use,
                },
                writer: PortWriter { cell, sender },
            }),
            Some(Err(error)) => Err(from_channel(&cell, error).await),
            Some(Ok(_)) | None => Err(unexpected()),
        }
    }
}

/// Both halves may be used from different tasks. The stream ends when the reader is dropped.
#[derive(Debug)]
pub struct PortStream {
    pub reader: PortReader,
    pub writer: PortWriter,
}

#[derive(Debug)]
pub struct PortReader {
    cell: Arc<Cell>,
    receiver: StreamReceiver,
    _in_use: InUse,
}

impl PortReader {
    /// `None`: the guest closed its side. Cancel-safe.
    pub async fn read(&mut self) -> Option<Result<Bytes, Fault>> {
        match self.receiver.next().await {
            // An empty one is the guest's half-close.
            Some(Ok(Incoming::Data { bytes, .. })) if bytes.is_empty() => None,
            Some(Ok(Incoming::Data { bytes, .. })) => Some(Ok(bytes)),
            Some(Ok(Incoming::Message(_))) => Some(Err(unexpected())),
            Some(Err(error)) => Some(Err(from_channel(&self.cell, error).await)),
            None => None,
        }
    }
}

#[derive(Debug)]
pub struct PortWriter {
    cell: Arc<Cell>,
    sender: StreamSender,
}

impl PortWriter {
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), Fault> {
        match self.sender.send_data(bytes).await {
            Ok(()) => Ok(()),
            Err(error) => Err(from_channel(&self.cell, error).await),
        }
    }

    /// Half-close.
    pub async fn finish(&mut self) -> Result<(), Fault> {
        match self.sender.send_end().await {
            Ok(()) => Ok(()),
            Err(error) => Err(from_channel(&self.cell, error).await),
        }
    }
}
