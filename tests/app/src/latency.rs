//! A server under open-loop load, both in one process: requests arrive at their own times (Poisson), whether
//! or not the ones before were answered, and a latency is counted from when the request should have arrived.
//! So neither a server that is late nor a load generator that is can hide a wait.

use rustix::time::{ClockId, clock_gettime};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// What is to be done.
struct Load {
    /// Requests per second.
    rate: f64,
    /// CPU time that each takes.
    work: Duration,
    /// Requests that arrive before this are not counted.
    warm_up: Duration,
    /// How long those come that are.
    measured: Duration,
    /// Where somebody has to connect before they begin to come.
    on: Option<u16>,
    /// MiB of a file that the answers are read from; 0: there is none.
    data: u32,
}

/// `--rate HZ --work MICROSECONDS --warm-up SECONDS --seconds SECONDS [--on PORT] [--data MIB]`. Prints
/// `measuring` when the warm-up is over, and at the end `result N` with a `PERCENTILE:MICROSECONDS` for each
/// of many percentiles.
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
        // A server that has ended says why.
        if requests.send(start + at).is_err() {
            break;
        }
        sent += 1;
    }
    drop(requests);
    let mut latencies = server.join().map_err(|_| "the server has failed".to_owned())??;
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

/// What a server looks things up in, as an index of a database: it is as fast as memory while the kernel
/// keeps its pages, and as slow as the disk where it has dropped them.
struct Data {
    file: File,
    pages: u64,
    random: Random,
}

impl Data {
    const PAGE: usize = 4096;
    /// Pages per request.
    const LOOKS: usize = 16;

    /// Writes it to the disk, so that the kernel may drop any page of it.
    fn write(mebibytes: u32) -> Result<Data, String> {
        let mut file = make_file("/tmp/data", mebibytes as usize)?;
        file.sync_all().and_then(|()| file.rewind()).map_err(|error| format!("/tmp/data: {error}"))?;
        let pages = u64::from(mebibytes) * ((1 << 20) / Self::PAGE as u64);
        Ok(Data { file, pages, random: Random(0xD1B5_4A32_D192_ED03) })
    }

    /// Reads pages from all over it.
    fn read(&mut self) -> Result<(), String> {
        let mut page = [0; Self::PAGE];
        for _ in 0..Self::LOOKS {
            let at = self.random.next() % self.pages * Self::PAGE as u64;
            self.file.read_exact_at(&mut page, at).map_err(|error| format!("/tmp/data: {error}"))?;
        }
        Ok(())
    }
}

/// A file of so many mebibytes that are no holes.
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

/// Uses CPU for so long by the thread's own clock, which stands while it waits.
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

/// Percentiles of 0 to 99.99, closer to each other towards the end.
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

/// Numbers that are the same in each run (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Exponentially distributed, 1 on average.
    fn exponential(&mut self) -> f64 {
        let bits = self.next() >> 11;
        -((bits as f64 + 1.0) / (1_u64 << 53) as f64).ln()
    }
}

/// A noisy neighbour, until it is stopped: see the kinds. With `--on PORT` it is quiet until somebody
/// connects there, so that all that takes part can be started before the noise.
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

/// `busy THREADS` takes all the CPU that it gets; `build JOBS` does something on so many threads.
fn on_threads(number: usize, work: fn() -> Result<(), String>) -> Result<(), String> {
    for _ in 1..number {
        std::thread::spawn(work);
    }
    work()
}

/// A process after another, each of which takes some CPU and writes a file: a compiler, as the machine sees
/// it.
fn build() -> Result<(), String> {
    let file = format!("/tmp/object-{:?}", std::thread::current().id());
    loop {
        work(Duration::from_millis(30));
        let mut compiler = crate::own()?.args(["probe", "ok"]).spawn().map_err(|error| error.to_string())?;
        compiler.wait().map_err(|error| error.to_string())?;
        std::fs::write(&file, vec![1_u8; 1 << 20]).map_err(|error| format!("{file}: {error}"))?;
    }
}

/// So many thousandths of a CPU, as a daemon takes them: a part of each 50 ms.
fn duty(permille: usize) -> Result<(), String> {
    let busy = Duration::from_micros(50 * permille.min(1000) as u64);
    loop {
        work(busy);
        std::thread::sleep(Duration::from_millis(50).saturating_sub(busy));
    }
}

/// Takes so many mebibytes, a hundred per second, gives them back, and begins again: memory that the kernel
/// cannot take back.
fn grow_over_and_over(mebibytes: usize) -> Result<(), String> {
    loop {
        let mut held = Vec::new();
        for _ in 0..mebibytes {
            // Not zeroes: every page must really be there.
            held.push(vec![1_u8; 1 << 20]);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Reads a file of so many mebibytes again and again, more than there is memory for: memory that the kernel
/// can take back, so that the reader lives on where there is less of it, and everybody beside it has to
/// reclaim.
fn read_over_and_over(mebibytes: usize) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("/tmp/hog: {error}");
    let mut file = make_file("/tmp/hog", mebibytes)?;
    let mut part = vec![0_u8; 1 << 20];
    loop {
        file.rewind().map_err(failed)?;
        while file.read(&mut part).map_err(failed)? > 0 {}
    }
}

/// Uses a CPU, and no `pause`: that one makes a hypervisor look for another CPU's turn, and an emulator leave
/// its loop each time, so that a second of an emulated machine took a minute.
fn spin() -> Result<(), String> {
    loop {
        std::hint::black_box(());
    }
}
