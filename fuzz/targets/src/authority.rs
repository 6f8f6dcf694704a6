//! The target for a client's HTTP/2 frames.

use loona_hpack::Decoder;

use beelet_serve::authority::{
    AUTHORITY, CONTINUATION, END_HEADERS, FRAME_HEADER, HEADERS, MAX_FRAME, Malformed, PREFACE, PRIORITY,
    Rewriter,
};

/// Tests a client's bytes, with the preface that every client sends. The output to the server is independent
/// of the pieces in which the bytes arrive, consists of whole frames with the agent's authority, and does not
/// change when it is rewritten again.
pub fn http2_authority(input: &[u8]) {
    let piece = input.first().map_or(1, |first| usize::from(*first));
    let mut bytes = if input.starts_with(b"PRI") { Vec::new() } else { PREFACE.to_vec() };
    bytes.extend_from_slice(input);
    let (out, result) = rewrite(&bytes, bytes.len());
    for piece in [1, piece] {
        let (other, of_other) = rewrite(&bytes, piece);
        assert_eq!(of_other, result, "in pieces of {piece}");
        // Before the error, smaller pieces may have passed on more of the output.
        assert!(other == out || result.is_err() && other.starts_with(&out), "in pieces of {piece}");
    }
    check(&out);
    assert_eq!(rewrite(&out, out.len()), (out.clone(), Ok(())), "rewritten again");
}

fn rewrite(bytes: &[u8], piece: usize) -> (Vec<u8>, Result<(), Malformed>) {
    let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
    for piece in bytes.chunks(piece.max(1)) {
        rewriter.push(piece);
        loop {
            match rewriter.pull(&mut out) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return (out, Err(error)),
            }
        }
    }
    (out, Ok(()))
}

/// Checks that the output consists of frames of an allowed size (the last frame may be incomplete), with
/// header blocks that any server can decode.
fn check(out: &[u8]) {
    let Some(mut rest) = out.strip_prefix(PREFACE) else {
        return assert!(PREFACE.starts_with(out));
    };
    let (mut decoder, mut block) = (Decoder::new(), Vec::new());
    while let Some((header, more)) = rest.split_first_chunk::<FRAME_HEADER>() {
        let [a, b, c, kind, flags, ..] = *header;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        assert!(length <= MAX_FRAME);
        let Some((payload, more)) = more.split_at_checked(length) else { return };
        rest = more;
        if kind == HEADERS || kind == CONTINUATION {
            block.extend(&payload[if kind == HEADERS && flags & PRIORITY != 0 { 5 } else { 0 }..]);
            if flags & END_HEADERS != 0 {
                for (name, value) in decoder.decode(&std::mem::take(&mut block)).unwrap() {
                    assert!(name != b":authority" || value == AUTHORITY);
                }
            }
        }
    }
}
