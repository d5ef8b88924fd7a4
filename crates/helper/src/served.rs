//! The helper's side: does what the front asks, if it may be asked.
//!
//! ```text
//!   Ask ── is it said of what the front may name? ── runtime, links, volumes, Debian ── Answer
//! ```
//! The front is not believed: see the checks in [`places`](self). A template is an image in the templates' directory, a mount
//! is a volume where volumes are mounted, an image to be sealed is a plain file in the scratch directory, a network is the
//! link that this very instance has leased.

mod agents;
mod places;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use atoll_image::{DebianOptions, Progress, Templates, Update};
use atoll_links::{Link, Links, LinksConfig};
use atoll_runtime::agent::{Raised, Raiser};
use atoll_runtime::probe::Probe;
use atoll_runtime::{CableEnd, InstanceSpec, Kind, Network, Restore, Told};
use atoll_types::{InstanceId, Isolation};
use atoll_volumes::elsewhere::{Op, Refusal, Streams, WireEntry, perform};
use atoll_volumes::{Entry, Volumes};
use tokio::sync::OnceCell;

use crate::peer::{Handler, Message, Peer};
use crate::stream::{Pieces, Whole};
use crate::words::{Answer, Ask, Failure, Kept, News, Setup, Spec, Word, confused};
use agents::{Front, Sink, Source};
use places::Places;

/// What the helper works with.
#[derive(Debug)]
pub struct Works {
    pub tiers: Vec<Probe>,
    /// Strongest first.
    pub raisers: Vec<Arc<dyn Raiser>>,
    pub volumes: Volumes,
    /// How links are made, if they are.
    pub links: Option<LinksConfig>,
    /// Where Debian packages are installed; not the store of the templates, which is the front's.
    pub packages: PathBuf,
    /// The templates' directory.
    pub templates: PathBuf,
    pub data: PathBuf,
}

/// Serves the front until it is gone; then calls `over`. Returns at once.
pub fn serve(socket: UnixStream, works: Works, over: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let peer = Peer::new(socket);
    let places = Places::new(&works.templates, &works.data)?;
    let served = Served {
        peer: peer.clone(),
        places,
        works: Arc::new(works),
        links: OnceCell::new(),
        leases: Mutex::default(),
        builds: Arc::default(),
    };
    peer.listen(Arc::new(served), over)
}

struct Served {
    peer: Peer,
    places: Places,
    works: Arc<Works>,
    links: OnceCell<Links>,
    /// Links that wait for their instance to be started.
    leases: Mutex<HashMap<InstanceId, Link>>,
    /// Builds that can be stopped.
    builds: Arc<Mutex<HashMap<u64, tokio::task::AbortHandle>>>,
}

#[async_trait]
impl Handler for Served {
    async fn call(&self, message: Message) -> io::Result<Message> {
        let ask: Ask = message.read()?;
        let (answer, files) = self.answer(ask, message.files).await;
        Message::new(&answer, files)
    }

    fn note(&self, message: Message) {
        if let Ok(Word::Stop { number }) = message.read()
            && let Some(build) = self.builds.lock().remove(&number)
        {
            build.abort();
        }
    }
}

type Answered = (Answer, Vec<OwnedFd>);

#[expect(
    clippy::needless_pass_by_value,
    reason = "errors and words alike, as they come"
)]
fn refused(error: impl ToString) -> Answer {
    Answer::Refused(error.to_string())
}

