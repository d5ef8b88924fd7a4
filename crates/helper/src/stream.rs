//! Bytes through a pipe with a mark at their end, so that a stream that broke off is not taken for one that is whole.

use std::io::{self, Read, Write};

/// Of one piece.
const LONGEST: usize = 1 << 20;

/// Cuts what is written into pieces, each after its length; a piece of none is the end.
#[derive(Debug)]
pub(crate) struct Pieces<W>(pub(crate) W);

impl<W: Write> Pieces<W> {
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.0.write_all(&[0; 4])
    }
}

impl<W: Write> Write for Pieces<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(LONGEST)];
        if piece.is_empty() {
            return Ok(0);
        }
        self.0.write_all(&(piece.len() as u32).to_le_bytes())?;
        self.0.write_all(piece)?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Puts the pieces together again.
#[derive(Debug)]
pub(crate) struct Whole<R> {
    from: R,
    left: usize,
    ended: bool,
}

impl<R: Read> Whole<R> {
    pub(crate) fn new(from: R) -> Self {
        Self {
            from,
            left: 0,
            ended: false,
        }
    }

    /// The whole next piece, which is a message of its own.
    pub(crate) fn piece(&mut self) -> io::Result<Vec<u8>> {
        self.next()?;
        let mut bytes = vec![0; self.left];
        self.from.read_exact(&mut bytes)?;
        self.left = 0;
        Ok(bytes)
    }

    fn next(&mut self) -> io::Result<()> {
        if self.ended || self.left > 0 {
            return Ok(());
        }
        let mut length = [0; 4];
        self.from.read_exact(&mut length)?;
        self.left = u32::from_le_bytes(length) as usize;
        if self.left > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.ended = self.left == 0;
        Ok(())
    }
}

impl<R: Read> Read for Whole<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.next()?;
        if self.ended || into.is_empty() {
            return Ok(0);
        }
        let most = into.len().min(self.left);
        let got = self.from.read(&mut into[..most])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= got;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_broke_off_is_not_whole() {
        let mut bytes = Vec::new();
        let mut pieces = Pieces(&mut bytes);
        pieces.write_all(b"head").unwrap();
        pieces.write_all(&[7; 3000]).unwrap();
        pieces.end().unwrap();
        let mut whole = Whole::new(bytes.as_slice());
        assert_eq!(whole.piece().unwrap(), b"head");
        let mut rest = Vec::new();
        whole.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, [7; 3000]);
        for length in [0, 3, 5, 100, bytes.len() - 1] {
            let broken = Whole::new(&bytes[..length]).read_to_end(&mut Vec::new());
            assert_eq!(
                broken.unwrap_err().kind(),
                io::ErrorKind::UnexpectedEof,
                "{length}"
            );
        }
    }
}
