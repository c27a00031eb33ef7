//! Query strings, read into what is searched for.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
};

use ec_placement_model::{
    Name, intern,
    search::{Group, ProviderFilter, Query},
};
use ec_placement_schema::{Query as Schema, check_query};
use uuid::Uuid;

use super::{
    Call,
    error::{ApiError, ApiResult, code},
};

/// Decodes a query string, in order. Parameters are parted by `&`, and by `;`, as WebOb reads them.
pub(super) fn decode(query: &str) -> ApiResult<Vec<(String, String)>> {
    let text = |bytes: &str| {
        let bytes = bytes.replace('+', " ");
        percent_encoding::percent_decode_str(&bytes)
            .decode_utf8()
            .map(std::borrow::Cow::into_owned)
            .map_err(|error| ApiError::bad_request(format!("Invalid query string parameters: {error}")))
    };
    query
        .split(['&', ';'])
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((text(key)?, text(value)?))
        })
        .collect()
}

/// A uuid as it is kept: lower case, with dashes. Any other text is nobody's.
pub(super) fn exact_uuid(text: &str) -> Option<Uuid> {
    let uuid = Uuid::try_parse(text).ok()?;
    (uuid.hyphenated().encode_lower(&mut Uuid::encode_buffer()) == text).then_some(uuid)
}

/// What reads as a uuid for upstream: 32 hexadecimal digits, with dashes, braces and a prefix in any places.
pub(super) fn uuid_like(text: &str) -> Option<Uuid> {
    let bare = text.replace("urn:", "").replace("uuid:", "");
    let digits = bare.trim_matches(['{', '}']).replace('-', "");
    if digits.len() != 32 {
        return None;
    }
    Uuid::try_parse(&digits).ok()
}

/// Each once, in the order of its first mention: who repeats a name does not have it looked for again.
fn unique<T: Clone + Eq + Hash>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = HashSet::new();
    all.into_iter().filter(|one| seen.insert(one.clone())).collect()
}

/// The same of lists of which one is wanted each: two with the same in them are one, whatever their order.
fn unique_lists<T: Clone + Ord + Hash>(lists: Vec<Vec<T>>) -> Vec<Vec<T>> {
    let mut seen = HashSet::new();
    let sorted = |list: &Vec<T>| {
        let mut list = list.clone();
        list.sort_unstable();
        list
    };
    lists.into_iter().filter(|list| seen.insert(sorted(list))).collect()
}

fn invalid(detail: String) -> ApiError {
    ApiError::bad_request(format!("Invalid query string parameters: {detail}"))
}

/// `VCPU:2,MEMORY_MB:1024`
fn resources(text: &str) -> ApiResult<Vec<(Name, i64)>> {
    let form = "Badly formed resources parameter. Expected resources query string parameter in form: \
                ?resources=VCPU:2,MEMORY_MB:1024. Got:";
    if text.trim().is_empty() {
        return Err(ApiError::bad_request(format!("{form} empty string.")));
    }
    let mut found: Vec<(Name, i64)> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for part in text.split(',') {
        let (class, amount) = part
            .split_once(':')
            .filter(|(_, amount)| !amount.contains(':'))
            .ok_or_else(|| ApiError::bad_request(format!("{form} {part}.")))?;
        let number = amount.trim().replace('_', "").parse::<i64>().map_err(|_| {
            ApiError::bad_request(format!(
                "Requested resource {class} expected positive integer amount. Got: {amount}."
            ))
        })?;
        if number < 1 {
            return Err(ApiError::bad_request(format!(
                "Requested resource {class} requires amount >= 1. Got: {number}."
            )));
        }
        // Said twice, the last counts.
        match places.get(class) {
            Some(place) => found[*place].1 = number,
            None => {
                places.insert(class, found.len());
                found.push((intern(class), number));
            }
        }
    }
    Ok(found)
}

/// Traits that are required, of each list one, and those that are forbidden.
type Traits = (Vec<Vec<Name>>, Vec<Name>);

