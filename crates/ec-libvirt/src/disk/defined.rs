//! The pool as libvirt knows it.

use std::path::Path;

use virt::{connect::Connect, error::ErrorNumber, storage_pool::StoragePool};

use super::Pool;
use crate::{
    error::{CallError, absent},
    xml::{self, PoolXml},
};

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
        Ok(pool)
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
