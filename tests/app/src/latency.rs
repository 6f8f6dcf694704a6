//! Server under open-loop load, both in one process: requests arrive at scheduled times (Poisson) even if
//! earlier ones are unanswered, and a latency is measured from the scheduled arrival. Neither a slow server
//! nor a slow load generator can hide a wait.

use rustix::time::{ClockId, clock_gettime};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Parameters of a measurement.
struct Load {
    /// Requests per second.
    rate: f64,
    /// CPU time of each request.
    work: Duration,
    /// Time during which requests are not counted.
    warm_up: Duration,
    /// Time during which requests are counted.
    measured: Duration,
    /// Port whose first connection starts the load.
    on: Option<u16>,
    /// Size in MiB of a file that the answers are read from; 0 for no file.
    data: u32,
}

/// Measures latencies: `--rate HZ --work MICROSECONDS --warm-up SECONDS --seconds SECONDS [--on PORT] [--data
/// MIB]`. Prints `measuring` after the warm-up, and finally `result N` with a `PERCENTILE:MICROSECONDS` for
/// each of many percentiles.
pub(super) fn run(arguments: &[String]) -> Result<(), String> {
    let load = parse(arguments)?;
    let mut data = if load.data > 0 { Some(Data::write(load.data)?) } else { None };
    load.on.map_or(Ok(()), wait_for_connection)?;
    let (requests, arrived) = mpsc::channel::<Instant>();
    let server = std::thread::spawn(move || {
        let mut latencies = Vec::new();
        for intended in arrived {
            if let Some(data) = &mut data {
                data.read()?;
            }
            work(load.work);
            latencies.push(intended.elapsed());
        }
        Ok::<_, String>(latencies)
    });
    let start = Instant::now();
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let (mut at, mut counted_from) = (Duration::ZERO, None);
    let mut sent = 0;
    while at < load.warm_up + load.measured {
        at += Duration::from_secs_f64(random.exponential() / load.rate);
        std::thread::sleep((start + at).saturating_duration_since(Instant::now()));
        if at >= load.warm_up && counted_from.is_none() {
            counted_from = Some(sent);
            println!("measuring");
        }
        // A server that has ended returns the reason.
        if requests.send(start + at).is_err() {
            break;
        }
        sent += 1;
    }
    drop(requests);
    let mut latencies = server.join().map_err(|_| "the server panicked".to_owned())??;
    latencies.drain(..counted_from.unwrap_or(0).min(latencies.len()));
    println!("{}", report(latencies));
    Ok(())
}

fn parse(arguments: &[String]) -> Result<Load, String> {
    let mut load = Load {
        rate: 300.0,
        work: Duration::from_micros(1000),
        warm_up: Duration::ZERO,
        measured: Duration::from_secs(10),
        on: None,
        data: 0,
    };
    for pair in arguments.chunks(2) {
        let [option, value] = pair else { return Err(format!("{} needs a value", pair[0])) };
        let number: u32 = value.parse().map_err(|_| format!("{option} {value}: not a number"))?;
        match option.as_str() {
            "--rate" => load.rate = f64::from(number),
            "--work" => load.work = Duration::from_micros(number.into()),
            "--warm-up" => load.warm_up = Duration::from_secs(number.into()),
            "--data" => load.data = number,
            "--seconds" => load.measured = Duration::from_secs(number.into()),
            "--on" => {
                load.on = Some(u16::try_from(number).map_err(|_| format!("{option} {value}: not a port"))?);
            }
            _ => return Err(format!("unknown option {option}")),
        }
    }
    Ok(load)
}

/// Data that a server reads, like the index of a database: as fast as memory while its pages are in the page
/// cache, and as slow as the disk otherwise.
struct Data {
    file: File,
    pages: u64,
    random: Random,
}

impl Data {
    const PAGE: usize = 4096;
    /// Pages per request.
    const LOOKS: usize = 16;

    /// Writes the file to disk, so that the kernel may drop any of its pages.
    fn write(mebibytes: u32) -> Result<Data, String> {
        let mut file = make_file("/tmp/data", mebibytes as usize)?;
        file.sync_all().and_then(|()| file.rewind()).map_err(|error| format!("/tmp/data: {error}"))?;
        let pages = u64::from(mebibytes) * ((1 << 20) / Self::PAGE as u64);
        Ok(Data { file, pages, random: Random(0xD1B5_4A32_D192_ED03) })
    }

    /// Reads pages at random positions.
    fn read(&mut self) -> Result<(), String> {
        let mut page = [0; Self::PAGE];
        for _ in 0..Self::LOOKS {
            let at = self.random.next() % self.pages * Self::PAGE as u64;
            self.file.read_exact_at(&mut page, at).map_err(|error| format!("/tmp/data: {error}"))?;
        }
        Ok(())
    }
}

