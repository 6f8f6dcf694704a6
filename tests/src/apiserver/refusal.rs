//! Answers of the fake API server to requests that it refuses.

use serde_json::{Value, json};

use super::path::Target;

/// Reason for which the server refuses a request; its answer is a `metav1.Status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: u16,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl Refusal {
    pub(super) fn not_found(target: &Target) -> Refusal {
        let message =
            format!("{} {:?} not found", target.resource(), target.name.as_deref().unwrap_or_default());
        Refusal { code: 404, reason: "NotFound", message }
    }

    pub(super) fn bad(message: impl Into<String>) -> Refusal {
        Refusal { code: 400, reason: "BadRequest", message: message.into() }
    }

    pub(super) fn conflict(target: &Target, cause: &str) -> Refusal {
        let (resource, name) = (target.resource(), target.name.as_deref().unwrap_or_default());
        let message = format!("Operation cannot be fulfilled on {resource} {name:?}: {cause}");
        Refusal { code: 409, reason: "Conflict", message }
    }

    /// Returns the `metav1.Status` object of the refusal.
    pub(super) fn status(&self) -> Value {
        let Refusal { code, reason, message } = self;
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code,
        })
    }
}
