//! Who may do what.

use ec_placement_model::Scope;

use super::{
    auth::Identity,
    error::{ApiError, ApiResult},
};

/// A set of rules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Policy {
    /// As upstream's defaults have been for long: what services may, administrators may, too
    #[default]
    Legacy,
    /// As upstream's defaults are with `enforce_new_defaults`
    Secure,
    /// Everybody who is let in may do everything
    Open,
}

/// What somebody wants to do; named in refusals as upstream names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule(pub(super) &'static str);

/// Seen by readers of the project, too.
pub(super) const TOTAL_USAGES: Rule = Rule("placement:usages");
/// Done by services.
pub(super) const RESHAPE: Rule = Rule("placement:reshaper:reshape");

/// What members of a project may do beside: look at what there is, but not at who uses it, and claim. That they claim for
/// their own project is seen to where it is done.
const OF_MEMBERS: [&str; 14] = [
    "placement:allocation_candidates:list",
    "placement:allocations:list",
    "placement:allocations:update",
    "placement:allocations:manage",
    "placement:allocations:delete",
    "placement:resource_classes:list",
    "placement:resource_classes:show",
    "placement:resource_providers:list",
    "placement:resource_providers:show",
    "placement:resource_providers:inventories:list",
    "placement:resource_providers:inventories:show",
    "placement:resource_providers:traits:list",
    "placement:traits:list",
    "placement:traits:show",
];

impl Policy {
    /// Refuses whoever may not. `project` is the one that is looked at.
    pub(super) fn check(self, rule: Rule, identity: &Identity, project: Option<&str>) -> ApiResult<()> {
        let is = |role: &str| identity.roles.iter().any(|own| own.eq_ignore_ascii_case(role));
        // By its token: upstream's `member` may do nothing.
        let of_project = matches!(identity.scope, Some(Scope::Project(_)));
        let allowed = match self {
            Self::Open => true,
            // Rules are for those who speak for a project.
            _ if identity.system => false,
            Self::Secure if rule == RESHAPE => is("service"),
            _ if rule == TOTAL_USAGES
                && (is("reader") || of_project)
                && project.is_some()
                && identity.project.as_deref() == project =>
            {
                true
            }
            _ => is("admin") || is("service") || of_project && OF_MEMBERS.contains(&rule.0),
        };
        if allowed {
            return Ok(());
        }
        Err(ApiError::new(403, format!("Policy does not allow {} to be performed.", rule.0)))
    }
}
