//! What log lines about an instance have in common.

use ec_model::{InstanceId, NodeId, RequestId};
use tracing::Span;

/// The span of what is done for an instance; there, too, where only warnings are wanted.
pub(crate) fn about(instance: InstanceId, node: NodeId, request_id: Option<RequestId>) -> Span {
    let request_id = request_id.map(tracing::field::display);
    tracing::error_span!("work", %instance, %node, request_id)
}
