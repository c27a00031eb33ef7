//! What is refused, and how it reads.

/// What handlers answer.
pub(super) type ApiResult<T> = Result<T, ApiError>;

/// Codes that clients tell errors by, from 1.23 on.
pub(super) mod code {
    pub(in super::super) const UNDEFINED: &str = "placement.undefined_code";
    pub(in super::super) const INVENTORY_IN_USE: &str = "placement.inventory.inuse";
    pub(in super::super) const CONCURRENT_UPDATE: &str = "placement.concurrent_update";
    pub(in super::super) const DUPLICATE_NAME: &str = "placement.duplicate_name";
    pub(in super::super) const PROVIDER_IN_USE: &str = "placement.resource_provider.inuse";
    pub(in super::super) const CANNOT_DELETE_PARENT: &str =
        "placement.resource_provider.cannot_delete_parent";
    pub(in super::super) const PROVIDER_NOT_FOUND: &str = "placement.resource_provider.not_found";
    pub(in super::super) const DUPLICATE_KEY: &str = "placement.query.duplicate_key";
    pub(in super::super) const BAD_VALUE: &str = "placement.query.bad_value";
    pub(in super::super) const MISSING_VALUE: &str = "placement.query.missing_value";
}

/// An answer that refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) status: u16,
    pub(super) code: &'static str,
    pub(super) detail: String,
    /// Methods that there are, for 405.
    pub(super) allow: Option<&'static str>,
}

impl ApiError {
    pub(super) fn new(status: u16, detail: impl Into<String>) -> Self {
        Self { status, code: code::UNDEFINED, detail: detail.into(), allow: None }
    }

    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(400, detail)
    }

    pub(super) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(404, detail)
    }

    pub(super) fn conflict(detail: impl Into<String>) -> Self {
        Self::new(409, detail)
    }

    pub(super) fn code(self, code: &'static str) -> Self {
        Self { code, ..self }
    }

    /// The status in words.
    pub(super) fn title(&self) -> &'static str {
        match self.status {
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            406 => "Not Acceptable",
            408 => "Request Timeout",
            409 => "Conflict",
            413 => "Request Entity Too Large",
            415 => "Unsupported Media Type",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        }
    }

    /// What the status means, as it stands before the detail.
    pub(super) fn explanation(&self, method: &str, content_type: &str, accept: &str) -> String {
        match self.status {
            400 => {
                "The server could not comply with the request since it is either malformed or otherwise incorrect."
                    .into()
            }
            401 => "This server could not verify that you are authorized to access the document you requested.".into(),
            403 => "Access was denied to this resource.".into(),
            404 => "The resource could not be found.".into(),
            405 => format!("The method {method} is not allowed for this resource. "),
            406 => format!("The resource could not be generated that was acceptable to your browser (content of type {accept})."),
            408 => "The server has waited too long for the request to be sent by the client.".into(),
            409 => "There was a conflict when trying to complete your request.".into(),
            413 => "The body of your request was too large for this server.".into(),
            415 => format!("The request media type {content_type} is not supported by this server."),
            503 => "The server is currently unavailable. Please try again at a later time.".into(),
            _ => "The server has either erred or is incapable of performing the requested operation.".into(),
        }
    }
}
