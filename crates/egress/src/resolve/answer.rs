//! What a reply says about the name that was asked for.

use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name as WireName, RData, Record, RecordType};

use super::upstream::Query;

const SHORTEST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(300);
/// For what does not exist.
const LONGEST_NEGATIVE: Duration = Duration::from_secs(30);
/// Aliases that are followed within one reply.
const MOST_ALIASES: usize = 12;
/// Records that are kept.
const MOST_RECORDS: usize = 64;

/// What a name has of one type.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// Whether there is such a name at all.
    pub exists: bool,
    /// Of the type that was asked for only.
    pub records: Vec<Record>,
    /// How long this may be believed.
    pub ttl: Duration,
}

impl Answer {
    /// Reads `reply`, which is known to be one to `query`. Also gives the name at which to go on asking, where the reply
    /// only leads there. `ttl` is that of the aliases that led to `query`.
    pub(crate) fn read(reply: &Message, query: &Query, ttl: Option<Duration>) -> (Self, Option<WireName>) {
        let mut name = query.name().clone();
        let mut ttl = ttl.unwrap_or(LONGEST);
        let mut moved = false;
        if query.kind() != RecordType::CNAME {
            for _ in 0..MOST_ALIASES {
                let Some((alias, seconds)) = alias_of(&reply.answers, &name) else {
                    break;
                };
                name = alias;
                ttl = ttl.min(Duration::from_secs(seconds.into()));
                moved = true;
            }
        }
        let records: Vec<_> = reply
            .answers
            .iter()
            .filter(|record| record.record_type() == query.kind() && record.name == name)
            .take(MOST_RECORDS)
            .cloned()
            .collect();
        let exists = reply.metadata.response_code != ResponseCode::NXDomain;
        let denied = reply.authorities.iter().find_map(|record| match &record.data {
            RData::SOA(soa) => Some(Duration::from_secs(record.ttl.min(soa.minimum).into())),
            _ => None,
        });
        // Somebody who knows the end of the chain would have said that there is nothing.
        let unfinished = moved && exists && records.is_empty() && denied.is_none();
        let ttl = if records.is_empty() && !unfinished {
            denied.unwrap_or(SHORTEST).clamp(SHORTEST, LONGEST_NEGATIVE)
        } else {
            let shortest = records.iter().map(|record| record.ttl).min();
            shortest
                .map_or(ttl, |seconds| ttl.min(Duration::from_secs(seconds.into())))
                .clamp(SHORTEST, LONGEST)
        };
        let answer = Self { exists, records, ttl };
        (answer, unfinished.then_some(name))
    }
}

fn alias_of(records: &[Record], name: &WireName) -> Option<(WireName, u32)> {
    records.iter().find_map(|record| match &record.data {
        RData::CNAME(alias) if record.name == *name => Some((alias.0.clone(), record.ttl)),
        _ => None,
    })
}