/// `HW_A,!HW_B`, or `in:HW_A,HW_B`
fn traits(text: &str, may_forbid: bool, may_choose: bool) -> ApiResult<Traits> {
    if let Some(list) = text.strip_prefix("in:") {
        let form = "HW_CPU_X86_VMX,CUSTOM_MAGIC";
        if !may_choose {
            return Err(invalid(format!(
                "The format 'in:{form}' only supported since microversion 1.39. Got: {text}"
            )));
        }
        let names: Vec<&str> = list.split(',').map(str::trim).collect();
        if names.iter().any(|name| name.is_empty()) {
            return Err(invalid(format!(
                "Expected 'required' parameter value of the form: in:{form}. Got an empty trait in: {text}"
            )));
        }
        if names.iter().any(|name| name.starts_with('!')) {
            return Err(invalid(format!(
                "The format 'in:{form}' does not support forbidden traits. Got: {text}"
            )));
        }
        return Ok((vec![unique(names.into_iter().map(intern))], Vec::new()));
    }
    let names: Vec<&str> = text.split(',').map(str::trim).collect();
    let (forbidden, required): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| name.starts_with('!'));
    let forbidden: Vec<&str> = forbidden.into_iter().map(|name| name.trim_start_matches('!')).collect();
    if names.iter().chain(&forbidden).any(|name| name.is_empty()) {
        let form = if may_forbid { "HW_CPU_X86_VMX,!CUSTOM_MAGIC" } else { "HW_CPU_X86_VMX,CUSTOM_MAGIC" };
        return Err(invalid(format!(
            "Expected 'required' parameter value of the form: {form}. Got an empty trait in: {text}"
        )));
    }
    if !forbidden.is_empty() && !may_forbid {
        return Err(invalid(format!(
            "Expected 'required' parameter value of the form: HW_CPU_X86_VMX,CUSTOM_MAGIC. Got: {text}"
        )));
    }
    let required = unique(required).into_iter().map(|name| vec![intern(name)]).collect();
    Ok((required, unique(forbidden).into_iter().map(intern).collect()))
}

/// One value of `member_of`: aggregates of which one is required, and those that are forbidden.
fn member_of(text: &str) -> ApiResult<(Vec<Uuid>, Vec<Uuid>)> {
    if text.contains(',') && !text.starts_with("in:") && !text.starts_with("!in:") {
        return Err(ApiError::bad_request(format!(
            "Multiple values for 'member_of' must be prefixed with the 'in:' or '!in:' keyword using the valid \
             microversion. Got: {text}"
        )));
    }
    let uuids = |list: &str| -> ApiResult<Vec<Uuid>> {
        let mut uuids = Vec::new();
        for one in list.split(',') {
            uuids.push(uuid_like(one).ok_or_else(|| {
                invalid(format!("Expected 'member_of' parameter to contain valid UUID(s). Got: {one}"))
            })?);
        }
        Ok(unique(uuids))
    };
    if let Some(list) = text.strip_prefix("!in:") {
        Ok((Vec::new(), uuids(list)?))
    } else if let Some(one) = text.strip_prefix('!') {
        Ok((Vec::new(), vec![uuids(one)?.remove(0)]))
    } else {
        Ok((uuids(text.strip_prefix("in:").unwrap_or(text))?, Vec::new()))
    }
}

/// The values of each key, in order: a query may have some ten thousand, and each is looked for.
struct Params<'c>(HashMap<&'c str, Vec<&'c str>>);

impl Params<'_> {
    fn of(&self, key: &str) -> &[&str] {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }
}

/// Those that are in both, in the order of the first.
fn in_both<'n>(some: impl Iterator<Item = &'n Name>, others: &[Name]) -> Vec<&'n str> {
    let others: HashSet<&Name> = others.iter().collect();
    some.filter(|name| others.contains(name)).map(|name| &**name).collect()
}

