//! Kubernetes types that beelet reads and writes. To add a type, add a line to the table.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, VolumeAttachment};
use k8s_openapi::{ListableResource, Resource};
use serde_json::{Value, json};

use crate::{
    data, decode,
    error::{JsonError, Problem},
};

/// A type of the Kubernetes API that is read from values and written to them.
pub trait ApiType: Sized {
    /// Reads an object written by a person. Returns it with its unknown fields.
    ///
    /// # Errors
    /// Fails with every field of a wrong type (the first ten), in words for people.
    fn read(value: &Value) -> Result<(Self, Vec<Problem>), Vec<Problem>>;

    /// Reads an object written by a program, and skips unknown fields.
    ///
    /// # Errors
    /// Fails with the first field of a wrong type.
    fn from_value(value: &Value) -> Result<Self, Problem>;

    /// Writes the object; an object of the API with its `apiVersion` and `kind`.
    fn to_value(&self) -> Value;

    /// Reads a text, as [`ApiType::from_value`] reads a value.
    ///
    /// # Errors
    /// The text is not JSON, or holds something else.
    fn from_json(text: &[u8]) -> Result<Self, JsonError> {
        let value = data::parse(text).map_err(JsonError::Syntax)?;
        Self::from_value(&value).map_err(JsonError::Field)
    }

    /// Writes the object as JSON on one line: the text of [`ApiType::to_value`], without building the value.
    fn to_json(&self) -> Vec<u8>;
}

/// Implements [`ApiType`]. The functions are not generic, so serde's code for the types is generated only
/// here.
macro_rules! api_types {
    ($($type:ty),* $(,)?) => {$(
        impl ApiType for $type {
            fn read(value: &Value) -> Result<(Self, Vec<Problem>), Vec<Problem>> {
                decode::object(value)
            }

            fn from_value(value: &Value) -> Result<Self, Problem> {
                data::read(value)
            }

            fn to_value(&self) -> Value {
                // Every key of a Kubernetes type is text, so this cannot fail.
                data::to_value(self).unwrap_or_default()
            }

            fn to_json(&self) -> Vec<u8> {
                // As above.
                data::to_json(self).unwrap_or_default().into_bytes()
            }
        }
    )*};
}

api_types![
    core::ConfigMap,
    core::Event,
    core::Node,
    core::PersistentVolume,
    core::PersistentVolumeClaim,
    core::Pod,
    core::PodStatus,
    core::Probe,
    core::Secret,
    core::Service,
    core::Volume,
    core::VolumeProjection,
    CertificateSigningRequest,
    ClusterTrustBundle,
    CSIDriver,
    CSINode,
    Lease,
    PriorityClass,
    ResourceClaim,
    RuntimeClass,
    VolumeAttachment,
];

/// Builds a list of objects, such as a `v1.PodList` of pods.
pub fn list<'o, T>(objects: impl IntoIterator<Item = &'o T>) -> Value
where
    T: ApiType + Resource + ListableResource + 'o,
{
    let items: Vec<Value> = objects.into_iter().map(ApiType::to_value).collect();
    json!({ "apiVersion": T::API_VERSION, "kind": T::LIST_KIND, "metadata": {}, "items": items })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [{"name": "c"}]}})
    }

    #[test]
    fn an_object_survives_both_ways() {
        let value = pod("web");
        let read = core::Pod::from_value(&value).unwrap();
        assert_eq!(read.to_value(), value);
        assert_eq!(read.to_json(), value.to_string().into_bytes());
        assert_eq!(core::Pod::from_json(&read.to_json()).unwrap(), read);
        assert_eq!(crate::document::parse(&crate::yaml(&value).unwrap()).unwrap()[0].value, value);
    }

    #[test]
    fn a_list_has_the_lists_kind_and_all_objects() {
        let pods = ["a", "b"].map(|name| core::Pod::from_value(&pod(name)).unwrap());
        let list = list(&pods);
        assert_eq!(
            (&list["apiVersion"], &list["kind"], &list["items"]),
            (&json!("v1"), &json!("PodList"), &json!([pod("a"), pod("b")]))
        );
    }

    #[test]
    fn errors_of_programs_have_a_path_too() {
        let check = |text: &str, expected: &str| {
            assert_eq!(core::Pod::from_json(text.as_bytes()).unwrap_err().to_string(), expected);
        };
        check("{", "is not JSON: EOF while parsing an object at line 1 column 1");
        check(
            r#"{"spec": {"containers": [{"name": 5}]}}"#,
            "spec.containers[0].name: invalid type: integer `5`, expected a string",
        );
        check("[]", "invalid type: sequence, expected Pod");
    }
}
