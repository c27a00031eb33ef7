//! What certificates that are there say, and when they end.

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::Path,
};

use ec_metrics::Exposition;
use time::{Date, Duration, OffsetDateTime};
use x509_parser::{extensions::GeneralName, parse_x509_certificate, parse_x509_crl, pem::Pem};

use crate::authority::NAME;

/// From so long before a certificate's end on it is spoken of.
const SOON: Duration = Duration::days(30);

/// What of a certificate concerns us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Names and addresses of the server whose it is.
    pub hosts: Vec<String>,
    /// Before that nobody believes it.
    pub begins: OffsetDateTime,
    /// From then on nobody believes it.
    pub ends: OffsetDateTime,
    /// The name of whose it is, which is their user's in etcd; empty where it has none.
    pub name: String,
    /// Its number, of which its authority has one only.
    pub serial: Vec<u8>,
    /// Whether it is the authority's that `eschedule cluster init` makes, which signs others.
    pub is_authority: bool,
}

impl Certificate {
    /// The first certificate of a file, PEM: whose it is. Those that follow are its authorities'.
    ///
    /// # Errors
    /// In a line, why there is none, with the file's name.
    pub fn read(path: &Path) -> Result<Self, String> {
        let pem = fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Self::parse(&pem).ok_or_else(|| format!("there is no certificate in {}", path.display()))
    }

    pub(crate) fn parse(pem: &[u8]) -> Option<Self> {
        let first =
            Pem::iter_from_buffer(pem).filter_map(Result::ok).find(|pem| pem.label == "CERTIFICATE")?;
        let certificate = first.parse_x509().ok()?;
        let names = certificate.subject_alternative_name().ok().flatten();
        let hosts = names.iter().flat_map(|names| &names.value.general_names).filter_map(host).collect();
        let name = common_names(&first.contents).into_iter().next().unwrap_or_default();
        Some(Self {
            hosts,
            begins: certificate.validity().not_before.to_datetime(),
            ends: certificate.validity().not_after.to_datetime(),
            serial: unsigned(certificate.raw_serial()),
            is_authority: certificate.is_ca() && name == NAME,
            name,
        })
    }

    /// As what it is spoken of.
    fn kind(&self) -> &'static str {
        if self.is_authority { "authority" } else { "certificate" }
    }

    /// The day on which it ends.
    pub fn last_day(&self) -> Date {
        self.ends.date()
    }

    /// What is to be said of its end, behind its name: that it is over, or soon will be; or that it is not good yet.
    pub fn ending(&self) -> Option<String> {
        self.ending_at(OffsetDateTime::now_utc())
    }

    fn ending_at(&self, now: OffsetDateTime) -> Option<String> {
        let left = self.ends - now;
        let soon = || format!("runs out on {}, in {} days", self.last_day(), left.whole_days());
        self.over_at(now).or_else(|| (left < SOON).then(soon))
    }

    fn over_at(&self, now: OffsetDateTime) -> Option<String> {
        if self.ends <= now {
            return Some(format!("ran out on {}", self.last_day()));
        }
        not_yet(self.begins, now)
    }
}

/// A serial number without the bytes that only keep it from being negative.
fn unsigned(serial: &[u8]) -> Vec<u8> {
    serial.iter().copied().skip_while(|byte| *byte == 0).collect()
}

/// The serial numbers on a list of revoked certificates, DER; `None` where it is none.
pub fn revoked_serials(der: &[u8]) -> Option<BTreeSet<Vec<u8>>> {
    let (_, list) = parse_x509_crl(der).ok()?;
    Some(list.iter_revoked_certificates().map(|one| unsigned(one.raw_serial())).collect())
}

fn host(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => <[u8; 4]>::try_from(*bytes)
            .map(|four| Ipv4Addr::from(four).to_string())
            .or_else(|_| <[u8; 16]>::try_from(*bytes).map(|sixteen| Ipv6Addr::from(sixteen).to_string()))
            .ok(),
        _ => None,
    }
}

