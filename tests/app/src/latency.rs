//! A server under open-loop load, both in one process: requests arrive at their own times (Poisson), whether
//! or not the ones before were answered, and a latency is counted from when the request should have arrived.
//! So neither a server that is late nor a load generator that is can hide a wait.

use rustix::time::{ClockId, clock_gettime};
use std::fmt::Write as _;
use std::io::{Read as _, Seek as _, Write as _};
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
}

/// `--rate HZ --work MICROSECONDS --warm-up SECONDS --seconds SECONDS`. Prints `measuring` when the warm-up
/// is over, and at the end `result N` with a `PERCENTILE:MICROSECONDS` for each of many percentiles.
pub(super) fn run(arguments: &[String]) -> Result<(), String> {
    let load = parse(arguments)?;
    let (requests, arrived) = mpsc::channel::<Instant>();
    let server = std::thread::spawn(move || {
        let mut latencies = Vec::new();
        for intended in arrived {
            work(load.work);
            latencies.push(intended.elapsed());
        }
        latencies
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
        requests.send(start + at).map_err(|_| "the server has ended".to_owned())?;
        sent += 1;
    }
    drop(requests);
    let mut latencies = server.join().map_err(|_| "the server has failed".to_owned())?;
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
    };
    for pair in arguments.chunks(2) {
        let [option, value] = pair else { return Err(format!("{} needs a value", pair[0])) };
        let number: u32 = value.parse().map_err(|_| format!("{option} {value}: not a number"))?;
        match option.as_str() {
            "--rate" => load.rate = f64::from(number),
            "--work" => load.work = Duration::from_micros(number.into()),
            "--warm-up" => load.warm_up = Duration::from_secs(number.into()),
            "--seconds" => load.measured = Duration::from_secs(number.into()),
            _ => return Err(format!("unknown option {option}")),
        }
    }
    Ok(load)
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
    /// Exponentially distributed, 1 on average.
    fn exponential(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11;
        -((bits as f64 + 1.0) / (1_u64 << 53) as f64).ln()
    }
}

/// `busy THREADS`, or `memory MIB`: a neighbour that takes all the CPU it gets, or that keeps reading more
/// than there is memory for, until it is stopped.
pub(super) fn hog(arguments: &[String]) -> Result<(), String> {
    let number = |text: &String| text.parse::<usize>().map_err(|_| format!("{text}: not a number"));
    match arguments {
        [kind, threads] if kind == "busy" => {
            for _ in 1..number(threads)? {
                std::thread::spawn(spin);
            }
            spin()
        }
        [kind, mebibytes] if kind == "memory" => read_over_and_over(number(mebibytes)?),
        _ => Err("usage: testapp hog busy THREADS | memory MIB".to_owned()),
    }
}

/// Reads a file of so many mebibytes again and again: memory that the kernel can take back, so that the
/// reader lives on where there is less of it, and everybody beside it has to reclaim.
fn read_over_and_over(mebibytes: usize) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("/tmp/hog: {error}");
    let mut file = std::fs::File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open("/tmp/hog")
        .map_err(failed)?;
    let mut part = vec![1_u8; 1 << 20];
    for _ in 0..mebibytes {
        file.write_all(&part).map_err(failed)?;
    }
    loop {
        file.rewind().map_err(failed)?;
        while file.read(&mut part).map_err(failed)? > 0 {}
    }
}

fn spin() -> ! {
    loop {
        std::hint::spin_loop();
    }
}
