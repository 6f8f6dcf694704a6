//! Objects and tokens of the API server that pods refer to and that have been read.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use beelet_model::{
    objects::{Object, Objects, Services, TrustBundles},
    status::has_ended,
};
use beelet_policy::pod::references::{self, Reference, TokenReference};

use crate::assigned::Wanted;

/// Objects and tokens that have been read.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct Held {
    /// The object; None if it does not exist.
    pub(crate) objects: BTreeMap<Reference, Option<Object>>,
    pub(crate) tokens: BTreeMap<TokenReference, Arc<str>>,
    /// True if pods may start without missing tokens because the API server is away.
    pub(crate) tokens_optional: bool,
    /// The services; None until listed.
    pub(crate) services: Option<Services>,
    /// The trust bundles; None until listed, or if no pod needs one.
    pub(crate) trust_bundles: Option<TrustBundles>,
}

impl std::fmt::Debug for Held {
    /// Omits values, which may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("objects", &self.objects.keys()).finish_non_exhaustive()
    }
}

/// Reference of a pod to an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Item {
    Object(Reference),
    Token(TokenReference),
    /// All trust bundles: a projection may select any.
    TrustBundles,
}

/// Returns all references of the pods.
pub(crate) fn items(wanted: &Wanted) -> BTreeSet<Item> {
    let here = wanted.iter().flat_map(|all| all.pods.values()).filter(|pod| !has_ended(pod.status.as_ref()));
    here.flat_map(|pod| {
        let objects = references::of(pod).into_iter().map(Item::Object);
        let bundles = references::wants_trust_bundles(pod).then_some(Item::TrustBundles);
        objects.chain(references::tokens(pod).into_iter().map(Item::Token)).chain(bundles)
    })
    .collect()
}

impl Held {
    /// Returns the objects for the pods; referenced objects that have not been read are marked as unread.
    pub(crate) fn objects(&self, wanted: &Wanted) -> Objects {
        let mut objects = Objects::default();
        for object in self.objects.values().flatten() {
            objects.add(Path::new(""), object);
        }
        for (of, token) in &self.tokens {
            objects.tokens.add(of.clone(), Arc::clone(token));
        }
        if let Some(services) = &self.services {
            objects.services = Some(services.clone());
        }
        if let Some(bundles) = &self.trust_bundles {
            objects.trust_bundles = Some(Arc::clone(bundles));
        }
        if self.tokens_optional {
            objects.tokens.are_optional = true;
        }
        for item in items(wanted) {
            match item {
                Item::Object(reference) if !self.objects.contains_key(&reference) => {
                    objects.add_unread(reference);
                }
                Item::Object(_) | Item::Token(_) | Item::TrustBundles => {}
            }
        }
        objects
    }

    /// Fills in missing objects that the pods refer to from `before`.
    pub(crate) fn or(mut self, before: Self, wanted: &Wanted) -> Self {
        for item in items(wanted) {
            match item {
                Item::Object(reference) => {
                    if let Some(object) = before.objects.get(&reference) {
                        self.objects.entry(reference).or_insert_with(|| object.clone());
                    }
                }
                Item::Token(of) => {
                    if let Some(token) = before.tokens.get(&of) {
                        self.tokens.entry(of).or_insert_with(|| Arc::clone(token));
                    }
                }
                Item::TrustBundles => {
                    if self.trust_bundles.is_none() {
                        self.trust_bundles.clone_from(&before.trust_bundles);
                    }
                }
            }
        }
        self.services = self.services.or(before.services);
        self
    }

    /// Removes all items except `wanted`. Returns true if any item was removed.
    pub(crate) fn keep(&mut self, wanted: &BTreeSet<Item>) -> bool {
        let before = self.objects.len() + self.tokens.len();
        self.objects.retain(|reference, _| wanted.contains(&Item::Object(reference.clone())));
        self.tokens.retain(|of, _| wanted.contains(&Item::Token(of.clone())));
        let bundles = self.trust_bundles.take_if(|_| !wanted.contains(&Item::TrustBundles));
        before != self.objects.len() + self.tokens.len() || bundles.is_some()
    }
}
