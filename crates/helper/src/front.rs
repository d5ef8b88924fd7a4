//! The front's side: runtimes, links, volumes and Debian packages whose work the helper does.

mod runtime;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use atoll_image::{DebianOptions, Installer, Progress, Update};
use atoll_links::{Links, Slot, Sockets};
use atoll_runtime::Runtimes;
use atoll_types::InstanceId;
use atoll_volumes::elsewhere::{Answer as VolumeAnswer, Op, Streams, WireEntry};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::peer::{Handler, Message, Peer};
use crate::stream::{Pieces, Whole};
use crate::words::{Answer, Ask, News, Word, confused};
pub use crate::words::{Kept, Setup};
use runtime::{Guests, Remote};

/// The helper, as the front knows it. Clones are the same.
#[derive(Debug, Clone)]
pub struct Helper {
    peer: Peer,
    guests: Arc<Guests>,
    builds: Builds,
    next: Arc<AtomicU64>,
}

/// Who hears of which build.
type Builds = Arc<Mutex<HashMap<u64, Hears>>>;

#[derive(Clone)]
struct Hears(Arc<dyn Progress>);

impl std::fmt::Debug for Hears {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hears").finish_non_exhaustive()
    }
}

impl Helper {
    /// Begins to speak with it. `over` is called when it is gone.
    pub fn new(socket: UnixStream, over: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let helper = Self {
            peer: Peer::new(socket),
            guests: Arc::default(),
            builds: Builds::default(),
            next: Arc::new(AtomicU64::new(1)),
        };
        let listener = Listener {
            guests: Arc::clone(&helper.guests),
            builds: Arc::clone(&helper.builds),
        };
        helper.peer.listen(Arc::new(listener), over)?;
        Ok(helper)
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    async fn ask(&self, ask: &Ask, files: Vec<OwnedFd>) -> io::Result<(Answer, Vec<OwnedFd>)> {
        heard(self.peer.ask(Message::new(ask, files)?).await?)
    }

    /// What there is.
    pub async fn setup(&self) -> io::Result<(Setup, Runtimes)> {
        let (Answer::Setup(setup), _) = self.ask(&Ask::Setup, Vec::new()).await? else {
            return Err(confused());
        };
        let runtimes = setup.runtimes.iter().map(|(isolation, saves)| {
            let remote = Remote::new(self.clone(), *isolation, saves.clone());
            Arc::new(remote) as Arc<dyn atoll_runtime::Runtime>
        });
        let runtimes = runtimes.collect();
        Ok((setup, runtimes))
    }

    /// Opens the gateway of the links.
    pub async fn links(&self) -> io::Result<(Links, Sockets)> {
        let (Answer::Links { sockets, leases }, files) = self.ask(&Ask::Links, Vec::new()).await? else {
            return Err(confused());
        };
        let mut files = files.into_iter();
        let mut given = sockets.map(|is_there| is_there.then(|| files.next()).flatten());
        let mut take = |at: usize| given[at].take();
        let sockets = Sockets {
            tcp4: take(0).map(TcpListener::from).ok_or_else(confused)?,
            tcp6: take(1).map(TcpListener::from),
            dns4: take(2).map(UdpSocket::from).ok_or_else(confused)?,
            dns6: take(3).map(UdpSocket::from),
            udp4: take(4).map(UdpSocket::from).ok_or_else(confused)?,
            udp6: take(5).map(UdpSocket::from),
        };
        let leases = leases
            .into_iter()
            .filter_map(|(address, id)| Some((slot(address)?, id)));
        Ok((Links::elsewhere(Box::new(self.clone()), leases), sockets))
    }

    pub fn volumes(&self) -> atoll_volumes::Volumes {
        atoll_volumes::Volumes::elsewhere(Box::new(self.clone()))
    }

    /// Writes one of the files of the data directory that are not the front's.
    pub fn keep(&self, what: Kept, bytes: Vec<u8>) -> io::Result<()> {
        let ask = Message::new(&Ask::Keep { what, bytes }, Vec::new())?;
        heard(self.peer.ask_blocking(ask)?).map(drop)
    }

    /// There is no server any more.
    pub fn retire(&self) {
        if let Ok(ask) = Message::new(&Ask::Retire, Vec::new()) {
            let _gone = self.peer.ask_blocking(ask);
        }
    }
}

fn heard(message: Message) -> io::Result<(Answer, Vec<OwnedFd>)> {
    match message.read()? {
        Answer::Refused(why) => Err(io::Error::other(why)),
        answer => Ok((answer, message.files)),
    }
}

fn slot(address: Ipv4Addr) -> Option<Slot> {
    Slot::of_source(address.into())
}

struct Listener {
    guests: Arc<Guests>,
    builds: Builds,
}

#[async_trait]
impl Handler for Listener {
    async fn call(&self, message: Message) -> io::Result<Message> {
        let beg = message.read()?;
        let (gift, files) = self.guests.give(beg, message.files).await;
        Message::new(&gift, files)
    }

