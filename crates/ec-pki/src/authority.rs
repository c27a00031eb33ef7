//! The authority and the certificates that it signs.

use std::collections::BTreeSet;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use time::{Duration, OffsetDateTime};
use x509_parser::parse_x509_certificate;

use crate::pair::is_its_key;

/// The authority's name, which all that it signed says.
pub(crate) const NAME: &str = "etcd-compute authority";
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
    /// Whoever made it renews it: what it signed says its name, which another certificate would not bear.
    #[error("the authority was not made by `eschedule cluster init`: whoever made it renews it")]
    OtherName,
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

/// What an authority's own certificate says, from now on.
fn of_authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    good_for(&mut params, AUTHORITY_FOR);
    // Of one that is made again, the key is the same: two certificates of one issuer have never the same number.
    let mut serial: [u8; 16] = rand::random();
    serial[0] &= 0x7f;
    params.serial_number = Some(SerialNumber::from(serial.to_vec()));
    params
}

/// Whether two files of authorities, PEM, have one in common: the same key, however long its certificate is good.
pub fn is_same_authority(one: &str, other: &str) -> bool {
    let keys = |pem: &str| -> BTreeSet<Vec<u8>> {
        let found = CertificateDer::pem_slice_iter(pem.as_bytes()).filter_map(Result::ok);
        let key =
            |der: CertificateDer<'_>| Some(parse_x509_certificate(&der).ok()?.1.public_key().raw.to_vec());
        found.filter_map(key).collect()
    };
    !keys(one).is_disjoint(&keys(other))
}

impl Authority {
    /// A new authority, and its key as PEM.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn create() -> Result<(Self, String), PkiError> {
        let what = "a certificate authority";
        let params = of_authority();
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

    /// Its own certificate as PEM, good for as long as a new one's, with those of others that stood behind it. The key and the name are
    /// the same: what it signed stays good.
    ///
    /// # Errors
    /// It was made elsewhere, by another name.
    pub fn renewed(&self) -> Result<String, PkiError> {
        const END: &str = "-----END CERTIFICATE-----";
        let certificate = of_authority().self_signed(self.issuer.key());
        let certificate = certificate.map_err(failed("a certificate authority"))?;
        let before = CertificateDer::from_pem_slice(self.certificate.as_bytes()).ok();
        let name = |der: &[u8]| Some(parse_x509_certificate(der).ok()?.1.subject().as_raw().to_vec());
        if before.and_then(|before| name(&before)) != name(certificate.der()) {
            return Err(PkiError::OtherName);
        }
        let others = self.certificate.split_once(END).map_or("", |(_, others)| others.trim_start());
        Ok(format!("{}{others}", certificate.pem()))
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
    fn one_that_is_renewed_is_good_for_longer_and_so_is_what_it_signed() {
        let key = KeyPair::generate().unwrap();
        let mut params = of_authority();
        params.not_after = rcgen::date_time_ymd(2025, 1, 2);
        let (other, _) = Authority::create().unwrap();
        let old = params.self_signed(&key).unwrap().pem();
        let both = format!("{old}{}", other.certificate());
        let authority = Authority::read(&both, &key.serialize_pem()).unwrap();
        let issued = authority.issue("ecompute-1", &["host1".into()]).unwrap().certificate;
        let renewed = authority.renewed().unwrap();
        assert!(renewed.ends_with(other.certificate()), "{renewed}");
        let [before, now] = [&old, &renewed].map(|pem| Certificate::parse(pem.as_bytes()).unwrap());
        assert_eq!((before.last_day().year(), before.is_authority, now.is_authority), (2025, true, true));
        assert!(now.ends - OffsetDateTime::now_utc() > Duration::days(3649) && now.serial != before.serial);
        verified(&renewed, &issued).unwrap();
        let again = Authority::read(&renewed, &key.serialize_pem()).unwrap();
        verified(&old, &again.issue("ecompute-1", &[]).unwrap().certificate).unwrap();
        assert!(is_same_authority(&old, &renewed) && is_same_authority(other.certificate(), &renewed));
        assert!(!is_same_authority(&old, other.certificate()) && !is_same_authority("none", "none"));

        params.distinguished_name.push(DnType::CommonName, "ours");
        let theirs = params.self_signed(&key).unwrap().pem();
        let theirs = Authority::read(&theirs, &key.serialize_pem()).unwrap();
        assert!(matches!(theirs.renewed(), Err(PkiError::OtherName)));
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
