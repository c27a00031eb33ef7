//! A certificate and its key, which are of use together only.

use std::{fs, io, path::Path};

use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use x509_parser::parse_x509_certificate;

/// Whether a key is the one that a certificate, DER, is of.
pub(crate) fn is_its_key(certificate: &[u8], key: &KeyPair) -> bool {
    parse_x509_certificate(certificate)
        .is_ok_and(|(_, certificate)| certificate.public_key().subject_public_key.data == key.der_bytes())
}

/// Why a certificate and a key in these files, PEM, are of no use to anybody, in a line. `None` also of a key of a kind that is never
/// made here: whose it is cannot be told.
pub fn unfit(certificate: &Path, key: &Path) -> Option<String> {
    let [of_certificate, of_key] = [certificate, key].map(|path| match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read,
    });
    // Who may not read them hears of that elsewhere.
    let (of_certificate, of_key) = (of_certificate.ok()?, of_key.ok()?);
    let (certificate_in, key_in) = (certificate.display(), key.display());
    let Ok(certificate) = CertificateDer::from_pem_slice(&of_certificate) else {
        return Some(format!("there is no certificate in {certificate_in}"));
    };
    let Ok(key) = PrivateKeyDer::from_pem_slice(&of_key) else {
        return Some(format!("there is no key in {key_in}"));
    };
    let key = KeyPair::try_from(key.secret_der()).ok()?;
    (!is_its_key(&certificate, &key)).then(|| format!("{key_in} is not the key of {certificate_in}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Authority;

    #[test]
    fn what_does_not_fit_or_is_not_there_is_told_by_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let [certificate, key] = ["a.pem", "a.key"].map(|name| directory.path().join(name));
        let (authority, _) = Authority::create().unwrap();
        let [one, other] = ["1", "2"].map(|name| authority.issue(name, &[]).unwrap());
        let told = |of_certificate: &str, of_key: &str| {
            fs::write(&certificate, of_certificate).unwrap();
            fs::write(&key, of_key).unwrap();
            unfit(&certificate, &key)
        };
        assert_eq!(told(&one.certificate, &one.key), None);
        for (of_certificate, of_key, why) in [
            (one.certificate.as_str(), other.key.as_str(), "a.key is not the key of"),
            (&one.certificate, "", "there is no key in"),
            ("", &one.key, "there is no certificate in"),
        ] {
            let told = told(of_certificate, of_key).unwrap();
            assert!(told.contains(why), "{told}");
        }
        // An operator's own, of a kind that is never made here.
        let own = one.key.replace("PRIVATE KEY", "EC PRIVATE KEY");
        let foreign = own.lines().take(2).chain(own.lines().last()).collect::<Vec<_>>().join("\n");
        assert_eq!(told(&one.certificate, &foreign), None);
        fs::remove_file(&key).unwrap();
        assert!(unfit(&certificate, &key).unwrap().contains("there is no key in"));
    }
}
