//! Process that loads the machine in kernel tests: see [`beelet_tests::load`].

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    beelet_tests::load::serve(&arguments)
}
