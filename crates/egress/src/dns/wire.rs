//! DNS messages from strangers, guests and resolvers alike.

use hickory_proto::op::Message;

const HEAD: usize = 12;
/// The root's name, a type and a class.
const SHORTEST_QUESTION: usize = 5;
/// The root's name, type, class, time to live, and a length of nothing.
const SHORTEST_RECORD: usize = 11;

/// Reads a message. One that says that it holds more than fits into it is refused first: the parser makes room for what is said
/// before it looks at what is there, megabytes for a dozen bytes.
pub(crate) fn parse(bytes: &[u8]) -> Option<Message> {
    let (head, rest) = bytes.split_at_checked(HEAD)?;
    let count = |at: usize| usize::from(u16::from_be_bytes([head[at], head[at + 1]]));
    let records = count(6) + count(8) + count(10);
    if count(4) * SHORTEST_QUESTION + records * SHORTEST_RECORD > rest.len() {
        return None;
    }
    Message::from_vec(bytes).ok()
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::Query;
    use hickory_proto::rr::rdata::A;
    use hickory_proto::rr::{Name, RData, Record, RecordType};

    use super::*;

    #[test]
    fn what_fits_is_read_and_what_cannot_fit_is_not() {
        let mut message = Message::query();
        message.add_query(Query::query(Name::root(), RecordType::NS));
        message.add_answer(Record::from_rdata(
            Name::root(),
            1,
            RData::A(A::new(192, 0, 2, 1)),
        ));
        let bytes = message.to_vec().unwrap();
        assert_eq!(parse(&bytes), Some(message));
        for (at, count) in [(4, 2_u16), (4, 0xffff), (6, 3), (8, 0xffff), (10, 0xffff)] {
            let mut more = bytes.clone();
            more[at..at + 2].copy_from_slice(&count.to_be_bytes());
            assert_eq!(parse(&more), None, "{count} at {at}");
        }
        for end in 0..bytes.len() {
            assert_eq!(parse(&bytes[..end]), None);
        }
    }
}
