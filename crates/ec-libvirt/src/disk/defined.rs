//! The pool as libvirt knows it.

use std::path::Path;

use nix::sys::statvfs::statvfs;
use virt::{connect::Connect, error::ErrorNumber, storage_pool::StoragePool};

use super::Pool;
use crate::{
    error::{CallError, absent},
    xml::{self, PoolXml},
};

/// So often it is looked whether libvirt and this program see the same file system.
const LOOKS: usize = 3;

impl Pool {
    /// libvirt's pool of that name, which has to be of the same directory, defined where there is none, and active.
    pub(crate) fn define(&self, connect: &Connect) -> Result<StoragePool, CallError> {
        let pool = match self.defined(connect)? {
            Some(pool) => self.unless_another(pool)?,
            None => match connect.define_storage_pool_xml(&self.document(connect)?, 0) {
                Ok(pool) => pool,
                // Another call may have been faster.
                Err(error) => self.defined(connect)?.ok_or(error)?,
            },
        };
        // So that it is there after a restart of libvirtd.
        pool.set_autostart(true)?;
        if !pool.is_active()? {
            let started = pool.build(0).and_then(|()| pool.create(0));
            // Somebody else may have been faster.
            if let Err(error) = started
                && !pool.is_active()?
            {
                return Err(error.into());
            }
        }
        self.same_file_system(&pool)?;
        Ok(pool)
    }

    /// That libvirt has the pool there, and sees the file system that this program sees, where it has it already. Changes nothing.
    pub(crate) fn survey(&self, connect: &Connect) -> Result<(), CallError> {
        match self.defined(connect)? {
            Some(pool) if pool.is_active()? => self.same_file_system(&self.unless_another(pool)?),
            _ => Ok(()),
        }
    }

    /// An error where libvirtd has another file system at this path, as it may in a mount namespace of its own: this program would look
    /// for disks where libvirt makes none. How large both are tells, which is counted in the same way.
    fn same_file_system(&self, pool: &StoragePool) -> Result<(), CallError> {
        let path = &self.path;
        let capacity = || {
            let found = statvfs(path).map_err(|error| CallError::io("measure", path, &error.into()))?;
            Ok::<u64, CallError>(found.blocks() * found.fragment_size())
        };
        let mut there = pool.info()?.capacity;
        let mut here = capacity()?;
        if there == here {
            return Ok(());
        }
        // What libvirt knows may be old, and some file systems grow and shrink by what others write beside them.
        for _ in 0..LOOKS {
            let before = here;
            if let Err(error) = pool.refresh(0) {
                // A disk is being made in it at this moment.
                tracing::debug!(%error, "whether libvirt sees the same file system is not known");
                return Ok(());
            }
            there = pool.info()?.capacity;
            here = capacity()?;
            if (before.min(here)..=before.max(here)).contains(&there) {
                return Ok(());
            }
        }
        let [there, here] = [there, here].map(|bytes| bytes >> 20);
        Err(CallError::Refused(format!(
            "libvirtd has another file system at {0} than this program, of {there} MiB instead of {here}: what is mounted there one of both does not see. Have {0} on the \
             same file system for both: where it was mounted after libvirtd was started, start libvirtd anew (guests run on)",
            path.display()
        )))
    }

    /// As it is defined, where it is.
    pub(super) fn defined(&self, connect: &Connect) -> Result<Option<StoragePool>, virt::error::Error> {
        absent(connect.lookup_storage_pool_by_name(&self.name), ErrorNumber::NoStoragePool)
    }

    fn unless_another(&self, pool: StoragePool) -> Result<StoragePool, CallError> {
        let found: PoolXml = xml::read(&pool.xml_desc(0)?).map_err(CallError::Refused)?;
        let target = found.target.map(|target| target.path).unwrap_or_default();
        let (name, path) = (&self.name, self.path.display());
        if found.kind != "dir" {
            return Err(CallError::Refused(format!(
                "the storage pool `{name}` is of type {}, but a directory is needed: set another name",
                found.kind
            )));
        }
        if !same_directory(Path::new(&target), &self.path) {
            return Err(CallError::Refused(format!(
                "the storage pool `{name}` lies in {target}, but the configuration says {path}: \
                 set that directory or another name"
            )));
        }
        Ok(pool)
    }

    fn document(&self, connect: &Connect) -> Result<String, CallError> {
        let (name, path) = (&self.name, xml::utf8(&self.path).map_err(CallError::Refused)?);
        if let Ok(other) = connect.lookup_storage_pool_by_target_path(path) {
            return Err(CallError::Refused(format!(
                "the directory {path} belongs to the storage pool `{}`: set that name, or another directory \
                 for `{name}`",
                other.name()?
            )));
        }
        xml::write(&PoolXml::directory(name, path)).map_err(CallError::Refused)
    }
}

fn same_directory(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    one == other || canonical(one) == canonical(other)
}
