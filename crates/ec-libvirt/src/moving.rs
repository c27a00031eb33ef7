//! A volume's disk that becomes another node's, on storage that both have.

use std::{
    fs::{File, Metadata, hard_link, metadata, remove_file},
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt,
    path::Path,
};

use ec_model::{InstanceId, NodeId};
use virt::connect::Connect;

use crate::{
    disk::Pool,
    error::CallError,
    volumes,
    xml::{self, VolumeXml},
};

/// Moves the disk into the directory of the other node, which lies beside this one's. By a second name for it, and then without the
/// first: unlike a rename, that never takes the place of another file, and can be done again from where it ended.
pub(crate) fn hand_over(
    connect: &Connect,
    pool: &Pool,
    volume: InstanceId,
    node: NodeId,
) -> Result<(), CallError> {
    volumes::refuse_used(connect, pool, volume)?;
    let from = pool.volume_path(volume);
    let (Some(beside), Some(name)) = (pool.path.parent(), from.file_name()) else {
        return Err(CallError::Refused(format!("{} lies beside nothing", pool.path.display())));
    };
    let there = beside.join(node.to_string());
    let to = there.join(name);
    let Some(own) = look(&from)? else { return Ok(()) };
    match look(&to)? {
        Some(other) if (other.dev(), other.ino()) == (own.dev(), own.ino()) => {}
        Some(_) => return Err(CallError::Refused(format!("another disk lies at {}", to.display()))),
        None => {
            pool.refuse_snapshots(volume)?;
            if let Some(known) = pool.known(connect, volume)? {
                let described: VolumeXml = xml::read(&known.xml_desc(0)?).map_err(CallError::Refused)?;
                if described.stands_on_another() {
                    return Err(CallError::Refused(
                        "it stands on an image, which lies with this node".to_owned(),
                    ));
                }
            }
            let linked =
                File::open(&from).and_then(|file| file.sync_all()).and_then(|()| hard_link(&from, &to));
            linked.map_err(|error| CallError::io("hand over to", &to, &error))?;
        }
    }
    // The new name lasts before the old one goes.
    written(&there)?;
    remove_file(&from).map_err(|error| CallError::io("delete", &from, &error))?;
    written(&pool.path)?;
    pool.forget_gone(connect)
}

fn look(path: &Path) -> Result<Option<Metadata>, CallError> {
    match metadata(path) {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CallError::io("look at", path, &error)),
    }
}

/// Has the names in a directory outlive a power cut.
fn written(directory: &Path) -> Result<(), CallError> {
    let synced: io::Result<()> = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| CallError::io("write", directory, &error))
}
