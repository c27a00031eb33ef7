//! Which paths there are, and what is checked of a request before its handler sees it.

use hyper::{Method, header, http::request::Parts};

use super::{
    Call, accept, allocations, candidates, classes,
    error::{ApiError, ApiResult},
    inventories, providers,
    reply::{Frame, Reply, now},
    reshaper, traits, usages, version,
};

/// A path of the API, without the names in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    Root,
    Classes,
    Class,
    Providers,
    Provider,
    Inventories,
    Inventory,
    ProviderUsages,
    Aggregates,
    ProviderAllocations,
    ProviderTraits,
    AllocationsOfMany,
    Allocations,
    Candidates,
    Traits,
    Trait,
    TotalUsages,
    Reshaper,
}

/// A method of a route.
#[derive(Clone, Copy)]
struct Operation {
    /// The first microversion that has it.
    since: u32,
    /// What those before it get.
    before: u16,
    form: Form,
    /// Whether the microversion is looked at before the form.
    version_first: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Answers JSON, which the client must take.
    Answers,
    /// Takes JSON, which the client must send.
    Takes,
    /// Neither.
    Plain,
}

const fn operation(form: Form) -> Operation {
    Operation { since: 0, before: 404, form, version_first: false }
}

impl Operation {
    const fn since(self, since: u32) -> Self {
        Self { since, ..self }
    }

    /// Those before it get this status instead of 404.
    const fn before(self, before: u16) -> Self {
        Self { before, ..self }
    }

    const fn version_first(self) -> Self {
        Self { version_first: true, ..self }
    }
}

impl Route {
    /// The route of a path, with the names in it. One newline at its end is none of them, as for upstream's router.
    pub(super) fn find(path: &str) -> Option<(Self, Vec<String>)> {
        let path = path.strip_suffix('\n').unwrap_or(path);
        if path.is_empty() || path == "/" {
            return Some((Self::Root, Vec::new()));
        }
        let parts: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
        if parts.iter().any(|part| part.is_empty()) {
            return None;
        }
        let (route, names): (Self, &[&str]) = match parts.as_slice() {
            ["resource_classes"] => (Self::Classes, &[]),
            ["resource_classes", _] => (Self::Class, &parts[1..]),
            ["resource_providers"] => (Self::Providers, &[]),
            ["resource_providers", _] => (Self::Provider, &parts[1..]),
            ["resource_providers", _, "inventories"] => (Self::Inventories, &parts[1..2]),
            ["resource_providers", _, "usages"] => (Self::ProviderUsages, &parts[1..2]),
            ["resource_providers", _, "aggregates"] => (Self::Aggregates, &parts[1..2]),
            ["resource_providers", _, "allocations"] => (Self::ProviderAllocations, &parts[1..2]),
            ["resource_providers", _, "traits"] => (Self::ProviderTraits, &parts[1..2]),
            ["resource_providers", uuid, "inventories", class] => {
                return Some((Self::Inventory, vec![(*uuid).to_owned(), (*class).to_owned()]));
            }
            ["allocations"] => (Self::AllocationsOfMany, &[]),
            ["allocations", _] => (Self::Allocations, &parts[1..]),
            ["allocation_candidates"] => (Self::Candidates, &[]),
            ["traits"] => (Self::Traits, &[]),
            ["traits", _] => (Self::Trait, &parts[1..]),
            ["usages"] => (Self::TotalUsages, &[]),
            ["reshaper"] => (Self::Reshaper, &[]),
            _ => return None,
        };
        Some((route, names.iter().map(|name| (*name).to_owned()).collect()))
    }