impl Served {
    async fn answer(&self, ask: Ask, files: Vec<OwnedFd>) -> Answered {
        let answer = match ask {
            Ask::Setup => self.setup().await,
            Ask::Start { isolation, spec } => self.start(isolation, *spec).await,
            Ask::Adopt { isolation, id } => self.adopt(isolation, &id).await,
            Ask::Discover { isolation } => match self.raiser(isolation) {
                Ok(raiser) => match raiser.discover().await {
                    Ok(ids) => Answer::Ids(ids),
                    Err(error) => Answer::Failed(error.into()),
                },
                Err(refused) => refused,
            },
            Ask::Usage { isolation, id } => match self.raiser(isolation) {
                Ok(raiser) => match raiser.usage(&id).await {
                    Ok(usage) => Answer::Usage(usage),
                    Err(error) => Answer::Failed(error.into()),
                },
                Err(refused) => refused,
            },
            Ask::Resize {
                isolation,
                id,
                resources,
            } => match self.raiser(isolation) {
                Ok(raiser) => done(raiser.resize(&id, &resources).await),
                Err(refused) => refused,
            },
            Ask::Thaw { isolation, id } => match self.raiser(isolation) {
                Ok(raiser) => done(raiser.thaw(&id).await),
                Err(refused) => refused,
            },
            Ask::Destroy { isolation, id } => match self.raiser(isolation) {
                Ok(raiser) => done(raiser.destroy(&id).await),
                Err(refused) => refused,
            },
            Ask::Save {
                isolation,
                id,
                kind,
                sink,
            } => match self.raiser(isolation) {
                Ok(raiser) => {
                    let sink = Arc::new(Sink::new(self.peer.clone(), sink));
                    done(raiser.save(&id, kind, sink).await)
                }
                Err(refused) => refused,
            },
            Ask::Links => return self.open_links().await,
            Ask::Lease { id } => self.lease(&id).await,
            Ask::Leased => match self.links.get() {
                Some(links) => match links.discover().await {
                    Ok(ids) => Answer::Ids(ids),
                    Err(error) => refused(error),
                },
                None => refused(atoll_links::Error::Closed),
            },
            Ask::Release { id } => {
                drop(self.leases.lock().remove(&id));
                match self.links.get() {
                    Some(links) => match links.release(&id).await {
                        Ok(()) => Answer::Done,
                        Err(error) => refused(error),
                    },
                    None => refused(atoll_links::Error::Closed),
                }
            }
            Ask::CloseLinks => match self.links.get() {
                Some(links) => match links.close().await {
                    Ok(closed) => Answer::Closed(closed),
                    Err(error) => refused(error),
                },
                None => refused(atoll_links::Error::Closed),
            },
            Ask::AnswerFrom { asked } => {
                let links = self.links.get().cloned();
                let made = blocking(move || match links {
                    Some(links) => links.answer_from(asked),
                    None => Err(io::Error::other("links are closed")),
                });
                match made.await {
                    Ok(socket) => return (Answer::Done, vec![socket.into()]),
                    Err(error) => refused(error),
                }
            }
            Ask::Volume { op, input, output } => self.volume(op, input, output, files).await,
            Ask::Debian {
                suite,
                packages,
                number,
            } => self.debian(suite, packages, number, files).await,
            Ask::Keep { what, bytes } => {
                let (data, name) = (self.works.data.clone(), name_of(what));
                match blocking(move || keep(&data, name, &bytes)).await {
                    Ok(()) => Answer::Done,
                    Err(error) => refused(error),
                }
            }
            Ask::Retire => {
                let _absent = std::fs::remove_file(self.works.data.join(name_of(Kept::ServerFile).0));
                Answer::Done
            }
        };
        (answer, Vec::new())
    }

    fn raiser(&self, isolation: Isolation) -> Result<&Arc<dyn Raiser>, Answer> {
        let mut raisers = self.works.raisers.iter();
        raisers
            .find(|raiser| raiser.isolation() == isolation)
            .ok_or_else(|| refused(format!("there is no {isolation} runtime")))
    }

    async fn setup(&self) -> Answer {
        let works = Arc::clone(&self.works);
        let found = blocking(move || {
            // Asks the runtime's program, the first time.
            let saves = works
                .raisers
                .iter()
                .map(|raiser| (raiser.isolation(), raiser.saves()));
            Ok(saves.collect())
        });
        match found.await {
            Ok(runtimes) => Answer::Setup(Setup {
                tiers: self.works.tiers.clone(),
                runtimes,
            }),
            Err(error) => refused(error),
        }
    }