    fn note(&self, message: Message) {
        match message.read() {
            Ok(News::Ended { id, end }) => self.guests.ended(&id, end),
            Ok(News::Progress {
                number,
                stage,
                done,
                total,
                message,
            }) => {
                let hears = self.builds.lock().get(&number).cloned();
                if let Some(Hears(progress)) = hears {
                    progress.update(Update {
                        stage: &stage,
                        done,
                        total,
                        message: &message,
                    });
                }
            }
            Err(error) => tracing::error!(%error, "the helper says what nobody understands"),
        }
    }
}

fn link_error(what: &str, source: io::Error) -> atoll_links::Error {
    atoll_links::Error::Io {
        what: what.into(),
        source,
    }
}

#[async_trait]
impl atoll_links::Elsewhere for Helper {
    async fn lease(&self, instance: &InstanceId) -> atoll_links::Result<Slot> {
        let id = instance.clone();
        match self.ask(&Ask::Lease { id }, Vec::new()).await {
            Ok((Answer::Slot(address), _)) => {
                slot(address).ok_or_else(|| link_error("leasing a link", confused()))
            }
            Ok(_) => Err(link_error("leasing a link", confused())),
            Err(error) => Err(link_error("leasing a link", error)),
        }
    }

    async fn discover(&self) -> atoll_links::Result<Vec<InstanceId>> {
        match self.ask(&Ask::Leased, Vec::new()).await {
            Ok((Answer::Ids(ids), _)) => Ok(ids),
            Ok(_) => Err(link_error("looking for links", confused())),
            Err(error) => Err(link_error("looking for links", error)),
        }
    }

    async fn release(&self, instance: &InstanceId) -> atoll_links::Result<()> {
        let id = instance.clone();
        let released = self.ask(&Ask::Release { id }, Vec::new()).await;
        released
            .map(drop)
            .map_err(|error| link_error("cutting a link", error))
    }

    async fn close(&self) -> atoll_links::Result<bool> {
        match self.ask(&Ask::CloseLinks, Vec::new()).await {
            Ok((Answer::Closed(closed), _)) => Ok(closed),
            Ok(_) => Err(link_error("closing the links", confused())),
            Err(error) => Err(link_error("closing the links", error)),
        }
    }

