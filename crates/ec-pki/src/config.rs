//! Configuration files that are made for people, who may change them.

use std::{fs, io, path::Path};

/// What is at a configuration file's place.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing; or what was shipped, which says nothing but defaults.
    Nothing,
    /// What we made, perhaps changed since.
    Ours(String),
    /// What somebody else wrote.
    Others,
}

/// Looks at a configuration file. What we make begins with `mark`; `shipped` are texts as they are shipped.
///
/// # Errors
/// It is there and cannot be read.
pub fn find(path: &Path, mark: &str, shipped: &[&str]) -> io::Result<Found> {
    match fs::read_to_string(path) {
        Ok(text) if shipped.contains(&text.as_str()) => Ok(Found::Nothing),
        Ok(text) if text.starts_with(mark) => Ok(Found::Ours(text)),
        Ok(_) => Ok(Found::Others),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
        Err(error) => Err(error),
    }
}

/// A text as YAML has it, whatever is in it.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A path as YAML has it.
pub fn quoted_path(path: &Path) -> String {
    quoted(&path.display().to_string())
}

/// The files by which one who asks is known, as `etcd` and `placement` of all configuration files have them.
pub fn trust(authority: &Path, certificate: &Path, key: &Path) -> String {
    let [authority, certificate, key] = [authority, certificate, key].map(quoted_path);
    format!("  ca_cert: {authority}\n  cert_cert: {certificate}\n  cert_key: {key}\n")
}

/// The files of one who serves, as `tls` of all configuration files has them.
pub fn served(authority: &Path, certificate: &Path, key: &Path) -> String {
    let [authority, certificate, key] = [authority, certificate, key].map(quoted_path);
    format!("tls:\n  certificate: {certificate}\n  key: {key}\n  client_ca: {authority}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_wrote_is_told_from_ours_and_from_what_was_shipped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.yaml");
        let found = || find(&path, "# Ours", &["a: 1\n"]).unwrap();
        assert_eq!(found(), Found::Nothing);
        for (text, wanted) in [
            ("a: 1\n", Found::Nothing),
            ("a: 2\n", Found::Others),
            ("# Ours\nb: 1\n", Found::Ours("# Ours\nb: 1\n".into())),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(found(), wanted);
        }
        assert!(find(directory.path(), "# Ours", &[]).is_err());
    }
}