    async fn start(&self, isolation: Isolation, spec: Spec) -> Answer {
        let raiser = match self.raiser(isolation) {
            Ok(raiser) => raiser,
            Err(refused) => return refused,
        };
        let failed = |why| Answer::Failed(Failure::Start { isolation, why });
        let unlinked = |why| failed(Told::new(Kind::State, why));
        // Held until the instance is in it.
        let link = self.leases.lock().remove(&spec.id);
        let network = match (spec.network, &link) {
            (false, _) => None,
            (true, Some(link)) => match network_of(link) {
                Some(network) => Some(network),
                None => return unlinked("its link is in use"),
            },
            (true, None) => return unlinked("it has leased no link"),
        };
        let (places, checked) = (self.places.clone(), spec.clone());
        let open = match blocking(move || places.check(&checked)).await {
            Ok(open) => open,
            Err(why) => {
                tracing::error!(instance = %spec.id, %why, "the front asked for what it must not have");
                return failed((&why).into());
            }
        };
        // An ordinary user's templates are extracted once, and known by their names; nobody there reads more than the front.
        let image = match rustix::process::geteuid().is_root() {
            true => open
                .iter()
                .map(|file| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into())
                .collect(),
            false => spec.image,
        };
        let source = spec.restore.as_ref().map(|restore| restore.source);
        let restore = spec.restore.map(|restore| Restore {
            kind: restore.kind,
            source: Arc::new(Source::new(self.peer.clone(), restore.source, restore.names)),
        });
        let spec = InstanceSpec {
            id: spec.id,
            image,
            resources: spec.resources,
            hostname: spec.hostname,
            restore,
            mounts: spec.mounts,
            network,
        };
        let front = Arc::new(Front::new(self.peer.clone(), source));
        let raised = raiser.raise(spec, front).await;
        drop((open, link));
        match raised {
            Ok(raised) => self.watch(raised),
            Err(error) => Answer::Failed(error.into()),
        }
    }

    async fn adopt(&self, isolation: Isolation, id: &InstanceId) -> Answer {
        let raiser = match self.raiser(isolation) {
            Ok(raiser) => raiser,
            Err(refused) => return refused,
        };
        let front = Arc::new(Front::new(self.peer.clone(), None));
        match raiser.take_over(id, front).await {
            Ok(raised) => self.watch(raised),
            Err(error) => Answer::Failed(error.into()),
        }
    }

    /// Tells the front when it is over.
    fn watch(&self, raised: Raised) -> Answer {
        let Raised { id, mut end, .. } = raised;
        let peer = self.peer.clone();
        tokio::spawn(async move {
            let Ok(end) = end.wait_for(Option::is_some).await.map(|end| end.clone()) else {
                return;
            };
            if let Some(end) = end
                && let Ok(news) = Message::new(&News::Ended { id, end }, Vec::new())
            {
                let _gone = peer.tell(&news);
            }
        });
        Answer::Done
    }

    async fn open_links(&self) -> Answered {
        let Some(config) = self.works.links.clone() else {
            return (refused("links are switched off"), Vec::new());
        };
        let mut sockets = None;
        let opened = self.links.get_or_try_init(|| async {
            let (links, opened) = Links::start(config).await?;
            sockets = Some(opened);
            Ok::<_, atoll_links::Error>(links)
        });
        let links = match opened.await {
            Ok(links) => links.clone(),
            Err(error) => return (refused(error), Vec::new()),
        };
        let Some(sockets) = sockets else {
            return (refused("the links are open already"), Vec::new());
        };
        let given: [Option<OwnedFd>; 6] = [
            Some(sockets.tcp4.into()),
            sockets.tcp6.map(Into::into),
            Some(sockets.dns4.into()),
            sockets.dns6.map(Into::into),
            Some(sockets.udp4.into()),
            sockets.udp6.map(Into::into),
        ];
        let leases = links
            .leases()
            .into_iter()
            .map(|(slot, id)| (slot.v4(), id))
            .collect();
        let answer = Answer::Links {
            sockets: std::array::from_fn(|at| given[at].is_some()),
            leases,
        };
        (answer, given.into_iter().flatten().collect())
    }

    async fn lease(&self, id: &InstanceId) -> Answer {
        let Some(links) = self.links.get() else {
            return refused(atoll_links::Error::Closed);
        };
        match links.lease(id).await {
            Ok(link) => {
                let address = link.slot().v4();
                self.leases.lock().insert(id.clone(), link);
                Answer::Slot(address)
            }
            Err(error) => refused(error),
        }
    }

