//! Authenticates bearer tokens (TokenReview) and authorizes users on this node (SubjectAccessReview) through
//! the API server.

use std::collections::BTreeMap;

use beelet_model::review::{AccessReviewer, Review, ReviewError, TokenReviewer, User};
use beelet_policy::node::access::Access;
use serde_json::{Value, json};

use crate::client::Client;

const TOKENS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
const ACCESS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// Client of the API server's reviews for one node.
#[derive(Clone, Debug)]
pub struct Reviews {
    client: Client,
    node: String,
}

impl Reviews {
    /// Sends reviews for the node of this name through `client`.
    #[must_use]
    pub fn new(client: Client, node: String) -> Self {
        Self { client, node }
    }
}

impl TokenReviewer for Reviews {
    fn review<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
        Box::pin(async move {
            let answer = self.client.create(TOKENS, &token_review(token)).await;
            let answer = answer.map_err(|error| ReviewError(error.to_string()))?;
            Ok(user(&answer["status"]))
        })
    }
}

impl AccessReviewer for Reviews {
    fn review<'a>(&'a self, user: &'a User, access: Access) -> Review<'a, bool> {
        Box::pin(async move {
            let answer = self.client.create(ACCESS, &access_review(user, &self.node, access)).await;
            let answer = answer.map_err(|error| ReviewError(error.to_string()))?;
            let status = &answer["status"];
            Ok(status["allowed"] == true && status["denied"] != true)
        })
    }
}

fn token_review(token: &str) -> Value {
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": { "token": token },
    })
}

fn access_review(user: &User, node: &str, access: Access) -> Value {
    json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user.name,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "resourceAttributes": {
                "verb": access.verb,
                "version": "v1",
                "resource": "nodes",
                "subresource": access.subresource,
                "name": node,
            },
        },
    })
}

/// Returns the token's user; None if the token is invalid.
fn user(status: &Value) -> Option<User> {
    if status["authenticated"] != true {
        return None;
    }
    let of = &status["user"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| -> Vec<String> { value.as_array().into_iter().flatten().map(text).collect() };
    let extra = of["extra"].as_object().into_iter().flatten();
    let extra: BTreeMap<String, Vec<String>> =
        extra.map(|(key, values)| (key.clone(), list(values))).collect();
    let user =
        User { name: text(&of["username"]), uid: text(&of["uid"]), groups: list(&of["groups"]), extra };
    // A user without a name does not count as authenticated.
    (!user.name.is_empty()).then_some(user)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_authenticated_user_with_a_name_is_somebody() {
        let check = |status: Value, expected: Option<&str>| {
            assert_eq!(user(&status).map(|user| user.name).as_deref(), expected, "{status}");
        };
        check(json!({ "authenticated": true, "user": { "username": "jane" } }), Some("jane"));
        check(json!({ "authenticated": false, "user": { "username": "jane" } }), None);
        check(json!({ "authenticated": "true", "user": { "username": "jane" } }), None);
        check(json!({ "user": { "username": "jane" } }), None);
        check(json!({ "authenticated": true, "user": {} }), None);
        check(json!({ "error": "token expired" }), None);
        check(Value::Null, None);
    }

    #[test]
    fn a_review_carries_all_that_is_known_of_the_user() {
        let status = json!({ "authenticated": true, "user": {
            "username": "jane", "uid": "7", "groups": ["a", "b"], "extra": { "scopes": ["x"] },
        } });
        let access = Access { verb: "get", subresource: "stats" };
        let spec = access_review(&user(&status).unwrap(), "n1", access)["spec"].clone();
        assert_eq!(
            spec,
            json!({
                "user": "jane", "uid": "7", "groups": ["a", "b"], "extra": { "scopes": ["x"] },
                "resourceAttributes": {
                    "verb": "get", "version": "v1", "resource": "nodes", "subresource": "stats", "name": "n1",
                },
            })
        );
    }
}
