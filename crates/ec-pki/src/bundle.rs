//! What a host is given to join the cluster.

use ec_model::{NodeId, Record};
use rcgen::KeyPair;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use x509_parser::{certificate::X509Certificate, error::X509Error, parse_x509_certificate};

use crate::{certificate::not_yet, common_names, pair::is_its_key};

/// All that one host needs to be a node, and nothing that another could use. A secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bundle {
    /// The node's name, and its resource provider's.
    pub name: String,
    /// The node's uuid, which its rights in etcd and placement are bound to.
    pub node: NodeId,
    /// By what others reach the host.
    pub host: String,
    /// etcd's members, as URLs.
    pub etcd: Vec<String>,
    /// What every key begins with.
    pub prefix: String,
    /// Placement's URL.
    pub placement: String,
    /// The authority's certificate, PEM.
    pub authority: String,
    /// The node's own certificate, PEM.
    pub certificate: String,
    /// Its key, PEM.
    pub key: String,
    /// Its token for placement.
    pub token: String,
    /// The keys that user-data is sealed with in etcd, a line each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data_key: Option<String>,
}

impl Bundle {
    /// Whether a host can be this node with it: what was cut off or put together of several on its way cannot be told from what
    /// works by whoever only writes it down.
    ///
    /// # Errors
    /// Why not, in a line.
    pub fn check(&self) -> Result<(), String> {
        let authorities: Vec<_> = CertificateDer::pem_slice_iter(self.authority.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(|error| format!("its authority is no certificate ({error})"))?;
        let authorities: Vec<_> =
            authorities.iter().map(|der| parsed(der, "authority")).collect::<Result<_, _>>()?;
        let der = CertificateDer::from_pem_slice(self.certificate.as_bytes())
            .map_err(|error| format!("its certificate is none ({error})"))?;
        let certificate = parsed(&der, "certificate")?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())
            .map_err(|error| format!("its key is none ({error})"))?;
        let key =
            KeyPair::try_from(key.secret_der()).map_err(|error| format!("its key is none ({error})"))?;
        if !is_its_key(&der, &key) {
            return Err("its key is not that of its certificate".into());
        }
        if common_names(&der) != [self.node.user()] {
            return Err(format!("its certificate is not of node {}", self.node));
        }
        // One that signed itself shows by that whether it is as it was made.
        let is_whole = |one: &X509Certificate<'_>| {
            one.signature_algorithm == one.tbs_certificate.signature
                && (one.subject() != one.issuer()
                    || matches!(
                        one.verify_signature(None),
                        Ok(()) | Err(X509Error::SignatureUnsupportedAlgorithm)
                    ))
        };
        let has_signed = |one: &X509Certificate<'_>| {
            certificate.issuer() == one.subject()
                && certificate.verify_signature(Some(one.public_key())).is_ok()
        };
        if !authorities.iter().all(is_whole) || !authorities.iter().any(has_signed) {
            return Err("its certificate is not signed by its authority".into());
        }
        let now = OffsetDateTime::now_utc();
        let ends = certificate.validity().not_after.to_datetime();
        if ends <= now {
            return Err(format!("its certificate ran out on {}", ends.date()));
        }
        if let Some(why) = not_yet(certificate.validity().not_before.to_datetime(), now) {
            return Err(format!("its certificate {why}"));
        }
        if self.token.is_empty() || !self.token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("its token is none".into());
        }
        let is_key = |line: &str| line.len() == 64 && line.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut keys =
            self.user_data_key.iter().map(|keys| keys.lines().map(str::trim).filter(|line| !line.is_empty()));
        if keys.any(|mut keys| keys.clone().next().is_none() || !keys.all(is_key)) {
            return Err("its keys of user-data are none".into());
        }
        Ok(())
    }
}

fn parsed<'a>(der: &'a CertificateDer<'_>, what: &str) -> Result<X509Certificate<'a>, String> {
    let (rest, certificate) =
        parse_x509_certificate(der).map_err(|error| format!("its {what} is no certificate ({error})"))?;
    if rest.is_empty() { Ok(certificate) } else { Err(format!("its {what} is more than a certificate")) }
}

impl Record for Bundle {
    const WHAT: &'static str = "bundle";
    const FORMAT: u32 = 1;
}