/// Creates a file of `mebibytes` without holes.
fn make_file(path: &str, mebibytes: usize) -> Result<File, String> {
    let failed = |error: std::io::Error| format!("{path}: {error}");
    let mut file =
        File::options().create(true).truncate(true).read(true).write(true).open(path).map_err(failed)?;
    let part = vec![1_u8; 1 << 20];
    for _ in 0..mebibytes {
        file.write_all(&part).map_err(failed)?;
    }
    Ok(file)
}

/// Uses CPU for this time by the thread's own clock, which stops while the thread waits.
fn work(time: Duration) {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    };
    let end = now() + time;
    while now() < end {
        for _ in 0..200 {
            std::hint::spin_loop();
        }
    }
}

/// Returns percentiles from 0 to 99.99, denser towards the end.
fn report(mut latencies: Vec<Duration>) -> String {
    latencies.sort_unstable();
    let mut text = format!("result {}", latencies.len());
    for step in 0..=64 {
        let percentile = 100.0 - 100.0 / 10_f64.powf(f64::from(step) / 16.0);
        let rank = (latencies.len() as f64 * percentile / 100.0).ceil() as usize;
        let Some(latency) = latencies.get(rank.saturating_sub(1)) else { continue };
        let _ = write!(text, " {percentile:.4}:{}", latency.as_micros()); // to a String: never fails
    }
    text
}

/// Numbers that are equal in each run (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Returns an exponentially distributed number, 1 on average.
    fn exponential(&mut self) -> f64 {
        let bits = self.next() >> 11;
        -((bits as f64 + 1.0) / (1_u64 << 53) as f64).ln()
    }
}

/// Runs a noisy neighbour of a given kind ([`USAGE`] lists the kinds) until the process is killed. With `--on
/// PORT`, first waits for a connection to that port, so that all participants are running before the noise
/// starts.
pub(super) fn hog(arguments: &[String]) -> Result<(), String> {
    let arguments = match arguments {
        [option, port, rest @ ..] if option == "--on" => {
            wait_for_connection(port.parse().map_err(|_| format!("{port}: not a port"))?)?;
            rest
        }
        _ => arguments,
    };
    let [kind, number] = arguments else { return Err(USAGE.to_owned()) };
    let number: usize = number.parse().map_err(|_| format!("{number}: not a number"))?;
    match kind.as_str() {
        "busy" => on_threads(number, spin),
        "memory" => read_over_and_over(number),
        "grow" => grow_over_and_over(number),
        "build" => on_threads(number, build),
        "duty" => duty(number),
        _ => Err(USAGE.to_owned()),
    }
}

fn wait_for_connection(port: u16) -> Result<(), String> {
    crate::bind(port)?.accept().map(drop).map_err(|error| error.to_string())
}

const USAGE: &str =
    "usage: testapp hog [--on PORT] busy THREADS | memory MIB | grow MIB | build JOBS | duty PERMILLE";

/// Runs `work` on this number of threads: `busy THREADS` uses all available CPU, `build JOBS` compiles.
fn on_threads(number: usize, work: fn() -> Result<(), String>) -> Result<(), String> {
    for _ in 1..number {
        std::thread::spawn(work);
    }
    work()
}

/// Starts one process after another, each with some CPU time and a written file: a compiler, from the
/// machine's point of view.
fn build() -> Result<(), String> {
    let file = format!("/tmp/object-{:?}", std::thread::current().id());
    loop {
        work(Duration::from_millis(30));
        let mut compiler = crate::own()?.args(["probe", "ok"]).spawn().map_err(|error| error.to_string())?;
        compiler.wait().map_err(|error| error.to_string())?;
        std::fs::write(&file, vec![1_u8; 1 << 20]).map_err(|error| format!("{file}: {error}"))?;
    }
}

/// Uses this many thousandths of a CPU like a daemon: a part of each 50 ms.
fn duty(permille: usize) -> Result<(), String> {
    let busy = Duration::from_micros(50 * permille.min(1000) as u64);
    loop {
        work(busy);
        std::thread::sleep(Duration::from_millis(50).saturating_sub(busy));
    }
}

/// Allocates this many mebibytes, a hundred per second, frees them, and starts again: memory that the kernel
/// cannot reclaim.
fn grow_over_and_over(mebibytes: usize) -> Result<(), String> {
    loop {
        let mut held = Vec::new();
        for _ in 0..mebibytes {
            // Nonzero bytes: every page must be allocated.
            held.push(vec![1_u8; 1 << 20]);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Reads a file of this many mebibytes, larger than the memory, again and again: memory that the kernel can
/// reclaim, so that the reader survives with less memory, and its neighbours have to reclaim.
fn read_over_and_over(mebibytes: usize) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("/tmp/hog: {error}");
    let mut file = make_file("/tmp/hog", mebibytes)?;
    let mut part = vec![0_u8; 1 << 20];
    loop {
        file.rewind().map_err(failed)?;
        while file.read(&mut part).map_err(failed)? > 0 {}
    }
}

/// Uses a CPU without `pause`: that instruction makes a hypervisor schedule another CPU, and an emulator
/// leave its loop each time, so that a second of an emulated machine took a minute.
fn spin() -> Result<(), String> {
    loop {
        std::hint::black_box(());
    }
}
