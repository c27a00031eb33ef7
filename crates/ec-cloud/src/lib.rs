//! The use-cases of control, over a store and a placement: what the command line does, and what whoever acts for
//! the whole cluster does, too.
//!
//! ```text
//!   schedule ──▶ intent (index and name first, taken back last) ──▶ claim ──▶ request
//!   destroy  ──▶ lookup ──▶ the wish in the request                  explain: why there was no room
//!   preview  ──▶ the first steps of schedule, which only look
//!   act      ──▶ lookup ──▶ what is wanted from now on, judged by ec_plan::verbs; for another size its claim first
//!   look_at  ──▶ lookup ──▶ a wish to look at it, judged by ec_plan::reach ──▶ its node's ticket
//!   heal     ──▶ what nodes hold that etcd lacks ──▶ record and request, judged by ec_plan::heal
//!   history: what was asked of an instance, and what came of it
//!   find, list, nodes: what there is                                 wait: until it is so
//!   select: which of them                                            watch: each change of them
//!   image: the catalogue of images              catalog: flavors and keypairs
//!   group: groups, and what their policies demand of a placement
//!   volume: disks with a life of their own, and which machine has them
//!   forget: what its agent would have done, of a node that will never come back
//!   tend: what nobody else is there to do      members, rights: who belongs to the cloud, and may do what
//! ```
//!
//! What is decided on the way is pure and lies in `ec-plan`; errors are typed ([`CloudError`]), and who uses them
//! makes exit codes, or statuses, of their kinds.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod act;
mod ask;
mod catalog;
mod destroy;
mod error;
mod explain;
mod forget;
mod group;
mod heal;
mod history;
mod image;
mod intent;
mod kinds;
mod lookup;
mod members;
mod moving;
mod nodes;
mod preview;
mod reach;
mod restore;
mod rights;
mod schedule;
mod select;
mod sizes;
mod source;
mod storage;
mod tend;
mod view;
mod volume;
mod wait;
mod watch;

use std::sync::Arc;

use ec_model::{Keyspace, RequestId};
use ec_placement_client::Placement;
use ec_runtime::Host;
use ec_store::Store;

pub use act::{Acted, act, act_selected};
pub use ask::{Ask, Guest, Wanted};
pub use catalog::{
    add_keypair, create_flavor, delete_flavor, delete_keypair, flavor, flavors, keypair, keypairs,
    no_keypair, unreadable,
};
pub use destroy::{Doomed, destroy, destroy_called, destroy_selected};
pub use ec_plan::{
    choice::Strategy,
    history::{Fate, Happening},
    lack::Reasons,
    stack::{
        Begun, Difference, Placed, Prune, Refused, STACK, Standing, VolumeStep, Volumes, Wished,
        WishedVolume, differences,
    },
    verbs::{Change, Verb},
};
pub use error::{CloudError, CloudResult, Kind};
pub use explain::explain;
pub use forget::{forget, node_to_forget};
pub use group::{
    GroupView, Joining, Member, create_group, delete_group, delete_group_of, group, groups, lost_groups,
};
pub use heal::{Healed, HeldNamed, Outcome, heal, held_named, unfound, unrecorded};
pub use history::history;
pub use image::{
    Bytes, Facts, ImageChange, NewImage, Upload, add_image, change_image, copy_for_image, delete_image,
    drop_copy, image, image_for, images, least_of_origin, stored_images, tend_copies, tend_images,
    unnamed_images, unrecorded_images,
};
pub use intent::{Naming, name_is_free};
pub use kinds::Kinds;
pub use lookup::{Found, Known, Read, bearing, called_beginning, find, find_placed, resolve, resolve_name};
pub use members::{Membership, ROOT};
pub use moving::{move_volume, node_to_come_to, node_with, takes_volumes};
pub use nodes::{NodeView, nodes, nodes_again};
pub use preview::{Preview, Share, preview};
pub use reach::{Door, look_at};
pub use restore::{Restoring, restore_snapshot};
pub use rights::Part;
pub use schedule::{NoRoom, Scheduled, schedule};
pub use select::{
    Filter, NodeNames, Page, SortBy, SortVolumesBy, VolumeFilter, Whose, named_nodes, node_named, page,
    page_of_volumes, select, select_volumes,
};
pub use sizes::{settle, tend_claims};
pub use source::{find_if_any, image_of, is_made, made_of, room_from};
pub use storage::{StorageView, join_storage, leave_storage, sharing, storages};
pub use tend::{Cleared, Tended, clock_in_words, clocks_differ, tend_instances, tend_nodes, trust_clock};
pub use view::{View, list, standing};
pub use volume::{
    Attached, NewVolume, VolumeView, attach, create_volume, delete_called_volume, delete_selected_volume,
    delete_volume, detach, extend_volume, let_go, nameable, node_of_copy, resolve_volume, restore_volume,
    room_of, snapshot_of, until_free, volume, volumes,
};
pub use wait::{Awaited, Step, until_active, until_done, until_gone};
pub use watch::{Seen, Watched, What, watch};

/// The services that every use-case talks to, and for whom.
#[derive(Clone)]
pub struct Cloud {
    /// Where requests are written and statuses read.
    pub store: Arc<dyn Store>,
    /// What counts resources.
    pub placement: Arc<dyn Placement>,
    /// Where everything lies in the store.
    pub keys: Keyspace,
    /// To whom what is made is accounted.
    pub project: String,
    /// Who makes it.
    pub user: String,
    /// The machine that this runs on.
    pub host: Host,
    /// Of the command that this is used for, one for all that it does; none of whoever asks for nothing of their own.
    pub request_id: Option<RequestId>,
    /// Called with what takes longer than anybody expects, as it begins.
    pub notice: fn(&str),
}

impl Cloud {
    /// The same for a command of its own, by an id that is made for it. Placement is told that, too.
    #[must_use]
    pub fn for_another(&self) -> Self {
        self.on_behalf(Some(RequestId::new(self.host.mark())))
    }

    /// The same for the command that has this id.
    #[must_use]
    pub fn on_behalf(&self, request_id: Option<RequestId>) -> Self {
        Self { placement: self.placement.on_behalf(request_id), request_id, ..self.clone() }
    }
}
