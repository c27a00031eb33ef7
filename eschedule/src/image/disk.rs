//! Images made of disks: the node makes a copy of one moment, and its agent sends the file of that.

use std::{io, time::Duration};

use bytes::Bytes;
use ec_cloud::{Scheduled, Upload, copy_for_image, drop_copy, find_placed, until_active};
use ec_model::{AccessKind, ImageRef};
use ec_runtime::exit::{Failure, INTERRUPTED, chain, tell};
use futures::stream;
use tokio_util::{io::StreamReader, sync::CancellationToken};

use super::send::{Sender, signs_of_life};
use crate::{
    config::Session,
    reach::{Piece, Stream},
    shown::Shown,
};

/// A node copies some hundreds of MiB in a second.
const LONGEST: Duration = Duration::from_hours(24);

/// So many looks in a row, of one in a minute, find no agent before nobody waits for it any more.
const MISSED: u32 = 5;

/// Has the copy made, and opens it; meanwhile the image's record goes on saying which upload is its own. Whether that works or not, [`end`] is to be called.
pub(super) async fn sender(
    session: &Session,
    upload: &mut Upload,
    part: Option<String>,
    (of, size_gb): (&ImageRef, Option<u64>),
    stop: &CancellationToken,
    shown: &Shown,
) -> Result<Sender, Failure> {
    let cloud = &session.cloud;
    shown.tell("copying");
    let scheduled = copy_for_image(cloud, upload.image().id, of, size_gb, stop).await;
    let Scheduled { instance: volume, node } = match scheduled.map_err(|error| session.failed(error))? {
        Ok(scheduled) => scheduled,
        Err(no_room) => {
            // Of one whose disks lie on shared storage no candidate tells.
            let is_alive = match of.copied() {
                Some(copied) => find_placed(cloud, copied.disk).await?.node_alive,
                None => true,
            };
            let is_alive = is_alive && no_room.not_alive.is_empty();
            let why = if is_alive { "has no room for one" } else { "is not alive" };
            return Err(Failure::failed(format!(
                "no copy of {} could be made: its node {why}; nothing was added",
                of.url
            )));
        }
    };
    let made = until_active(cloud, node, volume, LONGEST, |step| shown.step_of_volume(step));
    tokio::pin!(made);
    let mut alive = signs_of_life();
    let mut missed = 0;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => {
                return Err(Failure { code: INTERRUPTED, message: "interrupted; nothing was added".to_owned() });
            }
            _ = alive.tick() => {
                upload.still_at_it(cloud, part.clone()).await?;
                // An agent may be started anew, and etcd be away, while the copy goes on.
                let is_missed = find_placed(cloud, volume).await.is_ok_and(|known| !known.node_alive);
                missed = if is_missed { missed + 1 } else { 0 };
                if missed == MISSED {
                    return Err(Failure::failed(format!("node {node} is not alive; nothing was added")));
                }
            }
            made = &mut made => {
                made.map_err(|error| session.failed(error))?;
                break;
            }
        }
    }
    let mut disk = Stream::open(session, volume, AccessKind::Disk).await?;
    let size = match disk.next().await? {
        Piece::Bytes(size) => <[u8; 8]>::try_from(size.as_ref()).map(u64::from_be_bytes).ok(),
        Piece::End(_) => None,
    };
    let size =
        size.ok_or_else(|| Failure::failed(format!("node {node} does not tell how large {} is", of.url)))?;
    let pieces = stream::try_unfold((disk, 0), move |(mut disk, read)| async move {
        match disk.next().await {
            Ok(Piece::Bytes(bytes)) => {
                let read = read + bytes.len() as u64;
                Ok::<_, io::Error>(Some((bytes, (disk, read))))
            }
            Ok(Piece::End(_)) if read == size => Ok(None),
            Ok(Piece::End(why)) => {
                Err(io::Error::other(format!("its node sent {read} of {size} bytes: {why}")))
            }
            Err(failure) => Err(io::Error::other(failure.message)),
        }
    });
    Ok(Sender::of(StreamReader::<_, Bytes>::new(Box::pin(pieces)), of.url.clone(), Some(size)))
}

/// Deletes the copy, where there is one.
pub(super) async fn end(session: &Session, upload: &Upload) {
    if let Err(error) = drop_copy(&session.cloud, upload.image().id).await {
        tell(&format!(
            "eschedule: the copy that was made for the image stays ({}); `eschedule image list` tries again",
            chain(&error)
        ));
    }
}