impl Call<'_> {
    pub(super) fn check_query(&self, schema: Schema) -> ApiResult<()> {
        check_query(schema, self.minor, &self.query).map_err(ApiError::bad_request)
    }

    /// The last value of a key.
    pub(super) fn param(&self, key: &str) -> Option<&str> {
        self.query.iter().rev().find(|(own, _)| own == key).map(|(_, value)| value.as_str())
    }

    fn params<'c>(&'c self, key: &'c str) -> impl Iterator<Item = &'c str> {
        self.query.iter().filter(move |(own, _)| own == key).map(|(_, value)| value.as_str())
    }

    fn all_params(&self) -> Params<'_> {
        let mut all: HashMap<&str, Vec<&str>> = HashMap::new();
        for (key, value) in &self.query {
            all.entry(key).or_default().push(value);
        }
        Params(all)
    }

    fn required(&self, params: &Params<'_>, suffix: &str) -> ApiResult<Traits> {
        let mut values = params.of(&format!("required{suffix}"));
        if !self.at_least(39) {
            // Said twice, the last counts.
            values = &values[values.len().saturating_sub(1)..];
        }
        let (mut required, mut forbidden) = (Vec::new(), Vec::new());
        for value in values {
            let (more_required, more_forbidden) = traits(value, self.at_least(22), self.at_least(39))?;
            required.extend(more_required);
            forbidden.extend(more_forbidden);
        }
        Ok((unique_lists(required), unique(forbidden)))
    }

    fn members(&self, params: &Params<'_>, suffix: &str) -> ApiResult<(Vec<Vec<Uuid>>, Vec<Uuid>)> {
        let values = params.of(&format!("member_of{suffix}"));
        if !self.at_least(24) && values.len() > 1 {
            return Err(ApiError::bad_request(format!(
                "Multiple member_of{suffix} parameters are not supported"
            )));
        }
        let (mut required, mut forbidden) = (Vec::new(), Vec::new());
        for value in values {
            let (any, none) = member_of(value)?;
            if !any.is_empty() {
                required.push(any);
            }
            if !none.is_empty() && !self.at_least(32) {
                return Err(ApiError::bad_request(format!(
                    "Forbidden member_of{suffix} parameters are not supported in the specified microversion"
                )));
            }
            forbidden.extend(none);
        }
        Ok((unique_lists(required), unique(forbidden)))
    }

    /// The filter of a list of providers.
    pub(super) fn provider_filter(&self) -> ApiResult<ProviderFilter> {
        self.check_query(Schema::ResourceProviders)?;
        let mut filter = ProviderFilter::default();
        let params = self.all_params();
        (filter.member_of, filter.forbidden_aggregates) = self.members(&params, "")?;
        (filter.required, filter.forbidden) = self.required(&params, "")?;
        // Empty values filter nothing.
        let given = |key| self.param(key).filter(|value| !value.is_empty());
        filter.name = given("name").map(str::to_owned);
        filter.uuid = given("uuid").map(exact_uuid);
        filter.in_tree = given("in_tree").map(exact_uuid);
        if let Some(text) = self.param("resources") {
            filter.resources = resources(text)?;
        }
        Ok(filter)
    }

    /// What allocation candidates are asked for.
    pub(super) fn candidates_query(&self) -> ApiResult<Query> {
        self.check_query(Schema::AllocationCandidates)?;
        let mut query = Query { nested_aware: self.at_least(29), ..Query::default() };
        // Said twice, the first counts.
        query.limit = self.params("limit").next().and_then(|limit| limit.trim().parse().ok());
        let policy = self.params("group_policy").next();
        query.isolate = policy == Some("isolate");
        self.root_required(&mut query)?;
        let same_subtrees = self.same_subtrees()?;
        self.groups(&mut query)?;
        let empty: Vec<&str> = query
            .groups
            .iter()
            .filter(|group| group.resources.is_empty())
            .map(|group| group.suffix.as_str())
            .collect();
        if self.at_least(36) {
            check_resourceless(&query, &same_subtrees, &empty)?;
        } else {
            check_orphans(&query)?;
        }
        if self.at_least(22) {
            check_conflicts(&query)?;
        }
        if policy.is_none() && query.groups.iter().filter(|group| !group.suffix.is_empty()).count() > 1 {
            return Err(ApiError::bad_request(
                "The \"group_policy\" parameter is required when specifying more than one \"resources{N}\" parameter.",
            ));
        }
        let suffixes = query.groups.iter().enumerate().map(|(place, group)| (group.suffix.as_str(), place));
        let places: HashMap<&str, usize> = suffixes.collect();
        let place = |suffix: &String| places.get(suffix.as_str()).copied();
        query.same_subtrees =
            same_subtrees.iter().map(|suffixes| suffixes.iter().filter_map(place).collect()).collect();
        Ok(query)
    }

    fn root_required(&self, query: &mut Query) -> ApiResult<()> {
        let values: Vec<&str> = self.params("root_required").collect();
        match values.as_slice() {
            [] => Ok(()),
            [value] => {
                let (required, forbidden) = traits(value, true, false)?;
                query.root_required = required.into_iter().flatten().collect();
                query.root_forbidden = forbidden;
                let mut both = in_both(query.root_required.iter(), &query.root_forbidden);
                both.sort_unstable();
                if both.is_empty() {
                    return Ok(());
                }
                Err(ApiError::bad_request(format!(
                    "Conflicting required and forbidden traits found in root_required: {}",
                    both.join(", ")
                ))
                .code(code::BAD_VALUE))
            }
            _ => Err(ApiError::bad_request("Query parameter 'root_required' may be specified only once.")
                .code(code::DUPLICATE_KEY)),
        }
    }

    fn same_subtrees(&self) -> ApiResult<Vec<Vec<String>>> {
        let mut found = Vec::new();
        for value in self.params("same_subtree") {
            let suffixes: Vec<String> = value.split(',').map(|suffix| suffix.trim().to_owned()).collect();
            if suffixes.iter().any(String::is_empty) {
                return Err(ApiError::bad_request(
                    "Empty string (unsuffixed group) can not be specified in `same_subtree` ",
                )
                .code(code::BAD_VALUE));
            }
            found.push(suffixes);
        }
        Ok(found)
    }

    fn groups(&self, query: &mut Query) -> ApiResult<()> {
        let params = self.all_params();
        let mut places = HashMap::new();
        // What is said of a group in several values is read with the first of them.
        let mut read = HashSet::new();
        for (key, value) in &self.query {
            let Some((kind, suffix)) = self.split_key(key) else { continue };
            let place = *places.entry(suffix.to_owned()).or_insert_with(|| {
                query.groups.push(Group { suffix: suffix.to_owned(), ..Group::default() });
                query.groups.len() - 1
            });
            let group = &mut query.groups[place];
            match kind {
                "resources" => group.resources = resources(value)?,
                "required" | "member_of" if !read.insert(key) => {}
                "required" => (group.required, group.forbidden) = self.required(&params, suffix)?,
                "member_of" => {
                    (group.member_of, group.forbidden_aggregates) = self.members(&params, suffix)?
                }
                _ => {
                    let text = value.trim();
                    if uuid_like(text).is_none() {
                        return Err(invalid(format!(
                            "Expected 'in_tree' parameter to be a format of uuid. Got: {value}"
                        )));
                    }
                    group.in_tree = Some(exact_uuid(text));
                }
            }
        }
        Ok(())
    }

    /// A key of a group, as its kind and the group's suffix.
    fn split_key<'k>(&self, key: &'k str) -> Option<(&'static str, &'k str)> {
        let kinds = ["resources", "required", "member_of", "in_tree"];
        let (kind, suffix) = kinds.into_iter().find_map(|kind| Some((kind, key.strip_prefix(kind)?)))?;
        let numeric =
            |suffix: &str| !suffix.starts_with('0') && suffix.bytes().all(|byte| byte.is_ascii_digit());
        let word = |suffix: &str| {
            suffix.len() <= 64
                && suffix.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        };
        let fits = suffix.is_empty() || if self.at_least(33) { word(suffix) } else { numeric(suffix) };
        fits.then_some((kind, suffix))
    }
}