    fn answer_from(&self, asked: SocketAddr) -> io::Result<UdpSocket> {
        let ask = Message::new(&Ask::AnswerFrom { asked }, Vec::new())?;
        let (_, files) = heard(self.peer.ask_blocking(ask)?)?;
        files.into_iter().next().map(UdpSocket::from).ok_or_else(confused)
    }
}

impl atoll_volumes::elsewhere::Elsewhere for Helper {
    fn ask(&self, op: Op, streams: Streams<'_>) -> atoll_volumes::Result<VolumeAnswer> {
        let failed = |source| atoll_volumes::Error::Io {
            what: "asking for a volume".into(),
            source,
        };
        let answer = self.ask_volume(op, streams).map_err(failed)?;
        answer.map_err(Into::into)
    }
}

type VolumeAnswered = Result<VolumeAnswer, atoll_volumes::elsewhere::Refusal>;

impl Helper {
    fn ask_volume(&self, op: Op, streams: Streams<'_>) -> io::Result<VolumeAnswered> {
        let Streams { input, begin, output } = streams;
        let has_head = matches!(op, Op::ReadFile { .. });
        let mut files = Vec::new();
        let pipe = |is_wanted: bool| match is_wanted {
            true => pipe_with(PipeFlags::CLOEXEC).map(Some),
            false => Ok(None),
        };
        let (theirs_in, ours_in) = pipe(input.is_some())?.unzip();
        let (ours_out, theirs_out) = pipe(output.is_some())?.unzip();
        files.extend(theirs_in);
        files.extend(theirs_out);
        let ask = Ask::Volume {
            op,
            input: input.is_some(),
            output: output.is_some(),
        };
        let asked = self.peer.begin(Message::new(&ask, files)?)?;
        let fed = match (input, ours_in) {
            (Some(input), Some(pipe)) => feed(input, File::from(pipe)),
            _ => Ok(()),
        };
        let drained = match (output, ours_out) {
            (Some(output), Some(pipe)) => {
                let mut whole = Whole::new(File::from(pipe));
                drain(&mut whole, has_head, begin, output)
            }
            _ => Ok(()),
        };
        let (answer, _) = heard(asked.wait()?)?;
        let Answer::Volume(answer) = answer else {
            return Err(confused());
        };
        // What it says is why nothing more came; else it is for us to say.
        if answer.is_ok() {
            fed?;
            drained?;
        }
        Ok(answer)
    }
}

/// Hands on all of the input. What cannot be read ends the stream without its mark, so it is not taken for whole.
fn feed(input: &mut dyn io::Read, pipe: File) -> io::Result<()> {
    let mut pieces = Pieces(pipe);
    let mut piece = vec![0; 256 << 10];
    loop {
        let count = match input.read(&mut piece) {
            Ok(0) => return pieces.end(),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        match pieces.write_all(&piece[..count]) {
            // Whoever does not want more says why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            other => other?,
        }
    }
}

fn drain(
    whole: &mut Whole<File>,
    has_head: bool,
    begin: Option<&mut dyn FnMut(&atoll_volumes::Entry)>,
    output: &mut dyn io::Write,
) -> io::Result<()> {
    if has_head {
        let head: WireEntry = serde_json::from_slice(&whole.piece()?)?;
        if let Some(begin) = begin {
            begin(&head.into_entry());
        }
    }
    let mut piece = vec![0; 256 << 10];
    loop {
        let count = whole.read(&mut piece)?;
        if count == 0 {
            return Ok(());
        }
        output.write_all(&piece[..count])?;
    }
}

#[async_trait]
impl Installer for Helper {
    async fn install(
        &self,
        options: &DebianOptions,
        out: File,
        progress: Arc<dyn Progress>,
    ) -> atoll_image::Result<()> {
        let failed = |error: io::Error| atoll_image::Error::Invalid(error.to_string());
        let number = self.number();
        self.builds.lock().insert(number, Hears(progress));
        let _stops = Stops { helper: self, number };
        let ask = Ask::Debian {
            suite: options.suite.clone(),
            packages: options.packages.clone(),
            number,
        };
        self.ask(&ask, vec![out.into()]).await.map(drop).map_err(failed)
    }
}

/// Whoever does not wait any more wants no build.
struct Stops<'a> {
    helper: &'a Helper,
    number: u64,
}

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.helper.builds.lock().remove(&self.number);
        let word = Word::Stop { number: self.number };
        if let Ok(word) = Message::new(&word, Vec::new()) {
            let _gone = self.helper.peer.tell(&word);
        }
    }
}
