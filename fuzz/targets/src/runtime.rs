//! The target for the frames of a runtime's streaming server.

use futures::FutureExt as _;
use tokio::sync::mpsc;

use beelet_cri::spdy;
use beelet_cri::stream::{Output, Session, Streams};

/// Tests a server's frames, after a byte with the streams of the session: the output is not larger than the
/// input, and a written frame reads back.
pub fn stream_frames(input: &[u8]) {
    let Some((options, frames)) = input.split_first() else { return };
    let streams = Streams { stdin: options & 1 != 0, tty: options & 2 != 0 };
    // A frame has at least 8 bytes, so the channel has room for all frames.
    let (outputs, mut received) = mpsc::channel(frames.len() / spdy::HEAD + 2);
    let (pongs, _pinged) = mpsc::channel(1);
    let done = Session::new(streams).read(frames, &outputs, &pongs).now_or_never();
    drop(outputs);
    let (mut bytes, mut exits) = (0, 0);
    while let Ok(output) = received.try_recv() {
        match output {
            Output::Stdout(some) | Output::Stderr(some) => bytes += some.len(),
            Output::Exit(_) => exits += 1,
        }
    }
    assert!(bytes <= frames.len());
    assert_eq!(done.unwrap().is_ok(), exits == 1);

    let written = spdy::data(7, frames, true);
    let head = spdy::head(*written.first_chunk().unwrap());
    let frame = spdy::frame(head, written[spdy::HEAD..spdy::HEAD + head.length].to_vec());
    let whole = frames.len() <= head.length;
    assert_eq!(frame, spdy::Frame::Data { stream: 7, bytes: frames[..head.length].to_vec(), last: whole });
}