fn quoted(suffixes: &[&str]) -> String {
    let quoted: Vec<String> = suffixes.iter().map(|suffix| format!("'{suffix}'")).collect();
    format!("[{}]", quoted.join(", "))
}

fn check_resourceless(query: &Query, same_subtrees: &[Vec<String>], empty: &[&str]) -> ApiResult<()> {
    if empty.len() == query.groups.len() {
        return Err(ApiError::bad_request(
            "There must be at least one resources or resources[$S] parameter.",
        )
        .code(code::MISSING_VALUE));
    }
    let mentioned: HashSet<&str> = same_subtrees.iter().flatten().map(String::as_str).collect();
    let bad: Vec<&str> = empty.iter().copied().filter(|suffix| !mentioned.contains(suffix)).collect();
    if !bad.is_empty() {
        return Err(ApiError::bad_request(format!(
            "Resourceless suffixed group request should be specified in `same_subtree` query param: bad group(s) - {}.",
            quoted(&bad)
        ))
        .code(code::BAD_VALUE));
    }
    let real: HashSet<&str> = query.groups.iter().map(|group| group.suffix.as_str()).collect();
    let mut bad: Vec<&str> = mentioned.into_iter().filter(|suffix| !real.contains(suffix)).collect();
    bad.sort_unstable();
    if !bad.is_empty() {
        let known: Vec<&str> = query.groups.iter().map(|group| group.suffix.as_str()).collect();
        return Err(ApiError::bad_request(format!(
            "Real suffixes should be specified in `same_subtree`: {} not found in {}.",
            quoted(&bad),
            quoted(&known)
        ))
        .code(code::BAD_VALUE));
    }
    Ok(())
}

