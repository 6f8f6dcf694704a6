//! Test that the agent does not take over a live kubelet's runtime. The kubelet here is the agent's own
//! client under that name.
#![allow(clippy::unwrap_used)] // a failure in a helper fails the test

use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use beelet_cri::ownership::{Ownership, OwnershipError, kubelet_on};
use tempfile::TempDir;

struct Kubelet(Child);

impl Drop for Kubelet {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended by itself
        let _ = self.0.wait();
    }
}

#[test]
fn a_kubelet_with_a_connection_to_the_runtime_owns_it() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("runtime.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let accepting = std::thread::spawn(move || {
        // The client probes the socket, and then connects; both connections stay open here.
        (0..2).map(|_| listener.accept().unwrap().0).collect::<Vec<_>>()
    });
    assert_eq!(kubelet_on(&socket).unwrap(), None);

    let program = dir.path().join("kubelet");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_beelet"), &program).unwrap();
    let mut command = Command::new(&program);
    // The kernel names the process after the file. Its first argument makes it run as the client.
    command.arg0("beelet");
    command.args(["get", "pods", "--watch", "--socket"]).arg(&socket).stderr(Stdio::null());
    let kubelet = Kubelet(command.spawn().unwrap());
    let _connections = accepting.join().unwrap();

    let deadline = Instant::now() + Duration::from_secs(60);
    let found = loop {
        if let Some(found) = kubelet_on(&socket).unwrap() {
            break found;
        }
        assert!(Instant::now() < deadline, "the kubelet was not found");
        std::thread::yield_now();
    };
    assert_eq!((found.pid, found.program.as_str()), (kubelet.0.id(), "kubelet"));
    // The kubelet does not own another runtime.
    let other = dir.path().join("other.sock");
    let _other_listener = UnixListener::bind(&other).unwrap();
    assert_eq!(kubelet_on(&other).unwrap(), None);

    if rustix::process::geteuid().is_root() {
        let error = Ownership::acquire(&socket).unwrap_err();
        assert!(matches!(error, OwnershipError::Kubelet { .. }), "{error}");
        assert!(error.to_string().contains(&format!("process {}", kubelet.0.id())), "{error}");
        drop(kubelet);
        Ownership::acquire(&socket).unwrap();
    }
}
