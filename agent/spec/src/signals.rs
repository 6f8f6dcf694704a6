//! Stop signals of containers, in the notation of pods (`SIGRTMIN+3`) and of the runtime (KEP-4960).

use beelet_proto::cri::Signal;
use k8s_openapi::api::core::v1::Container;

use crate::Error;

/// Parses a signal in the notation of pods.
pub fn parse(name: &str) -> Option<Signal> {
    let signal = Signal::from_str_name(&name.replace('+', "PLUS").replace('-', "MINUS"))?;
    // The runtime's own notation is invalid in pods.
    (self::name(signal).as_deref() == Some(name)).then_some(signal)
}

/// Returns a signal's name in the notation of pods; None for the runtime's default.
pub fn name(signal: Signal) -> Option<String> {
    let name = || signal.as_str_name().replace("PLUS", "+").replace("MINUS", "-");
    (signal != Signal::RuntimeDefault).then(name)
}

/// Returns the stop signal of a container.
///
/// # Errors
/// Fails for an unknown signal.
pub fn of_container(spec: &Container) -> Result<Signal, Error> {
    let asked = spec.lifecycle.as_ref().and_then(|lifecycle| lifecycle.stop_signal.as_deref());
    let Some(asked) = asked else { return Ok(Signal::RuntimeDefault) };
    parse(asked).ok_or_else(|| Error::StopSignal(asked.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_written_as_in_pods() {
        let check = |text: &str, expected: Option<Signal>| {
            assert_eq!(parse(text), expected, "{text}");
            if let Some(signal) = expected {
                assert_eq!(name(signal).as_deref(), Some(text));
            }
        };
        check("SIGTERM", Some(Signal::Sigterm));
        check("SIGUSR1", Some(Signal::Sigusr1));
        check("SIGRTMIN", Some(Signal::Sigrtmin));
        check("SIGRTMIN+15", Some(Signal::Sigrtminplus15));
        check("SIGRTMAX-14", Some(Signal::Sigrtmaxminus14));
        for wrong in ["", "TERM", "sigterm", "SIGRTMINPLUS1", "SIGRTMIN+16", "RUNTIME_DEFAULT", "15"] {
            check(wrong, None);
        }
        assert_eq!(name(Signal::RuntimeDefault), None);
    }
}
