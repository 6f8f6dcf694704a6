//! Reads pieces from a channel as a continuous file.

use std::io::{self, Read};

use tokio::sync::mpsc;

/// A blocking reader of pieces from a channel.
#[derive(Debug)]
pub struct Reader {
    pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    /// Bytes read of the piece.
    read: usize,
}

impl Reader {
    /// Reads from `pieces`; the closing of the channel is the end of the file.
    #[must_use]
    pub fn new(pieces: mpsc::Receiver<io::Result<Vec<u8>>>) -> Self {
        Self { pieces, piece: Vec::new(), read: 0 }
    }
}

impl Read for Reader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.read == self.piece.len() {
            match self.pieces.blocking_recv() {
                Some(piece) => (self.piece, self.read) = (piece?, 0),
                None => return Ok(0),
            }
        }
        let length = bytes.len().min(self.piece.len() - self.read);
        bytes[..length].copy_from_slice(&self.piece[self.read..self.read + length]);
        self.read += length;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_as_one_until_they_end_or_fail() {
        let (sender, receiver) = mpsc::channel(8);
        for piece in ["one ", "", "two"] {
            sender.try_send(Ok(piece.as_bytes().to_vec())).unwrap();
        }
        let mut reader = Reader::new(receiver);
        let mut text = [0; 6];
        reader.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"one tw");
        sender.try_send(Err(io::Error::other("gone"))).unwrap();
        drop(sender);
        assert_eq!(reader.read_to_end(&mut Vec::new()).unwrap_err().to_string(), "gone");
        assert_eq!(reader.read(&mut text).unwrap(), 0);
    }
}
