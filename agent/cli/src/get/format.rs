//! Output formats of `beelet get`, as in kubectl.

use std::str::FromStr;

use anyhow::Context as _;
use serde_json::Value;

use super::columns::Columns;
use super::path::{Path, Template, shown};

/// An output format of Kubernetes objects.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Format {
    /// A line per object.
    Table,
    /// As table, with more columns.
    Wide,
    /// JSON: the object that one name selects, or a list.
    Json,
    /// YAML: the object that one name selects, or a list.
    Yaml,
    /// `pod/NAME`.
    Name,
    /// kubectl's JSONPath.
    JsonPath(Template),
    /// Titles with the paths of their cells.
    Columns(Vec<(String, Path)>),
}

/// The formats, for help and errors.
pub(crate) const FORMATS: &str =
    "table, wide, json, yaml, name, jsonpath=TEMPLATE, custom-columns=TITLE:PATH,...";

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once('=').map_or((text, None), |(name, rest)| (name, Some(rest)));
        Ok(match (name, rest) {
            ("table", None) => Self::Table,
            ("wide", None) => Self::Wide,
            ("json", None) => Self::Json,
            ("yaml", None) => Self::Yaml,
            ("name", None) => Self::Name,
            ("jsonpath", Some(template)) => Self::JsonPath(template.parse()?),
            ("custom-columns", Some(columns)) => {
                Self::Columns(columns.split(',').map(column).collect::<Result<_, _>>()?)
            }
            _ => return Err(format!("expected one of: {FORMATS}")),
        })
    }
}

/// Parses `TITLE:PATH`.
fn column(text: &str) -> Result<(String, Path), String> {
    let (title, path) = text.split_once(':').ok_or_else(|| format!("{text:?} is not TITLE:PATH"))?;
    Ok((title.to_owned(), path.parse()?))
}

impl Format {
    /// Returns true if the caller draws its own table.
    pub(crate) fn is_table(&self) -> bool {
        matches!(self, Self::Table | Self::Wide)
    }

    /// Returns the text of the objects: of a single one if one name selected it, else of a list of them.
    /// `list` makes that list of all objects. Empty for [`Format::is_table`].
    pub(crate) fn text(
        &self,
        objects: &[Value],
        is_single: bool,
        has_titles: bool,
        list: impl FnOnce(&[Value]) -> Value,
    ) -> anyhow::Result<String> {
        let root = || match objects {
            [one] if is_single => one.clone(),
            all => list(all),
        };
        Ok(match self {
            Self::Table | Self::Wide => String::new(),
            Self::Json => format!("{:#}\n", root()),
            Self::Yaml => beelet_codec::yaml(&root()).context("cannot convert the objects to YAML")?,
            Self::Name => objects.iter().map(named).collect(),
            Self::JsonPath(template) => template.text(&root()),
            Self::Columns(columns) => {
                let titles: Vec<&str> = columns.iter().map(|(title, _)| title.as_str()).collect();
                let rows: Vec<Vec<String>> = objects.iter().map(|object| cells(columns, object)).collect();
                Columns::new(&titles).titled(has_titles).table(&rows)
            }
        })
    }
}

/// Returns `KIND/NAME`, on a line of its own.
fn named(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!("{}/{}\n", text(&object["kind"]).to_lowercase(), text(&object["metadata"]["name"]))
}

/// Returns the cells of custom columns; a missing value is `<none>`.
fn cells(columns: &[(String, Path)], object: &Value) -> Vec<String> {
    let cell = |(_, path): &(String, Path)| {
        let values: Vec<String> = path.values(object).into_iter().map(shown).collect();
        if values.is_empty() { "<none>".to_owned() } else { values.join(",") }
    };
    columns.iter().map(cell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn objects() -> Vec<Value> {
        let pod =
            |name: &str| json!({"kind": "Pod", "metadata": {"name": name}, "status": {"podIP": "10.0.0.7"}});
        vec![pod("web"), pod("db")]
    }

    fn text(format: &str, objects: &[Value], is_single: bool) -> String {
        let list = |all: &[Value]| json!({"kind": "PodList", "items": all});
        format.parse::<Format>().unwrap().text(objects, is_single, true, list).unwrap()
    }

    #[test]
    fn one_name_gives_the_object_and_others_give_a_list() {
        let all = objects();
        let kind = |text: &str| serde_json::from_str::<Value>(text).unwrap()["kind"].clone();
        assert_eq!(kind(&text("json", &all[..1], true)), "Pod");
        assert_eq!(kind(&text("json", &all[..1], false)), "PodList");
        assert_eq!(kind(&text("json", &all, true)), "PodList");
        assert_eq!(text("jsonpath={.status.podIP}", &all[..1], true), "10.0.0.7");
        assert_eq!(text("jsonpath={.items[*].metadata.name}", &all, false), "web db");
    }

    #[test]
    fn names_and_custom_columns_are_those_of_kubectl() {
        assert_eq!(text("name", &objects(), false), "pod/web\npod/db\n");
        assert_eq!(
            text("custom-columns=NAME:.metadata.name,NODE:.spec.nodeName", &objects(), false),
            "NAME   NODE\nweb    <none>\ndb     <none>\n"
        );
    }

    #[test]
    fn an_unknown_format_is_answered_with_all_formats() {
        for format in ["xml", "jsonpath", "json=x", "custom-columns=x", "jsonpath={.a"] {
            assert!(format.parse::<Format>().is_err(), "{format}");
        }
        assert!("xml".parse::<Format>().unwrap_err().contains("custom-columns="));
    }
}
