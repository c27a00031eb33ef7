//! The file of a volume, read for somebody elsewhere.

use std::{
    fs::{File, Metadata},
    io::Read,
};

use bytes::Bytes;
use ec_model::InstanceId;
use tokio::sync::mpsc;
use virt::connect::Connect;

use crate::{
    disk::{Pool, stands_on_another},
    error::CallError,
    volumes,
};

/// Bytes that are read at a time.
const PIECE: u64 = 256 << 10;
/// Pieces that wait for their reader.
const PIECES: usize = 4;

/// Opens the file of a volume that no domain has, and that is whole by itself.
pub(crate) fn open(connect: &Connect, pool: &Pool, volume: InstanceId) -> Result<File, CallError> {
    volumes::refuse_used(connect, pool, volume)?;
    volumes::refuse_astray(connect, pool, volume)?;
    if !pool.has_volume(volume)? {
        return Err(CallError::Refused("there is no disk of it".to_owned()));
    }
    let path = pool.volume_path(volume);
    let disk = File::open(&path).map_err(|error| CallError::io("read", &path, &error))?;
    if stands_on_another(&disk, &path)? {
        return Err(CallError::Refused("it stands on an image, without which it is nothing".to_owned()));
    }
    Ok(disk)
}

/// Its size, then all that is in it. The last piece is held back until nothing was changed meanwhile.
pub(crate) fn begin(file: File) -> mpsc::Receiver<Bytes> {
    let (pieces, output) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        if let Err(error) = read(file, &pieces) {
            // Who reads it has fewer bytes than there are.
            tracing::warn!(%error, "a disk was not read to its end");
        }
    });
    output
}

fn read(mut file: File, pieces: &mpsc::Sender<Bytes>) -> std::io::Result<()> {
    let before = file.metadata()?;
    let size = before.len();
    let mut next = Bytes::copy_from_slice(&size.to_be_bytes());
    let mut left = size;
    loop {
        let mut piece = Vec::new();
        (&mut file).take(PIECE.min(left)).read_to_end(&mut piece)?;
        left = left.saturating_sub(piece.len() as u64);
        if piece.is_empty() {
            if left > 0 || is_changed(&before, &file.metadata()?) {
                return Err(std::io::Error::other("it was changed meanwhile"));
            }
            // Who has gone does not want it.
            pieces.blocking_send(next).ok();
            return Ok(());
        }
        if pieces.blocking_send(std::mem::replace(&mut next, piece.into())).is_err() {
            return Ok(());
        }
    }
}

fn is_changed(before: &Metadata, after: &Metadata) -> bool {
    let seen = |meta: &Metadata| (meta.len(), meta.modified().ok());
    seen(before) != seen(after)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    async fn all(mut output: mpsc::Receiver<Bytes>) -> (u64, Vec<u8>) {
        let size = output.recv().await.unwrap();
        let mut read = Vec::new();
        while let Some(piece) = output.recv().await {
            read.extend_from_slice(&piece);
        }
        (u64::from_be_bytes(size.as_ref().try_into().unwrap()), read)
    }

    fn written(path: &Path, bytes: &[u8]) -> File {
        std::fs::write(path, bytes).unwrap();
        File::open(path).unwrap()
    }

    #[tokio::test]
    async fn all_of_a_file_is_read_and_less_where_it_changes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let bytes: Vec<u8> = (0_u32..500_000).flat_map(u32::to_be_bytes).collect();
        for bytes in [&bytes[..], b"x", b""] {
            assert_eq!(all(begin(written(&path, bytes))).await, (bytes.len() as u64, bytes.to_vec()));
        }
        let output = begin(written(&path, &bytes));
        // Some pieces wait, and the rest is still to be read.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        std::fs::write(&path, vec![1; bytes.len()]).unwrap();
        let (size, read) = all(output).await;
        assert_eq!(size, bytes.len() as u64);
        assert!(read.len() < bytes.len(), "the end is held back");
    }
}
