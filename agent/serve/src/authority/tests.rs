use loona_hpack::Encoder;
use proptest::prelude::*;

use super::*;
use beelet_testing::http2::frame;

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

fn fields(pairs: &[(&str, &str)]) -> Fields {
    pairs.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())).collect()
}

fn request(authority: &str) -> Fields {
    fields(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v1beta1.Registration/Register"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ])
}

/// Returns the bytes for the server when the input arrives in pieces of this size.
fn rewrite(bytes: &[u8], piece: usize) -> Result<Vec<u8>, Malformed> {
    let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
    for piece in bytes.chunks(piece.max(1)) {
        rewriter.push(piece);
        while rewriter.pull(&mut out)? {}
    }
    Ok(out)
}

/// Parses frames as `(kind, flags, stream, payload)` after the preface.
fn frames(mut bytes: &[u8]) -> Vec<(u8, u8, u32, Vec<u8>)> {
    bytes = bytes.strip_prefix(PREFACE).unwrap();
    let mut all = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<9>() {
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]) as usize;
        let stream = u32::from_be_bytes([header[5], header[6], header[7], header[8]]);
        all.push((header[3], header[4], stream, rest[..length].to_vec()));
        bytes = &rest[length..];
    }
    assert!(bytes.is_empty(), "half a frame");
    all
}

/// Returns the header lists of the output, assembled from HEADERS and CONTINUATION.
fn header_lists(bytes: &[u8]) -> Vec<Fields> {
    let mut decoder = Decoder::new();
    let (mut lists, mut block) = (Vec::new(), Vec::new());
    for (kind, flags, _, payload) in frames(bytes) {
        if kind != HEADERS && kind != CONTINUATION {
            continue;
        }
        block.extend(&payload[if flags & PRIORITY != 0 && kind == HEADERS { 5 } else { 0 }..]);
        if flags & END_HEADERS != 0 {
            lists.push(decoder.decode(&std::mem::take(&mut block)).unwrap());
        }
    }
    lists
}

fn with_localhost(mut list: Fields) -> Fields {
    for (name, value) in &mut list {
        if name == b":authority" {
            *value = AUTHORITY.to_vec();
        }
    }
    list
}

#[test]
fn a_sockets_path_becomes_localhost_also_where_it_is_indexed() {
    let mut encoder = Encoder::new();
    let list = request("/var/lib/kubelet/device-plugins/kubelet.sock");
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    // The second request refers to the dynamic table that the first one filled.
    for stream in [1, 3] {
        let block = encoder.encode(list.iter().map(|(name, value)| (&name[..], &value[..])));
        bytes.extend(frame(HEADERS, END_HEADERS, stream, &block));
        bytes.extend(frame(0, 1, stream, b"data that looks like /var/lib"));
    }
    for piece in [1, 7, 4096] {
        let out = rewrite(&bytes, piece).unwrap();
        let expected = with_localhost(list.clone());
        assert_eq!(header_lists(&out), [expected.clone(), expected]);
        let data: Vec<_> = frames(&out).into_iter().filter(|frame| frame.0 == 0).collect();
        assert_eq!(data.len(), 2);
        assert!(data.iter().all(|frame| frame.3 == b"data that looks like /var/lib"));
    }
}

#[test]
fn padding_goes_priority_stays_and_continuations_are_put_together() {
    let list = request("%2Fvar%2Flib%2Fkubelet");
    let block = Encoder::new().encode(list.iter().map(|(name, value)| (&name[..], &value[..])));
    let (first, second) = block.split_at(block.len() / 2);
    let mut payload = vec![3, 0, 0, 0, 0, 16];
    payload.extend(first);
    payload.extend([0; 3]);
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(HEADERS, PADDED | PRIORITY | 1, 1, &payload));
    bytes.extend(frame(CONTINUATION, END_HEADERS, 1, second));
    let out = rewrite(&bytes, 5).unwrap();
    let all = frames(&out);
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].0, all[0].1, all[0].2), (HEADERS, END_HEADERS | PRIORITY | 1, 1));
    assert_eq!(all[0].3[..5], [0, 0, 0, 0, 16]);
    assert_eq!(header_lists(&out), [with_localhost(list)]);
}

