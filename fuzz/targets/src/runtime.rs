//! Fuzzing: what a runtime's streaming server sends.

use futures::FutureExt as _;
use tokio::sync::mpsc;

use beelet_cri::spdy;
use beelet_cri::stream::{Output, Session, Streams};

/// A server's frames, after a byte that says which streams there are: no more comes out than came in, and
/// what is written in frames is read back from them.
pub fn stream_frames(input: &[u8]) {
    let Some((options, frames)) = input.split_first() else { return };
    let streams = Streams { stdin: options & 1 != 0, tty: options & 2 != 0 };
    // A frame has 8 bytes at least: there is room for all.
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
