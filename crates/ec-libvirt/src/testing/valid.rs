//! What libvirt's own schemas say of a document.

use std::{fs, process::Command};

/// Whether the document is as libvirt's schema of that name has it, by `virt-xml-validate`; it panics where not.
#[track_caller]
pub fn assert_valid(document: &str, schema: &str) {
    let directory = tempfile::tempdir().expect("a directory for the document");
    let file = directory.path().join("document.xml");
    fs::write(&file, document).expect("write the document");
    let output = Command::new("virt-xml-validate").arg(&file).arg(schema).output();
    let output = output.expect("virt-xml-validate, of the package libvirt-clients");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Without xmllint it says so, and ends with 127.
    assert!(output.status.success(), "not valid by the schema `{schema}`: {said}\n{document}");
}
