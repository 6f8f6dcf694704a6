//! Applies the settings of a unit file and executes the program that the unit would start: see
//! [`beelet_tests::confine`].

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    beelet_tests::confine::enter(&arguments)
}
