//! Subjects of `cargo xtask cluster test`.

use std::time::Instant;

use anyhow::{Result, ensure};
use beelet_tests::workdir;

use super::machine::Machine;
use super::steps::Life;
use super::{failures, life, plane};

/// Subject of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Subject {
    /// Init, join, updates, drains, a lost node, certificates, reboots, an upgrade, reset; two workers
    Life,
    /// StatefulSets and lost nodes, force deletion, a full disk, a wrong clock, a slow network; two workers
    Failures,
    /// Three nodes of the control plane: each lost and back, an etcd member that lost its data; one worker
    Plane,
}

/// Tests a subject on a cluster, new unless there is one.
pub(super) fn run(subject: Subject, keep: bool) -> Result<()> {
    workdir::heed_signals()?;
    let began = Instant::now();
    let mut life = Life::new();
    let ended = live(subject, &mut life);
    life.print();
    println!("| total | | {:.1} |", began.elapsed().as_secs_f64());
    if keep {
        return ended;
    }
    let removed = super::down();
    ended.and(removed)
}

fn live(subject: Subject, life: &mut Life) -> Result<()> {
    let (controls, workers) = match subject {
        Subject::Life | Subject::Failures => (1, 2),
        Subject::Plane => (3, 1),
    };
    if life.machines.is_empty() {
        let name = match subject {
            Subject::Plane => "images, machines, init, join of two control planes and a worker",
            Subject::Life | Subject::Failures => "images, machines, init, join of two workers",
        };
        life.step(name, |life| {
            life.machines = super::up(controls, workers)?;
            Ok(())
        })?;
    }
    let is_control = |machine: &&Machine| machine.is_control();
    let found = (life.machines.iter().filter(is_control).count(), life.machines.len());
    let wanted = (usize::from(controls), usize::from(controls) + usize::from(workers));
    ensure!(found == wanted, "the test needs {controls} nodes of the control plane and {workers} workers");
    match subject {
        Subject::Life => life::live(life),
        Subject::Failures => failures::live(life),
        Subject::Plane => plane::live(life),
    }
}
