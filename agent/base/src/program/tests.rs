use std::time::Instant;

use rustix::process::{Pid, Signal};

use super::*;

const SHORT: Duration = Duration::from_secs(120);
const SAID: usize = 4096;
const TOGETHER: Bounds = Bounds { within: SHORT, output: SAID, complaints: Complaints::InOutput };

fn shell(script: &str) -> Program {
    Program::tool("sh").flag("-c").operand(script)
}

fn say(script: &str, within: Duration) -> Result<(Option<i32>, String), ProgramError> {
    let ended = shell(script).run_blocking(Bounds { within, ..TOGETHER })?;
    Ok((ended.status.code(), String::from_utf8(ended.output).unwrap()))
}

#[test]
fn a_word_from_outside_is_never_an_option() {
    let listed = |program: Program| {
        let words = program.arguments().iter().map(|word| word.to_str().unwrap().to_owned());
        words.collect::<Vec<String>>()
    };
    let mount = Program::tool("mount").flag("-i").setting("-t", "-x").setting("--since", "-5m");
    assert_eq!(listed(mount.clone()), ["-i", "-t", "-x", "--since=-5m"]);
    assert_eq!(listed(mount.clone().end_of_options().operand("-o")).last().unwrap(), "-o");
    for word in ["-", "-o", "--version", "--"] {
        let refused = Program::tool("echo").operand(word).operand("x").run_blocking(TOGETHER).unwrap_err();
        let expected = format!("echo is not started: its argument {word:?} would be read as an option");
        assert_eq!(refused.to_string(), expected);
        let ended = Program::tool("echo").positional([word, "x"]).run_blocking(TOGETHER).unwrap();
        assert!(ended.status.success());
    }
    for word in ["", "a-b", "/-o", " -o"] {
        let ended = Program::tool("printf").operand("%s").operand(word).run_blocking(TOGETHER).unwrap();
        assert_eq!(ended.output, word.as_bytes());
    }
}

#[test]
fn a_program_is_heard_up_to_a_bound_and_no_shell_reads_its_arguments() {
    assert_eq!(say("echo out; echo err >&2; exit 3", SHORT).unwrap(), (Some(3), "out\nerr\n".to_owned()));
    let ended = Program::tool("printf").operand("%s").operand("$(id) `id`").run_blocking(TOGETHER).unwrap();
    assert_eq!((ended.output.as_slice(), ended.is_cut), (&b"$(id) `id`"[..], false));
    let ended = shell("head -c 100000 /dev/zero").run_blocking(TOGETHER).unwrap();
    assert_eq!((ended.output.len(), ended.is_cut), (SAID, true));
    let apart = Bounds { complaints: Complaints::Apart(3), ..TOGETHER };
    let ended = shell("echo out; echo err >&2").run_blocking(apart).unwrap();
    assert_eq!((ended.output.as_slice(), ended.complaints.as_slice()), (&b"out\n"[..], &b"err"[..]));
    let unheard = Bounds { complaints: Complaints::Unheard, ..TOGETHER };
    assert_eq!(shell("echo err >&2").run_blocking(unheard).unwrap().output, b"");
    let none = Program::tool("beelet-no-such-tool").run_blocking(TOGETHER).unwrap_err();
    assert!(none.is_missing());
    let none = none.to_string();
    assert!(none.contains("beelet-no-such-tool") && none.ends_with("is it installed?"), "{none}");
}

#[test]
fn a_program_gets_its_input_and_its_variables() {
    let program = shell("cat; echo $WORD").input(b"asked\n".to_vec()).env("WORD", "said");
    assert_eq!(program.run_blocking(TOGETHER).unwrap().output, b"asked\nsaid\n");
    // A program that doesn't read its large input.
    let program = shell("echo done").input(vec![b'x'; 1 << 20]);
    assert_eq!(program.run_blocking(TOGETHER).unwrap().output, b"done\n");
    assert_eq!(say("cat", SHORT).unwrap(), (Some(0), String::new()));
    assert!(!format!("{:?}", shell("hush").env("A", "hush")).contains("hush"));
}

#[test]
fn a_program_that_never_ends_times_out_with_any_output() {
    let late = |script: &str| {
        let why = say(script, Duration::from_millis(100)).unwrap_err().to_string();
        assert!(why.starts_with("sh took longer than"), "{script}: {why}");
    };
    late("sleep 1000");
    late("yes");
    late("exec >&- 2>&-; sleep 1000");
    late("exec >&- 2>&-; sleep 1000 & wait");
}

#[test]
fn a_run_does_not_wait_for_children_that_outlive_the_program() {
    let said = say("sleep 1000 & echo $! done; exec kill -9 $$", SHORT).unwrap();
    assert_eq!(said.0, None);
    let pid = said.1.strip_suffix(" done\n").unwrap().parse().unwrap();
    assert!(crate::process::FirstProcess::of(pid).runs(), "its child is left alone");
    rustix::process::kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
    // A child that writes without end finds the pipe closed, and ends.
    assert_eq!(say("yes & exit 3", SHORT).unwrap().0, Some(3));
}

#[test]
fn with_its_deadline_a_programs_whole_group_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("pid");
    let script = format!("sleep 1000 & echo $! > {}; sleep 1000", place.display());
    let program = shell(&script);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pid: u32 = runtime.block_on(async {
        // Dropped once its child is known to run.
        let mut running = std::pin::pin!(program.run(TOGETHER));
        let known = async {
            loop {
                let text = std::fs::read_to_string(&place).unwrap_or_default();
                if let Some(pid) = text.strip_suffix('\n') {
                    return pid.parse().unwrap();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! { _ = &mut running => panic!("the program ended"), pid = known => pid }
    });
    let child = crate::process::FirstProcess::of(pid);
    let began = Instant::now();
    while child.runs() {
        assert!(began.elapsed() < SHORT, "the child lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test]
async fn a_programs_output_is_read_piece_by_piece_and_with_the_value_it_is_killed() {
    use tokio::io::AsyncReadExt as _;
    let mut running = shell("echo $$; exec yes").start().unwrap();
    let mut output = running.output().unwrap();
    assert!(running.output().is_none());
    let mut text = Vec::new();
    while text.len() < 200_000 {
        assert!(output.read_buf(&mut text).await.unwrap() > 0);
    }
    drop(running);
    // A killed program writes no more.
    tokio::io::copy(&mut output, &mut tokio::io::sink()).await.unwrap();
}
