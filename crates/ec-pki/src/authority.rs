//! The authority and the certificates that it signs.

use std::collections::BTreeSet;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use time::{Duration, OffsetDateTime};

use crate::pair::is_its_key;

/// So long the authority itself is good.
const AUTHORITY_FOR: Duration = Duration::days(3650);
/// So long what it signs is good.
const SIGNED_FOR: Duration = Duration::days(398);
/// Clocks of hosts differ: what is signed now is good since then. So much that also a host whose clock was set to local time, or to that of
/// another zone, signs what others take at once; who has the authority's key may say any time, so it costs nothing.
const SINCE: Duration = Duration::hours(24);

/// Why a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// A name is none that a certificate can hold, or a file is no certificate or key.
    #[error("{what}")]
    Certificate {
        /// What was being made or read.
        what: String,
        /// Why it cannot be.
        #[source]
        source: rcgen::Error,
    },
    /// What it signs nobody who knows the certificate would believe.
    #[error("the key is not that of the authority's certificate")]
    OtherKey,
}

/// A certificate authority with its key: whoever has it may be anybody.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

/// A certificate and its key, both PEM.
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// Its key; a secret.
    pub key: String,
}

fn failed(what: impl Into<String>) -> impl FnOnce(rcgen::Error) -> PkiError {
    move |source| PkiError::Certificate { what: what.into(), source }
}

fn good_for(params: &mut CertificateParams, time: Duration) {
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - SINCE, now + time);
}

impl Authority {
    /// A new authority, and its key as PEM.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn create() -> Result<(Self, String), PkiError> {
        let what = "a certificate authority";
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "etcd-compute authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        good_for(&mut params, AUTHORITY_FOR);
        let key = KeyPair::generate().map_err(failed(what))?;
        let (certificate, pem) = (params.self_signed(&key).map_err(failed(what))?.pem(), key.serialize_pem());
        Ok((Self { issuer: Issuer::new(params, key), certificate }, pem))
    }

    /// The authority of these files' texts.
    ///
    /// # Errors
    /// One of them is not what it should be, or they do not belong together.
    pub fn read(certificate: &str, key: &str) -> Result<Self, PkiError> {
        let key = KeyPair::from_pem(key).map_err(failed("the authority's key"))?;
        let of = CertificateDer::from_pem_slice(certificate.as_bytes());
        if of.is_ok_and(|of| !is_its_key(&of, &key)) {
            return Err(PkiError::OtherKey);
        }
        let issuer =
            Issuer::from_ca_cert_pem(certificate, key).map_err(failed("the authority's certificate"))?;
        Ok(Self { issuer, certificate: certificate.to_owned() })
    }

    /// Its own certificate as PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// A certificate for `name` (its user in etcd), as a client of others and, where it has `hosts` (DNS names or
    /// addresses), as their server.
    ///
    /// # Errors
    /// A host's name is none.
    pub fn issue(&self, name: &str, hosts: &[String]) -> Result<Issued, PkiError> {
        let what = || failed(format!("a certificate for {name} ({})", hosts.join(", ")));
        let mut params = CertificateParams::new(hosts).map_err(what())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if !hosts.is_empty() {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.use_authority_key_identifier_extension = true;
        good_for(&mut params, SIGNED_FOR);
        let key = KeyPair::generate().map_err(what())?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(what())?.pem();
        Ok(Issued { certificate, key: key.serialize_pem() })
    }

    /// The list of those certificates that are good no more, by their serial numbers; DER, which every release of etcd reads.
    ///
    /// Good as long as an authority is: etcd never looks whether a list is over, and whoever does shall not be locked out by it.
    ///
    /// # Errors
    /// The authority's key cannot sign.
    pub fn revoke(&self, serials: &BTreeSet<Vec<u8>>) -> Result<Vec<u8>, PkiError> {
        let now = OffsetDateTime::now_utc();
        let revoked = |serial: &Vec<u8>| RevokedCertParams {
            serial_number: serial.clone().into(),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: now - SINCE,
            next_update: now + AUTHORITY_FOR,
            crl_number: SerialNumber::from(now.unix_timestamp().unsigned_abs()),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.issuer).map_err(failed("a list of revoked certificates"))?;
        Ok(list.der().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::{RootCertStore, pki_types::UnixTime, server::WebPkiClientVerifier};

    use super::*;
    use crate::{Certificate, revoked_serials};

    fn verified(authority: &str, certificate: &str) -> Result<(), rustls::Error> {
        verified_beside(authority, certificate, None)
    }

    fn verified_beside(
        authority: &str,
        certificate: &str,
        list: Option<Vec<u8>>,
    ) -> Result<(), rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .with_crls(list.map(Into::into))
            .enforce_revocation_expiration()
            .build()
            .unwrap();
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        verifier.verify_client_cert(&certificate, &[], UnixTime::now()).map(drop)
    }

    #[test]
    fn what_it_signs_is_good_also_after_it_was_read_again_and_nothing_of_anothers() {
        let (authority, key) = Authority::create().unwrap();
        let again = Authority::read(authority.certificate(), &key).unwrap();
        for signer in [&authority, &again] {
            let issued = signer.issue("ecompute-1", &["host1".into(), "10.0.0.1".into()]).unwrap();
            verified(authority.certificate(), &issued.certificate).unwrap();
        }
        let (other, other_key) = Authority::create().unwrap();
        let foreign = other.issue("root", &[]).unwrap();
        assert!(verified(authority.certificate(), &foreign.certificate).is_err());
        assert!(Authority::read("no pem", &other_key).is_err());
        let mixed = Authority::read(authority.certificate(), &other_key);
        assert!(matches!(mixed, Err(PkiError::OtherKey)));
    }

    #[test]
    fn a_list_takes_those_that_it_names_and_no_others() {
        let (authority, key) = Authority::create().unwrap();
        let [kept, stolen] = ["1", "2"].map(|name| authority.issue(name, &[]).unwrap().certificate);
        let serial = Certificate::parse(stolen.as_bytes()).unwrap().serial;
        // What an earlier release made, with a byte for the sign or without.
        let serials: BTreeSet<_> = [serial, vec![0x80, 1]].into();
        let again = Authority::read(authority.certificate(), &key).unwrap();
        for (serials, good) in [(&BTreeSet::new(), true), (&serials, false)] {
            let list = again.revoke(serials).unwrap();
            assert_eq!(revoked_serials(&list).as_ref(), Some(serials));
            verified_beside(authority.certificate(), &kept, Some(list.clone())).unwrap();
            assert_eq!(verified_beside(authority.certificate(), &stolen, Some(list)).is_ok(), good);
        }
        assert_eq!(revoked_serials(b"no list"), None);
    }

    #[test]
    fn a_host_that_is_none_is_refused_by_name() {
        let (authority, _) = Authority::create().unwrap();
        let error = authority.issue("etcd", &["hôte".into()]).err().unwrap().to_string();
        assert!(error.contains("hôte"), "{error}");
    }
}