/// A new token, or key: 256 random bits in hex.
pub fn new_token() -> String {
    let bytes: [u8; 32] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use ec_model::{decode, encode};

    use super::*;
    use crate::Authority;

    /// One that works.
    fn whole(authority: &Authority, node: NodeId) -> Bundle {
        let issued = authority.issue(&node.user(), &["host1".into()]).unwrap();
        Bundle {
            name: "host1".into(),
            node,
            host: "10.0.0.1".into(),
            etcd: vec!["https://etcd1:2379".into()],
            prefix: "/ecompute".into(),
            placement: "https://etcd1:8080".into(),
            authority: authority.certificate().to_owned(),
            certificate: issued.certificate,
            key: issued.key,
            token: new_token(),
            user_data_key: Some(format!("{}\n", new_token())),
        }
    }

    /// With another letter in each of its lines in turn.
    fn changed(pem: &str) -> impl Iterator<Item = String> {
        let lines = pem.lines().count();
        (1..lines - 2).map(move |at| {
            let other = |line: &str| {
                let letter = if line.as_bytes().get(20) == Some(&b'A') { "B" } else { "A" };
                format!("{}{letter}{}\n", &line[..20], &line[21..])
            };
            let line =
                |(number, line): (usize, &str)| if number == at { other(line) } else { format!("{line}\n") };
            pem.lines().enumerate().map(line).collect()
        })
    }

    #[test]
    fn a_bundle_that_cannot_work_is_told_from_one_that_does() {
        let (authority, _) = Authority::create().unwrap();
        let [node, another] =
            [1, 2].map(|number| format!("00000000-0000-4000-8000-00000000000{number}").parse().unwrap());
        let (good, other) = (whole(&authority, node), whole(&authority, another));
        good.check().unwrap();
        Bundle { user_data_key: None, ..good.clone() }.check().unwrap();
        let mangled = |pem: &str| pem.replace("CERTIFICATE", "CRTIFICATE");
        let (elsewhere, _) = Authority::create().unwrap();
        let refused = |bundle: Bundle, why: &str| {
            let told = bundle.check().unwrap_err();
            assert!(told.contains(why) && !told.contains('\n'), "{told}");
        };
        for (authority, why) in [
            (String::new(), "not signed by its authority"),
            (mangled(&good.authority), "authority"),
            (elsewhere.certificate().to_owned(), "not signed by its authority"),
        ] {
            refused(Bundle { authority, ..good.clone() }, why);
        }
        // By whom an authority was made, which its first lines tell, is of no matter to who believes it.
        for authority in changed(&good.authority).skip(3) {
            refused(Bundle { authority, ..good.clone() }, "authority");
        }
        for certificate in changed(&good.certificate) {
            refused(Bundle { certificate, ..good.clone() }, "its ");
        }
        for certificate in [String::new(), mangled(&good.certificate)] {
            refused(Bundle { certificate, ..good.clone() }, "its certificate is none");
        }
        for (key, why) in
            [(other.key.clone(), "not that of its certificate"), (String::new(), "its key is none")]
        {
            refused(Bundle { key, ..good.clone() }, why);
        }
        let pair = Bundle { certificate: other.certificate, key: other.key, ..good.clone() };
        refused(pair, "not of node 00000000");
        for token in [String::new(), "a\r\n".into(), "a b".into(), "é".into()] {
            refused(Bundle { token, ..good.clone() }, "its token is none");
        }
        for keys in ["", "\n", "a", &format!("{}\nb\n", new_token())] {
            refused(Bundle { user_data_key: Some(keys.to_owned()), ..good.clone() }, "keys of user-data");
        }
    }

    #[test]
    fn a_bundle_whose_certificate_is_not_good_yet_is_told_as_such() {
        let (authority, key) = Authority::create().unwrap();
        let node = "00000000-0000-4000-8000-000000000001".parse().unwrap();
        let good = whole(&authority, node);
        let signer = KeyPair::from_pem(&key).unwrap();
        let issuer = rcgen::Issuer::from_ca_cert_pem(&good.authority, signer).unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, node.user());
        params.not_before = OffsetDateTime::now_utc() + time::Duration::hours(4);
        params.not_after = params.not_before + time::Duration::days(9);
        let own = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&own, &issuer).unwrap().pem();
        let told = Bundle { certificate, key: own.serialize_pem(), ..good }.check().unwrap_err();
        assert!(told.starts_with("its certificate is good only from 2"), "{told}");
    }

    #[test]
    fn a_bundle_reads_as_it_was_written_and_what_is_none_is_told() {
        let bundle = Bundle {
            name: "host1".into(),
            node: "7d3c1f0a-2b4e-4c55-9a7e-0123456789ab".parse().unwrap(),
            host: "10.0.0.1".into(),
            etcd: vec!["https://etcd1:2379".into()],
            prefix: "/ecompute".into(),
            placement: "https://etcd1:8080".into(),
            authority: "a".into(),
            certificate: "b".into(),
            key: "c".into(),
            token: new_token(),
            user_data_key: Some(new_token()),
        };
        let text = String::from_utf8(encode(&bundle)).unwrap();
        assert_eq!(decode::<Bundle>(text.as_bytes()).unwrap(), bundle);
        for (text, why) in [
            (String::new(), "not a valid bundle"),
            (text.replace("\"version\":1", "\"version\":2"), "has version 2"),
            (text.replace("\"token\"", "\"coin\""), "token"),
        ] {
            let error = decode::<Bundle>(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