    async fn volume(&self, op: Op, input: bool, output: bool, files: Vec<OwnedFd>) -> Answer {
        let (works, places) = (Arc::clone(&self.works), self.places.clone());
        let done = tokio::task::spawn_blocking(move || {
            if let Op::Seal { image, .. } = &op {
                places.check_scratch(image).map_err(|source| {
                    Refusal::from(atoll_volumes::Error::Io {
                        what: "sealing a volume".into(),
                        source,
                    })
                })?;
            }
            let mut files = files.into_iter().map(File::from);
            let mut from = input.then(|| files.next()).flatten().map(Whole::new);
            let into = output
                .then(|| files.next())
                .flatten()
                .map(|file| Arc::new(Mutex::new(Pieces(file))));
            let mut begin = {
                let into = into.clone();
                move |entry: &Entry| {
                    let words = serde_json::to_vec(&WireEntry::of(entry)).unwrap_or_default();
                    if let Some(into) = &into {
                        // Whoever does not listen is noticed at the next bytes.
                        let _gone = into.lock().write_all(&words);
                    }
                }
            };
            let mut out = into.clone().map(Shared);
            let streams = Streams {
                input: from.as_mut().map(|from| from as &mut dyn io::Read),
                begin: Some(&mut begin),
                output: out.as_mut().map(|out| out as &mut dyn io::Write),
            };
            let done = perform(&works.volumes, op, streams).map_err(Refusal::from);
            drop((begin, out));
            if done.is_ok()
                && let Some(into) = into.and_then(Arc::into_inner)
            {
                let _gone = into.into_inner().end();
            }
            done
        });
        match done.await {
            Ok(done) => Answer::Volume(done),
            Err(error) => refused(error),
        }
    }

    async fn debian(&self, suite: String, packages: Vec<String>, number: u64, files: Vec<OwnedFd>) -> Answer {
        let Some(out) = files.into_iter().next().map(File::from) else {
            return refused(confused());
        };
        let (path, peer) = (self.works.packages.clone(), self.peer.clone());
        let progress: Arc<dyn Progress> = Arc::new(move |update: Update<'_>| {
            let news = News::Progress {
                number,
                stage: update.stage.to_owned(),
                done: update.done,
                total: update.total,
                message: update.message.to_owned(),
            };
            if let Ok(news) = Message::new(&news, Vec::new()) {
                let _gone = peer.tell(&news);
            }
        });
        let options = DebianOptions {
            suite,
            packages,
            ..DebianOptions::base(atoll_types::Timestamp(0))
        };
        let building = tokio::spawn(async move {
            let store = blocking(move || Templates::open(&path).map_err(io::Error::other)).await;
            let store = store.map_err(|error| error.to_string())?;
            let installed = store.install_debian(&options, out, progress).await;
            installed.map_err(|error| error.to_string())
        });
        self.builds.lock().insert(number, building.abort_handle());
        let built = building.await;
        self.builds.lock().remove(&number);
        match built {
            Ok(Ok(())) => Answer::Done,
            Ok(Err(why)) => Answer::Refused(why),
            Err(_) => refused("the build was stopped before it was finished"),
        }
    }
}

fn done(outcome: Result<(), atoll_runtime::Error>) -> Answer {
    match outcome {
        Ok(()) => Answer::Done,
        Err(error) => Answer::Failed(error.into()),
    }
}

fn network_of(link: &Link) -> Option<Network> {
    let slot = link.slot();
    Some(Network {
        namespace: link.namespace()?,
        mtu: atoll_links::MTU,
        guest: CableEnd {
            mac: atoll_links::GUEST_MAC,
            v4: slot.v4(),
            v6: slot.v6(),
        },
        gateway: CableEnd {
            mac: atoll_links::GATEWAY_MAC,
            v4: atoll_links::GATEWAY_V4,
            v6: atoll_links::GATEWAY_V6,
        },
    })
}

/// A writer that two have.
struct Shared<W>(Arc<Mutex<W>>);

impl<W: io::Write> io::Write for Shared<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().flush()
    }
}

/// Its name, and who may read it.
fn name_of(what: Kept) -> (&'static str, u32) {
    match what {
        Kept::ServerFile => ("server.json", 0o644),
        Kept::AdminKey => ("admin.key", 0o600),
    }
}

/// Writes a file of the data directory, whole or not at all.
fn keep(data: &Path, (name, mode): (&str, u32), bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    const MOST: usize = 64 << 10;
    if bytes.len() > MOST {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let draft = data.join(format!(".{name}.new"));
    let _absent = std::fs::remove_file(&draft);
    let mut options = File::options();
    let mut file = options.write(true).create_new(true).mode(mode).open(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&draft, data.join(name))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}