fn check_orphans(query: &Query) -> ApiResult<()> {
    let without = |wanted: fn(&Group) -> bool, key: &str| -> Vec<String> {
        let orphans = query.groups.iter().filter(|group| group.resources.is_empty() && wanted(group));
        orphans.map(|group| format!("{key}{}", group.suffix)).collect()
    };
    let traits = without(|group| !group.required.is_empty(), "required");
    if !traits.is_empty() {
        return Err(ApiError::bad_request(format!(
            "All traits parameters must be associated with resources.  Found the following orphaned traits keys: {}",
            traits.join(", ")
        )));
    }
    let members =
        without(|group| !group.member_of.is_empty() || !group.forbidden_aggregates.is_empty(), "member_of");
    if !members.is_empty() {
        return Err(ApiError::bad_request(format!(
            "All member_of parameters must be associated with resources. Found the following orphaned member_of \
             keys: {}",
            members.join(", ")
        )));
    }
    if query.groups.iter().any(|group| group.resources.is_empty()) {
        return Err(ApiError::bad_request("All request groups must specify resources."));
    }
    if query.groups.is_empty() {
        return Err(ApiError::bad_request(
            "At least one request group (`resources` or `resources{$S}`) is required.",
        ));
    }
    Ok(())
}

fn check_conflicts(query: &Query) -> ApiResult<()> {
    let mut conflicts: Vec<String> = Vec::new();
    for group in &query.groups {
        let forbidden: HashSet<&Name> = group.forbidden.iter().collect();
        for any in &group.required {
            if any.iter().all(|name| forbidden.contains(name)) {
                let mut names: Vec<&str> = any.iter().map(|name| &**name).collect();
                names.sort_unstable();
                conflicts.push(format!("required{}: ({})", group.suffix, names.join(", ")));
            }
        }
    }
    conflicts.sort_unstable();
    if conflicts.is_empty() {
        return Ok(());
    }
    Err(ApiError::bad_request(format!(
        "Conflicting required and forbidden traits found in the following traits keys: {}",
        conflicts.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_kept_in_one_form_and_read_in_many() {
        let text = "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab";
        assert!(exact_uuid(text).is_some());
        for other in [text.to_uppercase(), text.replace('-', ""), format!("{{{text}}}")] {
            assert!(exact_uuid(&other).is_none(), "{other}");
            assert_eq!(uuid_like(&other), exact_uuid(text), "{other}");
        }
        assert!(uuid_like("7d3c").is_none());
    }

    /// There is room for thousands of names in a query, and each is held against every provider.
    #[test]
    fn what_is_said_twice_is_looked_for_once() {
        let names = |names: &[&str]| names.iter().map(|name| intern(name)).collect::<Vec<Name>>();
        assert_eq!(traits("in:B,A,B", true, true).unwrap().0, [names(&["B", "A"])]);
        let all_of = (vec![names(&["B"]), names(&["A"])], names(&["C"]));
        assert_eq!(traits("B,!C,A,B,!C", true, true).unwrap(), all_of);
        let uuid = |number: u128| Uuid::from_u128(number);
        let (one, two) = (uuid(1).to_string(), uuid(2).to_string());
        let shouted = uuid(1).simple().to_string().to_uppercase();
        let any_of = (vec![uuid(2), uuid(1)], Vec::new());
        assert_eq!(member_of(&format!("in:{two},{one},{shouted},{two}")).unwrap(), any_of);
        assert_eq!(member_of(&format!("!in:{one},{shouted}")).unwrap().1, [uuid(1)]);
        assert_eq!(unique_lists(vec![vec![2, 1], vec![3], vec![1, 2]]), [vec![2, 1], vec![3]]);
    }

    #[test]
    fn what_is_not_utf8_is_refused() {
        assert!(decode("a=%ff").is_err());
        assert_eq!(
            decode("a=b+c%20d&&e").unwrap(),
            [("a".into(), "b c d".into()), ("e".into(), String::new())]
        );
    }
}
