//! Which job serves which request.

use atoll_guest_protocol::{CommandInfo, Exec, FailureKind, MAX_PAYLOAD, Message, Request, encode};

use crate::acting::{Acted, Actor};
use crate::attach::Attach;
use crate::configure;
use crate::connect::Connect;
use crate::failure::{Outcome, failure, from_io, invalid};
use crate::files::list::List;
use crate::files::read::ReadFile;
use crate::files::remove::Remove;
use crate::files::tar_in::TarIn;
use crate::files::tar_out::TarOut;
use crate::files::watch::Watch;
use crate::files::write::Writing;
use crate::files::{Place, Stats, attributes, change};
use crate::follow::Follow;
use crate::job::{Answer, Job, Shared};
use crate::long::Long;
use crate::usage;

pub(crate) fn open(request: Request, stream: u32, shared: &mut Shared) -> Outcome<Box<dyn Job>> {
    match Actor::of(&request, &shared.config)? {
        None => serve(request, stream, shared),
        Some(actor) => Acted::open(actor, || serve(request, stream, shared)),
    }
}

fn serve(request: Request, stream: u32, shared: &mut Shared) -> Outcome<Box<dyn Job>> {
    match request {
        Request::Long { length } => Long::open(length, stream),
        Request::Configure(configure) => configure::apply(configure, shared).map(|()| Answer::nothing()),
        Request::Network(network) => {
            shared.way_out.tell(network)?;
            Ok(Answer::nothing())
        }
        Request::Exec(exec) => start(exec, stream, shared),
        Request::Attach { command, from } => {
            let number = shared.commands.find(&command)?;
            shared.commands.attach(number, stream, from);
            Ok(Box::new(Attach::new(number, None, false)))
        }
        Request::ListCommands => Ok(Answer::of(
            batches(shared.commands.list()).into_iter().map(Message::Commands),
        )),
        Request::FollowCommands => Ok(Follow::open(stream, shared)),
        Request::Signal { command, signal } => {
            let number = shared.commands.find(&command)?;
            if !(1..=64).contains(&signal) {
                return Err(invalid(format!("no such signal: {signal}")));
            }
            let signaled = shared
                .commands
                .get_mut(number)
                .map_or(Ok(false), |command| command.signal(signal))
                .map_err(|error| from_io(format!("cannot signal {command}"), &error))?;
            match signaled {
                true => Ok(Answer::nothing()),
                false => Err(failure(
                    FailureKind::NotFound,
                    format!("command {command} is no longer running"),
                )),
            }
        }
        Request::Forget { command } => shared.commands.forget(&command).map(|()| Answer::nothing()),
        Request::ListPorts => Ok(Answer::of([Message::Ports(usage::ports())])),
        Request::Connect { port } => Connect::open(port, stream, shared),
        Request::Usage => Ok(Answer::of([Message::Usage(usage::usage())])),
        Request::ReadFile {
            path,
            user,
            offset,
            length,
        } => ReadFile::open(place(&path, user.as_deref(), shared)?, offset, length),
        Request::WriteFile(request) => {
            let place = place(&request.path, request.user.as_deref(), shared)?;
            Writing::open(&request, place)
        }
        Request::Stat { path, user } => {
            let place = place(&path, user.as_deref(), shared)?;
            match Stats::default().of(&place.path) {
                Ok(stat) => Ok(Answer::of([Message::Stat(stat)])),
                Err(error) => Err(place.failure("cannot look at", &error)),
            }
        }
        Request::List { path, user, depth } => List::open(&place(&path, user.as_deref(), shared)?, depth),
        Request::MakeDir { path, user, mode } => {
            let place = place(&path, user.as_deref(), shared)?;
            let created = change::make_directories(&place.path, place.owner, mode)?;
            Ok(Answer::of([Message::Created(created)]))
        }
        Request::Rename { from, to, user } => {
            let place = place(&from, user.as_deref(), shared)?;
            change::rename(&place, &place.sibling(&to)?).map(|()| Answer::nothing())
        }
        Request::Remove {
            path,
            user,
            recursive,
        } => Remove::open(place(&path, user.as_deref(), shared)?, recursive),
        Request::SetMode { path, user, mode } => {
            change::set_mode(&place(&path, user.as_deref(), shared)?, mode).map(|()| Answer::nothing())
        }
        Request::SetOwner { path, user, owner } => {
            change::set_owner(&place(&path, user.as_deref(), shared)?, &owner).map(|()| Answer::nothing())
        }
        Request::Symlink { path, target, user } => {
            change::make_symlink(&place(&path, user.as_deref(), shared)?, &target).map(|()| Answer::nothing())
        }
        Request::Watch {
            path,
            user,
            recursive,
        } => Watch::open(place(&path, user.as_deref(), shared)?, recursive, stream, shared),
        Request::TarOut {
            path,
            user,
            one_file_system,
        } => TarOut::open(place(&path, user.as_deref(), shared)?, one_file_system),
        Request::Attributes { paths, user, prefix } => {
            let all = paths
                .iter()
                .map(|path| {
                    place(path, user.as_deref(), shared).map(|place| attributes::read(&place, &prefix))
                })
                .collect::<Outcome<_>>()?;
            Ok(Answer::of([Message::Attributes(all)]))
        }
        Request::SetAttributes {
            path,
            user,
            prefix,
            attributes,
        } => {
            let place = place(&path, user.as_deref(), shared)?;
            attributes::replace(&place, &prefix, &attributes).map(|()| Answer::nothing())
        }
        Request::TarIn { path, user } => TarIn::open(&place(&path, user.as_deref(), shared)?),
    }
}

fn place(path: &[u8], user: Option<&str>, shared: &Shared) -> Outcome<Place> {
    Place::new(path, user, &shared.config)
}

fn start(exec: Exec, stream: u32, shared: &mut Shared) -> Outcome<Box<dyn Job>> {
    let kill_on_close = exec.kill_on_close;
    let number = shared
        .commands
        .start(exec, &shared.config, shared.way_out.env(), &shared.poller)?;
    shared.commands.attach(number, stream, 0);
    let pid = shared.commands.get_mut(number).map_or(0, |command| command.pid());
    let started = Message::Started {
        pid: pid.unsigned_abs(),
    };
    Ok(Box::new(Attach::new(number, Some(started), kill_on_close)))
}

/// Lists too long for one frame come in several messages. An empty list is one empty message.
pub(crate) fn batches(infos: impl Iterator<Item = CommandInfo>) -> Vec<Vec<CommandInfo>> {
    let mut all = vec![Vec::new()];
    let mut held = 0;
    for info in infos {
        let length = encode(&info).len();
        if held + length > MAX_PAYLOAD / 2 {
            all.push(Vec::new());
            held = 0;
        }
        held += length;
        if let Some(last) = all.last_mut() {
            last.push(info);
        }
    }
    all
}