/// The names of whose a certificate is, DER; as a rule one, which is their user's in etcd.
pub fn common_names(der: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = parse_x509_certificate(der) else { return Vec::new() };
    let names = certificate.subject().iter_common_name();
    names.filter_map(|name| Some(name.as_str().ok()?.to_owned())).collect()
}

/// That something is not good yet by this host's clock, where that is so, to be said of it.
pub(crate) fn not_yet(begins: OffsetDateTime, now: OffsetDateTime) -> Option<String> {
    let told = || {
        let (day, hour, minute) = (begins.date(), begins.hour(), begins.minute());
        format!(
            "is good only from {day} {hour:02}:{minute:02} UTC on: the clock of this host is wrong, or that of the host where it was \
             made was"
        )
    };
    (begins > now).then(told)
}

/// What is to be said of these certificates' ends: of those that are over, or soon will be; and of those that are not good yet.
pub fn endings<'a>(files: impl IntoIterator<Item = &'a Path>) -> Vec<String> {
    let now = OffsetDateTime::now_utc();
    let files: BTreeSet<_> = files.into_iter().collect();
    files.into_iter().filter_map(|file| ending(file, &Certificate::read(file).ok()?, now)).collect()
}

/// Which of these certificates nobody believes, since they are over or not good yet, in a line each. Whoever refuses one rarely says why.
pub fn ended<'a>(files: impl IntoIterator<Item = &'a Path>) -> Vec<String> {
    let now = OffsetDateTime::now_utc();
    let files: BTreeSet<_> = files.into_iter().collect();
    files.into_iter().filter_map(|file| over(file, &Certificate::read(file).ok()?, now)).collect()
}

fn over(file: &Path, certificate: &Certificate, now: OffsetDateTime) -> Option<String> {
    certificate.over_at(now).map(|why| format!("{} {} {why}", certificate.kind(), file.display()))
}

fn ending(file: &Path, certificate: &Certificate, now: OffsetDateTime) -> Option<String> {
    if certificate.is_authority {
        return certificate.ending_at(now).map(|why| {
            format!(
                "authority {} {why}: on the first host `eschedule cluster renew --authority` makes it good for longer; that file then \
                 belongs on every host, and etcd is to be started anew, see docs/cluster.md",
                file.display()
            )
        });
    }
    if let Some(over) = over(file, certificate, now) {
        return Some(format!("{over}; put a new one there, see docs/cluster.md"));
    }
    certificate.ending_at(now).map(|soon| {
        format!(
            "certificate {} {soon}: put a new one there, nothing has to be started anew for it, see docs/cluster.md",
            file.display()
        )
    })
}

