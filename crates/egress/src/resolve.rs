//! Asks the upstream resolvers, as little as possible and believing as little as possible.
//!
//! What must hold: an answer counts only if it comes from the resolver that was asked, to a port, an id and a spelling
//! of the name (0x20) that nobody else can know. Names are asked for as they are, without any search domain. What is
//! kept is bounded, and no longer valid than its sender said.

pub(crate) mod answer;
mod cache;
pub(crate) mod upstream;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use atoll_policy::Name;
use hickory_proto::rr::{RData, RecordType};
use tokio::sync::Semaphore;
use tokio::time::timeout;

pub(crate) use answer::Answer;
use cache::Cache;
use upstream::{Query, Upstreams};

/// Questions to upstream resolvers that may be under way, of all sandboxes together.
const OPEN: usize = 1024;
/// When three quarters are taken, what a sandbox may have under way to be given more: a few that ask for what nobody
/// answers shall not shut out the others.
const FEW: usize = 8;
/// How long the other family's answer is waited for when the first has come.
const OTHER_FAMILY: Duration = Duration::from_millis(50);
/// Addresses of a name that are looked at.
const MOST_ADDRESSES: usize = 32;
/// Answers that only lead to another name, after which is asked again.
const MOST_HOPS: usize = 4;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("no resolver is configured; set `[network] resolvers`, or list one in /etc/resolv.conf")]
    NoResolver,
    #[error("no resolver answered in time")]
    TimedOut,
    #[error("the resolver answered {0}")]
    Failed(String),
    #[error("too many names are being resolved at the moment")]
    Busy,
}

#[derive(Debug)]
pub(crate) struct Resolver {
    upstreams: Upstreams,
    cache: Cache,
    open: Semaphore,
    /// A name of Atoll's own, about which nobody else is asked.
    own: Option<Name>,
    patience: Duration,
}

/// Stands for the addresses of the own name: from a range in which nobody is.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 80);
const OWN_KEPT: Duration = Duration::from_secs(60);

/// The addresses of a name, those of version 6 first. `None` where the name does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub list: Option<Vec<IpAddr>>,
    pub ttl: Duration,
}

impl Resolver {
    pub(crate) fn new(resolvers: Vec<SocketAddr>, own: Option<Name>, patience: Duration) -> Self {
        Self {
            upstreams: Upstreams::new(resolvers),
            cache: Cache::default(),
            open: Semaphore::new(OPEN),
            own,
            patience,
        }
    }

    /// Both families at once. One that fails does not matter where the other has addresses.
    /// `held` is how many questions are under way for whoever asks.
    pub(crate) async fn addresses(&self, name: &Name, held: usize) -> Result<Addresses, ResolveError> {
        if self.own.as_ref() == Some(name) {
            return Ok(Addresses {
                list: Some(vec![OWN.into()]),
                ttl: OWN_KEPT,
            });
        }
        let six = self.records(name, RecordType::AAAA, held);
        let four = self.records(name, RecordType::A, held);
        tokio::pin!(six, four);
        let (six, four) = tokio::select! {
            first = &mut six => {
                let second = wait_for(four, &first).await;
                (Some(first), second)
            }
            first = &mut four => {
                let second = wait_for(six, &first).await;
                (second, Some(first))
            }
        };
        merge(six, four)
    }

    /// What the name has of one type, wherever aliases lead.
    pub(crate) async fn records(
        &self,
        name: &Name,
        kind: RecordType,
        held: usize,
    ) -> Result<Arc<Answer>, ResolveError> {
        if let Some(known) = self.cache.get(name, kind) {
            return Ok(known);
        }
        if held > FEW && self.open.available_permits() < OPEN / 4 {
            return Err(ResolveError::Busy);
        }
        let _open = self.open.try_acquire().map_err(|_| ResolveError::Busy)?;
        let answer = timeout(self.patience, self.ask(name, kind))
            .await
            .map_err(|_| ResolveError::TimedOut)??;
        let answer = Arc::new(answer);
        self.cache.put(name, kind, &answer);
        Ok(answer)
    }

    /// Forgets what it knows, as if time had passed.
    #[cfg(test)]
    pub(crate) fn forget(&self) {
        self.cache.clear();
    }

    async fn ask(&self, name: &Name, kind: RecordType) -> Result<Answer, ResolveError> {
        let mut query = Query::new(name, kind)?;
        let mut ttl = None;
        for _ in 0..MOST_HOPS {
            let reply = self.upstreams.ask(&query).await?;
            let (answer, alias) = Answer::read(&reply, &query, ttl);
            match alias {
                Some(alias) => {
                    ttl = Some(answer.ttl);
                    query = query.about(alias);
                }
                None => return Ok(answer),
            }
        }
        Err(ResolveError::Failed(
            "too many aliases, one after the other".to_owned(),
        ))
    }
}

type Outcome = Result<Arc<Answer>, ResolveError>;

/// The second answer: for as long as it takes, unless the first has something to go on with.
async fn wait_for(second: impl Future<Output = Outcome>, first: &Outcome) -> Option<Outcome> {
    match first {
        Ok(answer) if !answer.records.is_empty() => timeout(OTHER_FAMILY, second).await.ok(),
        _ => Some(second.await),
    }
}

fn merge(six: Option<Outcome>, four: Option<Outcome>) -> Result<Addresses, ResolveError> {
    let mut error = None;
    let mut answers = Vec::with_capacity(2);
    for outcome in [six, four].into_iter().flatten() {
        match outcome {
            Ok(answer) => answers.push(answer),
            Err(failed) => error = Some(failed),
        }
    }
    let list: Vec<_> = answers
        .iter()
        .flat_map(|answer| answer.records.iter())
        .filter_map(|record| match &record.data {
            RData::A(address) => Some(IpAddr::V4(address.0)),
            RData::AAAA(address) => Some(IpAddr::V6(address.0)),
            _ => None,
        })
        .take(MOST_ADDRESSES)
        .collect();
    let ttl = answers.iter().map(|answer| answer.ttl).min().unwrap_or_default();
    match error {
        Some(error) if list.is_empty() => Err(error),
        _ => Ok(Addresses {
            // Any family that knows the name proves that it exists.
            list: answers.iter().any(|answer| answer.exists).then_some(list),
            ttl,
        }),
    }
}

#[cfg(test)]
mod tests;
