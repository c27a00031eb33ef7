//! The certificates that nodes were given, and those that are good no more.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use ec_pki::{Certificate, new_token, revoked_serials};
use ec_runtime::exit::Failure;

use super::{super::wrong, Directory, certificates, failed};

/// Certificates that nodes were given.
pub(super) const GIVEN: &str = "nodes";
/// Certificates that are good no more, whoever put them there.
const REVOKED: &str = "revoked";
/// The list of them, for etcd.
const REVOKED_LIST: &str = "revoked.crl";

impl Directory {
    /// Keeps a certificate that a node is given, so that it is known when the node is revoked.
    pub(in crate::cluster) fn keep_given(&self, name: &str, certificate: &str) -> Result<(), Failure> {
        let directory = self.file(GIVEN);
        fs::create_dir_all(&directory).map_err(failed("make directory", &directory))?;
        // It may have others, which are good still.
        self.write(&format!("{GIVEN}/{name}-{}.pem", &new_token()[..16]), certificate)
    }

    /// The names and addresses in the newest certificate that this user was given, be it revoked by now; none where none is known.
    pub(in crate::cluster) fn hosts_given(&self, user: &str) -> Result<Vec<String>, Failure> {
        let given = certificates(&self.file(GIVEN))?.into_iter().chain(certificates(&self.revoked())?);
        Ok(newest(given, user).map(|newest| newest.hosts).unwrap_or_default())
    }

    /// Of which nodes the newest certificate is over, or soon will be, and what is to be done. Their hosts say so to their own logs only,
    /// and whoever can make new ones is here.
    pub(in crate::cluster) fn ending_given(&self) -> Result<Vec<String>, Failure> {
        let given = certificates(&self.file(GIVEN))?;
        let mut newest = BTreeMap::new();
        for (path, certificate) in &given {
            let known = newest.entry(&certificate.name).or_insert((path, certificate));
            if known.1.ends < certificate.ends {
                *known = (path, certificate);
            }
        }
        let ending = newest.into_values().filter_map(|(path, certificate)| {
            let (name, _) = path.file_stem()?.to_str()?.rsplit_once('-')?;
            let (why, elsewhere) = (certificate.ending()?, self.elsewhere());
            Some(format!(
                "the certificate of node {name} {why}: `eschedule node add {name} --again{elsewhere}` gives it another; of one that \
                 is gone for ever `eschedule node revoke {name}{elsewhere}` ends it"
            ))
        });
        Ok(ending.collect())
    }

    /// The users of whom certificates are revoked, and none is known that is not.
    pub(in crate::cluster) fn revoked_users(&self) -> Result<BTreeSet<String>, Failure> {
        let users = |certificates: Vec<(PathBuf, Certificate)>| -> BTreeSet<String> {
            certificates.into_iter().map(|(_, certificate)| certificate.name).collect()
        };
        let good = users(certificates(&self.file(GIVEN))?);
        Ok(users(certificates(&self.revoked())?).difference(&good).cloned().collect())
    }

    /// Puts the certificates that this user was given to those that are good no more; answers how many of theirs lie there now, with
    /// those of a call before. For who has the lock.
    pub(in crate::cluster) fn revoke_given(&self, user: &str) -> Result<usize, Failure> {
        let is_its = |certificate: &Certificate| certificate.name == user;
        self.move_given(|_, certificate| is_its(certificate))?;
        Ok(certificates(&self.revoked())?.iter().filter(|(_, certificate)| is_its(certificate)).count())
    }

    /// The same of what a node of this name was given that nobody knows any more; what is `known` users' stays. For who has the lock.
    pub(in crate::cluster) fn revoke_left(
        &self,
        name: &str,
        known: &BTreeSet<String>,
    ) -> Result<(), Failure> {
        // It may have borne the name in other letters.
        let begin = format!("{name}-").to_ascii_lowercase();
        let is_left = |path: &Path, certificate: &Certificate| {
            let file = path.file_stem().and_then(|file| file.to_str()).map(str::to_ascii_lowercase);
            let drawn = file.as_deref().and_then(|file| file.strip_prefix(&begin));
            drawn.is_some_and(|drawn| !drawn.contains('-')) && !known.contains(&certificate.name)
        };
        self.move_given(is_left)
    }

    fn move_given(&self, is_revoked: impl Fn(&Path, &Certificate) -> bool) -> Result<(), Failure> {
        let to = self.revoked();
        for (path, certificate) in certificates(&self.file(GIVEN))? {
            if is_revoked(&path, &certificate) {
                fs::create_dir_all(&to).map_err(failed("make directory", &to))?;
                fs::rename(&path, to.join(path.file_name().unwrap_or_default()))
                    .map_err(failed("move", &path))?;
            }
        }
        Ok(())
    }

    /// Writes the list of certificates that are good no more, where it lacks any; answers its name then. Whoever is on it stays. For
    /// who has the lock.
    pub(in crate::cluster) fn list_revoked(&self) -> Result<Option<String>, Failure> {
        let path = self.file(REVOKED_LIST);
        // etcd lets nobody in where the list is missing or none.
        let listed = match fs::read(&path) {
            Ok(der) => revoked_serials(&der),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("read", &path)(error)),
        };
        let revoked = certificates(&self.revoked())?;
        let revoked: BTreeSet<_> = revoked.into_iter().map(|(_, certificate)| certificate.serial).collect();
        if listed.as_ref().is_some_and(|listed| revoked.is_subset(listed)) {
            return Ok(None);
        }
        let serials = listed.into_iter().flatten().chain(revoked).collect();
        self.write(REVOKED_LIST, self.read_authority()?.revoke(&serials).map_err(wrong)?)?;
        Ok(Some(REVOKED_LIST.to_owned()))
    }

    /// Where certificates lie that are good no more.
    pub(in crate::cluster) fn revoked(&self) -> PathBuf {
        self.file(REVOKED)
    }

    pub(in crate::cluster) fn revoked_list(&self) -> PathBuf {
        self.file(REVOKED_LIST)
    }

    /// Whether etcd's configuration is here and does not make it look at the list.
    pub(in crate::cluster) fn list_is_ignored(&self) -> bool {
        fs::read_to_string(self.etcd()).is_ok_and(|text| {
            let says = |what: &str| text.lines().any(|line| line.trim_start().starts_with(what));
            !says("CRLFile:") || says("listen-client-http-urls:")
        })
    }
}

/// The newest that is this user's.
pub(super) fn newest(
    certificates: impl Iterator<Item = (PathBuf, Certificate)>,
    user: &str,
) -> Option<Certificate> {
    let certificates = certificates.map(|(_, certificate)| certificate);
    certificates.filter(|certificate| certificate.name == user).max_by_key(|certificate| certificate.ends)
}
