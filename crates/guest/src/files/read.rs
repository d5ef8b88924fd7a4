//! A file's bytes to the host, read straight into the output queue as fast as its credit comes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use atoll_guest_protocol::{FileStat, Message, SUB_MAIN};

use crate::failure::{Outcome, invalid, show};
use crate::files::{Place, Stats, bytes, open_regular};
use crate::job::{Context, Job, Step};

#[derive(Debug)]
pub(crate) struct ReadFile {
    place: Place,
    file: File,
    left: u64,
    stat: Option<FileStat>,
}

impl ReadFile {
    pub(crate) fn open(place: Place, offset: u64, length: Option<u64>) -> Outcome<Box<dyn Job>> {
        let fail = |error: std::io::Error| match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENXIO) => {
                invalid(format!("{} is not a file", show(bytes(&place.path))))
            }
            _ => place.failure("cannot read", &error),
        };
        let mut file = File::from(open_regular(&place.path).map_err(fail)?);
        let metadata = file.metadata().map_err(fail)?;
        if offset > 0 {
            file.seek(SeekFrom::Start(offset)).map_err(fail)?;
        }
        let stat = Stats::default().with_metadata(&place.path, &metadata);
        Ok(Box::new(Self {
            place,
            file,
            // The size of a file in /proc says nothing: what ends the stream is the end of the file.
            left: length.unwrap_or(u64::MAX),
            stat: Some(stat),
        }))
    }
}

impl Job for ReadFile {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        if let Some(stat) = self.stat.take() {
            let message = Message::Stat(stat.clone());
            if !cx.message(&message) {
                self.stat = Some(stat);
                return Step::Wait;
            }
        }
        if self.left == 0 {
            return Step::Done(Ok(()));
        }
        if cx.port.data_room() == 0 {
            return Step::Wait;
        }
        let most = usize::try_from(self.left).unwrap_or(usize::MAX);
        let (port, out) = (&mut *cx.port, &mut cx.shared.out);
        match port.data_run_with(out, SUB_MAIN, most, |spaces| self.file.read_vectored(spaces)) {
            Ok(0) => Step::Done(Ok(())),
            Ok(count) => {
                self.left -= count as u64;
                Step::Again
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Step::Again,
            Err(error) => Step::Done(Err(self.place.failure("cannot read", &error))),
        }
    }
}