#[test]
fn what_is_not_http2_or_too_much_is_refused() {
    let check = |frames: Vec<u8>, expected: &str| {
        let bytes = [PREFACE.to_vec(), frames].concat();
        let Err(Malformed(said)) = rewrite(&bytes, 4096) else { panic!("nothing refused: {expected}") };
        assert!(said.contains(expected), "{said}");
    };
    assert!(rewrite(b"GET / HTTP/1.1\r\n\r\n", 4096).is_err());
    check(frame(0, 0, 1, &[0; MAX_FRAME + 1]), "exceeds the maximum size");
    check(frame(CONTINUATION, 0, 1, &[]), "without a header block");
    check([frame(HEADERS, 0, 1, &[]), frame(0, 0, 1, &[])].concat(), "interrupted");
    check([frame(HEADERS, 0, 1, &[]), frame(CONTINUATION, 0, 3, &[])].concat(), "another stream");
    check(frame(HEADERS, PADDED | END_HEADERS, 1, &[9]), "too short");
    check(frame(HEADERS, PRIORITY | END_HEADERS, 1, &[0; 4]), "too short");
    check(frame(HEADERS, END_HEADERS, 1, &[0xff; 9]), "invalid HPACK");
    let mut endless = frame(HEADERS, 0, 1, &[0; MAX_FRAME]);
    endless.extend(frame(CONTINUATION, 0, 1, &[0; 1]));
    check(endless, "too large");
    // Small when encoded, large when decoded: one entry of the dynamic table, repeated.
    let mut bomb = vec![0x40, 1, b'x'];
    encode_integer_into(4000, 7, 0, &mut bomb).unwrap();
    bomb.extend(vec![b'y'; 4000]);
    bomb.extend(vec![0xbe; 1000]);
    check(frame(HEADERS, END_HEADERS, 1, &bomb), "too large");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The server sees the client's header lists with the new authority, however the client splits its frames
    /// and writes.
    #[test]
    fn any_clients_requests_arrive_whole(
        lists in prop::collection::vec(
            prop::collection::vec(("[a-z-]{1,12}", prop::collection::vec(any::<u8>(), 0..60)), 0..12),
            1..6,
        ),
        authority in prop::collection::vec(any::<u8>(), 0..80),
        cut in 1..200_usize,
        piece in 1..300_usize,
    ) {
        let mut encoder = Encoder::new();
        let (mut bytes, mut expected) = (PREFACE.to_vec(), Vec::new());
        for (index, list) in lists.into_iter().enumerate() {
            let mut list: Fields = list.into_iter().map(|(name, value)| (name.into_bytes(), value)).collect();
            list.insert(0, (b":authority".to_vec(), authority.clone()));
            let block = encoder.encode(list.iter().map(|(name, value)| (&name[..], &value[..])));
            let stream = u32::try_from(index).unwrap() * 2 + 1;
            let count = block.chunks(cut).count();
            for (n, fragment) in block.chunks(cut).enumerate() {
                let kind = if n == 0 { HEADERS } else { CONTINUATION };
                bytes.extend(frame(kind, if n + 1 == count { END_HEADERS } else { 0 }, stream, fragment));
            }
            bytes.extend(frame(0, 1, stream, &block));
            expected.push(with_localhost(list));
        }
        let out = rewrite(&bytes, piece).unwrap();
        prop_assert_eq!(header_lists(&out), expected);
    }

    /// Any bytes after the preface are forwarded or rejected, at most one frame at a time, without a panic.
    #[test]
    fn any_bytes_are_passed_on_or_refused(
        frames in prop::collection::vec((0..12_u8, any::<u8>(), 0..4_u32, prop::collection::vec(any::<u8>(), 0..90)), 0..20),
        garbage in prop::collection::vec(any::<u8>(), 0..200),
        piece in 1..100_usize,
    ) {
        let mut bytes = PREFACE.to_vec();
        for (kind, flags, stream, payload) in &frames {
            bytes.extend(frame(*kind, *flags, *stream, payload));
        }
        bytes.extend(garbage);
        let mut rewriter = Rewriter::default();
        'all: for piece in bytes.chunks(piece) {
            rewriter.push(piece);
            loop {
                let mut out = Vec::new();
                let Ok(more) = rewriter.pull(&mut out) else { break 'all };
                prop_assert!(out.len() <= 4 * MAX_FRAME);
                if !more { break }
            }
        }
    }

    #[test]
    fn a_damaged_request_is_passed_on_or_refused(at in 24..400_usize, byte: u8) {
        let list = request("/var/lib/kubelet/device-plugins/kubelet.sock");
        let mut encoder = Encoder::new();
        let mut bytes = PREFACE.to_vec();
        for stream in [1, 3, 5] {
            let block = encoder.encode(list.iter().map(|(name, value)| (&name[..], &value[..])));
            bytes.extend(frame(HEADERS, END_HEADERS, stream, &block));
        }
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = rewrite(&bytes, 64);
    }
}