/// When each of a program's certificates ends, as a number to watch; of files that cannot be read nothing is told.
pub fn write_ends<'a>(text: &mut Exposition, program: &str, files: impl IntoIterator<Item = &'a Path>) {
    let files: BTreeSet<_> = files.into_iter().collect();
    let known = files.into_iter().filter_map(|file| Some((file, Certificate::read(file).ok()?)));
    let known: Vec<_> = known.collect();
    if known.is_empty() {
        return;
    }
    let name = format!("{program}_certificate_not_after_timestamp_seconds");
    let mut family = text.gauges(&name, "When a certificate ends, by its file.");
    for (file, certificate) in known {
        family.sample(&[("file", &file.display().to_string())], certificate.ends.unix_timestamp());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Authority;

    fn good(begins: OffsetDateTime, ends: OffsetDateTime) -> Certificate {
        let (hosts, name, serial) = (Vec::new(), String::new(), Vec::new());
        Certificate { hosts, begins, ends, name, serial, is_authority: false }
    }

    #[test]
    fn a_certificate_tells_its_hosts_and_its_end_and_what_is_none_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let (authority, key) = Authority::create().unwrap();
        let hosts = ["control.example".to_owned(), "10.0.0.1".to_owned(), "::1".to_owned()];
        let issued = authority.issue("etcd", &hosts).unwrap();
        let chain = format!("{}{}", issued.certificate, authority.certificate());
        let path = file("etcd.pem", &chain);
        let read = Certificate::read(&path).unwrap();
        assert_eq!(read.hosts, hosts);
        assert_eq!((read.name.as_str(), read.serial.is_empty()), ("etcd", false));
        let left = read.ends - OffsetDateTime::now_utc();
        assert!((Duration::days(397)..Duration::days(399)).contains(&left), "{left}");
        let since = OffsetDateTime::now_utc() - read.begins;
        assert!(
            since > Duration::hours(23),
            "a host whose clock is that of another zone takes it at once: {since}"
        );
        for (name, text) in [("key.pem", key.as_str()), ("empty.pem", ""), ("none.pem", "no pem")] {
            let error = Certificate::read(&file(name, text)).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
        assert!(
            Certificate::read(&directory.path().join("missing.pem")).unwrap_err().contains("missing.pem")
        );
        assert_eq!(endings([path.as_path()]), Vec::<String>::new());
        let der = Pem::iter_from_buffer(chain.as_bytes()).next().unwrap().unwrap().contents;
        assert_eq!(common_names(&der), ["etcd"]);
        assert_eq!(common_names(b"no certificate"), Vec::<String>::new());

        let mut text = Exposition::default();
        let missing = directory.path().join("missing.pem");
        write_ends(&mut text, "ecompute", [path.as_path(), path.as_path(), missing.as_path()]);
        let wanted = format!(
            "ecompute_certificate_not_after_timestamp_seconds{{file=\"{}\"}} {}\n",
            path.display(),
            read.ends.unix_timestamp()
        );
        assert_eq!(text.into_text().lines().skip(2).collect::<Vec<_>>(), [wanted.trim_end()]);
    }

    #[test]
    fn an_end_is_spoken_of_from_thirty_days_before_on() {
        let ends = OffsetDateTime::from_unix_timestamp(1_800_000_000).unwrap();
        let begins = ends - Duration::days(400);
        let certificate = good(begins, ends);
        let told = |before: Duration| ending(Path::new("/etc/a.pem"), &certificate, ends - before);
        assert_eq!(told(SOON), None);
        let is_over = |before: Duration| over(Path::new("a.pem"), &certificate, ends - before).is_some();
        assert!(is_over(Duration::ZERO) && !is_over(Duration::SECOND));
        let soon = told(Duration::days(12)).unwrap();
        assert!(soon.contains("/etc/a.pem runs out on 2027-01-15, in 12 days"), "{soon}");
        for after in [Duration::ZERO, -Duration::days(1)] {
            assert!(told(after).unwrap().contains("ran out on 2027-01-15"));
        }
        // What helps there helps no authority.
        let authority = Certificate { is_authority: true, ..certificate };
        for before in [Duration::days(12), Duration::ZERO] {
            let told = ending(Path::new("/etc/ca.pem"), &authority, ends - before).unwrap();
            assert!(told.starts_with("authority /etc/ca.pem r") && told.contains("--authority"), "{told}");
            assert!(!told.contains("put a new one") && !told.contains("nothing has"), "{told}");
        }
    }

    #[test]
    fn one_that_is_not_good_yet_is_told_with_the_clocks_that_may_be_why() {
        let begins = OffsetDateTime::from_unix_timestamp(1_800_000_000).unwrap();
        let ends = begins + Duration::days(398);
        let certificate = good(begins, ends);
        let at = |now| {
            (over(Path::new("a.pem"), &certificate, now), ending(Path::new("a.pem"), &certificate, now))
        };
        assert_eq!(at(begins), (None, None));
        let (over, ending) = at(begins - Duration::SECOND);
        let told = "certificate a.pem is good only from 2027-01-15 08:00 UTC on: the clock of this host is wrong, or that of the \
                    host where it was made was";
        assert_eq!(over.as_deref(), Some(told));
        assert!(ending.unwrap().starts_with(told));
    }
}