    /// The path with placeholders.
    pub(super) fn pattern(self) -> &'static str {
        match self {
            Self::Root => "/",
            Self::Classes => "/resource_classes",
            Self::Class => "/resource_classes/{name}",
            Self::Providers => "/resource_providers",
            Self::Provider => "/resource_providers/{uuid}",
            Self::Inventories => "/resource_providers/{uuid}/inventories",
            Self::Inventory => "/resource_providers/{uuid}/inventories/{class}",
            Self::ProviderUsages => "/resource_providers/{uuid}/usages",
            Self::Aggregates => "/resource_providers/{uuid}/aggregates",
            Self::ProviderAllocations => "/resource_providers/{uuid}/allocations",
            Self::ProviderTraits => "/resource_providers/{uuid}/traits",
            Self::AllocationsOfMany => "/allocations",
            Self::Allocations => "/allocations/{consumer}",
            Self::Candidates => "/allocation_candidates",
            Self::Traits => "/traits",
            Self::Trait => "/traits/{name}",
            Self::TotalUsages => "/usages",
            Self::Reshaper => "/reshaper",
        }
    }

    fn methods(self) -> &'static str {
        match self {
            Self::Root
            | Self::ProviderUsages
            | Self::ProviderAllocations
            | Self::Candidates
            | Self::Traits
            | Self::TotalUsages => "GET",
            Self::Classes | Self::Providers => "GET, POST",
            Self::Class
            | Self::Provider
            | Self::Inventory
            | Self::ProviderTraits
            | Self::Allocations
            | Self::Trait => "GET, PUT, DELETE",
            Self::Inventories => "GET, POST, PUT, DELETE",
            Self::Aggregates => "GET, PUT",
            Self::AllocationsOfMany | Self::Reshaper => "POST",
        }
    }

    fn operation(self, method: &Method, minor: u32) -> Option<Operation> {
        use Form::{Answers, Plain, Takes};
        Some(match (self, method.as_str()) {
            (Self::Root, "GET") => operation(Plain),
            (Self::Classes, "GET") | (Self::Class, "GET") => operation(Answers).since(2).version_first(),
            (Self::Classes, "POST") => operation(Takes).since(2).version_first(),
            (Self::Class, "PUT") => operation(if minor < 7 { Takes } else { Plain }).since(2).version_first(),
            (Self::Class, "DELETE") => operation(Plain).since(2),
            (Self::Providers | Self::Provider | Self::Inventories | Self::Inventory, "GET")
            | (Self::ProviderUsages | Self::ProviderAllocations, "GET") => operation(Answers),
            (Self::Providers | Self::Inventories, "POST") => operation(Takes),
            (Self::Provider | Self::Inventories | Self::Inventory, "PUT") => operation(Takes),
            (Self::Provider | Self::Inventory, "DELETE") => operation(Plain),
            (Self::Inventories, "DELETE") => operation(Plain).since(5).before(405),
            (Self::Aggregates, "GET") => operation(Answers).since(1),
            (Self::Aggregates, "PUT") => operation(Takes).since(1),
            (Self::ProviderTraits | Self::Traits, "GET") => operation(Answers).since(6).version_first(),
            (Self::ProviderTraits, "PUT") => operation(Takes).since(6).version_first(),
            (Self::ProviderTraits | Self::Trait, "DELETE") => operation(Plain).since(6),
            (Self::Trait, "GET") => operation(Plain).since(6),
            (Self::Trait, "PUT") => operation(Plain).since(6),
            (Self::AllocationsOfMany, "POST") => operation(Takes).since(13).version_first(),
            (Self::Allocations, "GET") => operation(Answers),
            (Self::Allocations, "PUT") => operation(Takes),
            (Self::Allocations, "DELETE") => operation(Plain),
            (Self::Candidates, "GET") => operation(Answers).since(10).version_first(),
            (Self::TotalUsages, "GET") => operation(Answers).since(9).version_first(),
            (Self::Reshaper, "POST") => operation(Takes).since(30).version_first(),
            _ => return None,
        })
    }

    /// Refuses what the route does not have, or not in this form.
    pub(super) fn check(self, parts: &Parts, minor: u32, frame: &Frame) -> ApiResult<()> {
        let Some(operation) = self.operation(&parts.method, minor) else {
            let mut error = ApiError::new(405, "The method specified is not allowed for this resource.");
            error.allow = Some(self.methods());
            return Err(error);
        };
        let version = || {
            if minor < operation.since { Err(ApiError::new(operation.before, "")) } else { Ok(()) }
        };
        if operation.version_first {
            version()?;
        }
        match operation.form {
            Form::Answers if !accept::json_will_do(frame.accept()) => {
                return Err(ApiError::new(406, "Only application/json is provided"));
            }
            Form::Takes => {
                let kind = parts.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
                let kind = kind.map_or("", |kind| kind.split(';').next().unwrap_or(kind).trim());
                if kind != "application/json" {
                    let shown = if kind.is_empty() { "None" } else { kind };
                    return Err(ApiError::new(
                        415,
                        format!("The media type {shown} is not supported, use application/json"),
                    ));
                }
            }
            Form::Answers | Form::Plain => {}
        }
        version()
    }

    pub(super) fn takes_query(self) -> bool {
        matches!(self, Self::Providers | Self::Candidates | Self::Traits | Self::TotalUsages)
    }

    pub(super) fn takes_body(self, method: &Method) -> bool {
        matches!(*method, Method::POST | Method::PUT) && !matches!(self, Self::Trait)
    }

    /// Hands a checked request to its handler.
    pub(super) async fn call(self, method: &Method, call: &Call<'_>) -> ApiResult<Reply> {
        match (self, method.as_str()) {
            (Self::Root, _) => Ok(root()),
            (Self::Classes, "GET") => classes::list(call).await,
            (Self::Classes, _) => classes::create(call).await,
            (Self::Class, "GET") => classes::show(call).await,
            (Self::Class, "PUT") if call.minor < 7 => classes::rename(call).await,
            (Self::Class, "PUT") => classes::ensure(call).await,
            (Self::Class, _) => classes::delete(call).await,
            (Self::Providers, "GET") => providers::list(call).await,
            (Self::Providers, _) => providers::create(call).await,
            (Self::Provider, "GET") => providers::show(call).await,
            (Self::Provider, "PUT") => providers::update(call).await,
            (Self::Provider, _) => providers::delete(call).await,
            (Self::Inventories, "GET") => inventories::list(call).await,
            (Self::Inventories, "POST") => inventories::create(call).await,
            (Self::Inventories, "PUT") => inventories::set(call).await,
            (Self::Inventories, _) => inventories::delete_all(call).await,
            (Self::Inventory, "GET") => inventories::show(call).await,
            (Self::Inventory, "PUT") => inventories::update(call).await,
            (Self::Inventory, _) => inventories::delete(call).await,
            (Self::ProviderUsages, _) => usages::of_provider(call).await,
            (Self::Aggregates, "GET") => providers::aggregates(call).await,
            (Self::Aggregates, _) => providers::set_aggregates(call).await,
            (Self::ProviderAllocations, _) => allocations::of_provider(call).await,
            (Self::ProviderTraits, "GET") => traits::of_provider(call).await,
            (Self::ProviderTraits, "PUT") => traits::set_for_provider(call).await,
            (Self::ProviderTraits, _) => traits::clear_for_provider(call).await,
            (Self::AllocationsOfMany, _) => allocations::set_many(call).await,
            (Self::Allocations, "GET") => allocations::show(call).await,
            (Self::Allocations, "PUT") => allocations::set(call).await,
            (Self::Allocations, _) => allocations::delete(call).await,
            (Self::Candidates, _) => candidates::list(call).await,
            (Self::Traits, _) => traits::list(call).await,
            (Self::Trait, "GET") => traits::show(call).await,
            (Self::Trait, "PUT") => traits::ensure(call).await,
            (Self::Trait, _) => traits::delete(call).await,
            (Self::TotalUsages, _) => usages::total(call).await,
            (Self::Reshaper, _) => reshaper::reshape(call).await,
        }
    }
}

fn root() -> Reply {
    let (oldest, newest) = (version::text(0), version::text(version::NEWEST));
    let document = serde_json::json!({"versions": [{
        "id": format!("v{oldest}"),
        "max_version": newest,
        "min_version": oldest,
        "status": "CURRENT",
        "links": [{"rel": "self", "href": ""}],
    }]});
    Reply::json(&document, now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_find_their_routes() {
        let route = |path| Route::find(path).map(|(route, names)| (route, names.join("|")));
        assert_eq!(route(""), Some((Route::Root, String::new())));
        assert_eq!(route("/traits/CUSTOM_X"), Some((Route::Trait, "CUSTOM_X".into())));
        assert_eq!(
            route("/resource_providers/u/inventories/VCPU"),
            Some((Route::Inventory, "u|VCPU".into()))
        );
        assert_eq!(route("/resource_providers/u/cows"), None);
        assert_eq!(route("/resource_providers/"), None);
        assert_eq!(route("//"), None);
    }
}
