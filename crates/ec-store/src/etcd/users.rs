//! etcd's own users and roles.
//!
//! Everything here may be done again: what is there is made as it should be, and what is so already is not sent, since with each change of
//! users or roles etcd refuses what it is just about to do for anybody.

use async_trait::async_trait;
use etcd_client::{Permission, PermissionType, UserAddOptions};

use super::{
    EtcdStore,
    endpoints::{Lane, Repeat},
    failure::{Failure, classify},
    prefix_end,
};
use crate::{StoreError, StoreResult, Users};

/// A right that a role has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grant {
    /// A key, or what keys begin with.
    pub key: String,
    /// Whether it is for all keys that begin so.
    pub tree: bool,
    /// Whether they may be written, too.
    pub write: bool,
}

impl Grant {
    fn range_end(&self) -> Vec<u8> {
        if self.tree { prefix_end(&self.key) } else { Vec::new() }
    }

    fn kind(&self) -> PermissionType {
        if self.write { PermissionType::Readwrite } else { PermissionType::Read }
    }

    fn permission(&self) -> Permission {
        Permission::new(self.kind(), self.key.as_str()).with_range_end(self.range_end())
    }

    /// Whether a role that has this permission has the right already.
    fn is_given_by(&self, permission: &Permission) -> bool {
        permission.get_type() == self.kind() as i32 && self.is_for(permission)
    }

    /// Whether it is for the same keys.
    fn is_for(&self, permission: &Permission) -> bool {
        permission.key() == self.key.as_bytes() && permission.range_end() == self.range_end()
    }
}

impl EtcdStore {
    async fn administer<T, R>(&self, op: impl Fn(etcd_client::AuthClient) -> R) -> StoreResult<T>
    where
        R: Future<Output = Result<T, etcd_client::Error>>,
    {
        let done = self.endpoints.run(Lane::Requests, Repeat::Safe, |client| {
            let call = op(client.auth_client());
            async move { call.await.map_err(classify) }
        });
        done.await.map_err(|failure: Failure| self.endpoints.error(failure, Repeat::Safe))
    }

    /// What others may do at the same time, and what an earlier try may have done whose answer was lost: that it is so already, as
    /// etcd says in these words, is no error.
    async fn bring_about<T, R>(
        &self,
        is_so: &str,
        op: impl Fn(etcd_client::AuthClient) -> R,
    ) -> StoreResult<()>
    where
        R: Future<Output = Result<T, etcd_client::Error>>,
    {
        match self.administer(op).await {
            Err(StoreError::Refused(why)) if why.contains(is_so) => Ok(()),
            done => done.map(drop),
        }
    }

    async fn have_role(&self, role: &str) -> StoreResult<()> {
        let roles = self.administer(|mut auth| async move { auth.role_list().await }).await?;
        if !roles.roles().iter().any(|there| there == role) {
            let is_there = "role name already exists";
            self.bring_about(is_there, |mut auth| async move { auth.role_add(role).await }).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl Users for EtcdStore {
    async fn ensure_role(&self, role: &str, grants: &[Grant]) -> StoreResult<()> {
        self.have_role(role).await?;
        let has = self.administer(|mut auth| async move { auth.role_get(role).await }).await?.permissions();
        for grant in grants.iter().filter(|grant| !has.iter().any(|own| grant.is_given_by(own))) {
            self.administer(
                |mut auth| async move { auth.role_grant_permission(role, grant.permission()).await },
            )
            .await?;
        }
        for permission in has.iter().filter(|own| !grants.iter().any(|grant| grant.is_for(own))) {
            let (key, end) = (permission.key(), permission.range_end());
            self.bring_about("permission is not granted to the role", |mut auth| {
                let options = etcd_client::RoleRevokePermissionOptions::new().with_range_end(end);
                async move { auth.role_revoke_permission(role, key, Some(options)).await }
            })
            .await?;
        }
        Ok(())
    }

    async fn ensure_user(&self, user: &str, role: &str) -> StoreResult<()> {
        self.have_role(role).await?;
        let users = self.administer(|mut auth| async move { auth.user_list().await }).await?;
        if !users.users().iter().any(|there| there == user) {
            self.bring_about("user name already exists", |mut auth| async move {
                auth.user_add(user, "", Some(UserAddOptions::new().with_no_pwd())).await
            })
            .await?;
        }
        let has = self.administer(|mut auth| async move { auth.user_get(user).await }).await?;
        if !has.roles().iter().any(|there| there == role) {
            self.administer(|mut auth| async move { auth.user_grant_role(user, role).await }).await?;
        }
        Ok(())
    }

    async fn drop_user(&self, user: &str) -> StoreResult<()> {
        let users = self.administer(|mut auth| async move { auth.user_list().await }).await?;
        if users.users().iter().any(|there| there == user) {
            let is_gone = "user name not found";
            self.bring_about(is_gone, |mut auth| async move { auth.user_delete(user).await }).await?;
        }
        let roles = self.administer(|mut auth| async move { auth.role_list().await }).await?;
        if roles.roles().iter().any(|there| there == user) {
            let is_gone = "role name not found";
            self.bring_about(is_gone, |mut auth| async move { auth.role_delete(user).await }).await?;
        }
        Ok(())
    }

    async fn enable_auth(&self) -> StoreResult<()> {
        self.administer(|mut auth| async move { auth.auth_enable().await }).await.map(drop)
    }
}
